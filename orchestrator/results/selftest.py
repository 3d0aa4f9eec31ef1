"""The checks of `gemmfleet selftest`: statements about AITER on a real chip that nobody has seen hold yet.

A check asks what ordinary commands found (`nodes check`, `tune`, `verify`, `bench`, `db check`). Each command is a
process of its own, so that one that hangs can be ended when the time is over. docs/explanation/aiter.md lists CHECKS.
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
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from orchestrator.inventory.load import check_references, limit, load_inventory
from orchestrator.inventory.model import Node
from orchestrator.inventory.values import masker
from orchestrator.ledger.reader import LedgerReader
from worker.families import FAMILIES, Family, backend_of
from worker.text import plural

OUTCOMES = HELD, NOT_HELD, NOT_TRIED = "held", "did not hold", "could not be tried"
A4W4, *OTHERS = sorted((f for f in FAMILIES.values() if f.aiter.scripts), key=lambda f: f.name != "a4w4_blockscale")
SCRIPT = ("--tuner", "aiter", "-O", "batch=1")  # a family's own script, one shape a batch
# a K that is not a multiple of 256; seconds that a command may take to end; largest ratio of two times of one kernel
ODD_K, ENDING_S, LIKE = 384, 45, 1.25
SIZES = {
    "B": 2, "M": 64, "N": 512, "K": 512, "token": 16, "model_dim": 1024, "inter_dim": 512, "expert": 8, "topk": 2,
}  # fmt: skip
CANARIES, SLOTS = (
    "SELECT data FROM journal WHERE type LIKE 'Canary%'",
    """SELECT json_extract(j.data, '$.slot'), r.conditions, r.spent FROM reports r JOIN journal j
    ON j.type='AttemptStarted' AND json_extract(j.data, '$.attempt')=r.attempt""",
)


class NotTriedError(Exception):
    """A statement could not be tried. The text says why."""


def needs(there: object, why: str) -> None:
    """Raise NotTriedError if something is not there."""
    if not there:
        raise NotTriedError(why)


class Step(NamedTuple):
    """A command that ended: its JSON document, and why it has no result. `cut`: why it was ended early, "" if it ended
    by itself. `run`: the folder of its run, if it made one."""

    document: dict[str, Any]
    why: str
    cut: str
    run: Path

    def rows(self, name: str = "profile.csv") -> list[dict[str, str]]:
        """Rows of a result file of its run. Raises NotTriedError without any."""
        path = self.run / name
        rows = list(csv.DictReader(path.read_text().splitlines())) if path.is_file() else []
        needs(rows, self.why)
        return rows

    def slots(self, *, gpus: bool = False) -> list[dict[str, Any]]:
        """Reports of its slots that were ready. `gpus`: their workers must see a GPU. Raises NotTriedError."""
        path = self.run / "provenance.json"
        found = [d for d in json.loads(path.read_text())["devices"] if d["device"]] if path.is_file() else []
        blind = gpus and any(not d["worker"].get("gpus") for d in found)
        needs(found and not blind, "the workers see no GPU" if found else f"no slot was ready: {self.why}")
        return found

    def query(self, sql: str, *values: str) -> list[list[Any]]:
        """Rows of a query of its ledger, whose cells are JSON."""
        with LedgerReader.open_readonly(self.run / "ledger.db") as ledger:
            return [[json.loads(cell or "{}") for cell in row] for row in ledger.query(sql, values)]

    def log(self) -> str:
        """The text that its workers printed."""
        return "".join(path.read_text(errors="replace") for path in self.run.glob("logs/*.log"))


def node_of(inventory: Path, name: str | None) -> Node:
    """The node of this name, or the first. Raises InventoryError, also for a variable that is not set."""
    node = next(iter(limit(load_inventory(inventory), name).nodes.values()))
    check_references([node])
    return node


class Trial:
    """The node under test. It runs commands there, each once, and several at a time only on different GPUs.

    `whole`, `alone`: inventories of the node with all its GPUs, and with the first. `others`: the families' runs.
    """

    def __init__(self, folder: Path, inventory: Path, node: str | None, seconds: float) -> None:
        self.folder, self.inventory, self.node = folder, inventory, node_of(inventory, node)
        self.steps, self.others = dict[str, Step](), dict[str, Future[Step]]()
        self.interrupted, self.cut, self._ends = False, "the time was over", time.monotonic() + seconds
        self.whole = self.alone = self._inventory("node")

    def _inventory(self, name: str, **changed: Any) -> Path:
        """An inventory of this node alone, with some of its options changed."""
        raw, path = yaml.safe_load(self.inventory.read_bytes()), self.folder / f"{name}.yaml"
        raw["nodes"] = {self.node.name: {**(raw["nodes"][self.node.name] or {}), **changed}}
        path.write_text(yaml.safe_dump(raw, sort_keys=False))
        return path

    def gpus(self) -> dict[int, dict[str, Any]]:
        """The facts of each GPU that the inventory lets us use. Raises NotTriedError if the node cannot be used."""
        step, given = self.step("nodes", "nodes check", "-i", self.whole), self.node.gpus
        [node] = step.document.get("nodes") or [{"state": "unusable", "findings": ()}]
        wrong = (f["what"] for f in node["findings"] if f["level"] == "unusable")
        needs(node["state"] != "unusable", f"the node cannot be used: {'; '.join(wrong) or step.why}")
        every = range(given if isinstance(given, int) else len(node["gpus"]))
        return {n: node["gpus"][n] for n in (given if isinstance(given, tuple) else every) if n < len(node["gpus"])}

    def a4w4(self) -> Step:
        """The run of a4w4's script on all slots, two shapes a slot. The other families begin after it, in the
        background, on the GPUs beside the first if there are some."""
        gpus = self.gpus()
        step = self.run("tune", A4W4.name, A4W4, self.whole, *SCRIPT, count=2 * max(1, len(gpus)))
        if not self.others:
            lanes = [self._inventory(f"gpu-{n}", gpus=[n]) for n in gpus] or [self.whole]
            self.alone, beside = lanes[0], lanes[1:] or lanes
            pool = ThreadPoolExecutor(len(beside))
            self.others = {
                f.name: pool.submit(self.run, "tune", f.name, f, lane, *SCRIPT)
                for f, lane in zip(OTHERS, beside * len(OTHERS), strict=False)
            }
        return step

    def table(self) -> Path:
        """The winners of a4w4. Raises NotTriedError without any."""
        return self.a4w4().run / "tuned.csv" if self.a4w4().rows("tuned.csv") else Path()

    def run(self, verb: str, name: str, family: Family, inventory: Path, *words: object, count: int = 2) -> Step:
        """A run on tiny shapes of a family that differ in M alone."""
        shapes, names = self.folder / f"{name}.csv", [c.name for c in family.columns if c.required]
        sizes = [{**SIZES, family.m_column: SIZES[family.m_column] * i} for i in range(1, count + 1)]
        odd = [{**SIZES, "K": ODD_K}] if name == A4W4.name else []
        lines = (",".join(str(s[n]) for n in names) for s in sizes + odd)
        shapes.write_text("\n".join((",".join(names), *lines, "")))
        return self.step(
            name, verb, shapes, "-i", inventory, "--family", family.name, "--runs", self.folder, "--grace", 5, *words
        )

    def logs(self) -> str:
        """The texts that the workers of all families' runs printed, once these ended."""
        return self.a4w4().log() + "".join(begun.result().log() for begun in self.others.values())

    def interrupt(self, *_: object) -> None:
        """Start nothing more. A terminal's Ctrl-C goes to the commands that run, too, and they end by themselves."""
        self.interrupted, self.cut, self._ends = True, "it was interrupted", 0.0

    def step(self, name: str, verb: str, *words: object) -> Step:
        """The command of this name; it runs now if it did not run before."""
        left, log = self._ends - time.monotonic(), self.folder / f"{name}.log"
        if name not in self.steps and left > 0:
            argv = [
                "timeout", "--foreground", "--signal=INT", f"--kill-after={ENDING_S}", f"{left + 1:.0f}",
                sys.executable, "-m", "orchestrator", *verb.split(), *map(str, words), "--json",
            ]  # fmt: skip
            with log.open("wb") as said:
                done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said, check=False)
            document, printed = json.loads(done.stdout or "{}"), log.read_text(errors="replace").splitlines()
            failed = "; ".join(f"{f['reason']}: {f['detail'][:200]}" for f in document.get("failed", ())[:3])
            cut = self.cut if done.returncode in (124, 130, 137) else ""
            why = cut or failed or f"exit code {done.returncode}: {' '.join(printed[-1:])[:300]}"
            self.steps[name] = Step(document, why, cut, self.folder / str(document.get("run") or "none"))
        return self.steps.setdefault(name, Step({}, self.cut, self.cut, self.folder / "none"))


