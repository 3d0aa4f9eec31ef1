"""python -m benchmarks [NAME ...]: run all benchmarks, or those named; exit 1 where a bound is broken or one fails."""

from __future__ import annotations

import importlib
import sys
import tempfile
import traceback
from pathlib import Path

from benchmarks.figure import Figure, LeftOutError, show

BENCHMARKS = (
    "startup",
    "planning",
    "parts",
    "scale",
    "zero_cost",
    "recheck",
    "peers",
    "slurm",
    "pods",
    "main_job",
    "db_merge",
    "analysis",
    "compare",
    "report",
    "search",
)
"""Modules of this package; each has `run(folder) -> list of Figure`."""


def main(names: list[str]) -> int:
    """Returns the exit code."""
    unknown = set(names) - set(BENCHMARKS)
    if unknown:
        print(f"unknown: {', '.join(sorted(unknown))}; there are: {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    figures: list[Figure] = []
    left_out, failed = [], []
    for name in names or BENCHMARKS:
        print(f"running {name} ...", file=sys.stderr, flush=True)
        try:
            run = importlib.import_module(f"benchmarks.{name}").run
            with tempfile.TemporaryDirectory(prefix="gemmfleet-bench-") as folder:
                figures += run(Path(folder))
        except LeftOutError as e:
            left_out.append(f"{name}: {e}")
        except (Exception, SystemExit) as e:  # noqa: BLE001  the others are to be measured all the same
            traceback.print_exc()
            failed.append(f"{name}: {type(e).__name__}: {str(e)[-300:]}")
    show(figures, left_out, failed)
    return 1 if failed or not all(f.holds for f in figures) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
