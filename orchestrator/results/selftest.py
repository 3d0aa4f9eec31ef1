"""The checks of `gemmfleet selftest`: statements about AITER on a real chip that nobody has seen hold yet.

A check asks what ordinary commands found (`nodes check`, `tune`, `verify`, `bench`, `db check`). Each command is a
process of its own, so that one that hangs can be ended when the time is over. A new check is a function with
`@statement` at its place in the list; docs/explanation/aiter.md lists the statements.
"""

from __future__ import annotations

import csv
import io
import json
import re
import socket
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from orchestrator.inventory.load import check_references, limit, load_inventory
from orchestrator.inventory.model import Node
from orchestrator.inventory.references import value_hider
from orchestrator.ledger.reader import LedgerReader
from orchestrator.results import Document
from worker.families import FAMILIES, Family, backend_of
from worker.text import plural

HELD = "held"
NOT_HELD = "did not hold"
NOT_TRIED = "could not be tried"
OUTCOMES = (HELD, NOT_HELD, NOT_TRIED)
A4W4 = FAMILIES["a4w4_blockscale"]
OTHERS = [family for family in FAMILIES.values() if family.aiter.scripts and family is not A4W4]
SCRIPT = ("--tuner", "aiter", "-O", "batch=1")
"""Options for a family's own script, one shape a batch."""
ODD_K = 384
"""A K that is not a multiple of 256."""
ENDING_S = 45
"""Seconds that a command may take to end."""
LIKE = 1.25
"""Largest ratio of two times of one kernel."""
SIZES = {
    "B": 2,
    "M": 64,
    "N": 512,
    "K": 512,
    "token": 16,
    "model_dim": 1024,
    "inter_dim": 512,
    "expert": 8,
    "topk": 2,
}
GPU_FACTS = (
    "gfx",
    "cu_num",
    "id",
    "partition",
    "use_pct",
    "memory_used",
    "memory_total",
    "temperature_c",
    "power_w",
)
CANARIES = "SELECT data FROM journal WHERE type LIKE 'Canary%'"
SLOTS = """SELECT json_extract(j.data, '$.slot'), r.conditions, r.spent FROM reports r JOIN journal j
    ON j.type='AttemptStarted' AND json_extract(j.data, '$.attempt')=r.attempt"""


class NotTriedError(Exception):
    """A statement could not be tried. The text says why."""


def needs(requirement: object, why: str) -> None:
    """Raise NotTriedError if something that a check needs is false or empty."""
    if not requirement:
        raise NotTriedError(why)


class Step(NamedTuple):
    """A command that ended: its JSON document, and why it has no result. `cut`: why it was ended early, "" if it ended
    by itself. `run`: the folder of its run, if it made one."""

    document: Document
    why: str
    cut: str
    run: Path

    def rows(self, name: str = "profile.csv") -> list[dict[str, str]]:
        """Rows of a result file of its run. Raises NotTriedError without any."""
        path = self.run / name
        rows = []
        if path.is_file():
            rows = list(csv.DictReader(path.read_text().splitlines()))
        needs(rows, self.why)
        return rows

    def slots(self, *, gpus: bool = False) -> list[Document]:
        """Reports of its slots that were ready. `gpus`: their workers must see a GPU. Raises NotTriedError."""
        path = self.run / "provenance.json"
        reports = []
        if path.is_file():
            reports = [report for report in json.loads(path.read_text())["devices"] if report["device"]]
        needs(reports, f"no slot was ready: {self.why}")
        if gpus:
            needs(all(report["worker"].get("gpus") for report in reports), "the workers see no GPU")
        return reports

    def query(self, sql: str) -> list[list[Any]]:
        """Rows of a query of its ledger, whose cells are JSON."""
        with LedgerReader.open_readonly(self.run / "ledger.db") as ledger:
            return [[json.loads(cell or "{}") for cell in row] for row in ledger.query(sql)]

    def log(self) -> str:
        """The text that its workers printed."""
        return "".join(path.read_text(errors="replace") for path in self.run.glob("logs/*.log"))


def node_of(inventory: Path, name: str | None) -> Node:
    """The node of this name, or the first. Raises InventoryError, also for a variable that is not set."""
    node = next(iter(limit(load_inventory(inventory), name).nodes.values()))
    check_references([node])
    return node


