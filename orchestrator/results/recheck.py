"""The recheck of a tuned table on another build: the kernels to measure, and the verdict on each row.

`rows_to_check` chooses each row's kernel and its runners-up, `write_rows` keeps them for the run that measures them
without a search (`kernels_to_check`), and `judge_rows` compares the run's times with those of the table.

A row is `gone` if its kernel is wrong or does not run there. It is `slower` if it got slower than the median row by
more than a tolerance; the median takes out the clocks, which differ between sessions. It is `overtaken` if a runner-up,
measured next to it, beats it by more than the noise of a merge. Only these rows are worth tuning again.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeVar, get_args

from orchestrator.errors import InputError
from orchestrator.files.read import read_json
from orchestrator.files.write import write_atomic
from orchestrator.ledger.reader import LedgerReader, ProfileRow, ShapeState
from orchestrator.pages import Document
from orchestrator.tables.decision import Time, decide
from orchestrator.tables.keys import Key, key_of, number_of
from orchestrator.tables.merge_input import MergeInput
from worker.families import NULLS, Family, backend_of
from worker.protocol import TableKernel
from worker.protocol.candidates import MAX_WORD

FEW = 5
"""With fewer measured rows than this, their median does not count as the difference of the sessions."""
Verdict = Literal["good", "gone", "slower", "overtaken", "not measured"]
T = TypeVar("T")
KernelName = tuple[str, str]
"""(name, splitK), which identify a kernel in every build, as its number does not."""


@dataclass(frozen=True, slots=True)
class RowToCheck:
    """A row of a table to check. `kernels`: its kernel, then the runners-up, fastest first. `us`: its time in the
    table. `known`: how many candidates have a known time."""

    kernels: tuple[TableKernel, ...]
    us: float
    known: int

    @property
    def name(self) -> KernelName:
        """Name and splitK of its own kernel."""
        return self.kernels[0].name, self.kernels[0].split


def rows_to_check(sources: MergeInput, runners: int) -> dict[Key, RowToCheck]:
    """The rows of a table by key (gfx, cu_num, ...), each with the runners-up in its profiles, at most `runners`.
    Raises InputError for a file that is not a table, and for fmoe, whose rows are pairs of kernels."""
    family = sources.family
    if family.two_stages:
        raise InputError(f"a row of {family.name} is a pair of kernels, which recheck cannot measure: tune it again")
    table = {key_of(cells, family): cells for cells in sources.newcomers() if (number_of(cells["us"]) or 0.0) > 0}
    profiled = _profiled_kernels(sources, table)
    checks = {}
    for key, cells in table.items():
        kernel = _kernel(cells, family)
        profiled[key].pop((kernel.name, kernel.split), None)
        others = [other for _, other in sorted(profiled[key].values())]
        checks[key] = RowToCheck((kernel, *others[:runners]), float(cells["us"]), 1 + len(others))
    return checks


def _profiled_kernels(
    sources: MergeInput, keys: Iterable[Key]
) -> dict[Key, dict[KernelName, tuple[float, TableKernel]]]:
    """The kernels that were right in the profiles, each with its best time in microseconds, by key and name."""
    profiled: dict[Key, dict[KernelName, tuple[float, TableKernel]]] = {key: {} for key in keys}
    for cells in sources.beside():
        if cells.get("status", "ok") != "ok":
            continue
        key = key_of(cells, sources.family)
        kernel = _kernel(cells, sources.family)
        us = number_of(cells["us"]) or 0.0
        if key in profiled and kernel.name and us > 0:
            _keep_fastest(profiled[key], (kernel.name, kernel.split), (us, kernel))
    return profiled


def _keep_fastest(kernels: dict[KernelName, tuple[float, T]], name: KernelName, measurement: tuple[float, T]) -> None:
    """Keep a measurement (us, its row) of a kernel, unless an earlier one is as fast."""
    if name not in kernels or measurement[0] < kernels[name][0]:
        kernels[name] = measurement


def chip_of_rows(rows: Mapping[Key, object], gfx: str, cu_num: int) -> tuple[int | str, int | str]:
    """The chip whose rows are checked. It is the run's chip; if that is unknown before a node is reached (gfx "",
    cu_num 0), it is the only chip of the rows that fits."""
    fitting = {(key[0], key[1]) for key in rows if gfx in ("", key[0]) and cu_num in (0, key[1])}
    return fitting.pop() if len(fitting) == 1 else (gfx, cu_num)


def _kernel(cells: Mapping[str, str], family: Family) -> TableKernel:
    """The kernel that a row of a table or profile names; its name is "" if the row names none."""
    column = dict(family.renames).get("kernelId", "kernelId")
    name = cells.get("kernelName", "")
    split = number_of(cells.get("splitK", "")) or 0
    if name in NULLS:
        name = ""
    return TableKernel(backend_of(family.name, cells), cells.get(column, ""), name[:MAX_WORD], f"{split:g}")


def write_rows(path: Path, table: str, rows: Mapping[int, RowToCheck], slower: float) -> None:
    """Write the rows that a run checks, by shape id. `slower`: the tolerance, as a share.

    The file holds `{"table": "tuned.csv", "slower": 0.05, "rows": {"1": {"us": 9.9, "kernels": [["ck", "7", "name",
    "0"], ...]}}}`.
    """
    checked = {shape: {"us": row.us, "kernels": row.kernels} for shape, row in rows.items()}
    write_atomic(path, json.dumps({"table": table, "slower": slower, "rows": checked}) + "\n")


def _read_rows(document: Mapping[str, Any]) -> dict[int, RowToCheck]:
    rows = {}
    for shape, row in document["rows"].items():
        kernels = tuple(TableKernel(*cells) for cells in row["kernels"])
        rows[int(shape)] = RowToCheck(kernels, row["us"], len(kernels))
    return rows


def kernels_to_check(path: Path) -> dict[int, list[TableKernel]]:
    """The only kernels to measure for each shape; {} if the run is not a recheck."""
    if not path.exists():
        return {}
    return {shape: list(row.kernels) for shape, row in _read_rows(read_json(path)).items()}


@dataclass(frozen=True, slots=True)
class CheckedRow:
    """The verdict on a row. Times are in microseconds, None if not measured. `by`: the fastest runner-up now."""

    key: Key
    verdict: Verdict
    kernel: str
    then_us: float
    now_us: float | None = None
    by: str = ""
    by_us: float | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Recheck:
    """A recheck. `drift`: median of time now over time then, 1.0 with fewer than FEW rows. `slot_s`: seconds of slots
    that it took, with set-up."""

    table: str
    rows: tuple[CheckedRow, ...]
    drift: float
    slot_s: float

    @property
    def to_tune(self) -> list[CheckedRow]:
        """Rows that are not good."""
        return [row for row in self.rows if row.verdict != "good"]

    @property
    def counts(self) -> dict[str, int]:
        """Number of rows by verdict, without zeros."""
        counts = Counter(row.verdict for row in self.rows)
        return {verdict: counts[verdict] for verdict in get_args(Verdict) if counts[verdict]}

    def to_json(self, key_names: Sequence[str]) -> Document:
        """The document of `recheck --json`; `key_names`: of the family."""
        rows = [asdict(row) | {"key": dict(zip(key_names, row.key, strict=True))} for row in self.rows]
        return {**asdict(self), "counts": self.counts, "to_tune": len(self.to_tune), "rows": rows}


def slot_seconds(ledger: LedgerReader) -> float:
    """Seconds of slots that all attempts of a run took, with the starts of their tuners."""
    attempts = ledger.replayed.attempts.values()
    return sum(attempt.seconds for attempt in attempts) + ledger.spent().get("start", 0.0)


def judge_rows(ledger: LedgerReader, path: Path) -> Recheck:
    """Judge the rows of a recheck by its run's measurements. `path`: the file of `write_rows`."""
    document = read_json(path)
    checks = _read_rows(document)
    measured: dict[int, dict[KernelName, tuple[float, ProfileRow]]] = {shape: {} for shape in checks}
    for row in ledger.profile_rows():
        if row.shape in measured and not row.winner:
            _keep_fastest(measured[row.shape], _name_of(row), (_us_if_right(row), row))

    # the drift of the session: the median row's time now over its time in the table
    ratios = []
    for shape, check in checks.items():
        us, _ = measured[shape].get(check.name, (math.inf, None))
        if us != math.inf:
            ratios.append(us / check.us)
    drift = median(ratios) if len(ratios) >= FEW else 1.0
    most = drift * (1 + document["slower"])
    winners = {winner.shape: _name_of(winner) for winner in ledger.winners()}
    rows = [
        _check_row(shape, checks[shape.id], measured[shape.id], winners.get(shape.id), most)
        for shape in ledger.shapes()
        if shape.id in checks
    ]
    return Recheck(document["table"], tuple(rows), drift, slot_seconds(ledger))


