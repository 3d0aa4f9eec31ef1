"""Drives a run from its folder to its end. The same code starts, resumes and retries.

`drive` takes the run's lock, makes a `RunContext` and a `Controller` (loop.py), lets it run, and writes the results.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from orchestrator.controller.context import DriveSettings, RunContext, Watcher
from orchestrator.controller.deployment import plan_machines
from orchestrator.controller.limits import Limits
from orchestrator.controller.loop import Controller
from orchestrator.errors import TakenOverError
from orchestrator.events import RetryAsked
from orchestrator.inventory.load import limit, load_inventory
from orchestrator.inventory.references import value_hider
from orchestrator.leases.leased_nodes import LeasedNodes
from orchestrator.leases.pools import make_ready, pools_of
from orchestrator.ledger.database import checkpoints
from orchestrator.ledger.reader import NOT_WORTH_IT, LedgerReader, reconcile
from orchestrator.ledger.writer import Ledger
from orchestrator.machines.node_files import worker_code
from orchestrator.paths import RunConfig, RunPaths, run_lock
from orchestrator.policy import Policy
from orchestrator.results.export import export, make_provenance, write_results
from orchestrator.results.run_results import RunResults
from orchestrator.view.header import RunHeader
from orchestrator.view.live import LiveStatus
from worker.tuners.catalog import recorded_tuner


def drive(
    paths: RunPaths,
    watcher: Watcher,
    *,
    retry: Sequence[int] = (),
    cancel: bool = False,
    handle_signals: bool = True,
    settings: DriveSettings | None = None,
) -> str:
    """Drive the run until it is finished, interrupted or cancelled, and return which.

    `retry`: failed shapes to queue again first. `cancel`: only stop the workers and read their last records.

    Raises RunBusyError, TakenOverError, NoUsableNodeError, LedgerError, and InputError for the run's own files.
    """
    config = RunConfig.read(paths.config)
    with run_lock(paths), Ledger.open(paths.ledger) as ledger, checkpoints(paths.ledger):
        warn_without_wal(ledger, watcher)
        if not cancel and not retry and not _goes_on(ledger, config, watcher):
            write_results(RunResults.read(ledger), paths, config.options)  # a user may have damaged or removed one
            return "finished"
        with _interrupts(handle_signals) as interrupts:
            limited = ""
            state = "interrupted"
            try:
                context = _begin(paths, config, ledger, watcher, settings or DriveSettings())
                controller = _make_controller(context, interrupts, cancel=cancel, has_more=bool(retry))
                state = controller.run([RetryAsked(tuple(retry))] if retry else [])
                limited = controller.limited
            except TakenOverError:
                state = ""  # another controller has the run now
                raise
            finally:
                if state:
                    _end(paths, config, ledger, watcher, state, limited)
    return state


@contextlib.contextmanager
def _interrupts(handle_signals: bool) -> Iterator[list[int]]:
    """A list that gets one entry for each Ctrl-C or SIGTERM. Without `handle_signals` it stays empty."""
    interrupts: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM) if handle_signals else ()
    previous = {number: signal.signal(number, lambda *_: interrupts.append(1)) for number in numbers}
    try:
        yield interrupts
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _end(paths: RunPaths, config: RunConfig, ledger: Ledger, watcher: Watcher, state: str, limited: str) -> None:
    """Write how the run ended into the ledger, and its result files. `limited`: the limit that stopped new work."""
    with ledger.transaction():
        if state == "finished" and limited:
            pending = [shape.id for shape in ledger.shapes("pending")]
            ledger.skip_shapes(pending, limited, time.time(), reason=NOT_WORTH_IT)
        ledger.set_meta("state", state)
        ledger.set_meta("ended", time.time())
    inventory = hashlib.sha256(paths.inventory.read_bytes()).hexdigest()
    code, _ = worker_code(recorded_tuner(config.tuner).worker_package)
    results = RunResults.read(ledger)
    export(results, paths, make_provenance(results, config, inventory_sha256=inventory, code_sha=code))
    report_faults(ledger, watcher)


def _goes_on(ledger: Ledger, config: RunConfig, watcher: Watcher) -> bool:
    """Return False if the run is finished: then nothing changes on its nodes. If it ended at a limit that was raised
    since, queue the shapes that the limit left out."""
    if ledger.state != "finished":
        return True
    if config.until_gain is not None or config.gpu_hours is not None:
        why = Limits(ledger, config).reached()
        if why:
            watcher.note(f"{why}: raise --until-gain or --gpu-hours to go on")
            return False
        with ledger.transaction():
            ledger.reopen_skipped()
    if ledger.replayed.pending:
        return True
    watcher.note("every shape of this run is settled: nothing was started")
    return False


def warn_without_wal(ledger: LedgerReader, watcher: Watcher) -> None:
    """Tell the watcher if SQLite has no write-ahead log on the file system of the run, as on some network disks."""
    mode = ledger.query("PRAGMA journal_mode")[0][0]
    if mode != "wal":
        watcher.note(
            f"{ledger.path}: SQLite's write-ahead log does not work on this file system (journal mode {mode}), so"
            " `status` and the page may delay the run; keep runs on a local disk: --runs DIR",
            bad=True,
        )


def report_faults(ledger: LedgerReader, watcher: Watcher) -> None:
    """Report everything in the ledger that does not add up. That is always a fault of this program, not of the user."""
    for fault in reconcile(ledger):
        watcher.note(f"the ledger does not add up: {fault}", bad=True)


def _begin(paths: RunPaths, config: RunConfig, ledger: Ledger, watcher: Watcher, settings: DriveSettings) -> RunContext:
    """Write into the ledger that this controller drives the run, with the next epoch, and replay the journal."""
    epoch = int(ledger.meta("epoch", 0)) + 1
    with ledger.transaction():
        ledger.set_meta("epoch", epoch)
        ledger.set_meta("state", "running")
        ledger.set_meta("controller", f"{os.getpid()} on {socket.gethostname()}")
    policy = Policy(settings.policy)
    ledger.drive(policy.state)
    inventory = limit(load_inventory(paths.inventory), config.limit)
    return RunContext(
        paths,
        config,
        inventory,
        ledger,
        policy,
        watcher,
        epoch,
        settings,
        timeouts=replace(settings.timeouts, grace=config.grace_s, lost=config.lost_after_s),
        mask=value_hider([node.options() for node in inventory.nodes.values()]),
    )


def _make_controller(context: RunContext, interrupts: list[int], *, cancel: bool, has_more: bool) -> Controller:
    """`has_more`: there will be work, although every shape may be settled now."""
    config, inventory, state = context.config, context.inventory, context.policy.state
    machines = inventory.without_pools()
    plans = plan_machines(context.paths, config, machines) if machines.nodes else []
    leases = LeasedNodes(
        pools_of(inventory, config.run),
        partial(make_ready, inventory, config.run),
        known=[node for node in state.nodes.values() if node.lease],
        hold=config.hold,
        grow=not cancel,
    )
    header = RunHeader.of(context.ledger, config, {plan.node: plan.slots for plan in plans})
    return Controller(
        context,
        LiveStatus(state, header),
        leases,
        plans,
        launch=not cancel and (has_more or state.pending > 0),
        interrupts=interrupts,
        cancel=cancel,
    )
