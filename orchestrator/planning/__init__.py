"""Planning: shapes left out, groups in an order, cost and expected end (docs/explanation/scheduling.md)."""

from __future__ import annotations

from orchestrator.planning.cost import CostModel, CostSample, units
from orchestrator.planning.estimate import Range, UnderWay, seconds_left
from orchestrator.planning.plan import Group, NodeShare, Plan, make_groups, make_plan, memory_note, risk_notes

__all__ = [
    "CostModel",
    "CostSample",
    "Group",
    "NodeShare",
    "Plan",
    "Range",
    "UnderWay",
    "make_groups",
    "make_plan",
    "memory_note",
    "risk_notes",
    "seconds_left",
    "units",
]