class NodeTrial:
    """The node under test. It runs commands there, each once, and several at a time only on different GPUs.

    `whole`, `alone`: inventories of the node with all its GPUs, and with the first. `others`: the families' runs.
    """

    def __init__(self, folder: Path, inventory: Path, node: str | None, seconds: float) -> None:
        self.folder = folder
        self.inventory = inventory
        self.node = node_of(inventory, node)
        self.steps: dict[str, Step] = {}
        self.others: dict[str, Future[Step]] = {}
        self.interrupted = False
        self.cut = "the time was over"
        self._ends = time.monotonic() + seconds
        self.whole = self.alone = self._write_inventory("node")

    def _write_inventory(self, name: str, **changed: Any) -> Path:
        """An inventory of this node alone, with some of its options changed."""
        document = yaml.safe_load(self.inventory.read_bytes())
        options = document["nodes"][self.node.name] or {}
        document["nodes"] = {self.node.name: options | changed}
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(document, sort_keys=False))
        return path

    def gpus(self) -> dict[int, Document]:
        """The facts of each GPU that the inventory lets us use. Raises NotTriedError if the node cannot be used."""
        step = self.step("nodes", "nodes check", "-i", self.whole)
        nodes: list[Any] = step.document.get("nodes") or []
        needs(nodes, f"the node cannot be used: {step.why}")
        [node] = nodes
        faults = "; ".join(finding["what"] for finding in node["findings"] if finding["level"] == "unusable")
        needs(node["state"] != "unusable", f"the node cannot be used: {faults or step.why}")
        facts = node["gpus"]
        allowed = self.node.gpus
        numbers: Sequence[int] = range(len(facts))
        if isinstance(allowed, int):
            numbers = range(allowed)
        elif isinstance(allowed, tuple):
            numbers = allowed
        return {number: facts[number] for number in numbers if number < len(facts)}

    def a4w4(self) -> Step:
        """The run of a4w4's script on all slots, two shapes a slot. The other families begin after it, in the
        background, on the GPUs beside the first if there are some."""
        gpus = self.gpus()
        step = self.run("tune", A4W4.name, A4W4, self.whole, *SCRIPT, count=2 * max(1, len(gpus)))
        if not self.others:
            lanes = [self._write_inventory(f"gpu-{number}", gpus=[number]) for number in gpus] or [self.whole]
            self.alone = lanes[0]
            beside = lanes[1:] or lanes
            pool = ThreadPoolExecutor(len(beside))
            for i, family in enumerate(OTHERS):
                lane = beside[i % len(beside)]
                self.others[family.name] = pool.submit(self.run, "tune", family.name, family, lane, *SCRIPT)
        return step

    def table(self) -> Path:
        """The winners of a4w4. Raises NotTriedError without any."""
        step = self.a4w4()
        step.rows("tuned.csv")
        return step.run / "tuned.csv"

    def run(self, verb: str, name: str, family: Family, inventory: Path, *words: object, count: int = 2) -> Step:
        """A run on tiny shapes of a family that differ in M alone; for a4w4 also on a shape with an odd K."""
        sizes = [SIZES | {family.m_column: SIZES[family.m_column] * i} for i in range(1, count + 1)]
        if name == A4W4.name:
            sizes.append(SIZES | {"K": ODD_K})
        names = [column.name for column in family.columns if column.required]
        lines = [",".join(names)]
        for shape in sizes:
            lines.append(",".join(str(shape[column]) for column in names))
        shapes = self.folder / f"{name}.csv"
        shapes.write_text("\n".join((*lines, "")))
        return self.step(
            name, verb, shapes, "-i", inventory, "--family", family.name, "--runs", self.folder, "--grace", 5, *words
        )

    def logs(self) -> str:
        """The texts that the workers of all families' runs printed, once these ended."""
        return self.a4w4().log() + "".join(future.result().log() for future in self.others.values())

    def interrupt(self, *_: object) -> None:
        """Start nothing more. A terminal's Ctrl-C goes to the commands that run, too, and they end by themselves."""
        self.interrupted = True
        self.cut = "it was interrupted"
        self._ends = 0.0

    def step(self, name: str, verb: str, *words: object) -> Step:
        """The command of this name; it runs now if it did not run before."""
        if name not in self.steps:
            self.steps[name] = self._run_command(name, verb, words)
        return self.steps[name]

    def _run_command(self, name: str, verb: str, words: tuple[object, ...]) -> Step:
        """Run a command of gemmfleet until it ends or the time is over. Its standard error goes to NAME.log."""
        left = self._ends - time.monotonic()
        if left <= 0:
            return Step({}, self.cut, self.cut, self.folder / "none")
        argv = [
            "timeout",
            "--foreground",
            "--signal=INT",
            f"--kill-after={ENDING_S}",
            f"{left + 1:.0f}",
            sys.executable,
            "-m",
            "orchestrator",
            *verb.split(),
            *map(str, words),
            "--json",
        ]
        log = self.folder / f"{name}.log"
        with log.open("wb") as stderr:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, check=False)
        document = json.loads(done.stdout or "{}")
        last_line = " ".join(log.read_text(errors="replace").splitlines()[-1:])
        failed = "; ".join(f"{f['reason']}: {f['detail'][:200]}" for f in document.get("failed", ())[:3])
        cut = self.cut if done.returncode in (124, 130, 137) else ""
        why = cut or failed or f"exit code {done.returncode}: {last_line[:300]}"
        return Step(document, why, cut, self.folder / str(document.get("run") or "none"))


