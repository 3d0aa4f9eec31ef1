"""The measured M of a run of an engine's tuner, by file and layer, each with its times before and after.

M that changed are those of the winners (`winners.py`); M that keep their config are in the run's ledger alone.
`publish_engine.py` shows them to a reviewer, `results/gain.py` adds them up over the calls of a server:

    {("E=256,N=256,....json", Layer("moe", ...)): [MeasuredM(1, {"uniform": (29.5, 27.8), "zipf1": (30.1, 28.4)}), ...]}
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from orchestrator.configs.winners import read_winners
from orchestrator.ledger.reader import LedgerReader
from orchestrator.paths import RunPaths
from worker.triton_configs.cutting import MeasuredPoint, unite_points
from worker.triton_configs.engine_package import Layer
from worker.triton_configs.point_record import PointRecord

FileLayer = tuple[str, Layer]
"""The name of a file, and a layer that reads it."""


class MeasuredM(NamedTuple):
    """An M of a layer: `times` has (microseconds before, after) by routing; before is -1 if the old config does not
    run. `is_kept`: it keeps its config."""

    m: int
    times: dict[str, tuple[float, float]]
    is_kept: bool = False

    @property
    def outcome(self) -> str:
        """The word for it in a publication's document."""
        return "kept" if self.is_kept else "edited"

    @property
    def changes(self) -> list[float]:
        """The share by which the time changes (-0.1: 10 % less) at each routing at which the old config runs."""
        return [after / before - 1 for before, after in self.times.values() if before > 0]


def measured_of_run(run: Path) -> dict[FileLayer, list[MeasuredM]]:
    """The measured M of each layer, ascending. Raises InputError. Runs of version 0.3, and folders without a ledger,
    have only the M that changed."""
    by_layer: dict[FileLayer, dict[int, MeasuredM]] = {}
    for (file, layer), points in _points_of_run(run).items():
        kept = by_layer.setdefault((file, layer), {})
        for point in points:
            if math.isfinite(point.today_us):
                kept.setdefault(point.m, MeasuredM(point.m, {}, is_kept=True))
                kept[point.m].times[point.label] = (point.today_us, point.today_us)
    for winner_file in read_winners(run):
        for row in winner_file.measured:
            if row.layer is None:
                continue
            rows = by_layer.setdefault((winner_file.path.name, row.layer), {})
            if row.m not in rows or rows[row.m].is_kept:
                rows[row.m] = MeasuredM(row.m, {})
            rows[row.m].times[row.caller] = (row.old_us, row.new_us)
    return {name: [rows[m] for m in sorted(rows)] for name, rows in by_layer.items()}


def _points_of_run(run: Path) -> dict[FileLayer, list[MeasuredPoint]]:
    """The points of a run's ledger, those of all attempts united."""
    ledger_path = RunPaths(run).ledger
    if not ledger_path.is_file():
        return {}
    with LedgerReader.open_readonly(ledger_path) as ledger:
        records = ledger.points()
    by_layer: dict[FileLayer, list[PointRecord]] = {}
    for record in records:
        name = (str(record.file["file"]), Layer.from_document(record.file["layer"]))
        by_layer.setdefault(name, []).append(record)
    return {name: unite_points(record.point for record in same_layer) for name, same_layer in by_layer.items()}
