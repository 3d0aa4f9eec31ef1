"""Markdown tables of repeated measurements: ours, and each peer's beside it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

OURS = "gemmfleet"


@dataclass
class Row:
    """Measurements of one work by who did it; where a peer has none, the reason or a dash."""

    what: str
    unit: str
    values: dict[str, list[float]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def median(self, who: str) -> float:
        return statistics.median(self.values[who])


def table(rows: Sequence[Row], versions: Mapping[str, str]) -> str:
    """A Markdown table with a column for each of `versions`; of a peer also how many times as long it took."""
    head = ["what", *(f"{who} {version}".strip() for who, version in versions.items())]
    lines = [_line(head), _line(["---", *["---:"] * len(versions)])]
    lines += [_line([row.what, *(_cell(row, who) for who in versions)]) for row in rows]
    return "\n".join(lines)


def spread(values: Sequence[float], unit: str) -> str:
    """Median, and in brackets lowest and highest where there are several."""
    middle = f"{_number(statistics.median(values))} {unit}"
    return f"{middle} ({_number(min(values))} to {_number(max(values))})" if len(values) > 1 else middle


def _cell(row: Row, who: str) -> str:
    if not row.values.get(who):
        return row.missing.get(who, "-")
    text = spread(row.values[who], row.unit)
    if who == OURS or not row.values.get(OURS):
        return text
    return f"{text}, {_number(row.median(who) / row.median(OURS))} x"


def _number(x: float) -> str:
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
