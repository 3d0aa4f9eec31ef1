"""Planning 100,000 shapes: read, check, group, cost, order, as `tune --plan` does it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.figure import Figure

SHAPES = 100_000


def run(folder: Path) -> list[Figure]:
    """One process, its wall time and its peak memory."""
    csv = folder / "shapes.csv"
    with csv.open("w") as f:
        f.write("M,N,K\n")
        f.writelines(f"{i % 64 + 1},{16 * (i // 64 % 50 + 1)},{64 * (i // 3200 + 1)}\n" for i in range(SHAPES))
    argv = [sys.executable, "-m", "orchestrator", "tune", str(csv), "--plan", "--json", "--runs", str(folder / "runs")]
    root = Path(__file__).resolve().parents[1]
    began = time.perf_counter()
    p = subprocess.Popen(argv, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(root)})
    _, status, usage = os.wait4(p.pid, 0)
    seconds = time.perf_counter() - began
    p.returncode = os.waitstatus_to_exitcode(status)
    if p.returncode:
        raise SystemExit(f"tune --plan ended with code {p.returncode}")
    how = f"{SHAPES:,} shapes in 1,600 groups, whole process with start-up and JSON output"
    return [
        Figure("planning, time", seconds, 3.0, "s", how),
        Figure("planning, peak memory", usage.ru_maxrss / 1024, 500.0, "MB", how),
    ]
