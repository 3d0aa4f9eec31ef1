"""Gains of a run: over the calls of a workload, and of each winner over the median candidate.

Of a workload: GEMM time before and after, and how far both may be off.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from orchestrator.families import grid_point
from orchestrator.ledger.reader import LedgerReader
from orchestrator.paths import RunPaths
from orchestrator.shapes.model import NOW, Key, numbers
from orchestrator.shapes.reader import read_shapes
from orchestrator.tables.tuned import read_table
from worker.families import Family
from worker.text import plural

SIGMA = 1.4826
"""Standard deviation over half the interquartile range, of a normal distribution."""


@dataclass(frozen=True, slots=True)
class ShapeGain:
    """A shape of the workload; times of one call in microseconds, with the standard deviation of their difference."""

    key: Key
    calls: float
    before_us: float
    after_us: float
    sigma_us: float = 0.0

    @property
    def won_us(self) -> float:
        """Microseconds that its calls win (negative: lose)."""
        return self.calls * (self.before_us - self.after_us)


@dataclass(frozen=True, slots=True)
class Gain:
    """`rows`: shapes with a time before and after, what wins most first; `left_out`: those without."""

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
        """Standard deviation of `won_us`: calls of one shape are off together, shapes are not."""
        return math.hypot(*(r.calls * r.sigma_us for r in self.rows))


def gain(ledger: LedgerReader, calls: Mapping[Key, float], before: Mapping[Key, float], family: Family) -> Gain:
    """The gain of a run. A shape without a row of its own takes that of its padded M, as AITER's lookup does; one that
    the run has no row for stays as it was."""
    after = {w.key: (w.us, SIGMA * (w.row.get("spread", 0.0))) for w in ledger.winners()}
    rows, left_out = [], []
    for key, n in calls.items():
        ways = dict.fromkeys((key, grid_point(key, family, "fine"), grid_point(key, family, "coarse")))
        was = next((before[k] for k in ways if k in before), None)
        if was is None:
            left_out.append(key)
            continue
        us, spread = next((after[k] for k in ways if k in after), (was, 0.0))
        # a table tells no spread: the time before is taken to be as far off as the one after
        rows.append(ShapeGain(key, n, was, us, spread * math.hypot(was, us)))
    rows.sort(key=lambda r: -r.won_us)
    return Gain(tuple(rows), tuple(left_out))


def times_before(paths: RunPaths, ledger: LedgerReader, table: Path | None, family: Family) -> dict[Key, float]:
    """Times before the run in microseconds: of `table`'s rows of its chip, else of the rows that its merge met (of the
    old kernel beside the new one where it was measured there), else of the column now_us of its shapes. Raises
    InputError."""
    out: dict[Key, float] = {}
    if paths.annotations.exists():
        out |= numbers(read_shapes(paths.annotations, family), NOW)
    if paths.merge.exists():
        for r in json.loads(paths.merge.read_bytes())["rows"]:
            us = r["rival_us"] if r.get("rival_us") and r.get("judged") == "same profile" else r["old_us"]
            if us and all(n in r["key"] for n in family.key_names):
                out[tuple(r["key"][n] for n in family.key_names)] = us
    if table is not None:
        chips = {family.chip(w.gfx, w.cu_num or 0) for w in ledger.winners()}
        rows = read_table(table, family, doubled=True).rows
        out |= {r.key[2:]: r.us for r in rows if r.us is not None and r.key[:2] in chips}
    return out


NOISY_GAIN = 0.995
"""A winner with a gain below it (1.00x as shown) is noisy: measured again, it was slower than the median candidate."""
MOST_NAMED = 4


def gains(ledger: LedgerReader, shapes: Sequence[int]) -> dict[int, float]:
    """The gain over the median candidate of each of these shapes that has other candidates (1.0: the choice made no
    difference). Candidates are the right ones of the settling attempt, as they were first measured."""
    wanted = set(shapes)
    won = {w.shape: w for w in ledger.winners() if w.shape in wanted}
    marks = ", ".join(map(str, map(int, won)))
    rows = ledger.query(f"SELECT shape, us, id, attempt FROM rows WHERE us > 0 AND status='ok' AND shape IN ({marks})")
    beside: dict[int, list[float]] = {}
    for shape, us, row, attempt in rows:
        if attempt == won[shape].attempt and row != won[shape].id:
            beside.setdefault(shape, []).append(us)
    return {shape: median(times) / won[shape].us for shape, times in beside.items()}


def noise_note(shapes: Sequence[str]) -> str:
    """Return a sentence on the noisy winners of these shapes, "" where there are none.

    The leaders are measured again before one wins. A leader that is then slower than the median candidate was at first
    shows a disturbed machine: neither its time nor the choice can be trusted.
    """
    if not shapes:
        return ""
    more = f" and {len(shapes) - MOST_NAMED} more" if len(shapes) > MOST_NAMED else ""
    return (
        f"{plural(len(shapes), 'winner is', 'winners are')} noisy, not to be trusted: measured again, slower than the"
        f" median candidate ({', '.join(shapes[:MOST_NAMED])}{more}); tune {'it' if len(shapes) == 1 else 'them'} again"
        " on a quiet machine"
    )
