"""`gemmfleet --help` against a bare interpreter, turn by turn."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.figure import Figure

TURNS = 15


def run(folder: Path) -> list[Figure]:
    """Medians of whole processes, bare and help in turn."""
    bare, helped = [], []
    for _ in range(TURNS):
        bare.append(_seconds([sys.executable, "-c", "pass"], folder))
        helped.append(_seconds([str(Path(sys.executable).with_name("gemmfleet")), "--help"], folder))
    base = statistics.median(bare) * 1e3
    return [
        Figure(
            "gemmfleet --help", statistics.median(helped) * 1e3, 3 * base + 100, "ms",
            f"median of {TURNS}; bound: 3 x `python -c pass` ({base:.0f} ms) + 100 ms",
        )
    ]  # fmt: skip


def _seconds(argv: list[str], folder: Path) -> float:
    began = time.perf_counter()
    subprocess.run(argv, stdout=subprocess.DEVNULL, check=True, cwd=folder)
    return time.perf_counter() - began
