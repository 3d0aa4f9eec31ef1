"""Two sides joined by kernel and shape, judged, row by row."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from orchestrator.analysis.compare.reading import Key, Run, Timings
from orchestrator.analysis.compare.sides import UNDER_TEST, Difference, Side, differences, interleaved, refuse_swapped
from orchestrator.analysis.compare.statistics import ENOUGH, Floats, Settled
from orchestrator.analysis.compare.verdict import BOUND, VERDICTS, Judged, Rule, Verdict, by_rule_only, judge
from orchestrator.errors import InputError
from orchestrator.tables.faults import escaped, shown
from worker.text import plural


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel and shape. Times in us; `change`, `noise` and `seen_from` as shares of the golden time; None where
    there is none. `repeats` as kept of all, `1/3`. `configs`: the config of each side, "" where rows name none."""

    key: Key
    verdict: Verdict
    golden_us: float | None
    tot_us: float | None
    change: float | None
    p: float | None
    noise: float | None
    seen_from: float | None
    golden_repeats: str
    tot_repeats: str
    beyond: bool
    suspect: bool
    note: str
    configs: tuple[str, str] = ("", "")


@dataclass(frozen=True, slots=True)
class Comparison:
    """All rows, the worst first, with what the table says as a whole. `columns` are `kernel` and the shape's."""

    columns: tuple[str, ...]
    rows: list[Row]
    judged: Judged
    rule: Rule
    bound: float
    golden: Side
    tot: Side
    differences: list[Difference]
    warnings: list[str]
    rule_only: bool = False

    @property
    def regression(self) -> bool:
        """True where a row, or the table as a whole, is a regression."""
        return self.slower or any(r.verdict == "regression" for r in self.rows)

    @property
    def slower(self) -> bool:
        """True where the table as a whole is a regression."""
        return bool(self.judged.slower)

    @property
    def open(self) -> list[Row]:
        """The rows that could not be judged: they deserve a second look."""
        return [r for r in self.rows if r.suspect]

    @property
    def exit_code(self) -> int:
        """1: a regression; 4: something could not be judged; 0: all is judged, and nothing is slower."""
        return 1 if self.regression else 4 if self.open else 0

    @property
    def counts(self) -> dict[str, int]:
        """Rows by verdict, all verdicts."""
        found = Counter(r.verdict for r in self.rows)
        return {v: found[v] for v in VERDICTS}


def compare(
    golden: Side, tot: Side, *, rule: Rule | None = None, bound: float = BOUND, under_test: Sequence[str] = (),
    other_gpu: bool = False, rule_only: bool = False,
) -> Comparison:  # fmt: skip
    """Join and judge two sides. Raises InputError where they cannot be compared."""
    rule = rule or Rule()
    refuse_swapped(golden.records, tot.records)
    _same_columns(golden, tot)
    found = differences(golden.fields, tot.fields, (*UNDER_TEST, *under_test))
    warnings = [*golden.side.notes, *tot.side.notes]
    machine = [d for d in found if d.kind == "machine"]
    if machine:
        what = "; ".join(f"{d.name}: {d.golden} and {d.tot}" for d in machine)
        if not other_gpu:
            raise InputError(f"the sides are of different machines ({escaped(what)}): their times say nothing of the"
                             " software; --other-gpu compares them all the same")  # fmt: skip
        warnings.append(f"the sides are of different machines ({what}): a verdict is not one on the software")
    method = "; ".join(f"{d.name}: {d.golden} and {d.tot}" for d in found if d.kind == "method")
    warnings += [f"not measured in the same way ({method})"] if method else []
    names = golden.side.shape
    order = [tot.side.shape.index(n) for n in names]
    places = {k: (k[0], *(k[1 + i] for i in order)) for k in tot.side.times}
    tot_times = {places[k]: times for k, times in tot.side.times.items()}
    configs = golden.side.configs, {places[k]: config for k, config in tot.side.configs.items()}
    keys = list(dict.fromkeys((*golden.side.times, *tot_times)))
    in_turn = (golden.interleaved and tot.interleaved) or interleaved(golden.records, tot.records)
    paired = in_turn and _same_runs(golden.side, tot_times, tot.side.numbered, warnings)
    arrays = _array(keys, golden.side.times), _array(keys, tot_times)
    judged = judge(*arrays, rule=rule, bound=bound, paired=paired)
    if rule_only:
        judged = by_rule_only(judged, rule)
    if not any(k in tot_times for k in golden.side.times):
        example = [" ".join(map(str, next(iter(t)))) for t in (golden.side.times, tot_times)]
        warnings.append(f"no row is on both sides; golden has {shown(example[0], 120)}, tot {shown(example[1], 120)}")
    rows = [_row(i, key, judged, golden.side.times, tot_times) for i, key in enumerate(keys)]
    if any(configs):
        rows = [replace(r, configs=(configs[0].get(r.key, ""), configs[1].get(r.key, ""))) for r in rows]
    rows.sort(
        key=lambda r: (VERDICTS.index(r.verdict), -(r.change or 0.0) if r.verdict != "improved" else r.change or 0.0)
    )
    return Comparison(("kernel", *names), rows, judged, rule, bound, golden, tot, found, warnings, rule_only)