Answer = tuple[bool, str]
"""True if a statement held, and the figures that show it."""
Check = Callable[[NodeTrial], Answer]
CHECKS: list[tuple[int, str, Check]] = []
"""Number, statement and function of each check, in the order in which they are tried."""


def statement(number: int, text: str) -> Callable[[Check], Check]:
    """Makes a function the check of this statement. The function raises NotTriedError if it cannot tell."""

    def register(check: Check) -> Check:
        CHECKS.append((number, text, check))
        return check

    return register


@statement(1, "The node check reads chip, partition, use, memory, temperature and power of each GPU.")
def check_gpu_facts(trial: NodeTrial) -> Answer:
    gpus = trial.gpus()
    needs(gpus, "the node has no GPU")
    lacks = [name for name in GPU_FACTS if any(gpu.get(name) in (None, "", {}) for gpu in gpus.values())]
    return not lacks, f"{plural(len(gpus), 'GPU')}; missing: {', '.join(lacks) or 'nothing'}"


@statement(2, "KFD, torch and AITER's rows name the same chip.")
def check_chip(trial: NodeTrial) -> Answer:
    step = trial.a4w4()
    devices = [slot["device"] for slot in step.slots()]
    chips = {
        "KFD": {(gpu["gfx"], str(gpu["cu_num"])) for gpu in trial.gpus().values()},
        "torch": {(device.get("gfx"), str(device.get("cu_num"))) for device in devices},
        "rows": {(row["gfx"], row["cu_num"]) for row in step.rows()},
    }
    shown = "; ".join(f"{source}: {sorted(names)}" for source, names in chips.items())
    return chips["KFD"] == chips["torch"] == chips["rows"], shown


@statement(3, "Each worker sees one GPU, and no two workers see the same one.")
def check_isolation(trial: NodeTrial) -> Answer:
    step = trial.a4w4()
    seen = [len(slot["worker"]["gpus"]) for slot in step.slots(gpus=True)]
    pairs = set()
    for slot, conditions, _ in step.query(SLOTS):
        pairs |= {(str(slot), reading.get("id") or reading.get("pci")) for reading in conditions.values()}
    slots = {slot for slot, _ in pairs}
    gpus = {gpu for _, gpu in pairs}
    is_one_to_one = len(pairs) == len(slots) == len(gpus)
    shown = f"GPUs that each worker sees: {seen}; pairs of slot and GPU: {len(pairs)}"
    return set(seen) == {1} and is_one_to_one, shown


@statement(4, "Canaries pass, and take about the same time on all slots.")
def check_canaries(trial: NodeTrial) -> Answer:
    step = trial.a4w4()
    step.slots()
    events = [event for (event,) in step.query(CANARIES)]
    failed = [str(event["detail"]) for event in events if "detail" in event]
    needs(failed or any(event.get("us", 0) > 0 for event in events), "the image's torch cannot multiply")
    spans = []
    for name in ("us", "compute_us", "memory_us"):
        times = [event[name] for event in events if event.get(name, 0) > 0]
        if times:
            spans.append((min(times), max(times)))
    shown = [f"{least:.1f} to {most:.1f} us" for least, most in spans]
    return not failed and all(map(_is_alike, spans)), "; ".join(shown + failed)


