"""Link to a node of a plan: its transport, its engine, and what its workers get of our environment.

References of the inventory are resolved here, at the moment of use.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from orchestrator.dispatch.deploy import NodePlan
from orchestrator.engines import Engine, find_engine
from orchestrator.inventory import Node, resolved
from orchestrator.inventory.values import has_reference
from orchestrator.nodes.plan import RESULTS, all_env
from orchestrator.transport import LocalTransport, Transport

CONNECT_S = 15.0
"""A login takes long on a busy node, or where the account comes from a directory."""


def node_of(plan: NodePlan) -> Node:
    """The inventory's node that a plan was made of, its references unresolved."""
    assert plan.source is not None
    return plan.source


def private_env(plan: NodePlan) -> dict[str, str]:
    """The variables of the workers whose values come from our environment: for `Engine.start` alone, never for a
    file. Raises InventoryError naming file, line, node and variable."""
    node = node_of(plan)
    private = {name for name, value in all_env(node, plan.run).items() if has_reference(value)}
    return {n: v for n, v in all_env(resolved(node), plan.run).items() if n in private} if private else {}


def results_folder(plan: NodePlan) -> str | None:
    """The node's folder of results for this run, where the inventory names one."""
    return all_env(resolved(node_of(plan)), plan.run).get(RESULTS) if node_of(plan).results else None


def transport_of(
    plan: NodePlan, *, accept_new_host_keys: bool = False, patient: bool = True, connect_s: float = CONNECT_S
) -> Transport:
    """Transport to a plan's node. Raise InventoryError where a reference cannot be resolved."""
    node = node_of(plan)
    return transport_to(node, accept_new_host_keys=accept_new_host_keys, patient=patient, connect_s=connect_s)


def transport_to(
    node: Node, *, accept_new_host_keys: bool = False, patient: bool = True, connect_s: float = CONNECT_S
) -> Transport:
    """Transport to a node of an inventory. `connect_s`: the time limit of `connect`; `patient`: a refused connection
    is tried again within it."""
    if node.is_here:
        return LocalTransport(node.name)
    from orchestrator.transport.ssh import SshTransport

    real = resolved(node)
    return SshTransport(
        node.name,
        real.host or node.name,
        user=real.user,
        port=real.port,
        identity=os.path.expanduser(real.identity) if real.identity else None,
        proxy_jump=real.proxy_jump,
        accept_new_host_keys=accept_new_host_keys,
        connect_timeout=connect_s,
        patient=patient,
        config=Path(real.ssh_config).expanduser() if real.ssh_config else None,
    )


def engine_of(plan: NodePlan, transport: Transport, *, progress: Callable[[str], None] = lambda text: None) -> Engine:
    """Engine of a plan's node. `progress` is called with the state of an image's pull."""
    return find_engine(plan.engine).create(plan, transport, progress)
