"""The page of a run with 5,000 shapes, and with 50,000: how soon it stands in Chromium, and how large it is.

The time is the page's own, from the start of the navigation to the attribute that its script sets when table and
pictures stand, with a fresh profile each time.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from benchmarks.figure import Figure, LeftOutError
from orchestrator.analysis.report.page import MAX_BYTES, write_report
from tests.integration.browser import chromium, missing
from tests.support.report_kit import simulated_run

SHAPES, MANY = 5_000, 50_000
TURNS = 3
READY_S, WRITTEN_S = 3.0, 10.0


def run(folder: Path) -> list[Figure]:
    if why := missing():
        raise LeftOutError(why)
    figures = []
    for n in (SHAPES, MANY):
        paths = simulated_run(folder / str(n), n)
        began = time.perf_counter()
        written = write_report(paths, None)
        took = time.perf_counter() - began
        ready, table = [], []
        for _ in range(TURNS):
            with chromium() as browser:
                browser.open(written.path.as_uri())
                ready.append(float(browser.run("return Number(document.documentElement.dataset.ready)")) / 1000)
                table.append(float(browser.run("return Number(document.documentElement.dataset.table)")) / 1000)
        words = f"{n:,} shapes, {n * 10:,} rows"
        stands = statistics.median(table)
        spread = f"median of {TURNS} ({min(ready):.2f} to {max(ready):.2f} s), its table after {stands:.2f} s"
        figures.append(Figure(f"page, {words}: bytes", written.bytes / 1e6, MAX_BYTES / 1e6, "MB", "the file"))
        if n == SHAPES:
            figures += [
                Figure(f"page, {words}: ready in Chromium", statistics.median(ready), READY_S, "s", spread),
                Figure(f"page, {words}: written", took, WRITTEN_S, "s", "ledger to file, once, imports left out"),
            ]
    return figures
