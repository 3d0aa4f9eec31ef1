"""The results of a bench, made from its rows, and its files in the run folder.

`BenchResults.of_run` makes them at the end of a run; `write` writes the files. (A bench of images has a run for each
pass: `bench/image_passes.py` calls `settled_rows` for each and `join_runs` for all.) A side is a software stack or a
config set; in a bench without sides there is one, named "". A run, in this module, is one measurement of a backend on a
shape: a row of the ledger. The files are:

- bench.csv: a row for each shape and side, the columns of the runbook first, then those of other backends;
- bench_runs.csv: a row for each run;
- NAME.csv and NAME.env.json for each side: the input of `compare`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.backend_names import AITERS
from orchestrator.files.cells import no_formula
from orchestrator.files.write import write_atomic, write_csv
from orchestrator.ledger.reader import LedgerReader, ProfileRow, ShapeState
from orchestrator.pages import Document
from orchestrator.paths import RunPaths
from orchestrator.results.environment_record import join_records, make_record
from orchestrator.tables.keys import Key, best_by_key
from worker.families import BENCHED, Family
from worker.protocol.bench import HARMLESS, RunRule, is_reference, mean_of_runs, replace_texts

MEASURED = ("ok", "unstable", "short")
"""Statuses with a number; `short`: interrupted before all runs were in."""
RUNBOOK = ("M", "N", "K", "triton_tflops", "triton_us", "gluon_tflops", "gluon_us")
"""The columns of the runbook's fp4_triton_gluon_bench.csv; 0.0 where there is no number, as there."""
RUNBOOK_NAMES = {backend: name for name, backend in AITERS.items()}
"""AITER's backends by the names that their columns have there, `triton` and `gluon`. Others have their own names."""


@dataclass(frozen=True, slots=True)
class BackendResult:
    """The result of a backend on a shape. `op`, `kernel`, `timer`, `aiter_config`: as the worker reports them."""

    shape: int
    """The number of the shape in the bench, from 1."""
    key: Key
    env: str
    """The name of the side."""
    backend: str
    status: str
    us: float = 0.0
    """The mean of the runs that agree, 0 if there is no number; `detail` says why."""
    tflops: float = 0.0
    """For that time, as `bw`."""
    bw: float = 0.0
    """GB/s."""
    spread: float = 0.0
    """(max - min) / mean of the runs that agree."""
    samples: int = 0
    """Runs that were taken."""
    err: float | None = None
    op: str = ""
    kernel: str = ""
    timer: str = ""
    detail: str = ""
    node: str = ""
    slot: str = ""
    runs: tuple[tuple[int, float], ...] = ()
    """(number, us) of all runs."""
    aiter_config: str = ""

    @property
    def is_measured(self) -> bool:
        return self.status in MEASURED


@dataclass(frozen=True, slots=True)
class BenchResults:
    """The results of a bench. `stacks`: the facts of its sides by name (`environments`), in the order of `--env` or
    `--config-set`, golden first. `total`: how many shapes were asked for. `failed`: those whose attempts failed."""

    paths: RunPaths
    family: Family
    results: list[BackendResult]
    stacks: Mapping[str, Document]
    total: int
    failed: Sequence[ShapeState] = ()

    @classmethod
    def of_run(cls, ledger: LedgerReader, paths: RunPaths, options: Mapping[str, Any]) -> BenchResults:
        """The results of a run as its ledger is now; `options`: those of the run."""
        names = [side["name"] for side in options.get("sides", ())]
        results = join_runs(settled_rows(ledger), rule_of(options), names)
        return cls(paths, ledger.family, results, environments(ledger, names), ledger.counts().total, ledger.failed())

    @property
    def at_fault(self) -> bool:
        """True if a backend failed: by a fault, a wrong result or a hang, but not by being absent."""
        return any(not result.is_measured and result.status not in HARMLESS for result in self.results)

    @property
    def shapes_measured(self) -> int:
        """The number of shapes with a time."""
        return len({result.shape for result in self.results if result.is_measured})

    def write(self) -> None:
        """Write all files. Raises OSError."""
        _write(self.paths.bench, _bench_rows(self.results, self.family))
        _write(self.paths.bench_runs, _run_rows(self.results, self.family))
        for number, (side, stack) in enumerate(self.stacks.items(), 1):
            results = [result for result in self.results if result.env == side]
            if not side or not results:
                continue
            measured = [result for result in results if result.is_measured]
            _write(self.paths.root / f"{side}.csv", _side_rows(measured, self.family))
            places = join_records({"node": r.node, "slot": r.slot, "timer": r.timer} for r in measured)
            record = make_record(self.paths.run, side, number, stack, {"node": "", "slot": "", "timer": ""} | places)
            write_atomic(self.paths.root / f"{side}.env.json", json.dumps(record, indent=1) + "\n")


