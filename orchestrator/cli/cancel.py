"""`gemmfleet cancel`: stop a run and its workers, and say what was found on each node."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from orchestrator.cli.live_view import make_view
from orchestrator.cli.options import RunArg, RunsOpt
from orchestrator.cli.printer import print_page
from orchestrator.command_hints import command
from orchestrator.controller.context import DriveSettings
from orchestrator.controller.drive import drive
from orchestrator.controller.ended_runs import stop_left_workers
from orchestrator.errors import InputError
from orchestrator.ledger.reader import LedgerReader
from orchestrator.pages import Page
from orchestrator.paths import DEFAULT_RUNS, RunPaths, find_run, holder, leave_request
from worker.text import plural

ENDING_S = 60.0
"""Seconds that a controller gets to end its run."""
NodeStops = Mapping[str, dict[str, Any]]
"""Node -> what was found there: {"n1": {"ran": 8, "left": ""}}. `ran`: workers that were stopped, None if nothing was
started there. `left`: why some may still run."""


def cancel(run: RunArg = None, runs: RunsOpt = DEFAULT_RUNS) -> None:
    """Stop a run and its workers; results so far are kept."""
    cancel_run(find_run(runs, run))


def cancel_run(paths: RunPaths, settings: DriveSettings | None = None) -> None:
    """Stop the run, through its controller or, without one, on the nodes directly. A finished run stays finished; only
    workers that run again on its nodes, such as containers that came back, are stopped. Raises InputError."""
    page = Page()
    is_driven = bool(holder(paths.lock))
    state, nodes = _read_farewell(paths)
    ended_well = state == "finished" and nodes is not None and not any(stop["left"] for stop in nodes.values())
    if not is_driven and ended_well and nodes is not None:
        _add_stops(page, paths, state, _look_again(paths, nodes, settings))
        print_page(page)
        return
    if is_driven:
        leave_request(paths.requests, "cancel")
        _wait_for_controller(paths)
    else:
        drive(paths, make_view(quiet=True), cancel=True, settings=settings)
        page.line(f"run {paths.root.name}: no controller was driving it")
    _add_stops(page, paths, *_read_farewell(paths))
    print_page(page)


def _wait_for_controller(paths: RunPaths) -> None:
    until = time.monotonic() + ENDING_S
    controller = holder(paths.lock)
    while holder(paths.lock):
        if time.monotonic() > until:
            raise InputError(
                f"the controller (process {controller.get('pid')}) did not end within {ENDING_S:g} s; end it, then:"
                f" {command(f'cancel {paths.named}')}"
            )
        time.sleep(0.1)


def _look_again(paths: RunPaths, nodes: NodeStops, settings: DriveSettings | None) -> NodeStops:
    """Return what the last controller of a finished run found on each node, brought up to date by a look at the
    machines. Leases are given back with the run, and nobody looks at a node again that had no worker."""
    stops = dict(nodes)
    for node, stop in nodes.items():
        if stop["ran"] is not None:
            stops[node] = {**stop, "ran": 0}
    for node, stopped in stop_left_workers(paths, settings.reach if settings else None).items():
        had_workers = stops.get(node, {}).get("ran") is not None
        if stopped.ran or had_workers:
            stops[node] = asdict(stopped)
    return stops


def _read_farewell(paths: RunPaths) -> tuple[str, NodeStops | None]:
    """Return the run's state, and what its last controller found on each node; None if it ended without a look."""
    with LedgerReader.open_readonly(paths.ledger) as ledger:
        farewell = ledger.meta("farewell", {})
        is_of_last_controller = farewell.get("epoch") == ledger.meta("epoch", 0)
        return ledger.state, farewell.get("nodes") if is_of_last_controller else None


def _add_stops(page: Page, paths: RunPaths, state: str, nodes: NodeStops | None) -> None:
    """Add how the run ended, and what was found on each node; None: its last controller did not look."""
    page.line(f"run {paths.root.name} is {state}")
    if nodes is None:
        page.line(f"its last controller ended without checking the nodes: {command(f'cancel {paths.named}')}")
        return
    workers = {node: stop["ran"] for node, stop in sorted(nodes.items()) if not stop["left"]}
    stopped = [node for node, ran in workers.items() if ran]
    if stopped:
        page.line(f"stopped {plural(sum(workers[node] for node in stopped), 'worker')} on {', '.join(stopped)}")
    idle = [node for node, ran in workers.items() if ran == 0]
    if idle:
        page.line(f"no worker ran on {', '.join(idle)}")
    untouched = sorted(node for node, stop in nodes.items() if stop["ran"] is None)
    if untouched:
        page.line(f"nothing was started on {', '.join(untouched)}")
    for node in sorted(nodes.keys() - workers.keys()):
        page.line(f"! {node}: workers may be left; they end after 15 minutes without work: {nodes[node]['left']}")
