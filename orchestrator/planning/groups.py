"""Groups: the shapes that share every key column but M, cut so that no single one holds the run at its end."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from orchestrator.families import Family
from orchestrator.planning.cost import CostModel
from orchestrator.planning.risk import risk
from orchestrator.shapes import Shape

PARTS_PER_SLOT = 4
"""A group above the total over (slots times this) is cut: the last one holds at most about 1/4 of a slot's work."""

SMALLEST_CUT_S = 20.0
"""A group below this is never cut: a group costs set-up, and its end is near anyway."""


@dataclass(frozen=True, slots=True)
class Group:
    """What one attempt is sent to do: shape ids in the order of M, and the estimated seconds on one slot."""

    id: str
    shapes: tuple[int, ...]
    cost_s: float


def make_groups(
    shapes: Sequence[Shape], family: Family, cost: CostModel, slots: int, *, tuner: str = ""
) -> list[Group]:
    """Every shape in exactly one group, the longest group first (equal ones: the first in the file first).

    A shape of a risk class (orchestrator.planning.risk) is a group of its own.

    A group above the largest of SMALLEST_CUT_S and total / (slots * PARTS_PER_SLOT) is cut into parts of
    consecutive M of about equal cost, none above that limit but a single shape that is.
    """
    at = family.key_names.index(family.m_column)
    costs = cost.shape_costs(shapes, family)
    by_key: dict[tuple[int | str, ...], list[Shape]] = {}
    for s in shapes:
        alone = (s.id,) if risk(tuner, family.name, s.key_dict(family)) else ()
        by_key.setdefault((*s.key[:at], *s.key[at + 1 :], *alone), []).append(s)
    total = sum(costs.values()) + cost.setup_s * len(by_key)
    limit = max(SMALLEST_CUT_S, total / (max(1, slots) * PARTS_PER_SLOT))
    parts: list[tuple[float, tuple[int, ...]]] = []
    for members in by_key.values():
        members.sort(key=lambda s: (s.key[at], s.id))
        parts += _cut([(costs[s.id], s.id) for s in members], cost.setup_s, limit)
    parts.sort(key=lambda p: (-p[0], p[1][0]))
    width = max(4, len(str(len(parts))))
    return [Group(f"g{n:0{width}d}", ids, seconds) for n, (seconds, ids) in enumerate(parts, 1)]


def _cut(members: Sequence[tuple[float, int]], setup: float, limit: float) -> Iterator[tuple[float, tuple[int, ...]]]:
    """(cost, ids) of the parts; `members` are (cost, id) in the order of M, `setup` is paid by every part."""
    work = sum(c for c, _ in members)
    if setup + work <= limit:
        yield setup + work, tuple(i for _, i in members)
        return
    room = max(limit - setup, 0.0)
    ids: list[int] = []
    filled, left = 0.0, work
    target = _even(left, room)
    for c, i in members:
        if ids and (filled + c > room or filled + c / 2 > target):
            yield setup + filled, tuple(ids)
            left -= filled
            ids, filled, target = [], 0.0, _even(left, room)
        ids.append(i)
        filled += c
    yield setup + filled, tuple(ids)


def _even(work: float, room: float) -> float:
    """The share of each part when `work` is cut into as few as fit into `room`."""
    return work / math.ceil(work / room) if work > 0 < room else 0.0
