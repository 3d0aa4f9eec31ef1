"""Shapes that are run in groups of their own, because a kernel may fault on them (AITER only).

A class (`Family.risks`) is no verdict: it keeps what a fault would take along small.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from orchestrator.shapes.model import describe
from orchestrator.status import plural
from worker.families import Family

SHOWN = 3
LARGEST_BYTES = 64 << 30
"""Operands, output and float32 references above this may not fit beside AITER's copies of them."""


def risk(tuner: str, family: Family, key: Mapping[str, int | str]) -> str:
    """The class in words, "" for none."""
    if tuner != "aiter" or not family.risks:
        return ""
    found = [words for r in family.risks if (words := r.of(key))]
    m, n, k = (int(key[c]) for c in ("M", "N", "K"))
    if 4 * int(key.get("B", 1)) * (m * k + n * k + m * n) > LARGEST_BYTES:
        found.append("its references take more than 64 GiB")
    return ", ".join(found)


def risk_notes(family: Family, keys: Iterable[tuple[int | str, ...]], tuner: str = "aiter") -> list[str]:
    """A sentence a class, for people, with the first shapes of it; nothing for a tuner that has no such classes."""
    if tuner != "aiter":
        return []
    count, first = Counter[str](), defaultdict[str, list[str]](list)
    for key in keys:
        named = dict(zip(family.key_names, key, strict=True))
        if words := risk(tuner, family, named):
            count[words] += 1
            if count[words] <= SHOWN:
                first[words].append(describe(named))
    return [
        f"{plural(n, 'shape')} ({', '.join(first[words])}{', ...' if n > SHOWN else ''}): {words}: kernels of AITER may"
        f" fault there, so the tuner aiter runs {'each' if n > 1 else 'it'} alone"
        for words, n in count.items()
    ]
