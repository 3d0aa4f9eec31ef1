"""Planning: shapes left out, groups in an order, cost and expected end (docs/explanation/scheduling.md)."""

from __future__ import annotations

from orchestrator.planning.cost import CostModel, CostSample, units
from orchestrator.planning.estimate import Range, UnderWay, seconds_left
from orchestrator.planning.plan import Plan, make_plan, make_work, memory_note, risk_notes, seconds_of

__all__ = [
    "CostModel",
    "CostSample",
    "Plan",
    "Range",
    "UnderWay",
    "make_plan",
    "make_work",
    "memory_note",
    "risk_notes",
    "seconds_left",
    "seconds_of",
    "units",
]
