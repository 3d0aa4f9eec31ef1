"""The page of a run with 5,000 shapes, 50,000, and 100,000 on 1,600 slots: how soon it stands in Chromium, how
large it is, and how long the status of the last one takes.

The time is the page's own, from the start of the navigation to the attribute that its script sets when table and
pictures stand, with a fresh profile each time.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from benchmarks.figure import Figure, LeftOutError
from orchestrator.controller.run_snapshot import RunSnapshot
from orchestrator.paths import RunPaths
from orchestrator.report.page import MAX_BYTES, write_report
from tests.integration.browser import chromium, missing
from tests.kits.results import simulated_run

SHAPES, MANY = 5_000, 50_000
FLEET_SHAPES, NODES, SLOTS = 100_000, 200, 8
TURNS = 3
READY_S, FLEET_READY_S, WRITTEN_S, STATUS_S = 3.0, 2.0, 10.0, 3.0


def fleet_run(folder: Path, n: int) -> RunPaths:
    """A run of the whole fleet that is on its way: half its time is over."""
    return simulated_run(folder, n, nodes=NODES, slots=SLOTS, until=400.0)


def run(folder: Path) -> list[Figure]:
    if why := missing():
        raise LeftOutError(why)
    figures = []
    for n in (SHAPES, MANY, FLEET_SHAPES):
        fleet = n == FLEET_SHAPES
        paths = fleet_run(folder / str(n), n) if fleet else simulated_run(folder / str(n), n)
        began = time.perf_counter()
        file, _ = write_report(paths, None)
        took = time.perf_counter() - began
        ready, table = [], []
        for _ in range(TURNS):
            with chromium() as browser:
                browser.open(file.as_uri())
                ready.append(float(browser.run("return Number(document.documentElement.dataset.ready)")) / 1000)
                table.append(float(browser.run("return Number(document.documentElement.dataset.table)")) / 1000)
        words = f"{n:,} shapes" + (f", {NODES * SLOTS:,} slots" if fleet else f", {n * 10:,} rows")
        stands = statistics.median(table)
        spread = f"median of {TURNS} ({min(ready):.2f} to {max(ready):.2f} s), its table after {stands:.2f} s"
        figures.append(Figure(f"page, {words}: bytes", file.stat().st_size / 1e6, MAX_BYTES / 1e6, "MB", "the file"))
        if n != MANY:
            bound = FLEET_READY_S if fleet else READY_S
            figures.append(Figure(f"page, {words}: ready in Chromium", statistics.median(ready), bound, "s", spread))
        if n == SHAPES:
            how = "ledger to file, once, imports left out"
            figures.append(Figure(f"page, {words}: written", took, WRITTEN_S, "s", how))
        if fleet:
            began = time.perf_counter()
            RunSnapshot(paths).status()
            took = time.perf_counter() - began
            how = "from the ledger, once, without the poll of the nodes"
            figures.append(Figure(f"status, {words}", took, STATUS_S, "s", how))
    return figures