def _devices(t: Trial) -> tuple[bool, str]:
    lacks = [
        name
        for name in (
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
        if any(gpu.get(name) in (None, "", {}) for gpu in t.gpus().values())
    ]
    needs(t.gpus(), "the node has no GPU")
    return not lacks, f"{plural(len(t.gpus()), 'GPU')}; missing: {', '.join(lacks) or 'nothing'}"


def _chip(t: Trial) -> tuple[bool, str]:
    seen = {
        "KFD": {(g["gfx"], str(g["cu_num"])) for g in t.gpus().values()},
        "torch": {(d["device"].get("gfx"), str(d["device"].get("cu_num"))) for d in t.a4w4().slots()},
        "rows": {(r["gfx"], r["cu_num"]) for r in t.a4w4().rows()},
    }
    shown = "; ".join(f"{source}: {sorted(chips)}" for source, chips in seen.items())
    return seen["KFD"] == seen["torch"] == seen["rows"], shown


def _isolation(t: Trial) -> tuple[bool, str]:
    seen = [len(d["worker"]["gpus"]) for d in t.a4w4().slots(gpus=True)]
    pairs = {(str(slot), r.get("id") or r.get("pci")) for slot, c, _ in t.a4w4().query(SLOTS) for r in c.values()}
    shown = f"GPUs that each worker sees: {seen}; pairs of slot and GPU: {len(pairs)}"
    return set(seen) == {1} and len(pairs) == len(dict(pairs)) == len({gpu for _, gpu in pairs}), shown


def _canary(t: Trial) -> tuple[bool, str]:
    events = [e for (e,) in t.a4w4().query(CANARIES)] if t.a4w4().slots() else []
    times = [[e[n] for e in events if e.get(n, 0) > 0] for n in ("us", "compute_us", "memory_us")]
    failed = [str(e["detail"]) for e in events if "detail" in e]
    needs(times[0] or failed, "the image's torch cannot multiply")
    shown = "; ".join((*(f"{min(k):.1f} to {max(k):.1f} us" for k in times if k), *failed))
    return not failed and all(max(k) <= LIKE * min(k) for k in times if k), shown


def _tree(t: Trial) -> tuple[bool, str]:
    trees = [d["device"]["aiter"] for d in t.a4w4().slots()]
    wrong = {text for a in trees for text in (a["warning"], a["shim"]) if text not in ("", "used")}
    return not wrong, "; ".join(wrong or {f"version {a['version'] or 'unknown'} {a['commit'][:10]}" for a in trees})


def _applied(t: Trial, name: str) -> str:
    return "applied" if f"{name} is applied" in t.a4w4().log() else "not applied"


def _workaround(t: Trial, name: str, fault: str) -> tuple[bool, str]:
    """Held if the script measured ASM kernels, and printed no such fault."""
    counts, found = Counter(backend_of(A4W4.name, r) for r in t.a4w4().rows()), re.search(fault, t.a4w4().log())
    return counts["asm"] > 0 and not found, f"{name} {_applied(t, name)}; candidates: {dict(counts)}"


def _odd_k(t: Trial) -> tuple[bool, str]:
    tuned = any(int(r["K"]) == ODD_K for r in t.a4w4().rows("tuned.csv"))
    why = "; ".join(f"{f['reason']}: {f['detail']}" for f in t.a4w4().document["failed"] if str(ODD_K) in f["shape"])
    foretold = "wrong_result" in why and "not a multiple of 256" in why
    return tuned or foretold, f"k_trim {_applied(t, 'k_trim')}; {'right' if tuned else why[:400]}"


def _modules(t: Trial) -> tuple[bool, str]:
    builds, spent = t.a4w4().log().count("building the modules of"), [s for *_, s in t.a4w4().query(SLOTS)]
    ready, again = [round(s["start"]) for s in spent if "start" in s], max(s.get("build", 0.0) for s in spent)
    return builds <= 1 and again < 5, f"{plural(builds, 'build')}; slots ready after {ready} s; later {again:.1f} s"


def _lists(t: Trial) -> tuple[bool, str]:
    build, where = t.node.image or t.node.aiter.root or "", ("-i", t.whole) if t.node.image else ()
    step = t.step("lists", "db check", t.table(), "--build", build, *where)
    needs("verdict" in step.document, step.why)
    problems = (str(p["text"]) for p in list(step.document["problems"])[:3])
    return step.document["verdict"] != "unsafe", "; ".join((step.document["verdict"], *problems))


def _verify(t: Trial) -> tuple[bool, str]:
    step = t.step("verify", "verify", "-i", t.alone, "--table", t.table(), "--family", A4W4.name)
    answer: dict[str, Any] = next(iter(step.document.get("nodes", ())), {"why": step.why})
    needs(not answer["why"], answer["why"])
    shown = Counter(f"{r['verdict']}{'' if r['selected'] else ', not selected'} {r['why']}" for r in answer["rows"])
    return set(shown) == {"ok "}, "; ".join(f"{n} {what}" for what, n in shown.items())


def _triton(t: Trial) -> tuple[bool, str]:
    where = t.alone if t.a4w4() else t.whole
    step = t.run("tune", "aiter-triton", A4W4, where, "--tuner", "aiter-triton", "--budget", 40)
    failed, tuned = step.document.get("failed"), step.document.get("shapes", {}).get("tuned", 0)
    needs(tuned == 2 or (failed and "unsupported" not in step.why and not step.cut), step.why)
    return tuned == 2, step.why if failed else "2 shapes tuned"


def _bench(t: Trial, timer: str = "events") -> dict[tuple[str, int], float]:
    """Microseconds by backend and M. Raises NotTriedError without any."""
    words = ("--db", t.table(), "--timer", timer, "--backend", "aiter,aiter-triton,aiter-gluon")
    step = t.run("bench", f"bench-{timer}", A4W4, t.alone, *words)
    times = {(r["backend"], int(r["key"]["M"])): float(r["us"]) for r in step.document.get("rows", ()) if r["us"] > 0}
    missing = "; ".join(f"{m['backend']}: {m['detail'][:200]}" for m in step.document.get("missing", ()))
    needs(times, missing or step.why)
    return times


def _agree(some: dict[tuple[str, int], float], other: dict[tuple[str, int], float]) -> tuple[bool, str]:
    pairs = {key: (us, other[key]) for key, us in some.items() if key in other}
    shown = "; ".join(f"{name}, M {m}: {a:.2f} and {b:.2f} us" for (name, m), (a, b) in pairs.items())
    return bool(pairs) and all(max(pair) <= LIKE * min(pair) for pair in pairs.values()), shown


def _dispatch(t: Trial) -> tuple[bool, str]:
    rows = (r for r in t.a4w4().rows("tuned.csv") if int(r["K"]) != ODD_K)
    return _agree({("aiter", int(r["M"])): float(r["us"]) for r in rows}, _bench(t))


def _families(t: Trial) -> tuple[bool, str]:
    steps = {name: begun.result() for name, begun in t.others.items()} if t.a4w4() else {}
    why = {n: "" if s.document.get("shapes", {}).get("tuned") == 2 else s.why for n, s in steps.items()}
    failed = [steps[n] for n, text in why.items() if text and "has no tuner script" not in text]
    shown = "; ".join(f"{n}: {text or 'tuned'}" for n, text in why.items())
    needs("" in why.values() and not (failed and all(s.cut for s in failed)), shown)
    return not failed, shown


def _flags(t: Trial) -> tuple[bool, str]:
    refused = set(re.findall(r"error: (?:unrecognized|argument|the following arguments) .{0,200}", t.logs()))
    return not refused and bool(t.a4w4().rows()), "; ".join(refused) or "no script refused an option"


def _set_up(t: Trial, least: float, most: float, *, later: bool) -> tuple[bool, str]:
    needs(t.a4w4().slots(gpus=True), "")
    seconds = [float(s) for n, s in re.findall(r"set-up of batch (\d+): ([\d.]+) s", t.logs()) if (n != "1") is later]
    needs(seconds, "no process had such a batch")
    usual = sorted(seconds)[len(seconds) // 2]
    return least <= usual <= most, f"{min(seconds):.1f} to {max(seconds):.1f} s, mostly {usual:.1f} s"


def _cleaned(t: Trial) -> tuple[bool, str]:
    ours, after = (
        {s.run.name for s in t.steps.values() if s.run.is_dir()},
        t.step("after", "nodes check", "-i", t.whole),
    )
    needs(ours and "nodes" in after.document, after.why)
    left = {run for run in ours for node in after.document["nodes"] if run in f"{node['locks']} {node['containers']}"}
    return not left, f"{plural(len(ours), 'run')}, of which {len(left)} left containers or locks"


CHECKS: tuple[tuple[int, str, Callable[[Trial], tuple[bool, str]]], ...] = (
    (1, "The node check reads chip, partition, use, memory, temperature and power of each GPU.", _devices),
    (2, "KFD, torch and AITER's rows name the same chip.", _chip),
    (3, "Each worker sees one GPU, and no two workers see the same one.", _isolation),
    (4, "Canaries pass, and take about the same time on all slots.", _canary),
    (5, "gemmfleet promises to drive the AITER that it finds, and its shim fits.", _tree),
    (6, "`asm_dir_symlink` is applied where it is needed: AITER finds its ASM kernels.",
     lambda t: _workaround(t, "asm_dir_symlink", r"No such file or directory: .{0,200}f4gemm")),
    (7, "`tile_column_case` is applied where it is needed: the a4w4 script finds its columns.",
     lambda t: _workaround(t, "tile_column_case", r"KeyError: .tile_")),
    (8, "`k_trim` is applied where it is needed, and a K of 384 is wrong only where the files say so.", _odd_k),
    (9, "Modules are built once, in a slot's folder, and all slots load them.", _modules),
    (10, "AITER's lists of kernels name every winner.", _lists),
    (11, "`verify` proves every row with AITER's operators.", _verify),
    (12, "The tuner `aiter-triton` tunes two shapes.", _triton),
    (13, "AITER's dispatch takes as long in `bench` as its tuner measured.", _dispatch),
    (14, "rocprofv3 and device events give about the same times.", lambda t: _agree(_bench(t), _bench(t, "rocprof"))),
    (15, "The script of each other family tunes two tiny shapes.", _families),
    (16, "The scripts take every option that was read from their files.", _flags),
    (17, "A process needs 7 to 30 s before its first candidate.", lambda t: _set_up(t, 7, 30, later=False)),
    (18, "A further batch needs 5 to 25 s before its first candidate.", lambda t: _set_up(t, 5, 25, later=True)),
    (19, "No container and no lock of a run is left on the node.", _cleaned),
)  # fmt: skip


def tried(t: Trial) -> Iterator[dict[str, Any]]:
    """Try every statement in turn, and yield it with its outcome. One that fails does not end the others."""
    for number, statement, check in CHECKS:
        try:
            held, detail = check(t)
            outcome = HELD if held else NOT_HELD
        except Exception as e:  # noqa: BLE001 - whatever is odd on a new chip must not end the others
            outcome, detail = NOT_TRIED, str(e) if isinstance(e, NotTriedError) else f"{type(e).__name__}: {e}"
        yield {"number": number, "statement": statement, "outcome": outcome, "detail": detail}


# names that tell nothing about their owner; addresses; absolute paths but for those of the system and of packages
GENERIC = {"root", "localhost", "local", "/", "."}
ADDRESS = re.compile(
    r"[\w.+-]+@[\w.-]+|(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.])|(?<=<host>)(?!\.log\b)(?:\.[A-Za-z0-9-]+)+"
)
PATH = re.compile(
    r"(?:<path>|(?<![\w.<>/~$})-])~?/(?!dev/|sys/|proc/|opt/rocm)(?=[\w.+@%~<-]))"
    r"(?:(?!/(?:site|dist)-packages/)(?:<\w+>|[^\s\"'`\\,;:()<>|=\[\]{}]))*"
)


def scrubber(t: Trial) -> Callable[[str], str]:
    """A function that replaces names of hosts, users, images and paths in a text; absolute paths and addresses even if
    nobody named them."""
    node, facts = t.node, {k: v for n in t.steps["nodes"].document.get("nodes", ()) for k, v in n["facts"].items()}
    hosts = [str(h) for h in (node.name, node.host, node.proxy_jump, socket.gethostname(), facts.get("host")) if h]
    words = {
        "run": (facts.get("workdir"), node.workdir, t.folder),
        "path": (t.inventory, t.inventory.name, t.inventory.stem, Path.home(), Path.cwd()),
        "host": (*hosts, *(host.partition(".")[0] for host in hosts)), "image": (node.image,),
        "user": (node.user, facts.get("user"), Path.home().name), "aiter": (node.aiter.root,),
    }  # fmt: skip
    known = {str(name).lower(): f"<{word}>" for word, names in words.items() for name in names if name}
    longest = map(re.escape, sorted(known.keys() - GENERIC, key=len, reverse=True))
    names = re.compile(f"(?<![A-Za-z0-9])(?:{'|'.join(longest)})(?![A-Za-z0-9])", re.IGNORECASE)
    return lambda text: PATH.sub(
        "<path>", ADDRESS.sub("<address>", names.sub(lambda m: known[m[0].lower()], masker(node.options())(text)))
    )


def pack(t: Trial, outcome: str, to: Path) -> None:
    """Write the bundle: the outcome, facts of the GPUs, rows and logs, all scrubbed. Raises OSError."""
    gpus = [{**g, "id": "", "pci": ""} for node in t.steps["nodes"].document.get("nodes", ()) for g in node["gpus"]]
    paths = (p for p in sorted(t.folder.rglob("*")) if p.suffix in (".csv", ".log") or p.name == "provenance.json")
    texts, scrub = {str(p.relative_to(t.folder)): p.read_text(errors="replace") for p in paths}, scrubber(t)
    with tarfile.open(to, "w:gz") as archive:
        for name, text in {"selftest.json": outcome, "gpus.json": json.dumps(gpus, indent=1), **texts}.items():
            data, member = scrub(text[-(4 << 20) :]).encode("utf-8", "replace"), tarfile.TarInfo(scrub(name))
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
