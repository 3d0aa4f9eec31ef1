"""The data of an analysis: the best of each backend on each shape, and the rows left out.

`orchestrator.analysis.backends.best` fills it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from orchestrator.planning.roofline import Device
from orchestrator.shapes.model import Key
from worker.families import Family

COUNTED = ("no_time", "not_finite", "error_ratio")
"""The reasons why rows of a shape are left out (query.REASONS has the words); counts are kept in this order."""


def counted(counts: Sequence[int]) -> dict[str, int]:
    """Counts by reason, without those that are 0."""
    return {reason: n for reason, n in zip(COUNTED, counts, strict=True) if n}


class Best(NamedTuple):
    """The fastest valid row of a backend on a shape. `us`: microseconds; `tflops`: 1e12 operations a second, from the
    shape and `us`; `err`: share of wrong elements, None where the file has no such column."""

    backend: str
    us: float
    tflops: float
    kernel: str
    err: float | None
    turn: float = 0.0
    """`us`, with an order of equal times in digits that mean nothing: the lowest is kept."""


class Wrong(NamedTuple):
    """A row beyond the error ratio; `err` None where its cell is empty."""

    backend: str
    kernel: str
    err: float | None
    us: float


@dataclass(slots=True)
class ShapeBest:
    """A shape on a device. `key` follows the family's key columns; `counts` are of rows left out, by COUNTED."""

    device: Device
    key: Key
    best: dict[str, Best] = field(default_factory=dict)
    counts: list[int] = field(default_factory=lambda: [0, 0, 0])
    worst_err: float | None = None
    """Largest error among the rows beyond the limit, None where there are none."""
    wrong_us: float | None = None
    """Fastest time among the rows beyond the limit."""
    wrong: list[Wrong] = field(default_factory=list)
    """The rows beyond the limit (of a shape, backend and file at most query.MOST_WRONG)."""

    @property
    def left_out(self) -> dict[str, int]:
        """Rows left out, by reason."""
        return counted(self.counts)

    @property
    def winner(self) -> Best | None:
        """The fastest backend; of equals the first by name. None where no backend has a valid row."""
        best = self.best
        if len(best) == 1:
            return next(iter(best.values()))
        return _fastest(best.values())

    @property
    def wrong_was_faster(self) -> bool:
        """True where a row beyond the error ratio was faster than every valid one."""
        won = self.winner
        return self.wrong_us is not None and (won is None or self.wrong_us < won.us)

    def best_other(self, backend: str) -> Best | None:
        """The fastest of the other backends."""
        return _fastest(b for name, b in self.best.items() if name != backend)

    def take(self, other: ShapeBest) -> None:
        """Add what is known of the same shape from elsewhere."""
        for b in other.best.values():
            old = self.best.get(b.backend)
            if old is None or b.turn < old.turn:
                self.best[b.backend] = b
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.beyond(other.worst_err, other.wrong_us, other.wrong)

    def beyond(self, err: float | None, us: float | None, rows: Iterable[Wrong] = ()) -> None:
        """Note rows beyond the error ratio, their largest error and their fastest time."""
        self.wrong += rows
        if err is not None:
            self.worst_err = err if self.worst_err is None else max(self.worst_err, err)
        if us is not None:
            self.wrong_us = us if self.wrong_us is None else min(self.wrong_us, us)

    def ratio(self, backend: str) -> float | None:
        """TFLOPS of the backend over those of the best other one; None where one of the two is missing."""
        mine, other = self.best.get(backend), self.best_other(backend)
        return other.us / mine.us if mine and other else None


def _fastest(some: Iterable[Best]) -> Best | None:
    won = None
    for b in some:
        if won is None or b.us < won.us or (b.us == won.us and b.backend < won.backend):
            won = b
    return won


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file that was read: `rows` valid or not, `malformed` lines that were no rows (`more` of them than counted)."""

    name: str
    bytes: int
    rows: int
    malformed: int
    more: bool


@dataclass(frozen=True)
class BackendTable:
    """`shapes` by device and key; `backends` that have a valid row somewhere, in the order of display; `left_out`:
    reason to number of rows; `left_out_of`: the same by backend; `notes`: what a reader has to know."""

    family: Family
    err_ratio: float
    shapes: tuple[ShapeBest, ...]
    backends: tuple[str, ...]
    left_out: dict[str, int]
    left_out_of: dict[str, dict[str, int]]
    inputs: tuple[InputFile, ...]
    notes: tuple[str, ...]
    title: str
    device_names: tuple[str, ...]

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices that were measured."""
        return tuple(dict.fromkeys(s.device for s in self.shapes))

    def key_text(self, shape: ShapeBest) -> str:
        """`16x1280x8192`, batch first, with what else distinguishes the shape from others of the table."""
        return key_text(self.family, shape.key, self._varying)

    @cached_property
    def _varying(self) -> frozenset[int]:
        return varying(self.family, self.shapes)


def varying(family: Family, shapes: Iterable[ShapeBest]) -> frozenset[int]:
    """The key columns besides the sizes that differ from shape to shape, by number."""
    texts = [i for i, c in enumerate(family.columns) if c.kind == "text" or c.legal]
    seen: list[set[int | str]] = [set() for _ in texts]
    if texts:
        for shape in shapes:
            for values, i in zip(seen, texts, strict=True):
                values.add(shape.key[i])
    return frozenset(i for values, i in zip(seen, texts, strict=True) if len(values) > 1)


def key_text(family: Family, key: Key, also: frozenset[int] = frozenset()) -> str:
    """`16x1280x8192`, followed by `column=value` of the columns in `also`."""
    sizes = "x".join(str(v) for v, c in zip(key, family.columns, strict=True) if c.kind == "int" and not c.legal)
    rest = (f"{family.columns[i].name}={str(key[i]).removeprefix('torch.')}" for i in sorted(also))
    return " ".join((sizes, *rest))
