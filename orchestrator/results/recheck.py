"""Times then and now: the recheck of a tuned table on another build, and a run's gain over the calls of a workload.

A recheck measures each row's kernel and its runners-up, and does not search. A row is `gone` if its kernel is wrong or
does not run there. It is `slower` if it got slower than the median row by more than a tolerance; the median takes out
the clocks, which differ between sessions. It is `overtaken` if a runner-up, measured next to it, beats it by more than
the noise of a merge. Only these rows are worth tuning again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, get_args

from orchestrator.command_hints import command
from orchestrator.errors import InputError
from orchestrator.families import grid_point
from orchestrator.files.read import read_json
from orchestrator.files.write import write_atomic
from orchestrator.ledger.reader import LedgerReader, ProfileRow, ShapeState
from orchestrator.paths import RunPaths
from orchestrator.shapes.model import NOW, numbers
from orchestrator.shapes.reader import read_shapes
from orchestrator.tables.locate import MergeInput
from orchestrator.tables.policy import Time, decide
from orchestrator.tables.tuned import Key, best, key_of, number_of, read_table
from worker.families import NULLS, Family, backend_of
from worker.protocol import TableKernel
from worker.protocol.spec import MAX_WORD
from worker.text import and_more, plural

FEW = 5
"""With fewer measured rows than this, their median does not count as the difference of the sessions."""
Verdict = Literal["good", "gone", "slower", "overtaken", "not measured"]
Named = tuple[str, str]
"""Name and splitK, which identify a kernel in every build."""


@dataclass(frozen=True, slots=True)
class RowToCheck:
    """A row of a table to check. `kernels`: its kernel, then the runners-up, fastest first. `us`: its time in the
    table. `known`: how many candidates have a known time."""

    kernels: tuple[TableKernel, ...]
    us: float
    known: int


def rows_to_check(sources: MergeInput, runners: int) -> dict[Key, RowToCheck]:
    """The rows of a table by key (gfx, cu_num, ...), each with the runners-up in its profiles, at most `runners`.
    Raises InputError for a file that is not a table, and for fmoe, whose rows are pairs of kernels."""
    family = sources.family
    if family.two_stages:
        raise InputError(f"a row of {family.name} is a pair of kernels, which recheck cannot measure: tune it again")
    table = {key_of(cells, family): cells for cells in sources.newcomers() if (number_of(cells["us"]) or 0.0) > 0}
    measured = (
        (key_of(cells, family), _kernel(cells, family), number_of(cells["us"]) or 0.0)
        for cells in sources.beside()
        if cells.get("status", "ok") == "ok"
    )
    some = (m for m in measured if m[0] in table and m[1].name and m[2] > 0)
    fastest = best(some, lambda m: (m[0], m[1].name, m[1].split), lambda m: m[2])
    beside: dict[Key, list[TableKernel]] = {}
    for key, kernel, _ in sorted(fastest.values(), key=lambda m: (m[2], m[1])):
        beside.setdefault(key, []).append(kernel)
    out = {}
    for key, cells in table.items():
        own = _kernel(cells, family)
        others = [k for k in beside.get(key, ()) if (k.name, k.split) != (own.name, own.split)]
        out[key] = RowToCheck((own, *others[:runners]), float(cells["us"]), 1 + len(others))
    return out


def chip_of_rows(rows: Mapping[Key, object], gfx: str, cu_num: int) -> tuple[int | str, int | str]:
    """The chip whose rows are checked. It is the run's chip; if that is unknown before a node is reached (gfx "",
    cu_num 0), it is the only chip of the rows that fits."""
    fitting = {(key[0], key[1]) for key in rows if gfx in ("", key[0]) and cu_num in (0, key[1])}
    return fitting.pop() if len(fitting) == 1 else (gfx, cu_num)


def _kernel(cells: Mapping[str, str], family: Family) -> TableKernel:
    number = cells.get(dict(family.renames).get("kernelId", "kernelId"), "")
    name, split = cells.get("kernelName", ""), number_of(cells.get("splitK", "")) or 0
    return TableKernel(backend_of(family.name, cells), number, "" if name in NULLS else name[:MAX_WORD], f"{split:g}")


def write_rows(path: Path, table: str, rows: Mapping[int, RowToCheck], slower: float) -> None:
    """Write the rows that a run checks, by shape id. `slower`: the tolerance, as a share."""
    checked = {i: {"us": r.us, "kernels": r.kernels} for i, r in rows.items()}
    write_atomic(path, json.dumps({"table": table, "slower": slower, "rows": checked}) + "\n")


def kernels_to_check(path: Path) -> dict[int, list[TableKernel]]:
    """The only kernels to measure for each shape; {} if the run is not a recheck."""
    rows = read_json(path)["rows"] if path.exists() else {}
    return {int(i): [TableKernel(*k) for k in r["kernels"]] for i, r in rows.items()}


@dataclass(frozen=True, slots=True)
class CheckedRow:
    """The verdict on a row. Times are in microseconds, None if not measured. `by`: the fastest runner-up now."""

    key: tuple[int | str, ...]
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
        return [r for r in self.rows if r.verdict != "good"]

    @property
    def counts(self) -> dict[str, int]:
        """Number of rows by verdict, without zeros."""
        return {v: n for v in get_args(Verdict) if (n := sum(r.verdict == v for r in self.rows))}

    def to_json(self, key_names: Sequence[str]) -> dict[str, Any]:
        """The document of `recheck --json`; `key_names`: of the family."""
        rows = [{**asdict(r), "key": dict(zip(key_names, r.key, strict=True))} for r in self.rows]
        return {**asdict(self), "counts": self.counts, "to_tune": len(self.to_tune), "rows": rows}


def slot_seconds(ledger: LedgerReader) -> float:
    """Seconds of slots that all attempts of a run took, with the starts of their tuners."""
    return sum(a.seconds for a in ledger.replayed.attempts.values()) + ledger.spent().get("start", 0.0)


def judge(ledger: LedgerReader, path: Path) -> Recheck:
    """Judge the rows of a recheck by its run's measurements. `path`: the file of `write_rows`."""
    document = read_json(path)
    wanted = {int(i): r for i, r in document["rows"].items()}
    candidates = (row for row in ledger.profile_rows() if not row.winner and row.shape in wanted)
    measured: dict[int, dict[Named, ProfileRow]] = {i: {} for i in wanted}
    for (shape, named), row in best(candidates, lambda r: (r.shape, _named(r)), _us).items():
        measured[shape][named] = row
    names: dict[int, Named] = {i: (r["kernels"][0][2], r["kernels"][0][3]) for i, r in wanted.items()}
    rows_now = {i: measured[i][name] for i, name in names.items() if name in measured[i]}
    ratios = [_us(row) / wanted[i]["us"] for i, row in rows_now.items() if _us(row) != math.inf]
    drift = median(ratios) if len(ratios) >= FEW else 1.0
    winners = {w.shape: _named(w) for w in ledger.winners()}
    rows = tuple(
        _judged(s, wanted[s.id]["us"], names[s.id], measured[s.id], winners.get(s.id), drift * (1 + document["slower"]))
        for s in ledger.shapes()
        if s.id in wanted
    )
    return Recheck(document["table"], rows, drift, slot_seconds(ledger))


