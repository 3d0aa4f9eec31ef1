"""Plan of a run, as `tune --plan` shows it: what would run where, at what cost, until when."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from orchestrator.planning.cost import CostModel
from orchestrator.planning.estimate import Range, seconds_left
from orchestrator.planning.groups import Group, make_groups
from orchestrator.shapes import Shape
from worker.families import Family


@dataclass(frozen=True, slots=True)
class NodeShare:
    """Share of a node, if everything took as long as estimated."""

    node: str
    slots: int
    groups: int
    shapes: int
    cost_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Groups, longest first; `cost_s` is the sum of their estimates, `end_s` when the run would be over.

    `range_s`: nine of ten runs end between these. `first_guess`: nothing like it was measured yet.
    """

    family: str
    tuner: str
    gfx: str
    cu_num: int
    asked: int
    groups: tuple[Group, ...]
    skipped: tuple[int, ...]
    cost_s: float
    end_s: float
    nodes: tuple[NodeShare, ...]
    cost_source: str
    notes: tuple[str, ...]
    range_s: tuple[float, float] = (0.0, 0.0)
    first_guess: bool = False

    @property
    def todo(self) -> int:
        """Shapes to tune."""
        return self.asked - len(self.skipped)

    def to_json(self) -> dict[str, Any]:
        """Document of `tune --plan --json`; seconds are rounded to milliseconds."""
        raw = asdict(self)
        raw["todo"] = self.todo
        raw["cost_s"], raw["end_s"] = round(self.cost_s, 3), round(self.end_s, 3)
        raw["range_s"] = [round(s, 3) for s in self.range_s]
        for part in (*raw["groups"], *raw["nodes"]):
            part["cost_s"] = round(part["cost_s"], 3)
        return raw


def make_plan(
    todo: Sequence[Shape],
    family: Family,
    cost: CostModel,
    nodes: Mapping[str, int],
    *,
    tuner: str,
    gfx: str,
    cu_num: int,
    skipped: Sequence[Shape] = (),
    notes: Sequence[str] = (),
) -> Plan:
    """Group, cut and order the shapes for `nodes` (name to number of slots)."""
    slots = [name for name, n in nodes.items() for _ in range(n)]
    groups = make_groups(todo, family, cost, len(slots), tuner=tuner)
    where = _assign(groups, max(1, len(slots)))
    start = Range(cost.start_s / cost.spread, cost.start_s, cost.start_s * cost.spread)
    end = seconds_left([g.cost_s for g in groups], len(slots), spread=cost.spread, start=start)
    per_node = {name: [0, 0, 0.0] for name in nodes}
    for group, slot in zip(groups, where, strict=True):
        if slots:
            share = per_node[slots[slot]]
            share[0] += 1
            share[1] += len(group.shapes)
            share[2] += group.cost_s
    shares = tuple(NodeShare(name, nodes[name], int(g), int(s), c) for name, (g, s, c) in per_node.items())
    return Plan(
        family=family.name,
        tuner=tuner,
        gfx=gfx,
        cu_num=cu_num,
        asked=len(todo) + len(skipped),
        groups=tuple(groups),
        skipped=tuple(s.id for s in skipped),
        cost_s=sum(g.cost_s for g in groups),
        end_s=end.mid_s if end else 0.0,
        nodes=shares,
        cost_source=cost.source,
        notes=tuple(notes),
        range_s=(end.low_s, end.high_s) if end else (0.0, 0.0),
        first_guess=cost.is_guess,
    )


def _assign(groups: Sequence[Group], slots: int) -> list[int]:
    """Slot of each group in list scheduling, the longest first: at most 4/3 of the best possible end (Graham 1969)."""
    free = [(0.0, i) for i in range(slots)]
    where: list[int] = []
    for g in groups:
        at, slot = heapq.heappop(free)
        heapq.heappush(free, (at + g.cost_s, slot))
        where.append(slot)
    return where
