"""The main job on examples/llm.csv: how much of its wall time is not spent on what it is for."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from benchmarks.figure import Figure
from orchestrator.ledger.reader import LedgerReader
from orchestrator.paths import list_runs

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("import", "inputs", "check", "measure")


def run(folder: Path) -> list[Figure]:
    """Wall time of the whole command less import, input generation, checking and measuring (by the tuner's clock)."""
    runs = folder / "runs"
    argv = [sys.executable, "-m", "orchestrator", "tune", "examples/llm.csv", "--runs", str(runs)]
    began = time.perf_counter()
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    wall = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    with LedgerReader.open_readonly(list_runs(runs)[-1].ledger) as ledger:
        spent, tuned = ledger.spent(), ledger.counts().tuned
    needed = sum(spent.get(k, 0.0) for k in NEEDED)
    parts = ", ".join(f"{k} {spent.get(k, 0.0):.1f}" for k in NEEDED)
    return [
        Figure(
            "main job beyond its work",
            100 * (wall - needed) / wall,
            5.0,
            "%",
            f"{tuned} shapes, {wall:.1f} s wall; {parts} s",
        ),
        Figure("main job, whole", wall, 150.0, "s", "examples/llm.csv, two minutes are meant"),
    ]
