"""Cleans up after runs that nobody drives: removes them here and on their nodes, and stops workers that were left.

`gemmfleet runs prune` calls `prunable`, `remove_leftovers` and `remove_run`, and `cancel` of a finished run calls
`stop_left_workers`.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePosixPath

from orchestrator.command_hints import command
from orchestrator.controller.shutdown import StoppedNode
from orchestrator.engines import Engine, WorkerState
from orchestrator.errors import InputError, OrchestratorError, RunBusyError
from orchestrator.inventory.load import limit, load_inventory
from orchestrator.inventory.model import Inventory
from orchestrator.leases.pools import pools_of
from orchestrator.machines.node_link import engine_of, transport_of
from orchestrator.machines.node_plan import NodePlan, plan_nodes
from orchestrator.machines.node_poll import ask_all
from orchestrator.paths import RunConfig, RunPaths, holder, run_lock
from orchestrator.transport.base import Transport, connected
from orchestrator.view.run_list import ListedRun, listed_runs

REMOVED = ".removed"
"""End of the name of a run's folder while its files are removed."""
STOP_S = 30.0
"""Time for the nodes of a finished run to answer and to stop workers that are left."""


def prunable(runs: Path, *, keep: int, older_s: float, unfinished: bool, now: float) -> list[ListedRun]:
    """Runs that may be removed: finished (with `unfinished`: all that nobody drives), old enough, and not among the
    `keep` newest."""
    states = ("finished", "interrupted", "cancelled", "planned", "unreadable") if unfinished else ("finished",)
    idle = [listed for listed in listed_runs(runs) if listed.state in states and not holder(listed.paths.lock)]
    candidates = idle[: max(0, len(idle) - keep)]
    return [listed for listed in candidates if now - listed.created >= older_s]


def remove_run(paths: RunPaths) -> list[str]:
    """Remove a run's folders on its nodes, then here. Return sentences on nodes that could not be reached. Nobody can
    begin to drive the run meanwhile. Raises RunBusyError."""
    try:
        with run_lock(paths):
            return _remove_locked_run(paths)
    except RunBusyError:
        cancel = command(f"cancel {paths.named}")
        raise RunBusyError(f"run {paths.run} is being driven; cancel it first: {cancel}") from None


def _remove_locked_run(paths: RunPaths) -> list[str]:
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
