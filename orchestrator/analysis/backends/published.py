"""Published reference figures: `data/reference_fp4.csv`, with its source in its first lines."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from orchestrator.analysis.backends.table import BackendTable, Best, Key
from orchestrator.errors import InputError

DATA = Path(__file__).parent / "data" / "reference_fp4.csv"
OFF = 0.05
"""A deviation beyond this is marked."""
FAMILY = "a4w4_blockscale"


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
        """Whether it deviates by more than OFF."""
        return self.deviation is not None and abs(self.deviation) > OFF


def chips() -> tuple[str, ...]:
    """The chips that there are figures of."""
    return tuple(dict.fromkeys(row["chip"] for row in _rows()))


def source() -> str:
    """The source of the figures."""
    lines = DATA.read_text().splitlines()
    return " ".join(line.lstrip("# ") for line in lines if line.startswith("#"))


def against(table: BackendTable, chip: str) -> tuple[Reference, ...]:
    """Every figure of the chip beside the table's winner on that shape. Raises InputError."""
    known = chips()
    if chip.lower() not in known:
        raise InputError(f"--reference {chip[:40]!r}: there are figures of {', '.join(known)}")
    if table.family.name != FAMILY:
        raise InputError(f"--reference holds figures of {FAMILY}; these are results of {table.family.name}")
    won: dict[Key, Best] = {}
    for shape in table.shapes:
        best = shape.winner
        if best is not None and (shape.key not in won or best.us < won[shape.key].us):
            won[shape.key] = best
    out = []
    for row in _rows():
        if row["chip"] == chip.lower():
            key = (int(row["M"]), int(row["N"]), int(row["K"]))
            out.append(Reference(key, row["group"], float(row["tflops"]), float(row["us"]), won.get(key)))
    return tuple(out)


def _rows() -> list[dict[str, str]]:
    with DATA.open(newline="") as f:
        return list(csv.DictReader(line for line in f if not line.startswith("#")))
