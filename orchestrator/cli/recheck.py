"""`gemmfleet recheck`: measure the rows of a tuned table on another build, and tune those that are no longer good."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from orchestrator.cli.driving import drive_to_end, make_request
from orchestrator.cli.ending import EXIT_CODES, NextCommand, end_page, next_lines
from orchestrator.cli.options import FamilyOpt, InventoryOpt, RunFlags, SettingFlags, parse_tuner_options
from orchestrator.cli.plan_page import create_run, plan_page
from orchestrator.cli.printer import plain, print_page
from orchestrator.controller.prepare import prepare
from orchestrator.controller.prepared_run import PreparedRun
from orchestrator.controller.recheck_run import prepare_recheck
from orchestrator.controller.request import RunRequest
from orchestrator.errors import InputError
from orchestrator.ledger.reader import LedgerReader
from orchestrator.pages import Page
from orchestrator.paths import RunPaths
from orchestrator.results.recheck import Recheck, judge_rows, write_rows
from orchestrator.results.run_end import end_run
from orchestrator.shapes.model import describe, write_list
from worker.text import plural


def recheck(
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="Tuned table, or the folder of its run.")],
    image: Annotated[str | None, typer.Option(metavar="NEW", help="The new image; default: the inventory's.")] = None,
    inventory: InventoryOpt = None,
    family: FamilyOpt = None,
    tuner: Annotated[str | None, typer.Option(metavar="T", help="Default: the run's, else the inventory's.")] = None,
    profile: Annotated[
        list[Path] | None, typer.Option(metavar="CSV", help="Profile with the runners-up; repeatable.")
    ] = None,
    runners_up: Annotated[int, typer.Option(min=0, max=100, metavar="N", help="Measured beside each row.")] = 3,
    slower: Annotated[float, typer.Option(min=0.0, metavar="X", help="Tolerance beside the median row.")] = 0.05,
    only_check: Annotated[
        bool, typer.Option("--only-check", help="Tune nothing; exit code 1 where rows need it.")
    ] = False,
    option: Annotated[
        list[str] | None, typer.Option("-O", "--tuner-option", help="As of `tune`, repeatable.", metavar="NAME=VALUE")
    ] = None,
    *,
    run: RunFlags,
    settings: SettingFlags,
) -> Page:
    """Check a tuned table on a new build; tune what fails it.

    Each row's kernel and its runners-up are measured. Rows that are gone, slower or overtaken are tuned at once.
    """
    if run.detach:
        raise InputError("recheck waits for its own measurements: leave out --detach")
    request = make_request(
        run,
        settings,
        shapes=table,
        inventory=inventory,
        image=image,
        family=family,
        tuner=tuner,
        options=parse_tuner_options(option or []),
    )
    prepared, rows = prepare_recheck(request, profile or [], runners_up)
    if run.plan:
        return plan_page(prepared)
    paths = create_run(prepared, quiet=run.json_)
    write_rows(paths.recheck, str(table), rows, slower)
    state, error = drive_to_end(paths, json_=run.json_)
    if error is not None:
        raise error
    with LedgerReader.open_readonly(paths.ledger) as ledger:
        checked = judge_rows(ledger, paths.recheck)
    page = _checked_page(checked)
    page.code = EXIT_CODES[state]
    runs_to_merge = [paths]
    if page.code == 0 and checked.to_tune and not only_check:
        if not run.json_:
            print_page(page)
        tuning = prepare(_request_to_tune(prepared, paths, checked, run, settings)).create()
        runs_to_merge.append(tuning)
        page = _drive_tuning(tuning, json_=run.json_)
    if only_check and checked.to_tune:
        page.code = page.code or 1
    document = checked.to_json(prepared.family.key_names)
    page.document = {"runs": [merged.run for merged in runs_to_merge], "exit_code": page.code, **document}
    if not only_check:
        folders = " ".join(quote(str(merged.root)) for merged in runs_to_merge)
        page.line(*next_lines([NextCommand(f"db merge {folders} --into NEW.csv", "the table of the new build")]))
    return page


def _request_to_tune(
    prepared: PreparedRun, paths: RunPaths, checked: Recheck, run: RunFlags, settings: SettingFlags
) -> RunRequest:
    """Return the request of the run that tunes the rows that are not good. Its shapes lie in the recheck's folder."""
    queued = paths.root / "queued.csv"
    write_list(queued, [row.key for row in checked.to_tune], prepared.family)
    config = prepared.config
    return make_request(
        run,
        settings,
        shapes=queued,
        inventory=paths.inventory,
        family=config.family,
        tuner=config.tuner,
        options=config.options,
        err_ratio=config.err_ratio,
    )


def _drive_tuning(tuning: RunPaths, *, json_: bool) -> Page:
    """Drive the run that tunes the rows which are not good, and return the report of its end."""
    state, error = drive_to_end(tuning, json_=json_)
    page = end_page(end_run(tuning, state), alone=state != "finished")
    page.error = error
    return page


def _checked_page(checked: Recheck) -> Page:
    """Return the rows that need tuning, and the counts."""
    page = Page()
    rows = []
    for row in checked.to_tune:
        now = "" if row.now_us is None else f"{row.now_us:.2f}"
        reason = row.why if row.by_us is None else f"{row.by} {row.by_us:.2f} us"
        kernel = plain(row.kernel, 50)
        rows.append((describe(row.key), row.verdict, f"{row.then_us:.2f}", now, kernel, plain(reason, 90)))
    heads = ("shape", "row", "us then", "us now", "kernel", "runner-up or reason")
    page.table(heads, rows, right=("us then", "us now"))
    counts = ", ".join(f"{n} {verdict}" for verdict, n in checked.counts.items())
    size = f"{checked.table}: {plural(len(checked.rows), 'row')}: {counts}"
    page.line(f"{size}; time now over then, median: {checked.drift:.3f}")
    page.line(f"{checked.slot_s:.1f} s of slots; {plural(len(checked.to_tune), 'row')} to be tuned again")
    return page
