"""Source of a pool's leases, made of the inventory; a scheduler's module is imported when a pool needs it."""

from __future__ import annotations

from orchestrator.inventory import Node
from orchestrator.leases.base import LeaseSource


def source_of(node: Node, run: str) -> LeaseSource:
    """The source of a pool whose references are resolved. Raises InputError where its client is missing here."""
    assert node.lease is not None
    if node.lease == "kubernetes":
        from orchestrator.leases.kubernetes import KubernetesSource
        from orchestrator.leases.pods import PodRequest

        assert node.image is not None
        assert isinstance(node.gpus, int)
        request = PodRequest(node.image, node.gpus, node.resource, node.time_s, node.workdir or "", node.pod)
        return KubernetesSource(run, node.name, request, context=node.context, namespace=node.namespace)
    from orchestrator.leases.slurm import SlurmSource

    return SlurmSource(run, node.name, node)