def _is_alike(times: tuple[float, float]) -> bool:
    return max(times) <= LIKE * min(times)


@statement(5, "gemmfleet promises to drive the AITER that it finds, and its shim fits.")
def check_tree(trial: NodeTrial) -> Answer:
    trees = [slot["device"]["aiter"] for slot in trial.a4w4().slots()]
    wrong = {text for tree in trees for text in (tree["warning"], tree["shim"])} - {"", "used"}
    versions = {f"version {tree['version'] or 'unknown'} {tree['commit'][:10]}" for tree in trees}
    return not wrong, "; ".join(wrong or versions)


def _applied(trial: NodeTrial, name: str) -> str:
    return "applied" if f"{name} is applied" in trial.a4w4().log() else "not applied"


def _workaround(trial: NodeTrial, name: str, fault: str) -> Answer:
    """Held if the script measured ASM kernels, and printed no such fault."""
    counts = Counter(backend_of(A4W4.name, row) for row in trial.a4w4().rows())
    is_faulty = re.search(fault, trial.a4w4().log())
    return counts["asm"] > 0 and not is_faulty, f"{name} {_applied(trial, name)}; candidates: {dict(counts)}"


@statement(6, "`asm_dir_symlink` is applied where it is needed: AITER finds its ASM kernels.")
def check_asm_dir(trial: NodeTrial) -> Answer:
    return _workaround(trial, "asm_dir_symlink", r"No such file or directory: .{0,200}f4gemm")


@statement(7, "`tile_column_case` is applied where it is needed: the a4w4 script finds its columns.")
def check_tile_columns(trial: NodeTrial) -> Answer:
    return _workaround(trial, "tile_column_case", r"KeyError: .tile_")


@statement(8, "`k_trim` is applied where it is needed, and a K of 384 is wrong only where the files say so.")
def check_odd_k(trial: NodeTrial) -> Answer:
    step = trial.a4w4()
    shown = f"k_trim {_applied(trial, 'k_trim')}; "
    if any(int(row["K"]) == ODD_K for row in step.rows("tuned.csv")):
        return True, f"{shown}right"
    failed = [failure for failure in step.document["failed"] if str(ODD_K) in failure["shape"]]
    why = "; ".join(f"{failure['reason']}: {failure['detail']}" for failure in failed)
    return "wrong_result" in why and "not a multiple of 256" in why, shown + why[:400]


@statement(9, "Modules are built once, in a slot's folder, and all slots load them.")
def check_modules(trial: NodeTrial) -> Answer:
    step = trial.a4w4()
    builds = step.log().count("building the modules of")
    spent = [seconds for *_, seconds in step.query(SLOTS)]
    ready = [round(seconds["start"]) for seconds in spent if "start" in seconds]
    later = max(seconds.get("build", 0.0) for seconds in spent)
    return builds <= 1 and later < 5, f"{plural(builds, 'build')}; slots ready after {ready} s; later {later:.1f} s"


@statement(10, "AITER's lists of kernels name every winner.")
def check_lists(trial: NodeTrial) -> Answer:
    words = ["--build", trial.node.image or trial.node.aiter.root or ""]
    if trial.node.image:
        words += ["-i", str(trial.whole)]
    step = trial.step("lists", "db check", trial.table(), *words)
    needs("verdict" in step.document, step.why)
    verdict = step.document["verdict"]
    problems = [str(problem["text"]) for problem in list(step.document["problems"])[:3]]
    return verdict != "unsafe", "; ".join((verdict, *problems))


@statement(11, "`verify` proves every row with AITER's operators.")
def check_verify(trial: NodeTrial) -> Answer:
    step = trial.step("verify", "verify", "-i", trial.alone, "--table", trial.table(), "--family", A4W4.name)
    answer: Document = next(iter(step.document.get("nodes", ())), {"why": step.why})
    needs(not answer["why"], answer["why"])
    rows = answer["rows"]
    proofs = Counter(f"{r['verdict']}{'' if r['selected'] else ', not selected'} {r['why']}" for r in rows)
    return set(proofs) == {"ok "}, "; ".join(f"{count} {proof}" for proof, count in proofs.items())


