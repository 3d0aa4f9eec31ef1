"""What came of a simulation: the books, made from the journal alone as the ledger makes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from orchestrator import events as ev
from orchestrator.reasons import Reason


@dataclass(slots=True)
class ShapeEnd:
    """How a shape ended: `end` is its last settlement, `attempts` those that started it."""

    end: Literal["pending", "tuned", "failed"] = "pending"
    reason: Reason | None = None
    confirmed: bool = False
    detail: str = ""
    settled: int = 0
    attempts: list[str] = field(default_factory=list)
    winner: tuple[str, ...] = ()
    unconfirmed: bool = False
    """Tuned, with candidates left out that faulted on one slot alone."""


@dataclass(frozen=True, slots=True)
class Death:
    """A power cut. `followed`: a controller was there and reading the node's stream."""

    t: float
    node: str
    why: str
    followed: bool


@dataclass(slots=True)
class Result:
    """`end`: finished, stuck or late (the plan's limit was reached). Times in virtual seconds."""

    end: Literal["finished", "stuck", "late"]
    stuck: str | None
    shapes: dict[int, ShapeEnd]
    makespan_s: float
    utilisation: float
    """Seconds in which a shape was measured to its end, over all slots and the whole makespan."""
    deaths: list[Death]
    journal: list[tuple[float, ev.Record]]

    def of(self, end: str) -> list[int]:
        return [s for s, e in self.shapes.items() if e.end == end]

    def records(self, kind: type[ev.Record]) -> list[tuple[float, ev.Record]]:
        return [(t, r) for t, r in self.journal if isinstance(r, kind)]


def books(journal: list[tuple[float, ev.Record]]) -> dict[int, ShapeEnd]:
    """Each shape's end by the journal alone, as the ledger keeps it: the first settlement counts."""
    out: dict[int, ShapeEnd] = {}
    best: dict[tuple[str, int], tuple[str, ...]] = {}
    for _, r in journal:
        if isinstance(r, ev.ShapeTuned):
            best[r.attempt, r.shape] = r.best
        match r:
            case ev.GroupAdded(_, shapes, _):
                out.update((s, ShapeEnd()) for s in shapes)
            case ev.ShapeStarted(attempt, shape):
                out[shape].attempts.append(attempt)
            case ev.ShapeTuned(attempt, shape, True) if out[shape].end == "pending":
                out[shape].end, out[shape].reason = "tuned", None
                out[shape].winner = best[attempt, shape]
                out[shape].settled += 1
            case ev.SettleShape(shape, attempt, confirmed, detail):
                e = out[shape]
                e.end, e.reason, e.detail, e.confirmed = "tuned", None, detail, confirmed
                e.winner, e.unconfirmed = best[attempt, shape], not confirmed
                e.settled += 1
            case ev.Confirm(shape=shape):
                out[shape] = ShapeEnd(attempts=out[shape].attempts)
            case ev.FailShape(shape, reason, detail, _, confirmed):
                e = out[shape]
                e.end, e.reason, e.detail, e.confirmed = "failed", reason, detail, confirmed
                e.settled += 1
            case ev.RetryAsked(shapes):
                for s in shapes:
                    if out[s].end == "failed":
                        out[s] = ShapeEnd(attempts=out[s].attempts)
            case _:
                pass
    return out
