"""Occupied nodes (docs/explanation/scheduling.md): finds out who else computes on a node, and decides whether a run's
workers may start. A run waits for an occupied node, leaves it out, or shares it (`--busy`). This module also finds a
GPU that has two node names.

Only one run at a time checks a node and starts its workers. Meanwhile it holds a lock on the folder of the node's
device locks (LOCKS); the lock ends with its connection. So the next run sees the devices that the workers have locked.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Literal, NamedTuple

from orchestrator.engines import Engine
from orchestrator.errors import EngineError, InventoryError, LeftOutError
from orchestrator.inventory.model import Node
from orchestrator.inventory.values import MAX_GPU, Gpus
from orchestrator.machines.facts import ARGV, TIMEOUT_S, Container, Gpu, NodeFacts, read_facts
from orchestrator.transport.base import Transport
from worker.protocol import LOCKS

Mode = Literal["wait", "skip", "share"]
# A shared GPU gives wrong numbers, and a skipped node is lost for the whole run. Waiting only costs time.
DEFAULT: Mode = "wait"
# A GPU is in use if it is busier than this, or if a larger share of its memory is full.
BUSY_PCT, BUSY_MEMORY = 20.0, 0.1
_RENDER, _NVIDIA = re.compile(r"/dev/dri/(renderD\d+)\Z"), re.compile(r"/dev/nvidia(\d+)\Z")


class Occupant(NamedTuple):
    """Someone who computes on a node. `id` stays the same all the time; `words` may change. `stays`: it is useless to
    wait."""

    id: str
    words: str
    stays: bool = False


def mode_of(node: Node, requested: str | None) -> str:
    """The mode from `--busy`, else from the inventory, else DEFAULT."""
    return requested or node.busy or DEFAULT


def gpus_of(node: Node, facts: NodeFacts) -> tuple[int, ...]:
    """The numbers of the GPUs that the inventory gives us. Empty on a node that computes on its cores."""
    return tuple(range(len(facts.gpus))) if node.gpus == "auto" else tuple(_numbers(node.gpus))


def _numbers(gpus: Gpus) -> Sequence[int]:
    """The numbers of the GPUs that a `gpus:` option may mean; every possible one for `auto`."""
    if isinstance(gpus, int):
        return range(gpus)
    return range(MAX_GPU + 1) if isinstance(gpus, str) else gpus


def device_lock(gpu: int | None) -> str:
    """The name of the lock on a GPU of a host, or on its cores."""
    return "cores" if gpu is None else f"gpu-{gpu}"


def occupants(facts: NodeFacts, gpus: Sequence[int], run: str) -> tuple[Occupant, ...]:
    """Occupants of these GPUs, or of the cores if there are no GPUs, according to the node's facts. The facts must be
    from a moment without workers of the run there. `run`: our own run, whose workers do not count; "" before there is
    one.
    """
    return tuple({o.id: o for o in _occupants(facts, gpus, run)}.values())


def _occupants(facts: NodeFacts, gpus: Sequence[int], run: str) -> Iterator[Occupant]:
    theirs = [c for c in facts.containers if not (run and c.run == run) and _takes(c, facts, gpus)]
    for c in theirs:
        yield Occupant(f"container {c.name}", f"container {c.name} ({f'worker of run {c.run}' if c.run else c.image})")
    ours, known = set(map(device_lock, gpus or (None,))), {run, *(c.run for c in theirs)}
    for path in facts.locks.get("held", ()):
        other, device = path.partition("/")[0], path.rpartition("/")[2]
        if other not in known and device in ours:
            yield Occupant(f"run {other}", f"workers of run {other}")
    for line in facts.locks.get("closed", ()):
        device, _, lock = line.partition(" ")
        if device in ours or device == "all":
            yield closed_lock(lock)
    for number in gpus:
        if number < len(facts.gpus) and (use := _use(facts.gpus[number])):
            yield Occupant(f"GPU {number}", f"GPU {number} is {use}")


def closed_lock(lock: str) -> Occupant:
    """Whoever may hold a device's lock that we cannot open. `lock`: its path, with the owner."""
    words = (
        f"nobody can tell who measures there, because the lock {lock} cannot be opened; remove it, name another folder"
        " to all users there (GEMMFLEET_LOCKS in the node's environment), or share the devices (--busy share)"
    )
    return Occupant(f"lock {lock.partition(' of ')[0]}", words, stays=True)


def what_we_do(mode: str, found: Sequence[Occupant]) -> str:
    """The mode for these occupants. `wait` becomes `skip` if it is useless to wait for one of them."""
    return "skip" if mode == "wait" and any(o.stays for o in found) else mode


