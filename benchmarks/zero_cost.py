"""1,000 groups that cost nothing (replay), on 2 slots, durability on: what a group costs by itself."""

from __future__ import annotations

import json
import time
from pathlib import Path

from benchmarks.figure import Figure
from tests.kits.fleet import Bench

GROUPS = 1000


def run(folder: Path) -> list[Figure]:
    """Seconds from the first send to the last settlement, from the ledger's own times; and the whole command."""
    bench = Bench(folder)
    bench.shapes(GROUPS)
    began = time.perf_counter()
    done = bench.tune()
    whole = time.perf_counter() - began
    if done.code:
        raise SystemExit(done.out + done.err)
    with bench.ledger() as ledger:
        attempts = ledger.replayed.attempts.values()
        tuned = sorted(s.settled_at or 0.0 for s in ledger.shapes("tuned"))
    inside = tuned[-1] - min(a.sent_at for a in attempts)
    claims = _claim_gaps(bench)
    return [
        Figure(
            "a group of zero cost",
            1e3 * inside / GROUPS,
            10.0,
            "ms",
            f"{GROUPS} groups, 2 slots, first send to last row",
        ),
        Figure("the same, whole command", 1e3 * whole / GROUPS, 10.0, "ms", "with start-up, deploy, export and table"),
        Figure(
            "end of a group to start of the next", 1e3 * claims, 20.0, "ms", "median, next group in the inbox already"
        ),
    ]


def _claim_gaps(bench: Bench) -> float:
    """Median seconds between attempt_ended and the next attempt_started of a slot, by the worker's own clock."""
    gaps: list[float] = []
    for path in (bench.folder() / "events").glob("*.jsonl"):
        ended = None
        for line in path.read_bytes().splitlines():
            record = json.loads(line)
            if record["type"] == "attempt_started" and ended is not None:
                gaps.append(record["t"] - ended)
            if record["type"] == "attempt_ended":
                ended = record["t"]
    return sorted(gaps)[len(gaps) // 2]