def _named(row: ProfileRow) -> Named:
    return row.kernel_name, str(row.row.get("splitK", 0))


def _us(row: ProfileRow) -> float:
    return row.us if row.us > 0 and row.status == "ok" else math.inf


def _judged(
    s: ShapeState, then: float, own: Named, measured: Mapping[Named, ProfileRow], won: Named | None, most: float
) -> CheckedRow:
    """The verdict on one row. `won`: the run's winner of the shape. `most`: the row is slower if time now over time
    then is above this."""
    if s.state == "pending":
        return CheckedRow(s.key, "not measured", own[0], then)
    mine = measured.get(own)
    if mine is None or _us(mine) == math.inf:
        why = f"{mine.status}: {mine.row['detail']}" if mine else "this build has no such kernel, or cannot run it"
        why += f" ({s.detail})" if s.state == "failed" else ""
        return CheckedRow(s.key, "gone", own[0], then, why=why)
    now = mine.us
    by, by_us = min(
        ((n[0], _us(r)) for n, r in measured.items() if n != own), key=lambda b: b[1], default=("", math.inf)
    )
    verdict: Verdict = "good"
    if now > then * most:
        verdict = "slower"
    elif won != own and decide(Time(now), Time(by_us), is_key=True, rival=Time(now), policy="noise")[0] == "replaced":
        verdict = "overtaken"
    return CheckedRow(s.key, verdict, own[0], then, now, by, None if by_us == math.inf else by_us)


SIGMA = 1.4826
"""The standard deviation of a normal distribution over half its interquartile range."""


