"""Groups: the shapes that share every key column but M, cut so that the run is expected to end soonest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.planning.cost import CostModel
from orchestrator.planning.cutting import cut
from orchestrator.shapes import Shape
from worker.families import Family
from worker.tuners.catalog import recorded_tuner


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

    A shape on which a kernel of the tuner's may fault (TunerSpec.risk) is a group of its own; others are cut by
    orchestrator.planning.cutting.
    """
    at = family.key_names.index(family.m_column)
    risk = recorded_tuner(tuner).risk
    costs = cost.shape_costs(shapes, family)
    by_key: dict[tuple[int | str, ...], list[Shape]] = {}
    for s in shapes:
        alone = (s.id,) if risk(family.name, s.key_dict(family)) else ()
        by_key.setdefault((*s.key[:at], *s.key[at + 1 :], *alone), []).append(s)
    for members in by_key.values():
        members.sort(key=lambda s: (s.key[at], s.id))
    parts = cut([[(costs[s.id], s.id) for s in members] for members in by_key.values()], cost.setup_s, slots)
    width = max(4, len(str(len(parts))))
    return [Group(f"g{n:0{width}d}", ids, seconds) for n, (seconds, ids) in enumerate(parts, 1)]
