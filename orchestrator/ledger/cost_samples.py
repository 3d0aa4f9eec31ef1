"""Learns from earlier runs how long shapes take, and how long a run takes to begin and to end.

controller/prepare.py fits the cost model (planning/cost.py) to the samples. A sample is one attempt: how many shapes it
measured, their work, and the seconds that measuring took.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from orchestrator.errors import OrchestratorError
from orchestrator.ledger.reader import LedgerReader
from orchestrator.planning.cost import CostSample, weights
from worker.families import Family

NEWEST_RUNS = 12
"""At most this many of the newest runs give samples."""
MOST_SHAPES = 20_000
"""Most shapes whose attempts are read; more would only make planning slow."""
LONGEST_START_S = 900.0
"""Longer starts are left out: they waited for something that may not happen again."""

_DONE = """SELECT json_extract(j.data, '$.attempt'), json_extract(j.data, '$.seconds'), r.spent, r.device
    FROM journal j LEFT JOIN reports r ON r.attempt = json_extract(j.data, '$.attempt')
    WHERE j.type='AttemptEnded' AND json_extract(j.data, '$.outcome')='done' ORDER BY j.id DESC LIMIT 2000"""
_FIRST = """SELECT t, json_extract(data, '$.attempt') FROM journal WHERE type='AttemptStarted' ORDER BY id LIMIT 1"""
_LAST = "SELECT max(t) FROM journal WHERE type='AttemptEnded'"
_MEASURED = "SELECT s.key FROM shapes s WHERE s.id IN (SELECT DISTINCT shape FROM rows WHERE attempt=?)"


def gather_cost_samples(
    runs: Path, family: Family, tuner: str, gfx: str | None = None
) -> tuple[list[CostSample], list[float]]:
    """Cost samples from attempts of the newest runs in a folder with this family, tuner and (if given) gfx. Also the
    seconds that each run took until its first group and after its last.

    Unreadable ledgers are skipped. At most MOST_SHAPES shapes are read.
    """
    if not runs.is_dir():
        return [], []
    ledgers = sorted(runs.glob("*/ledger.db"), key=lambda p: (_mtime(p), p.parent.name), reverse=True)
    samples: list[CostSample] = []
    starts: list[float] = []
    runs_used = 0
    for path in ledgers[: 4 * NEWEST_RUNS]:
        try:
            run_samples, start_s = _samples_of_run(path, family, tuner, gfx)
        except (OrchestratorError, OSError, ValueError, KeyError, TypeError):
            continue
        if not run_samples:
            continue
        runs_used += 1
        samples += run_samples
        if 0.0 < start_s <= LONGEST_START_S:
            starts.append(start_s)
        if runs_used >= NEWEST_RUNS or sum(sample.shapes for sample in samples) >= MOST_SHAPES:
            break
    return samples, starts


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _samples_of_run(path: Path, family: Family, tuner: str, gfx: str | None) -> tuple[list[CostSample], float]:
    """The samples in a ledger, and the seconds before its first attempt and after its last."""
    samples: list[CostSample] = []
    shapes = 0
    with LedgerReader.open_readonly(path, at_rest=True) as ledger:
        if ledger.meta("family") != family.name or ledger.meta("tuner") != tuner:
            return [], 0.0
        units = float(ledger.meta("units", 1.0))
        for attempt, seconds, spent, device in ledger.query(_DONE):
            if not seconds or (gfx is not None and json.loads(device or "{}").get("gfx") != gfx):
                continue
            keys = [_key_dict(family, key) for (key,) in ledger.query(_MEASURED, (attempt,))]
            measuring_s = float(seconds) - _import_seconds(float(seconds), json.loads(spent or "{}"))
            if keys and measuring_s > 0:
                flops = sum(map(family.flops, keys))
                elements = sum(weights(key, family) for key in keys)
                run = path.parent.name
                samples.append(CostSample(units * len(keys), units * flops, units * elements, measuring_s, run))
                shapes += len(keys)
            if shapes >= MOST_SHAPES:
                break
        return samples, _start_seconds(ledger)


def _key_dict(family: Family, key: str) -> dict[str, int | str]:
    """The key columns of a shape by name. `key`: as the table `shapes` has it."""
    return dict(zip(family.key_names, json.loads(key), strict=True))


def _import_seconds(seconds: float, spent: Mapping[str, float]) -> float:
    """Seconds of an attempt in which its process imported modules; 0 if it had imported them before (it still reports
    the time)."""
    kinds = {kind: float(value) for kind, value in spent.items() if kind != "start"}
    return kinds.get("import", 0.0) if sum(kinds.values()) <= 1.05 * seconds else 0.0


def _start_seconds(ledger: LedgerReader) -> float:
    """Seconds of the run in which no slot worked on a shape: before its first attempt and after its last."""
    created = ledger.meta("created")
    first = ledger.query(_FIRST)
    if not first or created is None:
        return 0.0
    first_started, first_attempt = first[0]
    last_ended = ledger.query(_LAST)[0][0] or first_started
    first_seconds = next((seconds for attempt, seconds, *_ in ledger.query(_DONE) if attempt == first_attempt), 0.0)
    importing_s = _import_seconds(float(first_seconds), ledger.report(first_attempt).spent)
    after_last_s = max(0.0, float(ledger.meta("ended", last_ended)) - float(last_ended))
    return float(first_started) - float(created) + importing_s + after_last_s
