"""Works on runs that nobody drives: lists them, removes them, and stops workers that a finished run left.

The status of a run is in run_snapshot.py.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from orchestrator.command_hints import command
from orchestrator.controller.shutdown import StoppedNode
from orchestrator.engines import Engine, WorkerState
from orchestrator.errors import InputError, OrchestratorError, RunBusyError
from orchestrator.inventory.load import limit, load_inventory
from orchestrator.inventory.model import Inventory
from orchestrator.leases.pools import pools_of
from orchestrator.ledger.reader import Counts, LedgerReader
from orchestrator.machines.node_link import engine_of, transport_of
from orchestrator.machines.node_plan import NodePlan, plan_nodes
from orchestrator.machines.node_poll import ask_all
from orchestrator.paths import RunConfig, RunPaths, holder, list_runs
from orchestrator.transport.base import Transport, connected
from orchestrator.view.status import state_now

REMOVED = ".removed"
"""End of the name of a run's folder while its files are removed."""
STOP_S = 30.0
"""Time for the nodes of a finished run to answer and to stop workers that are left."""
UNENDED = ("planned", "running")
"""A run in one of these states has not written its counts yet."""


@dataclass(frozen=True, slots=True)
class ListedRun:
    """A run as one line of the list. `source`: the file of its shapes."""

    paths: RunPaths
    run: str
    state: str
    counts: Counts
    family: str
    source: str
    created: float

    def to_json(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "state": self.state,
            "created": self.created,
            "family": self.family,
            "source": self.source,
            "folder": str(self.paths.root),
            "shapes": {n: getattr(self.counts, n) for n in ("total", "tuned", "skipped", "failed")},
        }


def summaries(runs: Path) -> list[ListedRun]:
    """Every run of a folder, oldest first. If its files cannot be read, it is listed as `unreadable`."""
    return [_summary(p) for p in list_runs(runs)]


def _summary(paths: RunPaths) -> ListedRun:
    try:
        config = RunConfig.read(paths.config)
        with LedgerReader.open_readonly(paths.ledger) as ledger:
            state = ledger.state
            counts = (None if state in UNENDED else _counted(paths)) or ledger.counts()
    except OrchestratorError:
        return ListedRun(paths, paths.run, "unreadable", Counts(), "", "", paths.config.stat().st_mtime)
    state = state_now(state, driven=bool(holder(paths.lock)))
    return ListedRun(paths, config.run, state, counts, config.family, config.shapes, config.created)


def _counted(paths: RunPaths) -> Counts | None:
    """The counts that a run wrote at its end, so that a list need not replay the journal; None if it wrote none."""
    try:
        return Counts(**json.loads(paths.provenance.read_bytes())["counts"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def prunable(runs: Path, *, keep: int, older_s: float, unfinished: bool, now: float) -> list[ListedRun]:
    """Runs that may be removed: finished (with `unfinished`: all that nobody drives), old enough, and not among the
    `keep` newest."""
    states = ("finished", "interrupted", "cancelled", "planned", "unreadable") if unfinished else ("finished",)
    idle = [listed for listed in summaries(runs) if listed.state in states and not holder(listed.paths.lock)]
    candidates = idle[: max(0, len(idle) - keep)]
    return [listed for listed in candidates if now - listed.created >= older_s]


def remove_run(paths: RunPaths) -> list[str]:
    """Remove a run's folders on its nodes, then here. Return sentences on nodes that could not be reached."""
    if holder(paths.lock):
        raise RunBusyError(f"run {paths.run} is being driven; cancel it first: {command(f'cancel {paths.named}')}")
    troubles = []
    try:
        inventory = load_inventory(paths.inventory)
        plans = plan_nodes(inventory, paths.run, paths.root)
        troubles += _forget_leases(inventory, paths.run)
    except InputError as e:
        plans = []
        troubles = [f"{paths.run}: its nodes are unknown, their folders stay: {e}"]
    for plan in plans:
        try:
            _remove_node_folder(plan, paths.run)
        except OrchestratorError as e:
            troubles.append(str(e))
    # a kill while files are removed leaves no half of a run, and the next prune removes the rest
    aside = paths.root.with_name(f".{paths.run}{REMOVED}")
    paths.root.rename(aside)
    shutil.rmtree(aside)
    return troubles


def remove_leftovers(runs: Path) -> None:
    """Remove what a killed `remove_run` left."""
    for aside in runs.glob(f".*{REMOVED}"):
        shutil.rmtree(aside)


def _remove_node_folder(plan: NodePlan, run: str) -> None:
    """Stop the workers that are left on a node, and remove its folder and, if it is empty then, the run's."""
    with connected(transport_of(plan)) as transport:
        with contextlib.closing(engine_of(plan, transport)) as engine:
            if any(worker.state == "running" for worker in _workers(engine)):
                engine.stop(kill=True)
            engine.tidy()
        transport.run(["rm", "-rf", "--", plan.folder], timeout=120.0)
        run_folder = PurePosixPath(plan.folder).parent
        if run_folder.name == run:
            # it fails while another node that shares this folder has files in it
            transport.run(["rmdir", "--", str(run_folder)], timeout=20.0)


def stop_left_workers(paths: RunPaths, reach: Callable[[NodePlan], Transport] | None = None) -> dict[str, StoppedNode]:
    """Look at each machine of a finished run, and stop the workers that run there. Nothing else changes. `reach`: makes
    the transport of a node; None: as the inventory says."""
    inventory = limit(load_inventory(paths.inventory), RunConfig.read(paths.config).limit)
    plans = plan_nodes(inventory, paths.run, paths.root)
    stops = {plan.node: partial(_stop_on, plan, reach or transport_of) for plan in plans if plan.slots}
    silent = StoppedNode(0, f"it did not answer within {STOP_S:g} s")
    return {node: stopped or silent for node, stopped in ask_all(stops, STOP_S)}


def _stop_on(plan: NodePlan, reach: Callable[[NodePlan], Transport]) -> StoppedNode:
    try:
        with connected(reach(plan)) as transport, contextlib.closing(engine_of(plan, transport)) as engine:
            running = sum(worker.state == "running" for worker in engine.list())
            if running:
                engine.stop(kill=True)  # the run has all of its records
            return StoppedNode(running)
    except OrchestratorError as e:
        return StoppedNode(0, str(e))


def _forget_leases(inventory: Inventory, run: str) -> list[str]:
    """Remove what the run's leases left where their scheduler's commands run. Return sentences on what stays."""
    troubles = []
    for pool in pools_of(inventory, run):
        with contextlib.closing(pool.source) as source:
            try:
                source.forget()
            except OrchestratorError as e:
                troubles.append(str(e))
    return troubles


def _workers(engine: Engine) -> list[WorkerState]:
    try:
        return engine.list()
    except OrchestratorError:
        return []  # never deployed, or its scripts are gone, so no worker can run there
