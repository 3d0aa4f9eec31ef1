"""Which shape is in flight in a process of AITER that was given several, and what becomes of each.

AITER takes the shapes in the order of its input, on one GPU one after the other. A shape that is measured while its
batch goes on is parked: its row comes with the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from worker.protocol import Row, SpecShape, Withheld
from worker.tuners.aiter.drive.verdict import Verdict
from worker.tuners.base import Emit


@dataclass(frozen=True, slots=True)
class Candidates:
    """What became of a shape's candidates: the winner's identity; which of those asked for ran; which were left out."""

    winner: tuple[str, ...] | None = None
    ran: tuple[tuple[str, ...], ...] = ()
    withheld: tuple[Withheld, ...] = ()


class Flight:
    """Speaks to the agent for one process. `current`: the shape in flight."""

    def __init__(
        self, shapes: Sequence[SpecShape], emit: Emit, began: Callable[[int], None] = lambda shape: None
    ) -> None:
        self._order = [s.id for s in shapes]
        self._emit = emit
        self._began = began
        self._waiting = list(self._order)
        self._parked: list[int] = []
        self.current: int | None = None

    @property
    def left(self) -> list[int]:
        """Shapes without a verdict, in their order."""
        return [s for s in self._order if s == self.current or s in self._parked or s in self._waiting]

    def settled(self, shape: int) -> bool:
        return shape not in self.left

    def place(self, shape: int) -> int:
        """Its number in the input, from 0."""
        return self._order.index(shape)

    def at(self, place: int) -> int | None:
        """The shape at a place of the input."""
        return self._order[place] if 0 <= place < len(self._order) else None

    def begin(self, shape: int) -> None:
        """AITER is at this shape now; the one before is measured."""
        if shape == self.current or self.settled(shape):
            return
        self.park()
        if shape in self._parked:
            self._parked.remove(shape)
        else:
            self._waiting.remove(shape)
        self._emit.started(shape)
        self.current = shape
        self._began(shape)

    def park(self) -> None:
        """The shape in flight is measured; its verdict is not there yet."""
        if self.current is not None:
            self._emit.parked(self.current)
            self._parked.append(self.current)
            self.current = None

    def advance(self) -> None:
        """Begin the next of the input, where none is in flight."""
        if self.current is None and self._waiting:
            self.begin(self._waiting[0])

    def settle(self, shape: int, rows: Sequence[Row], verdict: Verdict, known: Candidates) -> None:
        """Its rows and its end."""
        if self.settled(shape):
            return
        if shape in self._waiting:
            self.begin(shape)
        for row in rows:
            self._emit.row(shape, row)
        if verdict.winner is not None:
            self._emit.tuned(
                shape, verdict.winner, candidate=known.winner, ran=known.ran, withheld=known.withheld
            )  # fmt: skip
        else:
            self._emit.failed(shape, verdict.reason, verdict.detail, ran=known.ran, withheld=known.withheld)
        if shape == self.current:
            self.current = None
        else:
            self._parked.remove(shape)
