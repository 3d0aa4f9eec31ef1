"""The journal from one point of view: what happened to a group, a shape, a node (`explain`).

`entries`: the journal, where it was read already.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator import events as ev
from orchestrator.ledger.reader import LedgerReader

_OF_A_SHAPE = (
    ev.ShapeStarted, ev.ShapeTuned, ev.ShapeRefused, ev.FailShape, ev.SettleShape, ev.Confirm, ev.ChargeSlot,
    ev.ConvictCandidates,
)  # fmt: skip
Entry = tuple[float, ev.Record]


def of_group(ledger: LedgerReader, group: str, entries: Sequence[Entry] | None = None) -> list[Entry]:
    """Its planning, splitting, attempts, and the verdicts and failures of its shapes; of its children only
    the split.

    A canary that was asked for because of one of its attempts is not among them.
    """
    attempts = {a.id for a in ledger.attempts(group=group)}
    shapes = set(ledger.group_shapes(group))

    def wanted(r: ev.Record) -> bool:
        if isinstance(r, ev.Split):
            return r.group == group or any(child == group for child, _ in r.children)
        if isinstance(r, ev.FailShape):
            return r.attempt in attempts or (r.attempt is None and r.shape in shapes)
        if isinstance(r, (ev.SettleShape, ev.ConvictCandidates, ev.ChargeSlot)):
            return r.shape in shapes
        if isinstance(r, ev.Confirm):
            return group in (r.group, r.child)
        if isinstance(r, ev.RetryAsked):
            return not shapes.isdisjoint(r.shapes)
        return getattr(r, "group", None) == group or getattr(r, "attempt", None) in attempts

    return [(t, r) for t, r in entries or ledger.journal_records() if wanted(r)]


def of_shape(ledger: LedgerReader, shape: int, entries: Sequence[Entry] | None = None) -> list[Entry]:
    """Its groups' planning and splitting, their attempts' coming and going, and every word on the shape itself."""
    groups = {g for (g,) in ledger.query("SELECT grp FROM members WHERE shape=?", (shape,))}
    attempts = {a.id for g in groups for a in ledger.attempts(group=g)}

    def wanted(r: ev.Record) -> bool:
        if isinstance(r, _OF_A_SHAPE):
            return r.shape == shape
        if isinstance(r, ev.RetryAsked):
            return shape in r.shapes
        return getattr(r, "group", None) in groups or getattr(r, "attempt", None) in attempts

    return [(t, r) for t, r in entries or ledger.journal_records() if wanted(r)]


def of_node(ledger: LedgerReader, node: str, entries: Sequence[Entry] | None = None) -> list[Entry]:
    """Its joining and leaving, its slots' canaries and quarantines, its attempts' coming and going (not
    their shapes)."""
    attempts = {a.id for a in ledger.attempts(node=node)}

    def wanted(r: ev.Record) -> bool:
        if isinstance(r, (ev.ShapeStarted, ev.ShapeTuned, ev.SettleShape)):
            return False
        return getattr(r, "node", None) == node or getattr(r, "attempt", None) in attempts

    return [(t, r) for t, r in entries or ledger.journal_records() if wanted(r)]
