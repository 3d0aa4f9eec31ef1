"""Keeps a slot's worker, and with it its tuner, on the cores that are near the slot's GPU."""

from __future__ import annotations

import os
from collections.abc import Mapping

from worker.protocol import CPUS

SLOTS_ON_CORES = "GEMMFLEET_SLOTS_ON_CORES"
"""Told to a slot's tuner: how many slots of its node, its own among them, run on its cores."""
_MAX_CORE = 65_535


def cores_of(text: str) -> set[int]:
    """The cores of a kernel list; ValueError where it is none."""
    out: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        begin, end = int(first), int(last or first)
        if not 0 <= begin <= end <= _MAX_CORE:
            raise ValueError(f"{part!r} is no range of cores")
        out.update(range(begin, end + 1))
    return out


def pin(cpus: str) -> int:
    """Run this process on these cores, as far as it may; how many there are now, 0 where nothing was changed."""
    try:
        wanted = cores_of(cpus) & os.sched_getaffinity(0)
        if not wanted:
            return 0
        os.sched_setaffinity(0, wanted)
    except (OSError, ValueError):
        return 0
    return len(wanted)


def slots_on_cores(slots: Mapping[str, Mapping[str, str]], slot: str) -> int:
    """How many slots run on the cores of `slot`; `slots` are their variables."""
    mine = slots.get(slot, {}).get(CPUS, "")
    return max(1, sum(env.get(CPUS, "") == mine for env in slots.values()))


def own_cores() -> int:
    """The cores that this process may run on, shared evenly with the slots that run there too; at least 1."""
    told = os.environ.get(SLOTS_ON_CORES, "")
    return max(1, len(os.sched_getaffinity(0)) // (int(told) if told.isdigit() and int(told) else 1))