@statement(12, "The tuner `aiter-triton` tunes two shapes.")
def check_triton(trial: NodeTrial) -> Answer:
    trial.a4w4()
    step = trial.run("tune", "aiter-triton", A4W4, trial.alone, "--tuner", "aiter-triton", "--budget", 40)
    if step.document.get("shapes", {}).get("tuned", 0) == 2:
        return True, step.why if step.document.get("failed") else "2 shapes tuned"
    needs(step.document.get("failed") and "unsupported" not in step.why and not step.cut, step.why)
    return False, step.why


Times = dict[tuple[str, int], float]
"""Microseconds by backend and M."""


def _bench(trial: NodeTrial, timer: str = "events") -> Times:
    """The times that `bench` measures. Raises NotTriedError without any."""
    words = ("--db", trial.table(), "--timer", timer, "--backend", "aiter,aiter-triton,aiter-gluon")
    step = trial.run("bench", f"bench-{timer}", A4W4, trial.alone, *words)
    rows = [row for row in step.document.get("rows", ()) if row["us"] > 0]
    missing = "; ".join(f"{m['backend']}: {m['detail'][:200]}" for m in step.document.get("missing", ()))
    needs(rows, missing or step.why)
    return {(row["backend"], int(row["key"]["M"])): float(row["us"]) for row in rows}


def _agree(times: Times, others: Times) -> Answer:
    pairs = {key: (us, others[key]) for key, us in times.items() if key in others}
    shown = [f"{backend}, M {m}: {us:.2f} and {other:.2f} us" for (backend, m), (us, other) in pairs.items()]
    return bool(pairs) and all(map(_is_alike, pairs.values())), "; ".join(shown)


@statement(13, "AITER's dispatch takes as long in `bench` as its tuner measured.")
def check_dispatch(trial: NodeTrial) -> Answer:
    rows = trial.a4w4().rows("tuned.csv")
    tuned = {("aiter", int(row["M"])): float(row["us"]) for row in rows if int(row["K"]) != ODD_K}
    return _agree(tuned, _bench(trial))


@statement(14, "rocprofv3 and device events give about the same times.")
def check_timers(trial: NodeTrial) -> Answer:
    return _agree(_bench(trial), _bench(trial, "rocprof"))


@statement(15, "The script of each other family tunes two tiny shapes.")
def check_families(trial: NodeTrial) -> Answer:
    trial.a4w4()
    outcomes = []
    tuned = []
    failed = []
    for name, future in trial.others.items():
        step = future.result()
        if step.document.get("shapes", {}).get("tuned") == 2:
            outcomes.append(f"{name}: tuned")
            tuned.append(name)
            continue
        outcomes.append(f"{name}: {step.why}")
        if "has no tuner script" not in step.why:
            failed.append(step)
    shown = "; ".join(outcomes)
    all_cut = failed and all(step.cut for step in failed)
    needs(tuned and not all_cut, shown)
    return not failed, shown


@statement(16, "The scripts take every option that was read from their files.")
def check_flags(trial: NodeTrial) -> Answer:
    refused = set(re.findall(r"error: (?:unrecognized|argument|the following arguments) .{0,200}", trial.logs()))
    if refused:
        return False, "; ".join(refused)
    trial.a4w4().rows()
    return True, "no script refused an option"


