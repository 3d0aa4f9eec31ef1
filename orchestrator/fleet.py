"""From inventory to nodes that can be deployed: slots, devices, folders, transports and engines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.dispatch.deploy import NodePlan
from orchestrator.engine import Engine, ProcessEngine
from orchestrator.transport import LocalTransport, Transport

if TYPE_CHECKING:
    from orchestrator.inventory import Inventory, Node


def plan_nodes(inventory: Inventory, run: str, run_folder: Path) -> list[NodePlan]:
    """One NodePlan a node. `gpus: auto` on this machine is detected: one slot a GPU, or one slot with all cores."""
    return [_plan(name, node, run, run_folder) for name, node in inventory.nodes.items()]


def _plan(name: str, node: Node, run: str, run_folder: Path) -> NodePlan:
    import sys

    from worker.probe import gpu_count, identify

    seen = identify()
    if node.gpus == "auto":
        gpus = list(range(gpu_count()))
    elif isinstance(node.gpus, int):
        gpus = list(range(node.gpus))
    else:
        gpus = list(node.gpus)
    slots = tuple(str(g) for g in gpus) or ("0",)
    visible = {s: s for s in slots} if gpus else {"0": ""}  # without GPUs on request: none may be seen
    devices = {s: {"HIP_VISIBLE_DEVICES": v, "CUDA_VISIBLE_DEVICES": v} for s, v in visible.items()}
    folder = Path(node.workdir).expanduser() / run / name if node.workdir else run_folder / "work" / name
    return NodePlan(
        node=name,
        folder=str(folder.absolute()),
        slots=slots,
        transport=node.transport,
        engine=node.engine,
        python=node.python or sys.executable,
        env=dict(node.env),
        devices=devices,
        gfx=str(seen["gfx"]) if seen.get("gfx") else None,
        cu_num=int(seen["cu_num"]) if seen.get("cu_num") else None,
    )


def transport_of(plan: NodePlan) -> Transport:
    """How to reach the node."""
    return LocalTransport(plan.node)


def engine_of(plan: NodePlan, transport: Transport) -> Engine:
    """How to start its workers."""
    return ProcessEngine(transport, plan.folder)
