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
"""The reasons why rows of a shape are left out; counts are kept in this order."""
REASONS = {
    "no_time": "without a time (us missing, not a number, or not above 0)",
    "not_finite": "with an infinite time",
    "error_ratio": "beyond the error ratio",
    "no_shape": "without a whole key",
    "malformed": "that are not rows of the header (cut short, too long, not UTF-8)",
}
"""The words after `N rows`."""


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


class Wrong(NamedTuple):
    """A row beyond the error ratio; `err` None where its cell is empty."""

    backend: str
    kernel: str
    err: float | None
    us: float


@dataclass(slots=True)
class ShapeBest:
    """A shape on a device. `key` follows the family's key columns; `counts`: rows left out, by COUNTED; `wrong`: those
    of them that are beyond the error ratio."""

    device: Device
    key: Key
    counts: Sequence[int] = (0, 0, 0)
    best: dict[str, Best] = field(default_factory=dict)
    wrong: list[Wrong] = field(default_factory=list)

    @property
    def left_out(self) -> dict[str, int]:
        """Rows left out, by reason."""
        return counted(self.counts)

    @property
    def winner(self) -> Best | None:
        """The fastest backend; of equals the first by name. None where no backend has a valid row."""
        return _fastest(self.best.values())

    @property
    def wrong_was_faster(self) -> bool:
        """True where a row beyond the error ratio was faster than every valid one."""
        won = self.winner
        return bool(self.wrong) and (won is None or min(w.us for w in self.wrong) < won.us)

    def best_other(self, backend: str) -> Best | None:
        """The fastest of the other backends."""
        return _fastest(b for name, b in self.best.items() if name != backend)

    def ratio(self, backend: str) -> float | None:
        """TFLOPS of the backend over those of the best other one; None where one of the two is missing."""
        mine, other = self.best.get(backend), self.best_other(backend)
        return other.us / mine.us if mine and other else None


def _fastest(some: Iterable[Best]) -> Best | None:
    return min(some, key=lambda b: (b.us, b.backend), default=None)


def device_text(device: Device) -> str:
    """`gfx950 with 256 CUs`."""
    gfx, cu_num = device
    return f"{gfx or 'unknown chip'}{f' with {cu_num} CUs' if cu_num else ''}"


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file that was read: `rows` valid or not, `malformed` lines that were no rows."""

    name: str
    bytes: int
    rows: int
    malformed: int


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
    def _varying(self) -> list[int]:
        """The key columns besides the sizes that differ from shape to shape, by number."""
        texts = (i for i, c in enumerate(self.family.columns) if c.kind == "text" or c.legal)
        return [i for i in texts if len({s.key[i] for s in self.shapes}) > 1]


def key_text(family: Family, key: Key, also: Iterable[int] = ()) -> str:
    """`16x1280x8192`, followed by `column=value` of the columns in `also`."""
    sizes = "x".join(str(v) for v, c in zip(key, family.columns, strict=True) if c.kind == "int" and not c.legal)
    rest = (f"{family.columns[i].name}={str(key[i]).removeprefix('torch.')}" for i in also)
    return " ".join((sizes, *rest))
