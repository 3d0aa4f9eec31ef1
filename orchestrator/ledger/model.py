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
    """A requested shape with its key. state: pending, tuned, skipped or failed.

    `attempt` settled it; of a failed shape that none settled, it is the last that began. `confirmed` of a tuned one:
    False where candidates were left out on the evidence of one slot; None: none were. `node`, `slot`: of the attempt.
    `attempts` of a failed one: number of those that a worker began.
    """

    id: int
    key: tuple[int | str, ...]
    state: str
    reason: str | None = None
    detail: str = ""
    confirmed: bool | None = None
    attempt: str = ""
    settled_at: float | None = None
    node: str = ""
    slot: str = ""
    attempts: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """A worker's report on an attempt beside its records; {} and None where it sent none.

    `conditions`: readings of worker/device.py, `before` and `after`.
    """

    device: dict[str, Any]
    exit: int | None
    spent: dict[str, float]
    conditions: dict[str, dict[str, Any]]


NO_REPORT = Report({}, None, {}, {})


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
