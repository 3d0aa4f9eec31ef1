"""Runs AITER's operator on the rows of a tuned table, for `worker verify` of an AITER without --run_config.

`python -m worker.bench.verify FAMILY TABLE`: prints a line a row as --run_config does, `(64, 512, 1024) | 5.10 | OK`,
with `reason: ...` below if it is not OK. AITER's own lines on its lookups come before it. The environment names the
tree and the table. A row whose operator faults costs its process alone.
"""

from __future__ import annotations

import csv
import sys
from contextlib import closing
from pathlib import Path

from worker.bench.runner import BackendRunner
from worker.families import FAMILIES
from worker.protocol.bench import HARMLESS, Options, Side
from worker.tuners.aiter.session import BUILD_QUIET_S
from worker.tuners.common.helper_process import HelperError

_STATUS = {"wrong": "MISMATCH", **dict.fromkeys(HARMLESS, "UNSUPPORTED")}


def main(name: str, table: Path) -> None:
    """Print a line for each row."""
    family, runner = FAMILIES[name], BackendRunner(Side(), "aiter", table.parent / "operator", Options(), {})
    with closing(runner), table.open(newline="") as f:
        for row in csv.DictReader(f):
            key = {c: row[c] for c in family.key_names if row.get(c)}
            us, status, why = "N/A", "OK", ""
            try:
                runner.prepare(name, key, family.aiter.err_ratio, BUILD_QUIET_S, lambda: None)
                us = f"{runner.sample(BUILD_QUIET_S, lambda: None)['us']:.2f}"
            except HelperError as e:
                status, why = _STATUS.get(e.status, "ERROR"), f"\nreason: {' '.join(str(e).split())}"
            print(f"({', '.join(key.values())}) | {us} | {status}{why}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
