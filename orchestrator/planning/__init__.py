"""Planning: shapes left out, groups in an order, cost and expected end (docs/explanation/scheduling.md)."""

from __future__ import annotations

from orchestrator.planning.cost import CostModel, Sample, units
from orchestrator.planning.dropping import Dropped, drop_tuned
from orchestrator.planning.estimate import Range, UnderWay, seconds_left
from orchestrator.planning.groups import Group, make_groups
from orchestrator.planning.memory import memory_note
from orchestrator.planning.plan import NodeShare, Plan, expected_end, make_plan
from orchestrator.planning.risk import risk_notes
from orchestrator.planning.samples import gather, gather_samples

__all__ = [
    "CostModel",
    "Dropped",
    "Group",
    "NodeShare",
    "Plan",
    "Range",
    "Sample",
    "UnderWay",
    "drop_tuned",
    "expected_end",
    "gather",
    "gather_samples",
    "make_groups",
    "make_plan",
    "memory_note",
    "risk_notes",
    "seconds_left",
    "units",
]
