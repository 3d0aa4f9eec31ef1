"""One GPU under two names: slots of different nodes that are the same device, told by the id that it has of its own.

Two workers on it would spoil each other's times without a word. Slots without a GPU are of no concern, nor are nodes of
one host that have different GPUs of it; the id of a machine says nothing, since clones share it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from orchestrator.errors import InventoryError
from orchestrator.inventory import Node
from orchestrator.nodes.facts import NodeFacts
from orchestrator.nodes.occupancy import gpus_of


def refuse_one_gpu_twice(nodes: Mapping[str, Node], facts: Mapping[str, NodeFacts]) -> None:
    """Raise InventoryError where two slots of these nodes are one GPU; nodes without facts are not known to be any."""
    faults = [why for _, why in twice(nodes, facts)]
    if faults:
        raise InventoryError(faults)


def twice(nodes: Mapping[str, Node], facts: Mapping[str, NodeFacts]) -> Iterator[tuple[str, str]]:
    """(node, what is wrong and the way out) of each node that has a GPU which one before it has."""
    owner: dict[tuple[str, int], tuple[str, int]] = {}
    for name, node in nodes.items():
        if name not in facts:
            continue
        shared: dict[str, list[str]] = {}
        for number, id_ in _ids(node, facts[name]):
            other, its = owner.setdefault(id_, (name, number))
            if other != name:
                shared.setdefault(other, []).append(f"its GPU {number} is GPU {its} of {other} (id {id_[0]})")
        for other, said in shared.items():
            more = f", and {len(said) - 1} more" if len(said) > 1 else ""
            yield (
                name,
                f"{node.source or 'inventory'}: node {name}: {said[0]}{more}: two workers on a GPU spoil each other's "
                f"times; drop {name} or {other}, or give each a list of its own in gpus:",
            )


def _ids(node: Node, facts: NodeFacts) -> Iterator[tuple[int, tuple[str, int]]]:
    """(number, identity) of the node's GPUs: partitions of one GPU have its id, and are told apart by their order."""
    seen: Counter[str] = Counter()
    ours = set(gpus_of(node, facts))
    for number, gpu in enumerate(facts.gpus):
        if gpu.id.strip("0x- "):
            if number in ours:
                yield number, (gpu.id, seen[gpu.id])
            seen[gpu.id] += 1
