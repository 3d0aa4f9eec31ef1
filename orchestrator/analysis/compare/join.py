"""Joins two sides by kernel and shape, and has them judged."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.analysis.compare.reading import Key, Run, Side
from orchestrator.analysis.compare.sides import Difference, differences, fields_of, in_turn, refuse_swapped
from orchestrator.analysis.compare.statistics import ENOUGH, Floats
from orchestrator.analysis.compare.verdict import BOUND, VERDICTS, Judged, Rule, by_rule_only, judge
from orchestrator.errors import InputError
from orchestrator.tables.faults import escaped, shown
from worker.text import plural

Times = dict[Key, dict[Run, float]]


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel and shape. Times in us; `change`, `noise` and `seen_from` as shares of the golden time; None for none.

    Repeats as kept of all, `1/3`. `second_look`: it could not be judged. `configs`: the config of each side, "" if
    rows name none.
    """

    key: Key
    golden_us: float | None
    tot_us: float | None
    change: float | None
    verdict: str
    p: float | None
    noise: float | None
    seen_from: float | None
    beyond_rule: bool
    second_look: bool
    golden_repeats: str
    tot_repeats: str
    note: str
    configs: tuple[str, str]


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
    rule_only: bool

    @property
    def slower(self) -> bool:
        """True if the table as a whole is a regression."""
        return bool(self.judged.slower)

    @property
    def open(self) -> list[Row]:
        """The rows that could not be judged: they deserve a second look."""
        return [r for r in self.rows if r.second_look]

    @property
    def exit_code(self) -> int:
        """1: a regression; 4: something could not be judged; 0: all is judged, and nothing is slower."""
        regression = self.slower or self.counts["regression"]
        return 1 if regression else 4 if self.open else 0

    @property
    def counts(self) -> dict[str, int]:
        """Rows by verdict, all verdicts."""
        found = Counter(r.verdict for r in self.rows)
        return {v: found[v] for v in VERDICTS}


def compare(
    golden: Side, tot: Side, *, rule: Rule | None = None, bound: float = BOUND, under_test: Sequence[str] = (),
    other_gpu: bool = False, rule_only: bool = False,
) -> Comparison:  # fmt: skip
    """Joins and judges two sides. Raises InputError if they cannot be compared."""
    rule = rule or Rule()
    if only := [(n, s) for s, o in ((golden, tot), (tot, golden)) for n in s.shape if n not in o.shape]:
        faults = [f"{escaped(str(s.files[0]))}:1: column {shown(n)} is on the {s.name} side only" for n, s in only]
        raise InputError([*faults, "rows are joined by the kernel and all columns of the shape; a column that is no"
                          " part of it is left out with --ignore-column NAME"])  # fmt: skip
    refuse_swapped(golden, tot)
    found = differences(fields_of(golden), fields_of(tot), under_test)
    machine, method = (
        "; ".join(f"{d.name}: {d.golden} and {d.tot}" for d in found if d.kind == kind)
        for kind in ("machine", "method")
    )
    warnings = [*golden.notes, *tot.notes]
    if machine:
        if not other_gpu:
            raise InputError(f"the sides are of different machines ({escaped(machine)}): their times say nothing of the"
                             " software; --other-gpu compares them all the same")  # fmt: skip
        warnings.append(f"the sides are of different machines ({machine}): a verdict is not one on the software")
    warnings += [f"not measured in the same way ({method})"] if method else []
    order = [0, *(1 + tot.shape.index(n) for n in golden.shape)]
    times = golden.times, {tuple(k[i] for i in order): v for k, v in tot.times.items()}
    configs = golden.configs, {tuple(k[i] for i in order): v for k, v in tot.configs.items()}
    keys = list(dict.fromkeys((*times[0], *times[1])))
    paired = in_turn(golden, tot) and _same_runs(golden.numbered and tot.numbered, *times, warnings)
    arrays = [_array(keys, side) for side in times]
    judged = judge(*arrays, rule=rule, bound=bound, paired=paired)
    judged = by_rule_only(judged, rule) if rule_only else judged
    if not times[0].keys() & times[1].keys():
        a, b = (shown(" ".join(next(iter(t))), 120) for t in times)
        warnings.append(f"no row is on both sides; golden has {a}, tot {b}")
    rows = [_row(i, k, judged, times, (configs[0].get(k, ""), configs[1].get(k, ""))) for i, k in enumerate(keys)]
    rows.sort(key=lambda r: (VERDICTS.index(r.verdict), (r.change or 0.0) * (1 if r.verdict == "improved" else -1)))
    return Comparison(("kernel", *golden.shape), rows, judged, rule, bound, golden, tot, found, warnings, rule_only)


def _same_runs(numbered: bool, golden: Times, tot: Times, warnings: list[str]) -> bool:
    odd = sum(golden[k].keys() != tot[k].keys() for k in golden.keys() & tot.keys())
    if not numbered:
        warnings.append("the sides say that they were measured in turn, but their rows have no run numbers: not paired")
    elif odd:
        rows = plural(odd, "row has", "rows have")
        warnings.append(f"measured in turn, but {rows} other run numbers on the other side: not paired")
    return numbered and not odd


def _array(keys: Sequence[Key], times: Times) -> Floats:
    """(rows, repeats), a row's repeats in the order of their runs: with the same runs on both sides, they pair up."""
    out = np.full((len(keys), max(map(len, times.values()))), np.nan)
    for row, key in enumerate(keys):
        there = times.get(key, {})
        out[row, : len(there)] = [there[run] for run in sorted(there)]
    return out


def _row(i: int, key: Key, of: Judged, times: tuple[Times, Times], configs: tuple[str, str]) -> Row:
    numbers = (of.golden.us[i], of.tot.us[i], of.p[i], of.noise.level[i] + 0 * of.p[i], of.seen_from[i])
    a, b, p, noise, seen = (float(x) if math.isfinite(x) else None for x in numbers)
    verdict, notes, repeats = str(of.verdicts[i]), [], []
    for name, side, all_times in (("golden", of.golden, times[0]), ("tot", of.tot, times[1])):
        n, kept = len(all_times.get(key, {})), int(side.count[i]) if side.stable[i] else 0
        repeats.append(f"{kept}/{n}")
        if n < ENOUGH or not kept:
            notes.append(f"{name}: {n} of {ENOUGH} repeats" if n < ENOUGH else f"{name}: no {ENOUGH} of {n} agree")
        elif kept < n:
            notes.append(f"{name}: {n - kept} of {n} strayed")
    if verdict == "unstable" and not notes:
        notes.append("fewer than three pairs of runs without a stray")
    if verdict == "ok" and of.beyond[i]:
        notes.append("beyond the rule only with the shift of the whole table")
    return Row(
        key, a, b, b / a - 1 if a and b else None, verdict, p, noise, seen, bool(of.beyond[i]), bool(of.suspect[i]),
        repeats[0], repeats[1], "" if verdict in ("new", "missing", "ignored") else "; ".join(notes), configs,
    )  # fmt: skip
