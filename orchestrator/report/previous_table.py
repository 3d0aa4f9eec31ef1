"""The tuned table as it was before the run, and what the run gained over it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.errors import OrchestratorError
from orchestrator.pages import Document
from orchestrator.paths import RunPaths
from orchestrator.report.figures import geomean
from orchestrator.report.measured import Winner
from orchestrator.tables.keys import Key
from orchestrator.tables.table import read_table
from worker.families import Family

MAX_BYTES = 64 << 20


@dataclass(slots=True)
class PreviousTable:
    """The table before the run: `us` by (gfx, cu_num, *key). `counts`: rows of the merge by action; {} before it."""

    source: str = ""
    us: dict[Key, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    note: str = ""


def read_previous_table(paths: RunPaths, db: str | None, family: Family) -> PreviousTable:
    """The table before this run. Never raises for bad files: the note names the fault."""
    if paths.merge.is_file():
        try:
            return _read_merge(paths.merge, family)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            return PreviousTable(note=f"{paths.merge.name} cannot be read: {type(e).__name__}: {e}")
    if db is None:
        return PreviousTable(note="No tuned table was named (--db), so there is nothing to compare with.")
    table = Path(db)
    if not table.is_file():
        return PreviousTable(note=f"{db} does not exist (yet), so there is nothing to compare with.")
    try:
        rows = read_table(table, family).rows
    except OrchestratorError as e:
        return PreviousTable(note=str(e).partition("\n")[0])
    return PreviousTable(db, {tuple(row.key): row.us for row in rows if row.us is not None and row.us > 0})


def _read_merge(path: Path, family: Family) -> PreviousTable:
    """The old times in the report of the run's merge, which may be another user's file."""
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"is larger than {MAX_BYTES} bytes")
    document: Document = json.loads(path.read_text(encoding="utf-8"))
    table = PreviousTable(source=str(document.get("path", "")))
    for row in document["rows"]:
        action = str(row["action"])
        table.counts[action] = table.counts.get(action, 0) + 1
        key = _key_of(row["key"], family)
        us = row.get("old_us")
        is_number = isinstance(us, (int, float)) and not isinstance(us, bool)
        if key is not None and is_number and us > 0:
            table.us[key] = float(us)
    return table


def _key_of(cells: Mapping[str, Any], family: Family) -> Key | None:
    names = ("gfx", "cu_num", *family.key_names)
    return tuple(cells[name] for name in names) if all(name in cells for name in names) else None


def gain_over(winners: Mapping[int, Winner], old: Mapping[int, float]) -> dict[str, float | int | None]:
    """The gain over the previous table: n, faster, slower, geomean of old over new. `old`: microseconds by shape."""
    ratios = [old[shape] / winner.us for shape, winner in winners.items() if shape in old]
    return {
        "n": len(ratios),
        "faster": sum(ratio > 1.0 for ratio in ratios),
        "slower": sum(ratio < 1.0 for ratio in ratios),
        "geomean": geomean(ratios),
    }
