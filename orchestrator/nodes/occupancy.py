"""Occupancy of a node: who else computes on its GPUs or cores (docs/explanation/scheduling.md, "Occupied nodes").

Pure: judges the node's facts. Meant for moments without workers of the run on the node, so that whatever uses a GPU is
not ours. Also finds one GPU under two node names.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from orchestrator.errors import InventoryError, TransportError
from orchestrator.inventory import resolved

if TYPE_CHECKING:
    from orchestrator.inventory import Node
    from orchestrator.inventory.values import Gpus
    from orchestrator.nodes.facts import Container, Gpu, NodeFacts

Mode = Literal["wait", "skip", "share"]
MODES: tuple[str, ...] = get_args(Mode)
DEFAULT: Mode = "wait"
"""A shared GPU gives wrong numbers, and a node left out is lost for the whole run: waiting loses only time."""
BUSY_PCT, BUSY_MEMORY = 20.0, 0.1
"""A GPU that is busier, or whose memory is fuller (share), is in use."""
_RENDER, _NVIDIA = re.compile(r"/dev/dri/(renderD\d+)\Z"), re.compile(r"/dev/nvidia(\d+)\Z")


@dataclass(frozen=True, slots=True)
class Occupant:
    """One who computes on a node. `id` stays the same meanwhile; `words` may change."""

    id: str
    words: str


def mode_of(node: Node, requested: str | None) -> str:
    """Mode of `--busy`, else of the inventory, else DEFAULT."""
    return requested or node.busy or DEFAULT


def gpus_of(node: Node, facts: NodeFacts) -> tuple[int, ...]:
    """The numbers of the GPUs that the inventory gives to us; none on a node that computes on its cores."""
    if isinstance(node.gpus, tuple):
        return node.gpus
    return tuple(range(len(facts.gpus) if node.gpus == "auto" else node.gpus))


def device_lock(gpu: int | None) -> str:
    """The name of the lock on a GPU of a host, or on its cores."""
    return "cores" if gpu is None else f"gpu-{gpu}"


def occupants(facts: NodeFacts, gpus: Sequence[int], run: str) -> tuple[Occupant, ...]:
    """Occupants of these GPUs (of the cores, where there are none). `run`: our own run, whose workers do not count; ""
    before there is one.
    """
    return tuple({o.id: o for o in _occupants(facts, gpus, run)}.values())


def _occupants(facts: NodeFacts, gpus: Sequence[int], run: str) -> Iterator[Occupant]:
    named = set()
    for c in facts.containers:
        if not (run and c.run == run) and _takes(c, facts, gpus):
            named.add(c.run)
            whose = f"worker of run {c.run}" if c.run else c.image
            yield Occupant(f"container {c.name}", f"container {c.name} ({whose})")
    ours = set(map(device_lock, gpus or (None,)))
    for path in facts.locks.get("held", ()):
        other, device = path.partition("/")[0], path.rpartition("/")[2]
        if other not in (run, *named) and device in ours:
            yield Occupant(f"run {other}", f"workers of run {other}")
    for number in gpus:
        if number < len(facts.gpus):
            yield from _use(number, facts.gpus[number])


def _takes(c: Container, facts: NodeFacts, gpus: Sequence[int]) -> bool:
    """Return whether a running container computes where we would; one that only exists (a database) does not."""
    if not gpus:
        return bool(c.run and c.slot)
    if c.run and c.slot.isdigit():  # a slot has its GPU's number, whatever devices it was given
        return bool(c.devices) and int(c.slot) in gpus
    renders = {m[1] for d in c.devices if (m := _RENDER.match(d))}
    numbers = {int(m[1]) for d in c.devices if (m := _NVIDIA.match(d))}
    ours = {facts.gpus[g].render for g in gpus if g < len(facts.gpus)} - {""}
    if renders and ours:
        return bool(renders & ours)
    if numbers:
        return bool(numbers.intersection(gpus))
    return any(d in ("/dev/kfd", "/dev/dri") or d.startswith("gpu:") for d in c.devices) or bool(renders)


def _use(number: int, gpu: Gpu) -> Iterator[Occupant]:
    held = {pid: n for pid, n in gpu.processes.items() if n > 0}
    if held:
        words = ", ".join(f"process {pid} ({n / 2**20:.0f} MiB)" for pid, n in list(held.items())[:3])
        yield Occupant(f"GPU {number}", f"GPU {number} is held by {words}")
        return
    full = (gpu.memory_used or 0) / gpu.memory_total if gpu.memory_total else 0.0
    if (gpu.use_pct or 0) >= BUSY_PCT or full >= BUSY_MEMORY:
        words = f"GPU {number} is in use (busy {gpu.use_pct or 0:.0f} %, memory {100 * full:.0f} %)"
        yield Occupant(f"GPU {number}", words)


def occupants_text(found: Sequence[Occupant]) -> str:
    """`container x (image); GPU 3 is held by process 12 (900 MiB)`."""
    more = f"; and {len(found) - 4} more" if len(found) > 4 else ""
    return "; ".join(o.words for o in found[:4]) + more


def busy_sentence(node: str, doing: str, detail: str) -> str:
    """Sentence on what was done about an occupied node."""
    match doing:
        case "wait":
            return f"{node} is occupied and waited for: {detail}"
        case "free":
            return f"{node} is free now: {detail}"
        case "skip":
            return f"{node} is occupied and left out: {detail}"
        case _:
            return f"{node} is occupied and shared, its times may be too long: {detail}"


def refuse_one_gpu_twice(nodes: Mapping[str, Node], facts: Mapping[str, NodeFacts]) -> None:
    """Raise InventoryError where two slots of these nodes are one GPU. The inventory shows it for nodes that name one
    host, the facts of the nodes for others."""
    faults = [why for _, why in twice(nodes, facts)]
    if faults:
        raise InventoryError(faults)


def twice(nodes: Mapping[str, Node], facts: Mapping[str, NodeFacts]) -> Iterator[tuple[str, str]]:
    """(node, what is wrong and the way out) of each node that has a GPU which one before it has."""
    told = set()
    for name, other, what in _named_twice(nodes):
        told.add((name, other))
        yield name, _refusal(nodes[name], nodes[other], what)
    owner: dict[tuple[str, int], tuple[str, int]] = {}
    for name, node in nodes.items():
        if name not in facts:
            continue
        shared: dict[str, list[str]] = {}
        for number, id_ in _ids(node, facts[name]):
            other, its = owner.setdefault(id_, (name, number))
            if other != name:
                shared.setdefault(other, []).append(f"its GPU {number} is GPU {its} of {other} (id {id_[0]})")
        for other, why in shared.items():
            if (name, other) not in told:
                more = f", and {len(why) - 1} more" if len(why) > 1 else ""
                yield name, _refusal(node, nodes[other], why[0] + more)


def _refusal(node: Node, other: Node, what: str) -> str:
    line = f" ({other.origin('name')})" if "name" in other.origins else ""
    return (
        f"{node.origin('name')}: node {node.name}: {what}: two workers there spoil each other's times; drop {node.name}"
        f" or {other.name}{line}, or give each a list of its own in gpus:"
    )


def _named_twice(nodes: Mapping[str, Node]) -> Iterator[tuple[str, str, str]]:
    """(node, one before it, what both take) where the inventory itself gives two nodes one device of one host."""
    on_host: dict[Hashable, list[Node]] = {}
    machines = [n for n in nodes.values() if n.lease is None]
    for node in machines:
        before = on_host.setdefault(_host(node) if len(machines) > 1 else None, [])
        for other in before:
            if both := _both(other.gpus, node.gpus):
                where = "this machine" if node.is_here else f"its host {node.host or node.name}"
                yield node.name, other.name, f"{other.name} is {where}, too, and both take {both}"
        before.append(node)


def _host(node: Node) -> Hashable:
    """The machine of a node as SSH would reach it, asked without contact: two nodes of one value are one machine."""
    if node.is_here:
        return "here"
    from orchestrator.transport.ssh.connection import hops
    from orchestrator.transport.ssh.link import HostRequest

    try:
        real = resolved(node)
        config = Path(real.ssh_config).expanduser() if real.ssh_config else None
        ask = HostRequest(real.host or node.name, real.user, real.port, None, real.proxy_jump, config)
        route = [hop.connection for hop in hops(node.name, ask)]
    except (InventoryError, TransportError):  # told where it is used
        return node.host or node.name, node.port
    first = route[0].gateway or None
    places = tuple((c.host.rstrip("."), c.port, first if c is route[0] else None) for c in route)
    return "here" if places in {((name, 22, None),) for name in ("localhost", "127.0.0.1", "::1")} else places


def _both(a: Gpus, b: Gpus) -> str:
    """The devices that both options `gpus:` take on one host, in words; "" for none."""
    if a == 0 or b == 0:
        return "its cores" if a == b else ""
    if a == "auto" or b == "auto":
        named = next((x for x in (a, b) if x != "auto"), None)
        return "all its GPUs" if named is None else f"GPU {', '.join(map(str, _numbers(named)))}"
    shared = [n for n in _numbers(a) if n in _numbers(b)]
    return f"GPU {', '.join(map(str, shared))}" if shared else ""


def _numbers(gpus: Gpus) -> Sequence[int]:
    return range(gpus) if isinstance(gpus, int) else [int(n) for n in gpus]


def _ids(node: Node, facts: NodeFacts) -> Iterator[tuple[int, tuple[str, int]]]:
    """(number, identity) of the node's GPUs: partitions of one GPU share its id and differ by their order."""
    seen: Counter[str] = Counter()
    ours = set(gpus_of(node, facts))
    for number, gpu in enumerate(facts.gpus):
        if gpu.id.strip("0x- "):
            if number in ours:
                yield number, (gpu.id, seen[gpu.id])
            seen[gpu.id] += 1
