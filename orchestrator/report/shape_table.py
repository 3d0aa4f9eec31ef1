"""The table of shapes on a page, and what is drawn beside it: the roofline and the figures of each backend.

`collector.py` calls `columns`, `shape_rows`, `by_backend` and `Roofs` for each document. A row is a list with a cell
for each of COLUMNS, because a page may have ten thousand rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.backend_names import backend_label
from orchestrator.ledger.reader import LedgerReader, ShapeState
from orchestrator.pages import Document
from orchestrator.planning.roofline import Chip, Roof, chip_of, roofline
from orchestrator.report.figures import five_numbers, rounded
from orchestrator.report.measured import Measurements, Tried, Winner
from orchestrator.shapes.model import Key, element_type
from worker.families import Family

MOST_CHARACTERS_OF_KERNEL = 300
MOST_CHARACTERS_OF_DETAIL = 600


@dataclass(frozen=True, slots=True)
class Roofs:
    """Rooflines of a run's shapes. `chip` is None if it is unknown or there are several; `note` gives the reason."""

    family: Family
    chip: Chip | None
    note: str

    @classmethod
    def of(cls, family: Family, devices: Sequence[Mapping[str, Any]]) -> Roofs:
        """The rooflines for `devices`, which workers and tuners describe by gfx, cu_num and device."""
        chips = {(str(device.get("gfx", "")), device.get("cu_num")) for device in devices}
        if not chips:
            return cls(family, None, "No device is known yet.")
        if len(chips) > 1:
            return cls(family, None, "The devices differ, so there is no common roof.")
        chip, note = chip_of(chips.pop(), [str(device.get("device", "")) for device in devices])
        if chip is None:
            note = "No data sheet is known for this device, so there is no roof."
        return cls(family, chip, note.replace(" (--chip corrects it)", ""))

    def roof_of(self, key: Key) -> Roof | None:
        """The roofline of one shape, None if it is not known."""
        return roofline(self.family, self.chip)(key) if self.chip else None

    def document(self, keys: Mapping[int, Key]) -> Document | None:
        """The roof to draw: the one for the most common type."""
        if self.chip is None:
            return None
        type_of = element_type(self.family)
        types = [type_of(key) for key in keys.values()]
        common = Counter(element[0] for element in types if element is not None).most_common()
        kind = next((kind for kind, _ in common if kind in self.chip.peaks), None)
        if kind is None:
            return None
        return {
            "device": self.chip.name,
            "format": kind.upper(),
            "tflops": self.chip.peaks[kind],
            "tbs": self.chip.bandwidth,
            "source": self.chip.source,
        }


COLUMNS = (
    "id",
    "key",
    "state",
    "backend",
    "kernel",
    "us",
    "tflops",
    "bw",
    "intensity",
    "share",
    "spread",
    "candidates",
    "median_us",
    "runner_up_us",
    "old_us",
    "node",
    "slot",
    "attempt",
    "reason",
    "detail",
    "best",
)
"""Cells of a row, "" or None for what is not known. Times are in microseconds.

- `key`: the shape's values of the key columns that are shown; `candidates`: how many were tried
- `backend` to `spread`: of the winner; `bw`: GB/s; `intensity`: operations per byte; `share`: of the roof
- `median_us`: of the correct candidates; `runner_up_us`: the best of another kernel
- `old_us`: in the table before the run
- `node`, `slot`, `attempt`, `reason`, `detail`: of the attempt that settled the shape
- `best`: the TFLOPS that each backend reached, in the order of the page's backends
"""


def columns(family: Family, keys: Mapping[int, Key]) -> Document:
    """The columns of the page. `row`: COLUMNS. `key`: the key columns that are shown. `same`: values that all shapes
    share."""
    same: dict[str, int | str] = {}
    for i, (name, column) in enumerate(zip(family.key_names, family.columns, strict=True)):
        values = {key[i] for key in keys.values()}
        if column.kind == "text" and len(values) < 2:
            same[name] = next(iter(values), "")
    return {"row": list(COLUMNS), "key": [name for name in family.key_names if name not in same], "same": same}


def shape_rows(
    ledger: LedgerReader,
    measured: Measurements,
    backends: list[str],
    old: Mapping[int, float],
    roofs: Roofs,
) -> list[list[Any]]:
    """One row for each shape, in the order of the shapes file."""
    shown = columns(measured.family, measured.keys)["key"]
    places = [measured.family.key_names.index(name) for name in shown]
    in_flight = ledger.replayed.shapes_in_flight
    nothing = Tried()
    rows: list[list[Any]] = []
    for shape in ledger.shapes():
        winner = measured.winners.get(shape.id)
        tried = measured.tried.get(shape.id, nothing)
        flops = measured.flops(shape.id)
        best: list[float | None] = []
        if tried.best:
            times = [tried.best.get(backend) for backend in backends]
            best = [rounded(flops / us / 1e6, 4) if us else None for us in times]
        rows.append(
            [
                shape.id,
                [shape.key[i] for i in places],
                "running" if shape.state == "pending" and shape.id in in_flight else shape.state,
                *_winner_cells(winner, roofs, shape.key),
                tried.candidates,
                rounded(winner.median_us) if winner else None,
                rounded(winner.runner_up_us) if winner else None,
                rounded(old.get(shape.id)),
                shape.node,
                shape.slot,
                shape.attempt,
                _reason(shape, winner),
                shape.detail[:MOST_CHARACTERS_OF_DETAIL],
                best,
            ]
        )
    return rows


def _winner_cells(winner: Winner | None, roofs: Roofs, key: Key) -> list[Any]:
    """The cells `backend` to `spread` of a row."""
    if winner is None:
        return ["", "", None, None, None, None, None, None]
    intensity, share = _under_roof(roofs, winner, key)
    return [
        winner.backend,
        winner.kernel[:MOST_CHARACTERS_OF_KERNEL],
        rounded(winner.us),
        rounded(winner.tflops, 4),
        rounded(winner.bw, 4),
        intensity,
        share,
        rounded(winner.spread, 3),
    ]


def _reason(shape: ShapeState, winner: Winner | None) -> str:
    """The reason for which a shape failed, or its winner is in doubt; "" if neither."""
    if shape.state == "tuned" and shape.confirmed is False:
        return "unconfirmed"
    if shape.reason:
        return shape.reason
    return "noisy" if winner and winner.noisy else ""


def _under_roof(roofs: Roofs, winner: Winner, key: Key) -> tuple[float | None, float | None]:
    """(operations per byte, share of the roof). Without a roof the intensity is computed from the row's bw (GB/s)."""
    roof = roofs.roof_of(key)
    if roof is not None:
        return rounded(roof.intensity, 4), rounded(winner.tflops / roof.tflops, 3)
    if winner.bw:
        return rounded(1000.0 * winner.tflops / winner.bw, 4), None
    return None, None


def by_backend(measured: Measurements) -> list[Document]:
    """Each backend's best TFLOPS over the shapes that it could do, and how many it won. Most wins come first."""
    rates: dict[str, list[float]] = {backend: [] for backend in measured.backends}
    for shape, tried in measured.tried.items():
        flops = measured.flops(shape)
        for backend, us in tried.best.items():
            rates[backend].append(flops / us / 1e6)
    wins = Counter(winner.backend for winner in measured.winners.values())
    documents = [
        {"name": backend, "label": backend_label(backend), "won": wins[backend], **five_numbers(tflops)}
        for backend, tflops in rates.items()
    ]
    return sorted(documents, key=lambda document: (-document["won"], -document["n"], document["name"]))