def _takes(c: Container, facts: NodeFacts, gpus: Sequence[int]) -> bool:
    """Return whether a running container uses our GPUs or cores. A database, for instance, does not."""
    if not gpus:
        return bool(c.run and c.slot)
    if c.run and c.slot.isdecimal():  # the slot's number is its GPU's number, whatever devices the container was given
        return bool(c.devices) and int(c.slot) in gpus
    renders = {m[1] for d in c.devices if (m := _RENDER.match(d))}
    numbers = {int(m[1]) for d in c.devices if (m := _NVIDIA.match(d))}
    ours = {facts.gpus[g].render for g in gpus if g < len(facts.gpus)} - {""}
    if renders and ours:
        return bool(renders & ours)
    whole = any(d in ("/dev/kfd", "/dev/dri") or d.startswith("gpu:") for d in c.devices)
    return bool(numbers.intersection(gpus)) if numbers else whole or bool(renders)


def _use(gpu: Gpu) -> str:
    held = [f"process {pid} ({n / 2**20:.0f} MiB)" for pid, n in gpu.processes.items() if n > 0]
    full = (gpu.memory_used or 0) / gpu.memory_total if gpu.memory_total else 0.0
    busy = (gpu.use_pct or 0) >= BUSY_PCT or full >= BUSY_MEMORY
    used = f"in use (busy {gpu.use_pct or 0:.0f} %, memory {100 * full:.0f} %)" if busy else ""
    return f"held by {', '.join(held[:3])}" if held else used


def occupants_text(found: Sequence[Occupant]) -> str:
    """`container x (image); GPU 3 is held by process 12 (900 MiB)`."""
    more = f"; and {len(found) - 4} more" if len(found) > 4 else ""
    return "; ".join(o.words for o in found[:4]) + more


_WHAT_WE_DO = {"wait": "is occupied; we wait for it", "free": "is free now", "skip": "is occupied and left out"}


def busy_sentence(node: str, doing: str, detail: str) -> str:
    """Sentence on what we do about an occupied node."""
    return f"{node} {_WHAT_WE_DO.get(doing, 'is occupied and shared, so its times may be too long')}: {detail}"


def refuse_one_gpu_twice(nodes: Mapping[str, Node], facts: Mapping[str, NodeFacts]) -> None:
    """Raise InventoryError if two slots of these nodes are the same GPU. For nodes with the same host the inventory
    shows it; for others, the nodes' facts do."""
    if faults := [why for _, why in twice(nodes, facts)]:
        raise InventoryError(faults)


def twice(nodes: Mapping[str, Node], facts: Mapping[str, NodeFacts]) -> Iterator[tuple[str, str]]:
    """(node, what is wrong and what to do) for each node with a GPU that an earlier node has too."""
    found = {(name, other): [what] for name, other, what in _named_twice(nodes)}
    told = set(found)
    owner: dict[tuple[str, int], tuple[str, int]] = {}
    for name in (n for n in nodes if n in facts):
        for number, id_ in _ids(nodes[name], facts[name]):
            other, its = owner.setdefault(id_, (name, number))
            if other != name and (name, other) not in told:
                what = f"its GPU {number} is GPU {its} of {other} (id {id_[0]})"
                found.setdefault((name, other), []).append(what)
    for (name, other), why in found.items():
        node, before = nodes[name], nodes[other]
        more = f", and {len(why) - 1} more" if len(why) > 1 else ""
        line = f" ({before.origin('name')})" if "name" in before.origins else ""
        yield (
            name,
            (
                f"{node.origin('name')}: node {name}: {why[0]}{more}: two workers there spoil each other's times; drop"
                f" {name} or {other}{line}, or give each node its own list in gpus:"
            ),
        )


def _named_twice(nodes: Mapping[str, Node]) -> Iterator[tuple[str, str, str]]:
    """(node, an earlier node, what both use) if the inventory itself gives two nodes the same device of a host."""
    hosts: dict[Hashable, list[Node]] = {}
    for node in nodes.values():
        if node.lease is None:
            before = hosts.setdefault(_host(node), [])
            where = "this machine" if node.is_here else f"its host {node.host or node.name}"
            for other in before:
                if both := _both(other.gpus, node.gpus):
                    yield node.name, other.name, f"{other.name} is {where}, too, and both take {both}"
            before.append(node)


def _host(node: Node) -> Hashable:
    """The machine of a node according to the inventory. Two nodes with the same value are on the same machine."""
    return node.is_here or ((node.host or node.name).lower(), node.port, node.proxy_jump, node.ssh_config)


def _both(a: Gpus, b: Gpus) -> str:
    """The devices that both `gpus:` options use on the same host, in words; "" if they share none."""
    if a == 0 or b == 0:
        return "its cores" if a == b else ""
    shared = sorted(set(_numbers(a)) & set(_numbers(b)))
    return "all its GPUs" if len(shared) > MAX_GPU else f"GPU {', '.join(map(str, shared))}" if shared else ""


