"""Finds a GPU that two nodes of an inventory have. Two workers on it would spoil each other's times, so such a run is
refused.

Two nodes of the same host are compared by the inventory (`_shared_by_inventory`). Two names for one host show only in
the nodes' facts: their GPUs have the same ids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence

from orchestrator.errors import InventoryError
from orchestrator.inventory.model import Node
from orchestrator.inventory.option_types import MAX_GPU, Gpus
from orchestrator.machines.facts import NodeFacts
from orchestrator.machines.occupancy import gpus_of, possible_gpus

GpuIdentity = tuple[str, int]
"""A GPU's id, and a partition's place among those with the same id: partitions of a GPU share its id."""


def refuse_one_gpu_twice(nodes: Mapping[str, Node], facts: Mapping[str, NodeFacts]) -> None:
    """Raise InventoryError if two slots of these nodes are the same GPU. For nodes with the same host the inventory
    shows it; for others, the nodes' facts do."""
    faults = [why for _, why in gpus_with_two_names(nodes, facts)]
    if faults:
        raise InventoryError(faults)


def gpus_with_two_names(nodes: Mapping[str, Node], facts: Mapping[str, NodeFacts]) -> Iterator[tuple[str, str]]:
    """(node, what is wrong and what to do) for each node with a GPU that an earlier node has too."""
    shared: dict[tuple[str, str], list[str]] = {}
    """(node, earlier node) -> each GPU that both have, in words."""
    for name, other, sentence in _shared_by_inventory(nodes):
        shared[name, other] = [sentence]
    named_in_inventory = set(shared)
    first_owner: dict[GpuIdentity, tuple[str, int]] = {}
    for name, node in nodes.items():
        if name not in facts:
            continue
        for number, identity in _gpu_identities(node, facts[name]):
            other, other_number = first_owner.setdefault(identity, (name, number))
            if other != name and (name, other) not in named_in_inventory:
                sentence = f"its GPU {number} is GPU {other_number} of {other} (id {identity[0]})"
                shared.setdefault((name, other), []).append(sentence)
    for (name, other), sentences in shared.items():
        yield name, _describe_shared_gpus(nodes[name], nodes[other], sentences)


def _describe_shared_gpus(node: Node, other: Node, sentences: Sequence[str]) -> str:
    """Sentence on what is wrong with the node, and what to do. `sentences`: each GPU that both nodes have."""
    more = f", and {len(sentences) - 1} more" if len(sentences) > 1 else ""
    other_place = f" ({other.origin('name')})" if "name" in other.origins else ""
    return (
        f"{node.origin('name')}: node {node.name}: {sentences[0]}{more}: two workers there spoil each other's times;"
        f" drop {node.name} or {other.name}{other_place}, or give each node its own list in gpus:"
    )


def _shared_by_inventory(nodes: Mapping[str, Node]) -> Iterator[tuple[str, str, str]]:
    """(node, an earlier node, the devices of both in a sentence) for two nodes to which the inventory gives the same
    device of a host."""
    hosts: dict[Hashable, list[Node]] = {}
    for node in nodes.values():
        if node.lease is not None:
            continue
        same_host = hosts.setdefault(_host(node), [])
        place = "this machine" if node.is_here else f"its host {node.host or node.name}"
        for other in same_host:
            devices = _describe_common_devices(other.gpus, node.gpus)
            if devices:
                yield node.name, other.name, f"{other.name} is {place}, too, and both take {devices}"
        same_host.append(node)


def _host(node: Node) -> Hashable:
    """The machine of a node according to the inventory. Two nodes with the same value are on the same machine."""
    return node.is_here or ((node.host or node.name).lower(), node.port, node.proxy_jump, node.ssh_config)


def _describe_common_devices(a: Gpus, b: Gpus) -> str:
    """The devices that both `gpus:` options use on the same host, in words; "" if they share none."""
    if a == 0 or b == 0:
        return "its cores" if a == b else ""
    common = sorted(set(possible_gpus(a)) & set(possible_gpus(b)))
    if len(common) > MAX_GPU:
        return "all its GPUs"
    return f"GPU {', '.join(map(str, common))}" if common else ""


def _gpu_identities(node: Node, facts: NodeFacts) -> Iterator[tuple[int, GpuIdentity]]:
    """(number, identity) of the node's GPUs that have an id."""
    order: Counter[str] = Counter()
    for number, gpu in enumerate(facts.gpus):
        if number in gpus_of(node, facts) and gpu.id.strip("0x- "):
            yield number, (gpu.id, order[gpu.id])
        order[gpu.id] += 1