@dataclass(frozen=True, slots=True)
class ShapeGain:
    """A shape of the workload. Times of a call are in microseconds, with the standard deviation of their difference."""

    key: Key
    calls: float
    before_us: float
    after_us: float
    sigma_us: float = 0.0

    @property
    def won_us(self) -> float:
        """Microseconds that its calls gain (negative: lose)."""
        return self.calls * (self.before_us - self.after_us)


@dataclass(frozen=True, slots=True)
class Gain:
    """The gain of a run. `rows`: shapes with times before and after, the largest gain first. `left_out`: others."""

    rows: tuple[ShapeGain, ...]
    left_out: tuple[Key, ...]

    @property
    def before_us(self) -> float:
        return sum(r.calls * r.before_us for r in self.rows)

    @property
    def won_us(self) -> float:
        return sum(r.won_us for r in self.rows)

    @property
    def sigma_us(self) -> float:
        """Standard deviation of `won_us`. The calls of a shape share one error; errors of shapes are independent."""
        return math.hypot(*(r.calls * r.sigma_us for r in self.rows))


def gain(ledger: LedgerReader, calls: Mapping[Key, float], before: Mapping[Key, float], family: Family) -> Gain:
    """The gain of a run. A shape without a row takes the row of its padded M, as AITER's lookup does. If there is no
    such row either, its time does not change."""
    after = {w.key: (w.us, SIGMA * (w.row.get("spread", 0.0))) for w in ledger.winners()}
    rows, left_out = [], []
    for key, n in calls.items():
        ways = dict.fromkeys((key, grid_point(key, family, "fine"), grid_point(key, family, "coarse")))
        was = next((before[k] for k in ways if k in before), None)
        if was is None:
            left_out.append(key)
            continue
        us, spread = next((after[k] for k in ways if k in after), (was, 0.0))
        # a table has no spread: we assume that the time before has the same error as the time after
        rows.append(ShapeGain(key, n, was, us, spread * math.hypot(was, us)))
    rows.sort(key=lambda r: -r.won_us)
    return Gain(tuple(rows), tuple(left_out))


def times_before(paths: RunPaths, ledger: LedgerReader, table: Path | None, family: Family) -> dict[Key, float]:
    """Times before the run in microseconds. They come from `table`'s rows of its chip; else from the rows that its
    merge found (if the old kernel was measured beside the new one, that time); else from the column now_us of its
    shapes. Raises InputError."""
    out: dict[Key, float] = {}
    if paths.annotations.exists():
        out |= numbers(read_shapes(paths.annotations, family), NOW)
    if paths.merge.exists():
        for r in read_json(paths.merge)["rows"]:
            us = r["rival_us"] if r.get("rival_us") and r.get("judged") == "same profile" else r["old_us"]
            if us and all(n in r["key"] for n in family.key_names):
                out[tuple(r["key"][n] for n in family.key_names)] = us
    if table is not None:
        chips = {family.chip(w.gfx, w.cu_num or 0) for w in ledger.winners()}
        rows = read_table(table, family, doubled=True).rows
        out |= {r.key[2:]: r.us for r in rows if r.us is not None and r.key[:2] in chips}
    return out


MOST_NAMED = 4


def gains(ledger: LedgerReader, winners: Sequence[ProfileRow]) -> dict[int, float]:
    """The gain over the median candidate, by shape, for each of these winners that has other candidates (1.0: the
    choice made no difference). Candidates are the correct ones of the settling attempt, with their first times."""
    won = {w.shape: w for w in winners}
    marks = ", ".join(map(str, map(int, won)))
    rows = ledger.query(f"SELECT shape, us, id, attempt FROM rows WHERE us > 0 AND status='ok' AND shape IN ({marks})")
    beside: dict[int, list[float]] = {}
    for shape, us, row, attempt in rows:
        if attempt == won[shape].attempt and row != won[shape].id:
            beside.setdefault(shape, []).append(us)
    return {shape: median(times) / won[shape].us for shape, times in beside.items()}


def noise_note(shapes: Sequence[str], run: str) -> str:
    """Return a sentence on the noisy winners of these shapes, "" if no winner is noisy. `run`: as it is typed.

    The leaders are measured again before one of them wins. If the winner then takes another time than at first,
    something disturbed the machine, and neither its time nor the choice can be trusted.
    """
    if not shapes:
        return ""
    return (
        f"{plural(len(shapes), 'winner is', 'winners are')} noisy, not to be trusted: measured again, the time differs"
        f" from the first by more than both spreads explain ({and_more(shapes, MOST_NAMED)}); measure again:"
        f" {command(f'retry {run} --noisy')}"
    )
