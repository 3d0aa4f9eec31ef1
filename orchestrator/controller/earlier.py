"""Earlier results: shapes that the tuned DB has already, and samples of earlier runs for the cost model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from orchestrator.errors import OrchestratorError
from orchestrator.ledger.reader import LedgerReader
from orchestrator.planning.cost import CostSample, weights
from orchestrator.shapes.model import Key, Shape
from orchestrator.tables.tuned import Table, chip_name, read_table
from worker.families import Family


class Dropped(NamedTuple):
    """Shapes split into `todo` and `skipped`, each in their order; `notes`: sentences for the user."""

    todo: list[Shape]
    skipped: list[Shape]
    notes: list[str]


def drop_tuned(
    shapes: Sequence[Shape], family: Family, db: Path | None, gfx: str, cu_num: int, *, retune: bool = False
) -> Dropped:
    """Split shapes by whether `db` has their key for this gfx and cu_num with a time above 0 (exact match).

    No `db`, or `retune`: nothing is skipped. Raises TunedDBError for a file that is no tuned table of the
    family.
    """
    todo = list(shapes)
    if db is None:
        return Dropped(todo, [], [])
    if not db.exists():
        return Dropped(todo, [], [f"{db} does not exist yet: nothing is skipped, and it will be created"])
    table = read_table(db, family)
    notes = list(table.notes)
    if retune:
        return Dropped(todo, [], notes)
    chip, there = family.chip(gfx, cu_num), _times(table, family, gfx, cu_num)
    if table.rows and not any(r.key[:2] == chip for r in table.rows):
        has = sorted({chip_name(*r.key[:2]) for r in table.rows})
        mine = f"{gfx} with cu_num {cu_num}" if chip[1] else gfx
        notes.append(f"{db} has no row for {mine} (it has {', '.join(has[:6])}): nothing is skipped")
    skipped = [s for s in todo if s.key in there]
    return Dropped([s for s in todo if s.key not in there], skipped, notes)


def tuned_times(db: Path | None, family: Family, gfx: str, cu_num: int) -> dict[Key, float]:
    """Times of the table's rows of a chip by key in microseconds; {} where there is no table. Raises TunedDBError."""
    return _times(read_table(db, family), family, gfx, cu_num) if db is not None and db.exists() else {}


def _times(table: Table, family: Family, gfx: str, cu_num: int) -> dict[Key, float]:
    chip = family.chip(gfx, cu_num)
    return {r.key[2:]: r.us for r in table.rows if r.key[:2] == chip and r.us is not None and not r.tag}


NEWEST_RUNS = 12
MOST_SHAPES = 20_000
LONGEST_START_S = 900.0
"""Longer starts are left out: they waited for something that need not happen again."""

_DONE = """SELECT json_extract(j.data, '$.attempt'), json_extract(j.data, '$.seconds'), r.spent, r.device
    FROM journal j LEFT JOIN reports r ON r.attempt = json_extract(j.data, '$.attempt')
    WHERE j.type='AttemptEnded' AND json_extract(j.data, '$.outcome')='done' ORDER BY j.id DESC LIMIT 2000"""
_FIRST = """SELECT t, json_extract(data, '$.attempt') FROM journal WHERE type='AttemptStarted' ORDER BY id LIMIT 1"""
_LAST = "SELECT max(t) FROM journal WHERE type='AttemptEnded'"
_MEASURED = "SELECT s.key FROM shapes s WHERE s.id IN (SELECT DISTINCT shape FROM rows WHERE attempt=?)"


class EarlierRuns(NamedTuple):
    """`samples` of attempts; `starts`: seconds that a run took until its first group, and after its last."""

    samples: list[CostSample]
    starts: list[float]


def gather(runs: Path, family: Family, tuner: str, gfx: str | None = None) -> EarlierRuns:
    """Samples of the newest runs in a folder with this family and tuner (and, if given, gfx). A ledger that cannot be
    read is left out. At most MOST_SHAPES shapes are read.
    """
    if not runs.is_dir():
        return EarlierRuns([], [])
    ledgers = sorted(runs.glob("*/ledger.db"), key=lambda p: (_mtime(p), p.parent.name), reverse=True)
    out: list[CostSample] = []
    starts: list[float] = []
    used = 0
    for path in ledgers[: 4 * NEWEST_RUNS]:
        try:
            found, start = _of_ledger(path, family, tuner, gfx)
        except (OrchestratorError, OSError, ValueError, KeyError, TypeError):
            continue
        used += bool(found)
        out += found
        if found and 0.0 < start <= LONGEST_START_S:
            starts.append(start)
        if used >= NEWEST_RUNS or sum(s.shapes for s in out) >= MOST_SHAPES:
            break
    return EarlierRuns(out, starts)


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _of_ledger(path: Path, family: Family, tuner: str, gfx: str | None) -> tuple[list[CostSample], float]:
    out: list[CostSample] = []
    shapes = 0
    with LedgerReader.open_readonly(path, at_rest=True) as ledger:
        if ledger.meta("family") != family.name or ledger.meta("tuner") != tuner:
            return [], 0.0
        times = float(ledger.meta("units", 1.0))
        for attempt, seconds, spent, device in ledger.query(_DONE):
            if not seconds:
                continue
            if gfx is not None and json.loads(device or "{}").get("gfx") != gfx:
                continue
            keys = [
                dict(zip(family.key_names, json.loads(k), strict=True)) for (k,) in ledger.query(_MEASURED, (attempt,))
            ]
            measuring = float(seconds) - _importing(float(seconds), json.loads(spent or "{}"))
            if keys and measuring > 0:
                flops, elements = sum(map(family.flops, keys)), sum(weights(k, family) for k in keys)
                out.append(CostSample(times * len(keys), times * flops, times * elements, measuring, path.parent.name))
                shapes += len(keys)
            if shapes >= MOST_SHAPES:
                break
        return out, _start_s(ledger)


def _importing(seconds: float, spent: Mapping[str, float]) -> float:
    """Seconds of an attempt in which its process imported; 0 where it did before (it reports them all the same)."""
    kinds = {k: float(v) for k, v in spent.items() if k != "start"}
    return kinds.get("import", 0.0) if sum(kinds.values()) <= 1.05 * seconds else 0.0


def _start_s(ledger: LedgerReader) -> float:
    """Seconds of the run in which no slot worked at a shape: before its first attempt, and after its last."""
    created, first = ledger.meta("created"), ledger.query(_FIRST)
    if not first or created is None:
        return 0.0
    started, attempt = first[0]
    last = ledger.query(_LAST)[0][0] or started
    seconds = [s for a, s, *_ in ledger.query(_DONE) if a == attempt]
    spent = ledger.report(attempt).spent
    importing = _importing(float(seconds[0] if seconds else 0.0), spent)
    return float(started) - float(created) + importing + max(0.0, float(ledger.meta("ended", last)) - float(last))
