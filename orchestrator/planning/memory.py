"""Shapes whose operands cannot fit into a device's memory."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.shapes import Shape, describe
from orchestrator.shapes.model import operand_bytes
from worker.families import Family
from worker.text import plural

GIB = 2.0**30
NAMED = 3


def memory_note(shapes: Sequence[Shape], family: Family, memory: int | None) -> list[str]:
    """A note that names shapes whose operands alone exceed `memory` bytes (of the largest device); else nothing.

    They are tried all the same: they end as failed with the tuner's own words, and cost one attempt each.
    """
    if not memory:
        return []
    size = operand_bytes(family)
    large = [(size(s.key), s) for s in shapes if size(s.key) > memory]
    if not large:
        return []
    large.sort(key=lambda found: (-found[0], found[1].id))
    named = [f"{describe(s.key_dict(family))} ({bytes_ / GIB:,.0f} GiB)" for bytes_, s in large[:NAMED]]
    more = f" and {len(large) - NAMED} more" if len(large) > NAMED else ""
    have = f"the operands of {plural(len(large), 'shape')} do"
    return [
        f"{have} not fit into the device's memory of {memory / GIB:,.0f} GiB, and will fail: {', '.join(named)}{more}"
    ]
