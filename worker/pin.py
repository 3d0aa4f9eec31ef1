"""Keeps a slot's worker, and with it its tuner, on the cores that are near the slot's GPU."""

from __future__ import annotations

import os

CPUS = "GEMMFLEET_CPUS"
"""A slot's variable: cores as the kernel lists them, such as 0-63,128-191."""
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