def settled_rows(ledger: LedgerReader) -> list[ProfileRow]:
    """The rows that count. If a shape was tried several times, only one attempt counts, because runs of two attempts
    are not comparable: the one that settled it, or else the last that has rows."""
    by_attempt: dict[int, dict[str, list[ProfileRow]]] = {}
    for row in ledger.profile_rows():
        by_attempt.setdefault(row.shape, {}).setdefault(row.attempt, []).append(row)
    settling = {shape.id: shape.attempt for shape in ledger.shapes() if shape.state == "tuned"}
    rows = []
    for shape, attempts in sorted(by_attempt.items()):
        last = next(reversed(attempts.values()))
        rows += attempts.get(settling.get(shape, ""), last)
    return rows


def join_runs(rows: Iterable[ProfileRow], rule: RunRule, sides: Sequence[str]) -> list[BackendResult]:
    """A result for each shape, side and backend, in this order; the sides in the order of `sides`, the backends in that
    of BENCHED. Rows of several passes are one result. If one pass has no time, the result has none."""
    groups: dict[tuple[Key, str, str], list[ProfileRow]] = {}
    for row in rows:
        groups.setdefault((row.key, str(row.row.get("env", "")), str(row.row["libtype"])), []).append(row)
    shapes: dict[Key, int] = {}
    order = list(sides)
    joined = []
    for (key, side, backend), group in groups.items():
        shape = shapes.setdefault(key, len(shapes) + 1)
        if side not in order:
            order.append(side)
        joined.append(_join_runs_of_backend(shape, side, backend, group, rule))
    backends = {backend: i for i, backend in enumerate(BENCHED)}
    return sorted(joined, key=lambda r: (r.shape, order.index(r.env), backends.get(r.backend, len(backends))))


def _join_runs_of_backend(
    shape: int, side: str, backend: str, rows: Sequence[ProfileRow], rule: RunRule
) -> BackendResult:
    """The result of a backend from the rows of its runs. If a row has a status other than ok, the result has it."""
    runs = {int(row.row["run"]): row for row in rows if row.row.get("run") and row.us > 0 and row.status == "ok"}
    failed = next((row for row in rows if row.status != "ok"), None)
    described = failed or rows[-1]
    without_mean = BackendResult(
        shape,
        described.key,
        side,
        backend,
        status=failed.status if failed else "short",
        err=described.row.get("errRatio"),
        op=str(described.row.get("op", "")),
        kernel=described.kernel_name,
        timer=str(described.row.get("timer", "")),
        detail=described.row["detail"],
        node=described.node,
        slot=described.slot,
        runs=tuple((number, row.us) for number, row in sorted(runs.items())),
        aiter_config=str(described.row.get("aiter_config", "")),
    )
    if failed or not runs:
        return without_mean
    # a row's tflops and bw are those of its own time: scale them to the mean
    mean = mean_of_runs([us for _, us in without_mean.runs], rule)
    timed = next(iter(runs.values()))
    return replace(
        without_mean,
        status=mean.status,
        us=mean.us,
        tflops=timed.row.get("tflops", 0.0) * timed.us / mean.us,
        bw=timed.row.get("bw", 0.0) * timed.us / mean.us,
        spread=mean.spread,
        samples=mean.taken,
    )


def rule_of(options: Mapping[str, Any]) -> RunRule:
    """The rule that a run's options give."""
    return RunRule(**{name: options[name] for name in ("runs", "extra", "within") if name in options})


def fastest(results: Sequence[BackendResult]) -> Mapping[tuple[int, str], BackendResult]:
    """The fastest measured backend of each (shape, side)."""
    measured = (result for result in results if result.is_measured)
    return best_by_key(measured, lambda result: (result.shape, result.env), lambda result: result.us)


def hide_texts(options: Mapping[str, Any]) -> Document:
    """The options of a bench for the record: hashes in place of the text of files."""

    def hash_of(text: str) -> str:
        return text if is_reference(text) else f"sha256 {hashlib.sha256(text.encode()).hexdigest()}"

    return replace_texts(options, hash_of)


