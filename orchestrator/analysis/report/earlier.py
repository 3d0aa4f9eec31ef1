"""The previous table: what it said of each shape, from the merge's own report, else from the table itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.errors import OrchestratorError
from orchestrator.paths import RunPaths
from orchestrator.tables.tuned import read_table
from worker.families import Family

MAX_BYTES = 64 << 20

Key = tuple[int | str, ...]


@dataclass(slots=True)
class Earlier:
    """`us` by (gfx, cu_num, *key). `counts`: what the merge did, by action; {} before it."""

    source: str = ""
    us: dict[Key, float] = field(default_factory=dict)
    actions: dict[Key, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    note: str = ""


def earlier(paths: RunPaths, db: str | None, family: Family) -> Earlier:
    """What was known before this run. Never raises for what is in the files: the note says what was wrong."""
    if paths.merge.is_file():
        try:
            return _of_merge(paths.merge, family)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            return Earlier(note=f"{paths.merge.name} cannot be read: {type(e).__name__}: {e}")
    if db is None:
        return Earlier(note="No tuned table was named (--db), so there is nothing to compare with.")
    table = Path(db)
    if not table.is_file():
        return Earlier(note=f"{db} is not there (yet), so there is nothing to compare with.")
    try:
        rows = read_table(table, family).rows
    except OrchestratorError as e:
        return Earlier(note=str(e).partition("\n")[0])
    return Earlier(db, {tuple(r.key): r.us for r in rows if r.us is not None and r.us > 0})


def _of_merge(path: Path, family: Family) -> Earlier:
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"is larger than {MAX_BYTES} bytes")
    raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    out = Earlier(source=str(raw.get("path", "")))
    for row in raw["rows"]:
        key, old, action = _key(row["key"], family), row.get("old_us"), str(row["action"])
        out.counts[action] = out.counts.get(action, 0) + 1
        if key is None:
            continue
        out.actions[key] = action
        if isinstance(old, (int, float)) and not isinstance(old, bool) and old > 0:
            out.us[key] = float(old)
    return out


def _key(raw: Mapping[str, Any], family: Family) -> Key | None:
    names = ("gfx", "cu_num", *family.key_names)
    return tuple(raw[n] for n in names) if all(n in raw for n in names) else None