def _same_columns(golden: Side, tot: Side) -> None:
    only = [(n, s) for s, other in ((golden, tot), (tot, golden)) for n in s.side.shape if n not in other.side.shape]
    if only:
        faults = [f"{escaped(str(s.files[0]))}:1: column {shown(n)} is on the {s.name} side only" for n, s in only]
        raise InputError([*faults, "rows are joined by the kernel and all columns of the shape; a column that is no"
                          " part of it is left out with --ignore-column NAME"])  # fmt: skip


def _same_runs(golden: Timings, tot: dict[Key, dict[Run, float]], numbered: bool, warnings: list[str]) -> bool:
    if not (golden.numbered and numbered):
        warnings.append("the sides say that they were measured in turn, but their rows have no run numbers: not paired")
        return False
    odd = sum(golden.times[k].keys() != tot[k].keys() for k in golden.times if k in tot)
    if odd:
        rows = plural(odd, "row has", "rows have")
        warnings.append(f"measured in turn, but {rows} other run numbers on the other side: not paired")
    return not odd


def _array(keys: Sequence[Key], times: dict[Key, dict[Run, float]]) -> Floats:
    """(rows, repeats), a row's repeats in the order of their runs: with the same runs on both sides, they pair up."""
    out = np.full((len(keys), max(ENOUGH, *map(len, times.values()))), np.nan)
    for row, key in enumerate(keys):
        there = times.get(key, {})
        out[row, : len(there)] = [there[run] for run in sorted(there)]
    return out


def _row(
    i: int, key: Key, judged: Judged, golden: dict[Key, dict[Run, float]], tot: dict[Key, dict[Run, float]]
) -> Row:
    verdict: Verdict = judged.verdicts[i]
    a, b = _number(judged.golden.us[i]), _number(judged.tot.us[i])
    sides = ((judged.golden, golden.get(key, {})), (judged.tot, tot.get(key, {})))
    repeats = [f"{s.count[i] if s.stable[i] or judged.averaged else 0}/{len(times)}" for s, times in sides]
    return Row(
        key, verdict, a, b, b / a - 1 if a and b else None, _number(judged.p[i]), _number(judged.noise[i]),
        _number(judged.seen_from[i]), repeats[0], repeats[1], bool(judged.beyond[i]), bool(judged.suspect[i]),
        _note(i, verdict, judged, sides),
    )  # fmt: skip


def _number(x: float) -> float | None:
    return float(x) if math.isfinite(x) else None


def _note(i: int, verdict: Verdict, judged: Judged, sides: Sequence[tuple[Settled, dict[Run, float]]]) -> str:
    if verdict in ("new", "missing", "ignored") or judged.averaged:
        return ""
    out = []
    for name, (side, times) in zip(("golden", "tot"), sides, strict=True):
        n = len(times)
        if n < ENOUGH:
            out.append(f"{name}: {n} of {ENOUGH} repeats")
        elif not side.stable[i]:
            out.append(f"{name}: no {ENOUGH} of {n} agree")
        elif side.count[i] < n:
            out.append(f"{name}: {n - side.count[i]} of {n} strayed")
    if verdict == "unstable" and not out:
        out.append("fewer than three pairs of runs without a stray")
    if verdict == "ok" and judged.beyond[i]:
        out.append("beyond the rule only with the shift of the whole table")
    return "; ".join(out)
