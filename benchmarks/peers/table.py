"""Markdown tables of repeated measurements: ours, and each peer's beside it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

OURS = "gemmfleet"


@dataclass
class Row:
    """Measurements of one work, by who did it; `missing`: reason where a peer failed or could not be installed."""

    what: str
    unit: str
    values: dict[str, list[float]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def add(self, who: str, value: float) -> None:
        self.values.setdefault(who, []).append(value)

    def median(self, who: str) -> float:
        return statistics.median(self.values[who])

    def cell(self, who: str) -> str:
        """Median, lowest and highest, and the factor to ours; or the reason why it was not measured."""
        if who in self.missing or who not in self.values:
            return self.missing.get(who, "-")
        values = self.values[who]
        text = f"{_number(self.median(who))} {self.unit}"
        text += f" ({_number(min(values))} to {_number(max(values))})" if len(values) > 1 else ""
        if who == OURS or OURS not in self.values:
            return text
        return f"{text}, {_number(self.median(who) / self.median(OURS))} x"


def table(rows: Sequence[Row], versions: Mapping[str, str]) -> str:
    """A Markdown table with a column for each of `versions` (who, and which version)."""
    lines = [["what", *(f"{who} {version}".strip() for who, version in versions.items())]]
    lines.append(["---", *["---:"] * len(versions)])
    lines += [[row.what, *(row.cell(who) for who in versions)] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _number(x: float) -> str:
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}"
