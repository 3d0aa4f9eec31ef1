"""Starting and driving a run from the command line: here in the foreground, or by a controller in the background."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestrator.cli.bench_page import bench_page
from orchestrator.cli.ending import EXIT_CODES, FAILED_SHAPES, end_page
from orchestrator.cli.live_view import make_view
from orchestrator.cli.options import RunFlags, SettingFlags
from orchestrator.cli.plan_page import create_run, plan_page
from orchestrator.cli.printer import print_page
from orchestrator.command_hints import command
from orchestrator.controller.context import DriveSettings
from orchestrator.controller.drive import drive
from orchestrator.controller.prepared_run import PreparedRun
from orchestrator.controller.request import RunRequest
from orchestrator.errors import InputError, NoUsableNodeError, OrchestratorError
from orchestrator.inventory.load import load_inventory
from orchestrator.ledger.reader import LedgerReader
from orchestrator.machines.gpu_names import refuse_one_gpu_twice
from orchestrator.pages import Page
from orchestrator.paths import RunConfig, RunPaths, holder
from orchestrator.results.bench import BenchResults
from orchestrator.results.run_end import end_run
from worker.text import plural
from worker.tuners.catalog import recorded_tuner

DETACH_S = 20.0
"""Seconds that `--detach` waits until the controller in the background holds the run's lock."""


def make_request(run: RunFlags, settings: SettingFlags, **fields: Any) -> RunRequest:
    """Return the request of a command that starts a run; `fields`: those that its common options do not give."""
    return RunRequest(runs=run.runs, limit=run.limit, plan=run.plan, argv=sys.argv[1:], **settings, **fields)


def start(prepared: PreparedRun, flags: RunFlags) -> Page:
    """Return the plan of a run, or create and drive it, and return its report."""
    if flags.plan:
        return plan_page(prepared)
    paths = create_run(prepared, quiet=flags.json_ or flags.detach)
    return detach(paths) if flags.detach else drive_here(paths, json_=flags.json_)


def start_each(prepared: Sequence[PreparedRun], flags: RunFlags) -> Page:
    """Start the runs of several families one after another, and sum them up. The exit code is the worst.

    After an interrupted run no other is started.
    """
    if len(prepared) == 1:
        return start(prepared[0], flags)
    if flags.detach:
        raise InputError("--detach: several families are runs one after another; leave it out")
    pages: list[Page] = []
    errors: list[OrchestratorError] = []
    for run in prepared:
        page = start(run, flags)
        pages.append(page)
        if page.error is not None:  # raised after the summary of all runs
            errors.append(page.error)
            page.error = None
        if not flags.json_:
            print_page(page)
        if page.code == EXIT_CODES["interrupted"]:
            break
    return _sum_up(prepared, pages, errors, is_plan=flags.plan)


def _sum_up(
    prepared: Sequence[PreparedRun], pages: Sequence[Page], errors: Sequence[OrchestratorError], *, is_plan: bool
) -> Page:
    """Return the page of several runs; `pages`: of those that were started."""
    code = max(0, *(page.code for page in pages), *(error.exit_code for error in errors))
    documents: list[Any] = [page.document for page in pages]
    not_started = prepared[len(pages) :]
    page = Page({"runs": documents, "not_started": [run.family.name for run in not_started], "exit_code": code}, code)
    page.error = next((error for error in errors if error.exit_code == code), None)
    if not is_plan:
        for run, document in zip(prepared, documents, strict=False):
            tuned = f"{document['shapes']['tuned']} of {plural(document['shapes']['total'], 'shape')} tuned"
            state = f"run {document['run']} {document['state']}"
            page.line(f"{run.family.name}: {state}: {tuned}; next: {document['next'][0]}")
    page.line(*(f"{run.family.name}: not started ({run.listed.source})" for run in not_started))
    return page


def drive_here(
    paths: RunPaths, *, json_: bool, retry: tuple[int, ...] = (), settings: DriveSettings | None = None
) -> Page:
    """Drive the run in this process, and return the report of its end."""
    state, error = drive_to_end(paths, json_=json_, retry=retry, settings=settings)
    page = finish_run(paths, state)
    page.error = error
    return page


def finish_run(paths: RunPaths, state: str) -> Page:
    """End a run that was driven: read its results, merge them into its table, and return the report. A bench has no
    winners, and nothing is merged."""
    config = RunConfig.read(paths.config)
    if not recorded_tuner(config.tuner).side_by_side:
        return end_page(end_run(paths, state))
    with LedgerReader.open_readonly(paths.ledger) as ledger:
        return bench_page(BenchResults.of_run(ledger, paths, config.options), state)


def drive_to_end(
    paths: RunPaths, *, json_: bool, retry: tuple[int, ...] = (), settings: DriveSettings | None = None
) -> tuple[str, NoUsableNodeError | None]:
    """Drive the run in this process, and return its state at the end, and the reason if it had no usable node."""
    with contextlib.closing(make_view(quiet=json_)) as view:
        try:
            return drive(paths, view, retry=retry, settings=settings), None
        except NoUsableNodeError as e:
            return "interrupted", e


def detach(paths: RunPaths) -> Page:
    """Start a controller in the background, as another process that outlives this one, with its output in
    controller.log. Wait until it drives the run. Raises InputError if it ended in the meantime with an error."""
    log = paths.controller_log
    runs = str(paths.root.absolute().parent)
    argv = [sys.executable, "-m", "orchestrator", "resume", paths.run, "--runs", runs]
    with log.open("ab") as out:
        child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    exit_code, is_driving = _wait_until_driven(paths, child)
    if exit_code not in (None, 0, FAILED_SHAPES):
        tail = log.read_text(errors="replace")[-2000:]
        raise InputError(f"the controller ended at once with code {exit_code}:\n{tail}")
    child.returncode = exit_code or 0  # else Popen warns that a process still runs, when this one ends
    page = Page({"run": paths.root.name, "pid": child.pid, "folder": str(paths.root)})
    page.line(paths.root.name)
    if exit_code is not None:
        page.aside(f"the controller has ended already, with code {exit_code}: {command(f'status {paths.named}')}")
    elif is_driving:
        page.aside(f"the controller is process {child.pid}; watch it: {command(f'status {paths.named} --watch')}")
    else:
        page.aside(
            f"process {child.pid} was started {DETACH_S:g} s ago, and does not drive the run yet: look into {log}"
        )
    return page


def _wait_until_driven(paths: RunPaths, controller: subprocess.Popen[bytes]) -> tuple[int | None, bool]:
    """Wait until a controller drives the run, has ended, or DETACH_S are over; (its exit code, whether it drives)."""
    exit_code = controller.poll()
    is_driving = False
    until = time.monotonic() + DETACH_S
    while exit_code is None and not is_driving and time.monotonic() < until:
        time.sleep(0.05)
        exit_code = controller.poll()
        is_driving = holder(paths.lock).get("pid") == controller.pid
    return exit_code, is_driving


def replace_inventory(paths: RunPaths, inventory: Path | None) -> None:
    """Check an inventory and make it the run's; None: the run keeps its own."""
    if inventory is None:
        return
    refuse_one_gpu_twice(load_inventory(inventory).nodes, {})
    aside = paths.inventory.with_suffix(".tmp")
    shutil.copyfile(inventory, aside)
    os.rename(aside, paths.inventory)
