"""Statistics of a backend table: pairs of backends, wins, losses, share of the roofline, published figures beside.

The published figures are `data/reference_fp4.csv`, with their source in its first lines.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from operator import itemgetter
from pathlib import Path
from statistics import fmean

from orchestrator.analysis.backends.table import BackendTable, Best, ShapeBest
from orchestrator.errors import InputError
from orchestrator.planning.roofline import Chip, Device, Roof, chip_of, roofline
from orchestrator.shapes.model import Key
from worker import without_gc
from worker.text import plural

LEAD = "asm"
"""The backend whose losses are listed: the one that AITER's dispatch prefers."""


@dataclass(frozen=True, slots=True)
class Pair:
    """TFLOPS of `first` over those of `second` on the shapes that both have."""

    first: str
    second: str
    shapes: int
    wins: int
    least: float
    most: float
    mean: float
    geomean: float
    """exp(mean(log)): the mean that does not depend on which of the two is divided by."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """`wins`: shapes won by backend; `lead_loses`: shapes where ASM is there and another backend is faster;
    `beyond`: shapes with rows beyond the error ratio; `without`: shapes that no backend has a valid row for;
    `chips`: what each device is taken for; `roofs`: one per shape of the table, None where nothing is known;
    `notes`: what to say of the chips."""

    pairs: tuple[Pair, ...]
    wins: dict[str, int]
    lead_loses: tuple[ShapeBest, ...]
    beyond: tuple[ShapeBest, ...]
    without: tuple[ShapeBest, ...]
    chips: dict[Device, Chip | None]
    roofs: tuple[Roof | None, ...]
    notes: tuple[str, ...]

    def share(self, at: int, shape: ShapeBest) -> float | None:
        """The winner's part of the roofline of shape number `at`."""
        roof, won = self.roofs[at], shape.winner
        return won.tflops / roof.tflops if roof and won else None


def statistics(table: BackendTable, chip: str | None = None) -> Statistics:
    """The statistics of a table. `chip`: its name, where the user gives one. Raises InputError for an unknown one."""
    with without_gc():
        return _statistics(table, chip)


def _statistics(table: BackendTable, chip: str | None) -> Statistics:
    known = {d: chip_of(d, table.device_names, chip) for d in table.devices}
    chips = {d: c for d, (c, _) in known.items()}
    limits = {d: roofline(table.family, c) for d, c in chips.items() if c is not None}
    roofs = [limits[s.device](s.key) if s.device in limits else None for s in table.shapes]
    notes = [note for _, note in known.values() if note]
    if any(chips.values()) and not any(roofs):
        notes = [f"no roofline: the data sheets say nothing that fits {table.family.name}"]
    winners = [s.winner for s in table.shapes]
    wins = Counter(w.backend for w in winners if w is not None)
    loses, above = [], []
    for s, won, roof in zip(table.shapes, winners, roofs, strict=True):
        if won is None:
            continue
        if won.backend != LEAD and (lead := s.best.get(LEAD)) is not None and won.us < lead.us:
            loses.append(s)
        if roof is not None and won.tflops > roof.tflops:
            above.append((won.tflops / roof.tflops, roof.bound, s))
    notes += _above(table, above)
    return Statistics(
        tuple(p for a, b in combinations(table.backends, 2) if (p := _pair(table.shapes, a, b)) is not None),
        {b: wins[b] for b in table.backends},
        tuple(loses),
        tuple(s for s in table.shapes if s.wrong),
        tuple(s for s in table.shapes if not s.best),
        chips,
        tuple(roofs),
        tuple(dict.fromkeys(notes)),
    )


def _above(table: BackendTable, above: Sequence[tuple[float, str, ShapeBest]]) -> Iterable[str]:
    """Notes on winners that are faster than their roofline, the most striking one by name."""
    causes = {
        "compute": "the chip is another one (--chip), or the times are wrong",
        "memory": "the operands were in a cache, the chip is another one (--chip), or the times are wrong",
    }
    for bound, cause in causes.items():
        found = [(share, s) for share, which, s in above if which == bound]
        if found:
            share, s = max(found, key=itemgetter(0))
            many = plural(len(found), "shape is", "shapes are")
            yield f"{many} above the {bound} roofline (most: {table.key_text(s)} at {share:.0%}): {cause}"


def _pair(shapes: Sequence[ShapeBest], first: str, second: str) -> Pair | None:
    ratios = [b.us / a.us for s in shapes if (a := s.best.get(first)) and (b := s.best.get(second))]
    if not ratios:
        return None
    return Pair(
        first, second, len(ratios), sum(r > 1 for r in ratios), min(ratios), max(ratios),
        fmean(ratios), math.exp(fmean([math.log(r) for r in ratios])),
    )  # fmt: skip


REFERENCE_FILE = Path(__file__).parent / "data" / "reference_fp4.csv"
OFF = 0.05
"""A deviation beyond this is marked."""
REFERENCE_FAMILY = "a4w4_blockscale"


@dataclass(frozen=True, slots=True)
class Reference:
    """A published figure of a shape (M, N, K), and what was measured here; `deviation` = measured / published - 1."""

    key: tuple[int, int, int]
    group: str
    tflops: float
    us: float
    measured: Best | None

    @property
    def deviation(self) -> float | None:
        """Positive: faster than published."""
        return self.measured.tflops / self.tflops - 1 if self.measured else None

    @property
    def off(self) -> bool:
        """True where it deviates by more than OFF."""
        return self.deviation is not None and abs(self.deviation) > OFF


def reference_chips() -> tuple[str, ...]:
    """The chips that there are figures of."""
    return tuple(dict.fromkeys(row["chip"] for row in _reference_rows()))


def reference_source() -> str:
    """The source of the figures."""
    lines = REFERENCE_FILE.read_text().splitlines()
    return " ".join(line.lstrip("# ") for line in lines if line.startswith("#"))


def against_reference(table: BackendTable, chip: str) -> tuple[Reference, ...]:
    """Every figure of the chip beside the table's winner on that shape. Raises InputError."""
    known = reference_chips()
    if chip.lower() not in known:
        raise InputError(f"--reference {chip[:40]!r}: there are figures of {', '.join(known)}")
    if table.family.name != REFERENCE_FAMILY:
        raise InputError(f"--reference holds figures of {REFERENCE_FAMILY}; these are results of {table.family.name}")
    won: dict[Key, Best] = {}
    for shape in table.shapes:
        best = shape.winner
        if best is not None and (shape.key not in won or best.us < won[shape.key].us):
            won[shape.key] = best
    out = []
    for row in _reference_rows():
        if row["chip"] == chip.lower():
            key = (int(row["M"]), int(row["N"]), int(row["K"]))
            out.append(Reference(key, row["group"], float(row["tflops"]), float(row["us"]), won.get(key)))
    return tuple(out)


def _reference_rows() -> list[dict[str, str]]:
    with REFERENCE_FILE.open(newline="") as f:
        return list(csv.DictReader(line for line in f if not line.startswith("#")))
