"""`gemmfleet selftest`: tries on one node the statements about AITER on a real chip that nobody has seen hold yet.

`results/selftest.py` has the list of them; each is tried once, in its order, and the command stops at its time limit.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.cli.options import RunsOpt
from orchestrator.cli.printer import plain
from orchestrator.errors import InputError
from orchestrator.pages import Page
from orchestrator.paths import DEFAULT_RUNS, create_run_folder, new_run_id
from orchestrator.results.selftest import NOT_HELD, NOT_TRIED, OUTCOMES, try_statements
from orchestrator.results.selftest_bundle import write_bundle
from orchestrator.results.selftest_trial import ENDING_S, NodeTrial, find_node


def selftest(
    inventory: Annotated[Path, typer.Option("-i", "--inventory", help="The inventory with the node.", metavar="INV")],
    out: Annotated[
        Path, typer.Option("-o", "--out", help="Write the bundle here; it must not exist yet.", metavar="BUNDLE.tar.gz")
    ],
    node: Annotated[str | None, typer.Option(help="The node; default: the first.", metavar="NODE")] = None,
    minutes: Annotated[int, typer.Option(min=2, help="Minutes that it may take.", metavar="N")] = 15,
    runs: RunsOpt = DEFAULT_RUNS,
) -> Page:
    """Try on one node with an MI355X what nobody has seen there yet.

    Exit code 1 if a statement did not hold, 3 if none could be tried. The bundle names no host, user or path.
    """
    if out.exists():
        raise InputError(f"{out}: exists already: name another file with -o")
    if not out.parent.is_dir():
        raise InputError(f"{out}: its folder does not exist: name another file with -o")
    find_node(inventory, node)  # refuses an inventory without the node
    folder = create_run_folder(runs.absolute(), f"selftest-{new_run_id(time.time())}").root
    trial = NodeTrial(folder, inventory, node, 60.0 * minutes - ENDING_S)
    rows = _try_statements(trial)
    counts = {outcome: sum(row["outcome"] == outcome for row in rows) for outcome in OUTCOMES}
    page = Page({"statements": rows, "counts": counts, "bundle": str(out)}, _exit_code(trial, counts, len(rows)))
    page.table(("", *list(rows[0])[1:]), _without_repeated_reasons(rows))
    page.line(", ".join(f"{n} {outcome}" for outcome, n in counts.items()), f"  {out}", f"  runs: {folder}")
    write_bundle(trial, json.dumps(page.document, indent=1, ensure_ascii=False), out)
    return page


def _try_statements(trial: NodeTrial) -> list[dict[str, Any]]:
    """Return a row for each statement: number, statement, outcome and reason. Ctrl-C ends the trial."""
    rows = []
    before = signal.signal(signal.SIGINT, trial.interrupt)
    try:
        for row in try_statements(trial):
            rows.append(row)
            print(plain(f"{row['number']:2} {row['outcome']}: {row['statement']}"), file=sys.stderr, flush=True)
    finally:
        signal.signal(signal.SIGINT, before)
    return rows


def _exit_code(trial: NodeTrial, counts: dict[str, int], statements: int) -> int:
    if trial.interrupted:
        return 130
    if counts[NOT_TRIED] == statements:
        return 3
    return 1 if counts[NOT_HELD] else 0


def _without_repeated_reasons(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the cells of the rows; a reason that is the one above is written as `as above`."""
    cells = []
    above = ""
    for row in rows:
        *others, reason = map(str, row.values())
        cells.append([*others, "as above" if reason and reason == above else reason])
        above = reason
    return cells
