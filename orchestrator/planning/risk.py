"""Notes on shapes that run in groups of their own, because a kernel of the tuner's may fault on them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from orchestrator.shapes.model import describe
from worker.families import Family
from worker.text import plural
from worker.tuners.catalog import recorded_tuner

SHOWN = 3


def risk_notes(family: Family, keys: Iterable[tuple[int | str, ...]], tuner: str = "aiter") -> list[str]:
    """A sentence a class, for people, with the first shapes of it; nothing for a tuner that has no such classes."""
    risk = recorded_tuner(tuner).risk
    count, first = Counter[str](), defaultdict[str, list[str]](list)
    for key in keys:
        named = dict(zip(family.key_names, key, strict=True))
        if words := risk(family.name, named):
            count[words] += 1
            if count[words] <= SHOWN:
                first[words].append(describe(named))
    return [
        f"{plural(n, 'shape')} ({', '.join(first[words])}{', ...' if n > SHOWN else ''}): {words}: kernels may"
        f" fault there, so the tuner {tuner} runs {'each' if n > 1 else 'it'} alone"
        for words, n in count.items()
    ]
