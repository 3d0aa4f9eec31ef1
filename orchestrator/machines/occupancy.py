"""Finds out who else computes on a node's GPUs or cores, and what a run does about it: wait, skip or share (`--busy`).

See docs/explanation/scheduling.md. The neighbours: admission.py lets a run's workers start when a node is free, and
gpu_names.py finds a GPU that has two node names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from orchestrator.inventory.model import Node
from orchestrator.inventory.option_types import MAX_GPU, Gpus
from orchestrator.machines.facts import Container, Gpu, NodeFacts

Mode = Literal["wait", "skip", "share"]
"""The ways to treat a node that others occupy: wait until it is free, leave it out, or compute beside them."""
DEFAULT: Mode = "wait"
"""A shared GPU gives wrong numbers, and a skipped node is lost for the whole run. Waiting only costs time."""
BUSY_PCT = 20.0
"""A GPU that is busier than this is in use."""
BUSY_MEMORY = 0.1
"""A GPU is in use if a larger share of its memory is full."""
_RENDER = re.compile(r"/dev/dri/(renderD\d+)\Z")
_NVIDIA = re.compile(r"/dev/nvidia(\d+)\Z")


class Occupant(NamedTuple):
    """Someone who computes on a node, such as `("GPU 3", "GPU 3 is held by process 12 (900 MiB)")`."""

    id: str
    """It stays the same from check to check, so that the same occupant is reported once."""
    words: str
    """For people; they may change."""
    stays: bool = False
    """It is useless to wait for its end."""


def mode_of(node: Node, requested: str | None) -> str:
    """The mode from `--busy`, else from the inventory, else DEFAULT."""
    return requested or node.busy or DEFAULT


def gpus_of(node: Node, facts: NodeFacts) -> tuple[int, ...]:
    """The numbers of the GPUs that the inventory gives us. Empty on a node that computes on its cores."""
    return tuple(range(len(facts.gpus))) if node.gpus == "auto" else tuple(possible_gpus(node.gpus))


def possible_gpus(gpus: Gpus) -> Sequence[int]:
    """The numbers of the GPUs that a `gpus:` option may mean; every possible one for `auto`."""
    if isinstance(gpus, int):
        return range(gpus)
    return range(MAX_GPU + 1) if isinstance(gpus, str) else gpus


def device_lock(gpu: int | None) -> str:
    """The name of the lock on a GPU of a host; None stands for its cores."""
    return "cores" if gpu is None else f"gpu-{gpu}"


def occupants(facts: NodeFacts, gpus: Sequence[int], run: str) -> tuple[Occupant, ...]:
    """Occupants of these GPUs, or of the cores if there are no GPUs, according to the node's facts. The facts must be
    from a moment without workers of the run there. `run`: our own run, whose workers do not count; "" before there is
    one.
    """
    by_id = {occupant.id: occupant for occupant in _find_occupants(facts, gpus, run)}
    return tuple(by_id.values())


def _find_occupants(facts: NodeFacts, gpus: Sequence[int], run: str) -> Iterator[Occupant]:
    """Containers first, then workers of runs that hold a device's lock, then locks that we cannot open, then load."""
    reported_runs = {run}
    for container in facts.containers:
        is_ours = bool(run) and container.run == run
        if is_ours or not _uses_devices(container, facts, gpus):
            continue
        reported_runs.add(container.run)
        what = f"worker of run {container.run}" if container.run else container.image
        yield Occupant(f"container {container.name}", f"container {container.name} ({what})")
    our_locks = {device_lock(gpu) for gpu in gpus or (None,)}
    for path in facts.locks.get("held", ()):
        other_run, device = path.partition("/")[0], path.rpartition("/")[2]
        if other_run not in reported_runs and device in our_locks:
            yield Occupant(f"run {other_run}", f"workers of run {other_run}")
    for line in facts.locks.get("closed", ()):
        device, _, lock = line.partition(" ")
        if device in our_locks or device == "all":
            yield closed_lock_occupant(lock)
    for number in gpus:
        use = _describe_use(facts.gpus[number]) if number < len(facts.gpus) else ""
        if use:
            yield Occupant(f"GPU {number}", f"GPU {number} is {use}")


def closed_lock_occupant(lock: str) -> Occupant:
    """Whoever may hold a device's lock that we cannot open. `lock`: its path, with the owner."""
    words = (
        f"nobody can tell who measures there, because the lock {lock} cannot be opened; remove it, name another folder"
        " to all users there (GEMMFLEET_LOCKS in the node's environment), or share the devices (--busy share)"
    )
    return Occupant(f"lock {lock.partition(' of ')[0]}", words, stays=True)


def what_we_do(mode: str, present: Sequence[Occupant]) -> str:
    """The mode for these occupants. `wait` becomes `skip` if it is useless to wait for one of them."""
    return "skip" if mode == "wait" and any(occupant.stays for occupant in present) else mode


def _uses_devices(container: Container, facts: NodeFacts, gpus: Sequence[int]) -> bool:
    """Return whether a running container uses our GPUs or cores. A database, for instance, does not."""
    if not gpus:
        return bool(container.run and container.slot)
    if container.run and container.slot.isdecimal():
        # the slot's number is its GPU's number, whatever devices the container was given
        return bool(container.devices) and int(container.slot) in gpus
    render_nodes = {match[1] for device in container.devices if (match := _RENDER.match(device))}
    our_render_nodes = {facts.gpus[g].render for g in gpus if g < len(facts.gpus)} - {""}
    if render_nodes and our_render_nodes:
        return bool(render_nodes & our_render_nodes)
    nvidia_gpus = {int(match[1]) for device in container.devices if (match := _NVIDIA.match(device))}
    if nvidia_gpus:
        return bool(nvidia_gpus.intersection(gpus))
    has_all_gpus = any(d in ("/dev/kfd", "/dev/dri") or d.startswith("gpu:") for d in container.devices)
    return has_all_gpus or bool(render_nodes)


def _describe_use(gpu: Gpu) -> str:
    """Describes who holds the GPU, or how busy it is; "" if it is free."""
    processes = [f"process {pid} ({size / 2**20:.0f} MiB)" for pid, size in gpu.processes.items() if size > 0]
    if processes:
        return f"held by {', '.join(processes[:3])}"
    busy_pct = gpu.use_pct or 0
    memory_share = (gpu.memory_used or 0) / gpu.memory_total if gpu.memory_total else 0.0
    if busy_pct >= BUSY_PCT or memory_share >= BUSY_MEMORY:
        return f"in use (busy {busy_pct:.0f} %, memory {100 * memory_share:.0f} %)"
    return ""


def occupants_text(present: Sequence[Occupant]) -> str:
    """`container x (image); GPU 3 is held by process 12 (900 MiB)`."""
    parts = [occupant.words for occupant in present[:4]]
    if len(present) > 4:
        parts.append(f"and {len(present) - 4} more")
    return "; ".join(parts)


_WHAT_WE_DO = {"wait": "is occupied; we wait for it", "free": "is free now", "skip": "is occupied and left out"}


def busy_sentence(node: str, doing: str, detail: str) -> str:
    """Sentence on what we do about an occupied node."""
    return f"{node} {_WHAT_WE_DO.get(doing, 'is occupied and shared, so its times may be too long')}: {detail}"
