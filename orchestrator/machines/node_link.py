"""Makes the transport and the engine of a node, and the values that its workers get from our environment.

References (`${env:NAME}`) are resolved here, at the moment of use; no value of one goes into a file.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.engines import Engine, find_engine
from orchestrator.inventory.load import resolved
from orchestrator.inventory.model import LoginHost, Node
from orchestrator.inventory.references import REFERENCE_RE, has_reference
from orchestrator.machines.node_plan import RESULTS, NodePlan, all_env, node_of
from orchestrator.transport.base import Transport
from orchestrator.transport.local import LocalTransport

if TYPE_CHECKING:  # paramiko takes long to import
    from orchestrator.transport.ssh import SshTransport

CONNECT_S = 15.0
"""A login is slow on a busy node, or if the account comes from a directory service."""


def private_env(plan: NodePlan) -> dict[str, str]:
    """The workers' variables whose values come from our environment. Only for `Engine.start`, never for a file. Raises
    InventoryError that names file, line, node and variable."""
    private = [name for name, value in all_env(node_of(plan), plan.run).items() if has_reference(value)]
    real = all_env(resolved(node_of(plan)), plan.run) if private else {}
    return {name: real[name] for name in private}


def results_folder(plan: NodePlan) -> str | None:
    """The node's folder of results for this run, if the inventory names one."""
    return all_env(resolved(node_of(plan)), plan.run).get(RESULTS) if node_of(plan).results else None


def transport_to(
    node: Node, *, accept_new_host_keys: bool = False, patient: bool = True, connect_s: float = CONNECT_S
) -> Transport:
    """The transport to a node of an inventory. `connect_s`: time limit of `connect`. `patient`: try a refused
    connection again within that time. Raise InventoryError if a reference cannot be resolved."""
    if node.is_here:
        return LocalTransport(node.name)
    limits = {"connect_timeout": connect_s, "patient": patient}
    return ssh_transport(resolved(node), node.name, node.name, accept_new_host_keys=accept_new_host_keys, **limits)


def ssh_transport(login: Node | LoginHost, host: str, name: str, **options: Any) -> SshTransport:
    """The SSH transport for an inventory's entry with resolved references. `host`: used if the entry names none.
    `name`: the name in messages. `options`: see SshTransport."""
    from orchestrator.transport.ssh import SshTransport

    return SshTransport(
        name,
        login.host or host,
        user=login.user,
        port=login.port,
        identity=os.path.expanduser(login.identity) if login.identity else None,
        proxy_jump=login.proxy_jump,
        config=Path(login.ssh_config).expanduser() if login.ssh_config else None,
        **options,
    )


def transport_of(plan: NodePlan, *, accept_new_host_keys: bool = False) -> Transport:
    """The transport to a plan's node, made by `transport_to`."""
    return transport_to(node_of(plan), accept_new_host_keys=accept_new_host_keys)


def login_line(node: Node) -> str:
    """The command that logs in to the node as the inventory describes it. A reference becomes a shell variable."""
    line = ["ssh"]
    options = (("-F", node.ssh_config), ("-p", node.port), ("-i", node.identity), ("-J", node.proxy_jump))
    for flag, value in options:
        if value is not None:
            line += [flag, _shell_word(str(value))]
    user = f"{_shell_word(node.user)}@" if node.user else ""
    return " ".join([*line, f"{user}{_shell_word(node.host or node.name)}", "true"])


def _shell_word(text: str) -> str:
    """The text as one word of a shell, with `${env:NAME}` as "${NAME}". The shell may expand a leading `~/`."""
    with_variables, references = REFERENCE_RE.subn(r"${\1}", text)
    if references:
        return f'"{with_variables}"'
    if text.startswith("~/") and shlex.quote(text[2:]) == text[2:]:
        return text
    return shlex.quote(text)


def engine_of(plan: NodePlan, transport: Transport, *, progress: Callable[[str], None] = lambda text: None) -> Engine:
    """The engine of a plan's node. `progress` is called with the state of an image's pull."""
    return find_engine(plan.engine).create(plan, transport, progress)