def _name_of(row: ProfileRow) -> KernelName:
    return row.kernel_name, str(row.row.get("splitK", 0))


def _us_if_right(row: ProfileRow) -> float:
    """The time of a row in microseconds, infinite if the kernel was wrong or did not run."""
    return row.us if row.us > 0 and row.status == "ok" else math.inf


def _check_row(
    shape: ShapeState,
    check: RowToCheck,
    measured: Mapping[KernelName, tuple[float, ProfileRow]],
    winner: KernelName | None,
    most: float,
) -> CheckedRow:
    """The verdict on one row. `winner`: the run's winner of the shape. `most`: the row is slower if time now over time
    then is above this."""
    kernel, _ = check.name
    if shape.state == "pending":
        return CheckedRow(shape.key, "not measured", kernel, check.us)
    now, row = measured.get(check.name, (math.inf, None))
    if now == math.inf:
        why = "this build has no such kernel, or cannot run it"
        if row:
            why = f"{row.status}: {row.row['detail']}"
        if shape.state == "failed":
            why += f" ({shape.detail})"
        return CheckedRow(shape.key, "gone", kernel, check.us, why=why)

    # against the table, and against the runners-up that were measured next to it
    rivals = [(us, name[0]) for name, (us, _) in measured.items() if name != check.name]
    by_us, by = min(rivals, key=itemgetter(0), default=(math.inf, ""))
    verdict: Verdict = "good"
    if now > check.us * most:
        verdict = "slower"
    elif winner != check.name:
        action, *_ = decide(Time(now), Time(by_us), is_key=True, rival=Time(now), policy="noise")
        if action == "replaced":
            verdict = "overtaken"
    return CheckedRow(shape.key, verdict, kernel, check.us, now, by, None if by_us == math.inf else by_us)
