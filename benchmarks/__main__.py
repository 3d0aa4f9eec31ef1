"""python -m benchmarks [NAME ...]: run all benchmarks, or those named; exit 1 where a bound does not hold."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks import handover, log_lines, main_job, planning, ssh_fleet, startup, status, zero_cost
from benchmarks.figure import Figure, show

BENCHMARKS: dict[str, Callable[[Path], list[Figure]]] = {
    "startup": startup.run,
    "planning": planning.run,
    "zero_cost": zero_cost.run,
    "ssh_fleet": ssh_fleet.run,
    "status": status.run,
    "handover": handover.run,
    "log_lines": log_lines.run,
    "main_job": main_job.run,
}


def main(names: list[str]) -> int:
    """Returns the exit code."""
    unknown = set(names) - set(BENCHMARKS)
    if unknown:
        print(f"unknown: {', '.join(sorted(unknown))}; there are: {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    figures: list[Figure] = []
    for name in names or list(BENCHMARKS):
        print(f"running {name} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="gemmfleet-bench-") as folder:
            figures += BENCHMARKS[name](Path(folder))
    show(figures)
    return 0 if all(f.holds for f in figures) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
