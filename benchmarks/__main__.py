"""python -m benchmarks [NAME ...]: run all benchmarks, or those named; exit 1 where a bound is broken or one fails."""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

from benchmarks import (
    handover,
    log_lines,
    main_job,
    planning,
    ssh_fleet,
    startup,
    status,
    triton_kernels,
    triton_tuner,
    zero_cost,
)
from benchmarks.figure import Figure, LeftOutError, show

BENCHMARKS: dict[str, Callable[[Path], list[Figure]]] = {
    "startup": startup.run,
    "planning": planning.run,
    "zero_cost": zero_cost.run,
    "ssh_fleet": ssh_fleet.run,
    "status": status.run,
    "handover": handover.run,
    "log_lines": log_lines.run,
    "main_job": main_job.run,
    "triton_tuner": triton_tuner.run,
    "triton_kernels": triton_kernels.run,
}


def main(names: list[str]) -> int:
    """Returns the exit code."""
    unknown = set(names) - set(BENCHMARKS)
    if unknown:
        print(f"unknown: {', '.join(sorted(unknown))}; there are: {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    figures: list[Figure] = []
    left_out, failed = [], []
    for name in names or list(BENCHMARKS):
        print(f"running {name} ...", file=sys.stderr, flush=True)
        try:
            with tempfile.TemporaryDirectory(prefix="gemmfleet-bench-") as folder:
                figures += BENCHMARKS[name](Path(folder))
        except LeftOutError as e:
            left_out.append(f"{name}: {e}")
        except (Exception, SystemExit) as e:  # noqa: BLE001  the others are to be measured all the same
            traceback.print_exc()
            failed.append(f"{name}: {type(e).__name__}: {str(e)[-300:]}")
    show(figures, left_out, failed)
    return 1 if failed or not all(f.holds for f in figures) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
