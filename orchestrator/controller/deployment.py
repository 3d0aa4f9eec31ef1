"""Plans the machines of a run, and makes the driver of a planned node, with the files that it deploys.

drive.py calls `plan_machines` once. The loop calls `make_driver` for each plan: at the start, for nodes that join
(`plan_newcomers`), and for leases. `tune --plan` shows what `node_files_of` would deploy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any, cast

from orchestrator.command_hints import command
from orchestrator.controller.context import RunContext
from orchestrator.controller.deployed_node import DeployedNode
from orchestrator.controller.messages import Message, NodeProgress
from orchestrator.controller.node_driver import NodeDriver
from orchestrator.errors import NoUsableNodeError
from orchestrator.families import get_tuner
from orchestrator.inventory.load import limit, load_inventory, resolved
from orchestrator.inventory.model import Inventory
from orchestrator.inventory.references import value_hider
from orchestrator.machines.admission import NodeAdmission
from orchestrator.machines.check_script import render_script
from orchestrator.machines.facts import load_facts, save_facts
from orchestrator.machines.gpu_names import refuse_one_gpu_twice
from orchestrator.machines.node_check import check_nodes
from orchestrator.machines.node_files import node_files, node_folders
from orchestrator.machines.node_link import engine_of, private_env, results_folder, transport_of
from orchestrator.machines.node_plan import NodePlan, node_of, plan_nodes, with_device_locks
from orchestrator.machines.occupancy import gpus_of, mode_of
from orchestrator.paths import RunConfig, RunPaths
from orchestrator.transport.base import RemoteFile, Transport
from worker.tuners.catalog import recorded_tuner

IDLE_EXIT_S = 900.0
"""A worker exits after this many seconds without work and without a controller."""


def plan_machines(paths: RunPaths, config: RunConfig, inventory: Inventory) -> list[NodePlan]:
    """The plans of the nodes to drive. A node without a known slot is checked again. Raise NoUsableNodeError if no node
    has a slot."""
    plans = plan_nodes(inventory, config.run, paths.root)
    without_slots = [inventory.nodes[plan.node] for plan in plans if not plan.slots]
    if without_slots:
        reports = check_nodes(without_slots, accept_new_host_keys=config.accept_new_host_keys)
        save_facts(paths.root, {report.node: report.facts for report in reports})
        plans = plan_nodes(inventory, config.run, paths.root)
    refuse_one_gpu_twice(inventory.nodes, load_facts(paths.root, inventory.nodes))
    if not any(plan.slots for plan in plans):
        check = command(f"nodes check -i {quote(str(paths.inventory))}")
        raise NoUsableNodeError(f"no node has a slot that we know of; see: {check}")
    return [plan for plan in plans if plan.slots]


def plan_newcomers(paths: RunPaths, config: RunConfig, known: Collection[str]) -> list[NodePlan]:
    """The plans of the machines that were added to the run's inventory. `known`: the nodes that the run has. Raises
    OrchestratorError."""
    inventory = limit(load_inventory(paths.inventory), config.limit)
    return [plan for plan in plan_machines(paths, config, inventory.without_pools()) if plan.node not in known]


def node_files_of(plan: NodePlan, config: RunConfig, texts: Path | None = None) -> dict[str, RemoteFile]:
    """The files of a planned node. The inventory's references stay unresolved."""
    node = node_of(plan)
    if node.lease is None:  # a scheduler lends each GPU to one run alone
        plan = with_device_locks(plan, shared=mode_of(node, config.busy) == "share")
    tuner = get_tuner(config.tuner, for_tune=False)
    options = dict(config.options)
    if tuner.wants_family:
        options["family"] = config.family
    return node_files(plan, config.run, tuner.name, options, IDLE_EXIT_S, texts)


def write_files(folder: Path, files: Mapping[str, RemoteFile]) -> None:
    """Write files of a planned node into a folder here. Raises OSError."""
    for name, file in files.items():
        path = folder / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_bytes(file.data)
        path.chmod(file.mode)


def make_driver(
    context: RunContext,
    plan: NodePlan,
    post: Callable[[Message], None],
    transport: Transport | None = None,
    *,
    launch: bool,
) -> NodeDriver:
    """The driver of a planned node. `transport`: a connected one, for a leased node; None: as the inventory says.
    `launch`: False takes over the running workers and starts none."""
    config, paths = context.config, context.paths
    node = node_of(plan)
    is_leased = transport is not None
    files = node_files_of(plan, config, paths.texts)
    write_files(paths.node(plan.node), {name: file for name, file in files.items() if not name.startswith("code/")})
    if transport is None:
        reach = context.settings.reach or partial(transport_of, accept_new_host_keys=config.accept_new_host_keys)
        transport = reach(plan)
    post = _masked(value_hider(node.options()), post)
    engine = engine_of(plan, transport, progress=lambda text: post(NodeProgress(plan.node, text)))
    admission = NodeAdmission(
        transport,
        engine,
        mode_of(node, config.busy),
        render_script(resolved(node), brief=True),
        lambda facts: gpus_of(node, facts),
        config.run,
        first_s=context.settings.timeouts.busy,
        locks=not is_leased,
    )
    offsets = context.ledger.offsets(plan.node)
    deployed = DeployedNode(
        folder=plan.folder,
        files=files,
        folders=node_folders(plan.slots),
        slots=plan.slots,
        env=private_env(plan),
        epoch=context.epoch,
        offsets={key: offset for key, offset in offsets.items() if key[0] in ("E", "L")},  # not of our log
        launch=launch,
        results=results_folder(plan),
        home=paths.attempts if recorded_tuner(config.tuner).keeps_reproductions else None,
        is_connected=is_leased,
    )
    return NodeDriver(transport, engine, deployed, admission, post, context.settings.timeouts)


def _masked(mask: Callable[[str], str], post: Callable[[Message], None]) -> Callable[[Message], None]:
    """Mask messages before they go into the ledger: it holds references (`${env:NAME}`) and not their values."""

    def post_masked(message: Message) -> None:
        texts = {name: mask(getattr(message, name)) for name in ("detail", "traceback") if hasattr(message, name)}
        post(replace(cast(Any, message), **texts) if texts else message)

    return post_masked
