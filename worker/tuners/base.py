"""The interface of a tuner: its methods, and the messages by which it reports to the agent.

A tuner lives in the agent's child process. `create` of its spec (worker/tuners/catalog.py) makes it. `open()` is called
once, then `canary()` and `tune()` any number of times, all on the main thread. Rules for `tune`:

- Tune one shape after the other, in the order of `spec.shapes`.
- Call `emit.started(id)` before any work on a shape (it returns once that is recorded). Then call `emit.row` for each
  candidate as soon as it is known (a failed candidate is a row too: us -1 and a status). Then call `emit.tuned` or
  `emit.failed` exactly once.
- While busy, call `emit.alive()` about once a second or more often (extra calls cost nothing).
- KeyboardInterrupt (SIGINT from the agent) may be raised at any time. Do not catch it.
- stdout and stderr go to the slot's log.

If `tune` raises an exception, the attempt ends as `error` (as `oom` if out of memory), and the agent starts a new
child. So raise only for faults that no shape caused. Tuners that start processes may raise TunerFault, which ends the
attempt with the outcome that it names.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from worker.protocol import BlockedRecord, Row, Spec

ALIVE_EVERY_S = 0.2
"""Signs of progress closer together than this are dropped."""


class TunerFault(Exception):
    """A process that the tuner started has ended badly. `outcome`: fault, hang, oom or error.

    The shape in flight is charged with it: `Emit.parked` those that are measured, and have the one to blame in flight.
    """

    def __init__(self, outcome: str, detail: str) -> None:
        super().__init__(detail)
        self.outcome = outcome


class Emit:
    """Messages of a tuner to the agent; each call sends one at once."""

    def __init__(self, send: Callable[[dict[str, Any]], None]) -> None:
        self._send = send
        self._quiet_since = 0.0

    def started(self, shape_id: int) -> None:
        """Put the shape in flight: from now on a fault is evidence about it."""
        self._say("shape_started", shape=shape_id)

    def parked(self, shape_id: int) -> None:
        """Report that the shape in flight is measured; its verdict comes later, another shape may be started."""
        self._say("shape_parked", shape=shape_id)

    def row(self, shape_id: int, row: Row) -> None:
        """Report one candidate of the shape in flight, measured or failed."""
        self._say("row", shape=shape_id, row=row)

    def tuned(
        self,
        shape_id: int,
        row: Row,
        *,
        candidate: Sequence[str] | None = None,
        blocked: Sequence[BlockedRecord] = (),
    ) -> None:
        """Report the shape's winner: the tuner is done with the shape.

        `candidate`: the winner's identity. `blocked`: candidates that were not measured because they faulted, which
        makes the attempt incomplete (worker/protocol/candidates.py).
        """
        self._say("shape_tuned", shape=shape_id, row=row, **_candidate_fields(candidate, blocked))

    def failed(self, shape_id: int, reason: str, detail: str, *, blocked: Sequence[BlockedRecord] = ()) -> None:
        """Report that the shape has no winner; `reason` is one of SHAPE_VERDICTS."""
        self._say("shape_failed", shape=shape_id, reason=reason, detail=detail, **_candidate_fields(None, blocked))

    def alive(self) -> None:
        """Report progress without a record, so that the watchdog stays quiet."""
        if time.monotonic() - self._quiet_since >= ALIVE_EVERY_S:
            self._say("alive")

    def _say(self, type_: str, **fields: Any) -> None:
        self._quiet_since = time.monotonic()
        self._send({"type": type_, **fields})


def _candidate_fields(candidate: Sequence[str] | None, blocked: Sequence[BlockedRecord]) -> dict[str, Any]:
    """The optional fields of a shape's end."""
    fields: dict[str, Any] = {}
    if candidate is not None:
        fields["candidate"] = list(candidate)
    if blocked:
        fields["withheld"] = list(blocked)
    return fields


class Tuner(Protocol):
    """Tuner that measures candidates of shapes on one device."""

    def open(self) -> dict[str, Any]:
        """Import what is needed and pick the device. Returns gfx, cu_num, device, tuner versions."""
        ...

    def canary(self) -> tuple[bool, float, str]:
        """A small problem with a known answer: (ok, microseconds, detail)."""
        ...

    def tune(self, spec: Spec, emit: Emit) -> dict[str, float]:
        """Tune every shape of the spec; seconds spent by kind (import, inputs, check, measure, other)."""
        ...


@runtime_checkable
class Timed(Protocol):
    """Optional interface of a tuner: two known kernels are timed between groups, by which GPUs can be compared."""

    timed_canary_s: float  # seconds that it takes, as far as is known before the first

    def time_canary(self) -> tuple[float, float]:
        """(microseconds of a compute-bound, of a memory-bound kernel); -1 where there is no room for one."""
        ...


@dataclass(frozen=True, slots=True)
class Place:
    """Place where a tuner runs: node folder, node, slot, process number of the agent."""

    node_dir: Path | None = None
    node: str = ""
    slot: str = "0"
    agent_pid: int = 0


@runtime_checkable
class Configurable(Protocol):
    """Optional interface of a tuner: called once, before `open`, with the node's options for its tuner."""

    def configure(self, options: Mapping[str, Any], place: Place) -> None: ...


@runtime_checkable
class Judging(Protocol):
    """Optional interface of a tuner that blocks candidates. It is called with the spec's `refuted` and `confirmed` if
    the spec has no work."""

    def judge(self, spec: Spec) -> None: ...