def _ids(node: Node, facts: NodeFacts) -> Iterator[tuple[int, tuple[str, int]]]:
    """(number, identity) of the node's GPUs. Partitions of a GPU share its id and differ by their order."""
    seen: Counter[str] = Counter()
    for number, gpu in enumerate(facts.gpus):
        if number in gpus_of(node, facts) and gpu.id.strip("0x- "):
            yield number, (gpu.id, seen[gpu.id])
        seen[gpu.id] += 1


# Pause before an occupied node is checked again. Each pause is 1.5 times the one before.
FIRST_S, LONGEST_S = 2.0, 30.0
# Seconds to wait for the lock in one call, and the longest time that a run holds it.
TURN_S, LONGEST_TURN_S = 10, 330
TURN = """\
command -v flock >/dev/null 2>&1 || { echo none; exit; }
folder=${GEMMFLEET_LOCKS:-$1}
(umask 0 && mkdir -m 1777 -- "$folder") 2>/dev/null
hold='echo ours; command -v timeout >/dev/null 2>&1 && exec timeout "$1" cat; exec cat'
flock -w "$2" "$folder" sh -c "$hold" sh "$3"
[ $? -eq 1 ] && echo theirs || echo none
"""
"""Prints `ours` and holds the lock until its input ends. Prints `theirs` if another run holds the lock (flock exits
with 1 after its wait), and `none` if the node has no locks."""
ANOTHER_START = Occupant("start", "another run is starting its workers there")

# Called with our decision (wait, free, skip, share) and the reason.
Report = Callable[[str, str], None]


@contextmanager
def start_turn(transport: Transport, place: str) -> Iterator[str]:
    """While the context lasts, it is our turn to start workers on a node. Yields the answer of TURN."""
    channel, answer = transport.open(["sh", "-c", TURN, "sh", place, str(TURN_S), str(LONGEST_TURN_S)]), b""
    try:
        while not answer.endswith(b"\n") and (more := channel.read(64)):
            answer += more
        yield answer.decode("ascii", "replace").strip()
    finally:
        channel.close()
        channel.error()  # a reader's last call


class NodeAdmission:
    """Decides when a run's workers may start on a node. `gpus`: gives the numbers of our GPUs from the node's facts.
    `locks`: False if a scheduler gives each GPU to only one run."""

    def __init__(
        self,
        transport: Transport,
        engine: Engine,
        mode: str,
        script: bytes,
        gpus: Callable[[NodeFacts], tuple[int, ...]],
        run: str,
        *,
        first_s: float = FIRST_S,
        place: str = LOCKS,
        locks: bool = True,
    ) -> None:
        self._transport, self._engine, self._mode, self._script = transport, engine, mode, script
        self._gpus, self._run, self._pause_s, self._place = gpus, run, first_s, place
        self._locks = locks and mode != "share"
        self._shared_with: set[str] = set()

    def __call__(self, ended: threading.Event, report: Report) -> AbstractContextManager[object]:
        """Wait until the workers may start, or `ended` is set. While the context lasts, no other run starts workers.
        Raise LeftOutError, NodeError."""
        began, waiting, pause = time.monotonic(), frozenset[str](), self._pause_s
        while not self._has_workers():  # if our workers run there already, we keep the node
            with ExitStack() as turn:
                theirs = self._locks and turn.enter_context(start_turn(self._transport, self._place)) == "theirs"
                found = (ANOTHER_START,) if theirs else self._look()
                if not found:
                    if waiting:
                        report("free", f"it was occupied for {time.monotonic() - began:.0f} s")
                    return turn.pop_all()
            names = frozenset(o.id for o in found)
            if names != waiting and self.decide(found, report) == "share":
                break
            waiting = names
            if ended.wait(pause):
                break
            pause = min(pause * 1.5, LONGEST_S)
        return nullcontext()

    def decide(self, found: Sequence[Occupant], report: Report) -> str:
        """Report and return what we do about these occupants. Raise LeftOutError if we leave the node out. With whom
        we share it is reported once."""
        doing = "wait" if ANOTHER_START in found else what_we_do(self._mode, found)
        names = {o.id for o in found}
        if doing == "share" and names <= self._shared_with:
            return doing
        self._shared_with |= names
        report(doing, occupants_text(found))
        if doing == "skip":
            raise LeftOutError(f"{self._transport.node}: left out: {occupants_text(found)}")
        return doing

    def _look(self) -> tuple[Occupant, ...]:
        facts = read_facts(self._transport.run(ARGV, stdin=self._script, timeout=TIMEOUT_S))
        return occupants(facts, self._gpus(facts), self._run)

    def _has_workers(self) -> bool:
        try:
            return any(w.state == "running" for w in self._engine.list())
        except EngineError:
            return False  # the start will raise the error