def _set_up(trial: NodeTrial, least: float, most: float, *, later: bool) -> Answer:
    """Held if the median seconds before the first candidate, of the first batch or of later ones, are in this range."""
    trial.a4w4().slots(gpus=True)
    batches = re.findall(r"set-up of batch (\d+): ([\d.]+) s", trial.logs())
    seconds = sorted(float(text) for number, text in batches if (number != "1") is later)
    needs(seconds, "no process had such a batch")
    median = seconds[len(seconds) // 2]
    return least <= median <= most, f"{seconds[0]:.1f} to {seconds[-1]:.1f} s, mostly {median:.1f} s"


@statement(17, "A process needs 7 to 30 s before its first candidate.")
def check_first_set_up(trial: NodeTrial) -> Answer:
    return _set_up(trial, 7, 30, later=False)


@statement(18, "A further batch needs 5 to 25 s before its first candidate.")
def check_later_set_up(trial: NodeTrial) -> Answer:
    return _set_up(trial, 5, 25, later=True)


@statement(19, "No container and no lock of a run is left on the node.")
def check_cleaned(trial: NodeTrial) -> Answer:
    runs = {step.run.name for step in trial.steps.values() if step.run.is_dir()}
    step = trial.step("after", "nodes check", "-i", trial.whole)
    needs(runs and "nodes" in step.document, step.why)
    texts = [f"{node['locks']} {node['containers']}" for node in step.document["nodes"]]
    left = [run for run in runs if any(run in text for text in texts)]
    return not left, f"{plural(len(runs), 'run')}, of which {len(left)} left containers or locks"


def tried(trial: NodeTrial) -> Iterator[Document]:
    """Try every statement in turn, and yield it with its outcome. One that fails does not end the others."""
    for number, text, check in CHECKS:
        outcome = NOT_TRIED
        try:
            held, detail = check(trial)
            outcome = HELD if held else NOT_HELD
        except NotTriedError as e:
            detail = str(e)
        except Exception as e:  # noqa: BLE001 - whatever is odd on a new chip must not end the others
            detail = f"{type(e).__name__}: {e}"
        yield {"number": number, "statement": text, "outcome": outcome, "detail": detail}


GENERIC = {"root", "localhost", "local", "/", "."}
"""Names that tell nothing about their owner."""
ADDRESS = re.compile(
    r"[\w.+-]+@[\w.-]+|(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.])|(?<=<host>)(?!\.log\b)(?:\.[A-Za-z0-9-]+)+"
)
# absolute paths but for those of the system and of packages
PATH = re.compile(
    r"(?:<path>|(?<![\w.<>/~$})-])~?/(?!dev/|sys/|proc/|opt/rocm)(?=[\w.+@%~<-]))"
    r"(?:(?!/(?:site|dist)-packages/)(?:<\w+>|[^\s\"'`\\,;:()<>|=\[\]{}]))*"
)


def scrubber(trial: NodeTrial) -> Callable[[str], str]:
    """A function that replaces names of hosts, users, images and paths in a text; absolute paths and addresses even if
    nobody named them."""
    node = trial.node
    facts: Document = {}
    for checked in trial.steps["nodes"].document.get("nodes", ()):
        facts |= checked["facts"]
    places = (node.name, node.host, node.proxy_jump, socket.gethostname(), facts.get("host"))
    hosts = [str(place) for place in places if place]
    words = {
        "run": (facts.get("workdir"), node.workdir, trial.folder),
        "path": (trial.inventory, trial.inventory.name, trial.inventory.stem, Path.home(), Path.cwd()),
        "host": (*hosts, *(host.partition(".")[0] for host in hosts)),
        "image": (node.image,),
        "user": (node.user, facts.get("user"), Path.home().name),
        "aiter": (node.aiter.root,),
    }
    known: dict[str, str] = {}
    for word, names in words.items():
        known |= {str(name).lower(): f"<{word}>" for name in names if name}
    longest_first = sorted(known.keys() - GENERIC, key=len, reverse=True)
    any_name = "|".join(map(re.escape, longest_first))
    pattern = re.compile(f"(?<![A-Za-z0-9])(?:{any_name})(?![A-Za-z0-9])", re.IGNORECASE)
    mask = value_hider(node.options())

    def scrub(text: str) -> str:
        text = pattern.sub(lambda match: known[match[0].lower()], mask(text))
        return PATH.sub("<path>", ADDRESS.sub("<address>", text))

    return scrub


def pack(trial: NodeTrial, outcome: str, to: Path) -> None:
    """Write the bundle: the outcome, facts of the GPUs, rows and logs, all scrubbed. Raises OSError."""
    gpus = []
    for node in trial.steps["nodes"].document.get("nodes", ()):
        gpus += [gpu | {"id": "", "pci": ""} for gpu in node["gpus"]]
    texts = {"selftest.json": outcome, "gpus.json": json.dumps(gpus, indent=1)}
    for path in sorted(trial.folder.rglob("*")):
        if path.suffix in (".csv", ".log") or path.name == "provenance.json":
            texts[str(path.relative_to(trial.folder))] = path.read_text(errors="replace")
    scrub = scrubber(trial)
    with tarfile.open(to, "w:gz") as archive:
        for name, text in texts.items():
            data = scrub(text[-(4 << 20) :]).encode("utf-8", "replace")
            member = tarfile.TarInfo(scrub(name))
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
