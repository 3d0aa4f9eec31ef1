"""Notes on shapes that may fail: those a kernel of the tuner may fault on, and those too large for the device."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from orchestrator.shapes import Shape, describe
from orchestrator.shapes.model import operand_bytes
from worker.families import Family
from worker.text import and_more, plural
from worker.tuners.catalog import recorded_tuner

SHOWN = 3


def risk_notes(family: Family, keys: Iterable[tuple[int | str, ...]], tuner: str = "aiter") -> list[str]:
    """Sentence for each class of risk, with its first shapes; none for a tuner without such classes."""
    risk = recorded_tuner(tuner).risk
    count, first = Counter[str](), defaultdict[str, list[str]](list)
    for key in keys:
        if words := risk(family.name, dict(zip(family.key_names, key, strict=True))):
            count[words] += 1
            if count[words] <= SHOWN:
                first[words].append(describe(key))
    return [
        f"{plural(n, 'shape')} ({', '.join(first[words])}{', ...' if n > SHOWN else ''}): {words}: kernels may"
        f" fault there, so the tuner {tuner} runs {'each' if n > 1 else 'it'} alone"
        for words, n in count.items()
    ]


GIB = 2.0**30
NAMED = 3


def memory_note(shapes: Sequence[Shape], family: Family, memory: int | None) -> list[str]:
    """A note that names shapes whose operands alone exceed `memory` bytes (of the largest device); else nothing.

    They are tried all the same: they fail with the tuner's own message, and cost one attempt each.
    """
    if not memory:
        return []
    size = operand_bytes(family)
    large = [(size(s.key), s) for s in shapes if size(s.key) > memory]
    if not large:
        return []
    large.sort(key=lambda found: (-found[0], found[1].id))
    named = [f"{describe(s.key)} ({bytes_ / GIB:,.0f} GiB)" for bytes_, s in large]
    have = f"the operands of {plural(len(large), 'shape')} do"
    return [
        f"{have} not fit into the device's memory of {memory / GIB:,.0f} GiB, and will fail: {and_more(named, NAMED)}"
    ]