def _bench_rows(results: Sequence[BackendResult], family: Family) -> Iterator[Sequence[Any]]:
    """Header and rows of bench.csv: a row for each shape and side, filled from the results of its backends."""
    header = _bench_columns(results, family)
    winners = fastest(results)
    rows: dict[tuple[int, str], Document] = {}
    for result in results:
        place = (result.shape, result.env)
        row = rows.setdefault(place, {column: _absent_cell(column) for column in header})
        row |= family.named_key(result.key)
        row["env"] = result.env
        row["node"] = row["node"] or result.node
        if place in winners:
            row["fastest"] = winners[place].backend
        name = RUNBOOK_NAMES.get(result.backend, result.backend)
        row[f"{name}_spread"] = f"{result.spread:.4f}"
        row[f"{name}_samples"] = result.samples
        row[f"{name}_status"] = result.status
        if result.is_measured:
            row[f"{name}_tflops"] = f"{result.tflops:.1f}" if result.tflops >= 100 else f"{result.tflops:.4g}"
            row[f"{name}_us"] = f"{result.us:.4f}"
    yield header
    for row in rows.values():
        yield [row[column] for column in header]


def _bench_columns(results: Sequence[BackendResult], family: Family) -> list[str]:
    """The columns of bench.csv: those of the runbook, the family's further ones, and those of this bench's backends."""
    figures = []
    judgements = []
    for backend in dict.fromkeys(result.backend for result in results):
        name = RUNBOOK_NAMES.get(backend, backend)
        judgements += [f"{name}_spread", f"{name}_samples", f"{name}_status"]
        if backend not in RUNBOOK_NAMES:
            figures += [f"{backend}_tflops", f"{backend}_us"]
    more = [column for column in family.key_names if column not in RUNBOOK]
    if any(result.env for result in results):
        more.append("env")
    return [*RUNBOOK, *more, *figures, *judgements, "fastest", "node"]


def _absent_cell(column: str) -> str | int:
    """The cell of bench.csv where a backend has no result."""
    if column.endswith(("_tflops", "_us")):
        return "0.0"
    return 0 if column.endswith("_samples") else ""


def _run_rows(results: Sequence[BackendResult], family: Family) -> Iterator[Sequence[Any]]:
    """Header and rows of bench_runs.csv: a row per run; one of us 0 where a backend has none."""
    more = [column for column in family.key_names if column not in ("M", "N", "K")]
    measurement = ("run", "env", "status", "op", "kernelName", "errRatio", "timer", "slot", "detail")
    header = ["M", "N", "K", "backend", "us", "tflops", "node", *more, *measurement]
    yield header
    for result in results:
        key = family.named_key(result.key)
        for number, us in result.runs or ((0, 0.0),):
            tflops = family.flops(key) / us / 1e6 if us > 0 else 0.0
            cells = {
                **key,
                "backend": result.backend,
                "us": f"{us:.4f}",
                "tflops": f"{tflops:.4f}",
                "node": result.node,
                "run": number,
                "env": result.env,
                "status": result.status,
                "op": result.op,
                "kernelName": no_formula(result.kernel),
                "errRatio": "" if result.err is None else result.err,
                "timer": result.timer,
                "slot": result.slot,
                "detail": no_formula(result.detail),
            }
            yield [cells[column] for column in header]


def _side_rows(measured: Sequence[BackendResult], family: Family) -> Iterator[Sequence[Any]]:
    """Header and rows of a side's file for `compare`: `kernel`, the key, `us`, `run`, of config sets also
    `aiter_config`; only what was measured.

    Equal `run` numbers of two sides were measured side by side.
    """
    header = ["kernel", *family.key_names, "us", "run"]
    has_configs = any(result.aiter_config for result in measured)
    if has_configs:
        header.append("aiter_config")
    yield header
    for result in measured:
        for number, us in result.runs:
            row = [f"{result.backend}/{result.op}", *result.key, f"{us:.4f}", number]
            if has_configs:
                row.append(no_formula(result.aiter_config))
            yield row


def environments(ledger: LedgerReader, sides: Sequence[str] = ()) -> dict[str, Document]:
    """The facts of each side's stack by name, in the order of `sides`, as `{"new": {"torch": "2.9.1", "device": "AMD
    Instinct MI355X", ..., "hosts": [{"node": "n1", "slot": "0", "device": ...}]}}`. Of facts that differ between slots
    the first counts; `hosts` are the slots that measured it."""
    stacks: dict[str, Document] = {name: {"hosts": []} for name in sides}
    for slot in ledger.slots():
        for name, facts in (slot.device.get("bench") or {}).items():
            if not isinstance(facts, dict):
                continue
            stack = stacks.setdefault(str(name), {"hosts": []})
            for fact, value in facts.items():
                stack.setdefault(fact, value)
            stack["hosts"].append({"node": slot.node, "slot": slot.slot, "device": slot.device.get("device", "")})
    return stacks


def _write(path: Path, rows: Iterable[Sequence[Any]]) -> None:
    header, *rest = rows
    write_csv(path, header, rest)
