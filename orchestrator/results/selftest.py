"""The checks of `gemmfleet selftest`: statements about AITER on a real chip that nobody has seen hold yet.

A check asks what ordinary commands found (`nodes check`, `tune`, `verify`, `bench`, `db check`). It gets each as a
`Step` of `selftest_trial.py`, which runs the command when the first check asks for it: most checks look at
`trial.run_a4w4()`, the one run of a4w4's script. `selftest_bundle.py` packs what the commands left.

`gemmfleet selftest` goes through `try_statements`. A new check is a function with `@statement` at its place in the
list; docs/explanation/aiter.md lists the statements.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator

from orchestrator.pages import Document
from orchestrator.results.selftest_trial import A4W4, ODD_K, NodeTrial, NotTriedError, require
from worker.families import backend_of
from worker.text import plural

HELD = "held"
NOT_HELD = "did not hold"
NOT_TRIED = "could not be tried"
OUTCOMES = (HELD, NOT_HELD, NOT_TRIED)
ALIKE = 1.25
"""Largest ratio of two times of one kernel."""
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
CANARY_EVENTS = "SELECT data FROM journal WHERE type LIKE 'Canary%'"
SLOT_REPORTS = """SELECT json_extract(j.data, '$.slot'), r.conditions, r.spent FROM reports r JOIN journal j
    ON j.type='AttemptStarted' AND json_extract(j.data, '$.attempt')=r.attempt"""
"""A row an attempt: its slot, the readings of its GPU and the seconds that it spent, each as JSON."""

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
    require(gpus, "the node has no GPU")
    lacks = [name for name in GPU_FACTS if any(gpu.get(name) in (None, "", {}) for gpu in gpus.values())]
    return not lacks, f"{plural(len(gpus), 'GPU')}; missing: {', '.join(lacks) or 'nothing'}"


@statement(2, "KFD, torch and AITER's rows name the same chip.")
def check_chip(trial: NodeTrial) -> Answer:
    step = trial.run_a4w4()
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
    step = trial.run_a4w4()
    seen = [len(slot["worker"]["gpus"]) for slot in step.slots(gpus=True)]
    pairs = set()
    for slot, conditions, _ in step.query(SLOT_REPORTS):
        pairs |= {(str(slot), reading.get("id") or reading.get("pci")) for reading in conditions.values()}
    slots = {slot for slot, _ in pairs}
    gpus = {gpu for _, gpu in pairs}
    is_one_to_one = len(pairs) == len(slots) == len(gpus)
    shown = f"GPUs that each worker sees: {seen}; pairs of slot and GPU: {len(pairs)}"
    return set(seen) == {1} and is_one_to_one, shown


@statement(4, "Canaries pass, and take about the same time on all slots.")
def check_canaries(trial: NodeTrial) -> Answer:
    step = trial.run_a4w4()
    step.slots()  # raises if none was ready
    events = [event for (event,) in step.query(CANARY_EVENTS)]
    failed = [str(event["detail"]) for event in events if "detail" in event]
    require(failed or any(event.get("us", 0) > 0 for event in events), "the image's torch cannot multiply")
    spans = []
    for name in ("us", "compute_us", "memory_us"):
        times = [event[name] for event in events if event.get(name, 0) > 0]
        if times:
            spans.append((min(times), max(times)))
    shown = [f"{least:.1f} to {most:.1f} us" for least, most in spans]
    return not failed and all(map(_is_alike, spans)), "; ".join(shown + failed)


def _is_alike(times: tuple[float, float]) -> bool:
    return max(times) <= ALIKE * min(times)


@statement(5, "gemmfleet promises to drive the AITER that it finds, and its shim fits.")
def check_tree(trial: NodeTrial) -> Answer:
    trees = [slot["device"]["aiter"] for slot in trial.run_a4w4().slots()]
    wrong = {text for tree in trees for text in (tree["warning"], tree["shim"])} - {"", "used"}
    versions = {f"version {tree['version'] or 'unknown'} {tree['commit'][:10]}" for tree in trees}
    return not wrong, "; ".join(wrong or versions)


def _describe_applied(trial: NodeTrial, name: str) -> str:
    return "applied" if f"{name} is applied" in trial.run_a4w4().log() else "not applied"


def _check_workaround(trial: NodeTrial, name: str, fault: str) -> Answer:
    """Held if the script measured ASM kernels, and printed no such fault."""
    counts = Counter(backend_of(A4W4.name, row) for row in trial.run_a4w4().rows())
    is_faulty = re.search(fault, trial.run_a4w4().log())
    return counts["asm"] > 0 and not is_faulty, f"{name} {_describe_applied(trial, name)}; candidates: {dict(counts)}"


@statement(6, "`asm_dir_symlink` is applied where it is needed: AITER finds its ASM kernels.")
def check_asm_dir(trial: NodeTrial) -> Answer:
    return _check_workaround(trial, "asm_dir_symlink", r"No such file or directory: .{0,200}f4gemm")


@statement(7, "`tile_column_case` is applied where it is needed: the a4w4 script finds its columns.")
def check_tile_columns(trial: NodeTrial) -> Answer:
    return _check_workaround(trial, "tile_column_case", r"KeyError: .tile_")


@statement(8, "`k_trim` is applied where it is needed, and a K of 384 is wrong only where the files say so.")
def check_odd_k(trial: NodeTrial) -> Answer:
    step = trial.run_a4w4()
    shown = f"k_trim {_describe_applied(trial, 'k_trim')}; "
    if any(int(row["K"]) == ODD_K for row in step.rows("tuned.csv")):
        return True, f"{shown}right"
    failed = [failure for failure in step.document["failed"] if str(ODD_K) in failure["shape"]]
    why = "; ".join(f"{failure['reason']}: {failure['detail']}" for failure in failed)
    return "wrong_result" in why and "not a multiple of 256" in why, shown + why[:400]


@statement(9, "Modules are built once, in a slot's folder, and all slots load them.")
def check_modules(trial: NodeTrial) -> Answer:
    step = trial.run_a4w4()
    builds = step.log().count("building the modules of")
    spent = [seconds for *_, seconds in step.query(SLOT_REPORTS)]
    ready = [round(seconds["start"]) for seconds in spent if "start" in seconds]
    later = max(seconds.get("build", 0.0) for seconds in spent)
    return builds <= 1 and later < 5, f"{plural(builds, 'build')}; slots ready after {ready} s; later {later:.1f} s"


@statement(10, "AITER's lists of kernels name every winner.")
def check_lists(trial: NodeTrial) -> Answer:
    words = ["--build", trial.node.image or trial.node.aiter.root or ""]
    if trial.node.image:
        words += ["-i", str(trial.all_gpus)]
    step = trial.step("lists", "db check", trial.winners_table(), *words)
    require("verdict" in step.document, step.why)
    verdict = step.document["verdict"]
    problems = [str(problem["text"]) for problem in list(step.document["problems"])[:3]]
    return verdict != "unsafe", "; ".join((verdict, *problems))


@statement(11, "`verify` proves every row with AITER's operators.")
def check_verify(trial: NodeTrial) -> Answer:
    words = ("-i", trial.first_gpu, "--table", trial.winners_table(), "--family", A4W4.name)
    step = trial.step("verify", "verify", *words)
    answer: Document = next(iter(step.document.get("nodes", ())), {"why": step.why})
    require(not answer["why"], answer["why"])
    proofs = Counter[str]()
    for row in answer["rows"]:
        selected = "" if row["selected"] else ", not selected"
        proofs[f"{row['verdict']}{selected} {row['why']}"] += 1
    return set(proofs) == {"ok "}, "; ".join(f"{count} {proof}" for proof, count in proofs.items())


@statement(12, "The tuner `aiter-triton` tunes two shapes.")
def check_triton(trial: NodeTrial) -> Answer:
    trial.run_a4w4()  # it sets first_gpu
    step = trial.run("tune", "aiter-triton", A4W4, trial.first_gpu, "--tuner", "aiter-triton", "--budget", 40)
    if step.document.get("shapes", {}).get("tuned", 0) == 2:
        return True, step.why if step.document.get("failed") else "2 shapes tuned"
    require(step.document.get("failed") and "unsupported" not in step.why and not step.cut, step.why)
    return False, step.why


Times = dict[tuple[str, int], float]
"""Microseconds by backend and M."""


def _bench_times(trial: NodeTrial, timer: str = "events") -> Times:
    """The times that `bench` measures. Raises NotTriedError without any."""
    words = ("--db", trial.winners_table(), "--timer", timer, "--backend", "aiter,aiter-triton,aiter-gluon")
    step = trial.run("bench", f"bench-{timer}", A4W4, trial.first_gpu, *words)
    rows = [row for row in step.document.get("rows", ()) if row["us"] > 0]
    missing = "; ".join(f"{m['backend']}: {m['detail'][:200]}" for m in step.document.get("missing", ()))
    require(rows, missing or step.why)
    return {(row["backend"], int(row["key"]["M"])): float(row["us"]) for row in rows}


def _compare_times(times: Times, others: Times) -> Answer:
    """Held if there are times of the same backend and M, and all of them are alike."""
    pairs = {key: (us, others[key]) for key, us in times.items() if key in others}
    shown = [f"{backend}, M {m}: {us:.2f} and {other:.2f} us" for (backend, m), (us, other) in pairs.items()]
    return bool(pairs) and all(map(_is_alike, pairs.values())), "; ".join(shown)


@statement(13, "AITER's dispatch takes as long in `bench` as its tuner measured.")
def check_dispatch(trial: NodeTrial) -> Answer:
    rows = trial.run_a4w4().rows("tuned.csv")
    tuned = {("aiter", int(row["M"])): float(row["us"]) for row in rows if int(row["K"]) != ODD_K}
    return _compare_times(tuned, _bench_times(trial))


@statement(14, "rocprofv3 and device events give about the same times.")
def check_timers(trial: NodeTrial) -> Answer:
    return _compare_times(_bench_times(trial), _bench_times(trial, "rocprof"))


@statement(15, "The script of each other family tunes two tiny shapes.")
def check_families(trial: NodeTrial) -> Answer:
    trial.run_a4w4()  # it begins the family runs
    outcomes = []
    tuned = []
    failed = []
    for name, future in trial.family_runs.items():
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
    require(tuned and not all_cut, shown)
    return not failed, shown


@statement(16, "The scripts take every option that was read from their files.")
def check_flags(trial: NodeTrial) -> Answer:
    refused = set(re.findall(r"error: (?:unrecognized|argument|the following arguments) .{0,200}", trial.logs()))
    if refused:
        return False, "; ".join(refused)
    trial.run_a4w4().rows()  # raises if the script measured nothing
    return True, "no script refused an option"


def _check_set_up(trial: NodeTrial, least: float, most: float, *, later: bool) -> Answer:
    """Held if the median seconds before the first candidate, of the first batch or of later ones, are in this range."""
    trial.run_a4w4().slots(gpus=True)
    batches = re.findall(r"set-up of batch (\d+): ([\d.]+) s", trial.logs())
    seconds = sorted(float(text) for number, text in batches if (number != "1") is later)
    require(seconds, "no process had such a batch")
    median = seconds[len(seconds) // 2]
    return least <= median <= most, f"{seconds[0]:.1f} to {seconds[-1]:.1f} s, mostly {median:.1f} s"


@statement(17, "A process needs 7 to 30 s before its first candidate.")
def check_first_set_up(trial: NodeTrial) -> Answer:
    return _check_set_up(trial, 7, 30, later=False)


@statement(18, "A further batch needs 5 to 25 s before its first candidate.")
def check_later_set_up(trial: NodeTrial) -> Answer:
    return _check_set_up(trial, 5, 25, later=True)


@statement(19, "No container and no lock of a run is left on the node.")
def check_cleaned(trial: NodeTrial) -> Answer:
    runs = {step.run.name for step in trial.steps.values() if step.run.is_dir()}
    step = trial.step("after", "nodes check", "-i", trial.all_gpus)
    require(runs, "no run was on the node")
    require("nodes" in step.document, step.why)
    texts = [f"{node['locks']} {node['containers']}" for node in step.document["nodes"]]
    left = [run for run in runs if any(run in text for text in texts)]
    return not left, f"{plural(len(runs), 'run')}, of which {len(left)} left containers or locks"


def try_statements(trial: NodeTrial) -> Iterator[Document]:
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
