"""Rows of a ledger as its readers see them: one frozen dataclass a kind."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from worker.protocol import Row


@dataclass(frozen=True, slots=True)
class Counts:
    """Shapes by state. `running` are unsettled shapes in flight, `pending` the other unsettled ones."""

    total: int = 0
    tuned: int = 0
    skipped: int = 0
    failed: int = 0
    running: int = 0
    pending: int = 0

    @property
    def settled(self) -> int:
        return self.tuned + self.skipped + self.failed

    def to_json(self) -> dict[str, int]:
        return asdict(self)


NOT_WORTH_IT = "not_worth_it"
"""Reason of shapes that were skipped because a limit of the run was reached."""


@dataclass(frozen=True, slots=True)
class ShapeState:
    """A requested shape. state: pending, tuned, skipped or failed; `attempt` is the one that settled it.

    `confirmed` of a tuned one: False where candidates were left out on the evidence of one slot; None: none were.
    """

    id: int
    key: tuple[int | str, ...]
    state: str
    group: str | None
    reason: str | None
    detail: str | None
    confirmed: bool | None
    attempt: str | None
    settled_at: float | None


@dataclass(frozen=True, slots=True)
class GroupState:
    """A group. state: waiting, sent, running, split or done (nothing of it is pending)."""

    id: str
    parent: str | None
    cost_s: float
    state: str
    shapes: int
    pending: int
    attempts: int
    why: str | None


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try of a group. `outcome` is a Reason's value, or `taken_back`; None while it has not ended."""

    id: str
    group: str
    number: int
    node: str
    slot: str | None
    seq: int
    sent_at: float
    started_at: float | None
    lost_at: float | None
    ended_at: float | None
    outcome: str | None
    in_flight: int | None
    exit: int | None
    detail: str | None
    seconds: float | None
    spent: dict[str, float]
    device: dict[str, Any]
    current: int | None
    conditions: dict[str, dict[str, Any]]
    """Readings of worker/device/health.py, `before` and `after`, as far as they were sent."""

    @property
    def open(self) -> bool:
        """Sent and, as far as is known, neither over nor lost."""
        return self.ended_at is None and self.lost_at is None


@dataclass(frozen=True, slots=True)
class FailedShape:
    """A failed shape with where it was last seen; `attempts` counts those of its groups that a worker began."""

    id: int
    key: tuple[int | str, ...]
    reason: str
    detail: str
    confirmed: bool
    attempt: str | None
    node: str
    slot: str
    attempts: int


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A candidate that an attempt did not measure because it faulted, there or before (docs/explanation/scheduling.md).

    `verdict`: what another slot made of it: `ran`, `faulted`, or None where none has tried it.
    """

    attempt: str
    shape: int
    candidate: tuple[str, ...]
    node: str
    slot: str
    name: str
    outcome: str
    detail: str
    source: str
    confirmed: bool
    """The node's blocklist had it from two slots already."""
    verdict: str | None
    key: tuple[str, ...]
    gpu: str
    """The slot as the worker names it: its GPU's stable id where there is one."""
    image: str
    driver: str
    t: float

    def to_json(self) -> dict[str, Any]:
        """Entry of provenance.json."""
        return {
            "name": self.name or " ".join(self.candidate), "outcome": self.outcome, "detail": self.detail,
            "node": self.node, "slot": self.slot, "gpu": self.gpu, "image": self.image, "driver": self.driver,
            "t": self.t, "source": self.source, "elsewhere": self.verdict or "not tried",
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Unconfirmed:
    """A tuned shape for which candidates were left out that faulted on one slot alone."""

    id: int
    key: tuple[int | str, ...]
    attempt: str
    node: str
    slot: str
    detail: str
    withheld: tuple[LeftOut, ...]


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """A measured candidate (worker/protocol/row.py) and its shape's key. `note`: why a winner was not accepted."""

    id: int
    attempt: str
    shape: int
    key: tuple[int | str, ...]
    node: str
    slot: str
    t: float
    winner: bool
    gfx: str
    cu_num: int | None
    note: str | None
    row: Row

    @property
    def us(self) -> float:
        """Device time in microseconds, -1 where there is none."""
        return float(self.row["us"])

    @property
    def status(self) -> str:
        """`ok`, or why the candidate cannot win."""
        return str(self.row["status"])

    @property
    def kernel_name(self) -> str:
        """The kernel."""
        return str(self.row["kernelName"])


@dataclass(frozen=True, slots=True)
class SlotInfo:
    """Latest information of a slot's workers: `info` of worker_started, `device` of tuner_ready."""

    node: str
    slot: str
    info: dict[str, Any]
    device: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Offset:
    """Offset up to which a slot's stream was read, and the number of lines that were no records."""

    node: str
    slot: str
    stream: str
    offset: int
    bad: int
    last_bad: str | None
