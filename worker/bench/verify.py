"""Runs AITER's operator on the rows of a tuned table, for `worker verify` of an AITER without --run_config.

`python -m worker.bench.verify FAMILY TABLE` is started by worker/tuners/aiter/verify.py; the environment names the tree
and the table. It prints a line a row as AITER's --run_config does, after AITER's own lines on its lookups:

    (64, 512, 1024) | 5.10 | OK
    (64, 512, 2048) | N/A | ERROR
    reason: ...

A row whose operator faults costs only its process.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from worker.bench.runner import BackendRunner
from worker.families import FAMILIES, Family
from worker.protocol.bench import HARMLESS, BenchOptions, Side
from worker.tuners.aiter.session import BUILD_QUIET_S
from worker.tuners.common.helper_process import HelperError

_STATUS = {"wrong": "MISMATCH", **dict.fromkeys(HARMLESS, "UNSUPPORTED")}


def main(family_name: str, table: Path) -> None:
    """Print a line for each row."""
    family = FAMILIES[family_name]
    runner = BackendRunner(Side(), "aiter", table.parent / "operator", BenchOptions(), {})
    with closing(runner), table.open(newline="") as f:
        for row in csv.DictReader(f):
            key = {column: row[column] for column in family.key_names if row.get(column)}
            print(f"({', '.join(key.values())}) | {_verdict(runner, family, key)}", flush=True)


def _verdict(runner: BackendRunner, family: Family, key: Mapping[str, str]) -> str:
    try:
        runner.prepare(family.name, key, family.aiter.err_ratio, BUILD_QUIET_S, lambda: None)
        answer = runner.sample(BUILD_QUIET_S, lambda: None)
    except HelperError as e:
        reason = " ".join(str(e).split())
        return f"N/A | {_STATUS.get(e.status, 'ERROR')}\nreason: {reason}"
    return f"{answer['us']:.2f} | OK"


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
