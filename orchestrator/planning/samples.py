"""What earlier runs measured, for the cost model: read from their ledgers, which stay as they are."""

from __future__ import annotations

import json
from pathlib import Path

from orchestrator.errors import OrchestratorError
from orchestrator.families import Family
from orchestrator.ledger.reader import LedgerReader
from orchestrator.planning.cost import Sample, weights

NEWEST_RUNS = 12
MOST_SHAPES = 20_000

_DONE = """SELECT a.id, a.seconds, a.spent, a.device FROM attempts a
    WHERE a.outcome='done' AND a.seconds > 0 ORDER BY a.ended_at DESC LIMIT 2000"""
_MEASURED = "SELECT s.key FROM shapes s WHERE s.id IN (SELECT DISTINCT shape FROM rows WHERE attempt=?)"


def gather_samples(runs: Path, family: Family, tuner: str, gfx: str | None = None) -> list[Sample]:
    """Samples of the newest runs in a folder that had this family and tuner (and, if given, ran on this gfx).

    A ledger that cannot be read is left out. At most MOST_SHAPES shapes are looked at.
    """
    if not runs.is_dir():
        return []
    ledgers = sorted(runs.glob("*/ledger.db"), key=lambda p: (_mtime(p), p.parent.name), reverse=True)
    out: list[Sample] = []
    used = 0
    for path in ledgers[: 4 * NEWEST_RUNS]:
        try:
            found = _of_ledger(path, family, tuner, gfx)
        except (OrchestratorError, OSError, ValueError, KeyError, TypeError):
            continue
        used += bool(found)
        out += found
        if used >= NEWEST_RUNS or sum(s.shapes for s in out) >= MOST_SHAPES:
            break
    return out


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _of_ledger(path: Path, family: Family, tuner: str, gfx: str | None) -> list[Sample]:
    out: list[Sample] = []
    shapes = 0
    with LedgerReader.open_readonly(path, at_rest=True) as ledger:
        if ledger.meta("family") != family.name or ledger.meta("tuner") != tuner:
            return []
        for attempt, seconds, spent, device in ledger.query(_DONE):
            if gfx is not None and json.loads(device or "{}").get("gfx") != gfx:
                continue
            keys = [
                dict(zip(family.key_names, json.loads(k), strict=True)) for (k,) in ledger.query(_MEASURED, (attempt,))
            ]
            measuring = float(seconds) - float(json.loads(spent or "{}").get("import", 0.0))
            if keys and measuring > 0:
                flops, elements = sum(map(family.flops, keys)), sum(weights(k, family) for k in keys)
                out.append(Sample(len(keys), flops, elements, measuring))
                shapes += len(keys)
            if shapes >= MOST_SHAPES:
                break
    return out
