"""`gemmfleet --help` and `gemmfleet tune --help` against a bare interpreter, turn by turn."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.figure import Figure

TURNS = 15


def run(folder: Path) -> list[Figure]:
    """Medians of whole processes, bare and each help in turn."""
    program = str(Path(sys.executable).with_name("gemmfleet"))
    helps = {"gemmfleet --help": ["--help"], "gemmfleet tune --help": ["tune", "--help"]}
    bare: list[float] = []
    helped: dict[str, list[float]] = {name: [] for name in helps}
    for _ in range(TURNS):
        bare.append(_seconds([sys.executable, "-c", "pass"], folder))
        for name, words in helps.items():
            helped[name].append(_seconds([program, *words], folder))
    base = statistics.median(bare) * 1e3
    how = f"median of {TURNS}; bound: 3 x `python -c pass` ({base:.0f} ms) + 100 ms"
    return [Figure(name, statistics.median(times) * 1e3, 3 * base + 100, "ms", how) for name, times in helped.items()]


def _seconds(argv: list[str], folder: Path) -> float:
    began = time.perf_counter()
    subprocess.run(argv, stdout=subprocess.DEVNULL, check=True, cwd=folder)
    return time.perf_counter() - began
