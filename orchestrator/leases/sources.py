"""Source of a pool's leases, made of the inventory; a scheduler's module is imported when a pool needs it."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.errors import InventoryError
from orchestrator.inventory import Node
from orchestrator.inventory.pools import LoginHost
from orchestrator.leases.base import LeaseSource

if TYPE_CHECKING:
    from orchestrator.leases.jobs import NodeKind
    from orchestrator.transport.ssh import SshTransport

OUT = "~/.gemmfleet/leases"
"""Folder for what holders print, where Slurm's commands run."""
_KINDS: dict[str | None, list[NodeKind]] = {}
"""Login node -> kinds of nodes of its cluster: a run checks a pool and then asks for its leases."""


def source_of(node: Node, run: str) -> LeaseSource:
    """The source of a pool whose references are resolved. Raises InputError where its client is missing here."""
    assert node.lease is not None
    if node.lease == "kubernetes":
        from orchestrator.leases.kubernetes import KubernetesSource
        from orchestrator.leases.pods import PodRequest, template_faults

        assert node.image is not None
        assert isinstance(node.gpus, int)
        if wrong := template_faults(node.pod, node.resource):
            raise InventoryError([f"{node.source}: node {node.name}: pod.{fault}" for fault in wrong])
        request = PodRequest(node.image, node.gpus, node.resource, node.time_s, node.workdir or "", node.pod)
        return KubernetesSource(run, node.name, request, context=node.context, namespace=node.namespace)
    from orchestrator.leases.jobs import SlurmPool
    from orchestrator.leases.slurm import SlurmSource

    pool = SlurmPool(
        run, node.name, node.partition or "", node.account or "", node.time_s,
        node.gpus if isinstance(node.gpus, int) else None, node.extra, node.workdir or "",
    )  # fmt: skip
    login = partial(_login, node.login or LoginHost(), node.via) if node.via else None
    return SlurmSource(pool, OUT, login, _KINDS.setdefault(node.via, []))


def _login(host: LoginHost, via: str, name: str) -> SshTransport:
    """Transport to a login node; `name`: what messages call it."""
    from orchestrator.transport.ssh import SshTransport

    return SshTransport(
        name,
        host.host or via,
        user=host.user,
        port=host.port,
        identity=os.path.expanduser(host.identity) if host.identity else None,
        proxy_jump=host.proxy_jump,
        config=Path(host.ssh_config).expanduser() if host.ssh_config else None,
    )
