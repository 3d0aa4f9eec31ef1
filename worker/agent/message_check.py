"""Check of a tuner's messages against the spec of the attempt; keeps the shape that is in flight.

The tuner is third-party code: none of its messages reaches the record file unchecked. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from worker.protocol import (
    MAX_ONLY,
    SHAPE_VERDICTS,
    ProtocolError,
    Spec,
    checked_row,
    identities,
    identity,
    record,
    withheld_list,
)
from worker.text import clean

SHAPE_MESSAGES = ("shape_started", "shape_parked", "row", "shape_tuned", "shape_failed")


class MessageCheck:
    """Follows the messages of one attempt.

    `in_flight`: the shape that was started and is neither settled nor parked. A parked shape was measured and waits for
    its verdict (a tuner that writes after several shapes); what happens meanwhile is no evidence about it.
    """

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._open = {s.id for s in spec.shapes}
        self._parked: set[int] = set()
        self.in_flight: int | None = None

    def take(self, message: Mapping[str, Any], t: float) -> dict[str, Any] | None:
        """The record for a tuner's message on a shape, None if it needs none.

        Raises ProtocolError where it breaks the rules.
        """
        kind, shape = message["type"], message.get("shape")
        if kind == "shape_started":
            if self.in_flight is not None:
                raise ProtocolError(f"shape {shape} was started while {self.in_flight} was in flight")
            if type(shape) is not int or shape not in self._open:
                raise ProtocolError(f"shape {shape!r} is not an open shape of the attempt")
            self.in_flight = shape
            self._parked.discard(shape)
            return record(kind, t, attempt=self._spec.attempt, shape=shape)
        flying = type(shape) is int and shape == self.in_flight
        if type(shape) is not int or not (flying or (shape in self._parked and kind != "shape_parked")):
            raise ProtocolError(f"{kind} of shape {shape!r} while {self.in_flight} was in flight")
        if kind == "shape_parked":
            self._parked.add(shape)
            self.in_flight = None
            return None
        if kind == "shape_failed":
            made = self._failed(message, t, shape)
        else:
            row = checked_row(message.get("row"), self._spec.err_ratio)
            more: dict[str, Any] = {}
            if kind == "shape_tuned":
                self._check_winner(row)
                more = self._of_candidates(message, shape)
            made = record(kind, t, attempt=self._spec.attempt, shape=shape, row=row, **more)
        if kind != "row":
            self._open.discard(shape)
            self._parked.discard(shape)
            self.in_flight = None if flying else self.in_flight
        return made

    def _failed(self, message: Mapping[str, Any], t: float, shape: int) -> dict[str, Any]:
        reason, detail = message.get("reason"), message.get("detail")
        if reason not in SHAPE_VERDICTS or not isinstance(detail, str):
            raise ProtocolError(f"shape_failed with reason {reason!r}")
        attempt, more = self._spec.attempt, self._of_candidates(message, shape)
        return record("shape_failed", t, attempt=attempt, shape=shape, reason=reason, detail=clean(detail), **more)

    def _of_candidates(self, message: Mapping[str, Any], shape: int) -> dict[str, Any]:
        """The optional fields of a shape's end. Those of `ran` that `only` does not name by identity are dropped."""
        out: dict[str, Any] = {}
        if message.get("candidate") is not None:
            out["candidate"] = list(identity(message["candidate"], "candidate"))
        only = self._spec.only_of(shape)
        if only is not None and only.identities:
            ran = identities(message.get("ran") or [], MAX_ONLY, "ran")
            out["ran"] = [list(c) for c in ran if c in only.identities]
        if message.get("withheld"):
            entries, more = withheld_list(message["withheld"], message.get("withheld_more", 0))
            for entry in entries:
                entry["name"], entry["detail"] = clean(entry["name"]), clean(entry["detail"])
            out["withheld"] = entries
            if more:
                out["withheld_more"] = more
        return out

    def _check_winner(self, row: Mapping[str, Any]) -> None:
        if row.get("us", -1) <= 0:
            raise ProtocolError("shape_tuned without a time")
        if row.get("status", "ok") == "wrong":
            raise ProtocolError(f"shape_tuned with errRatio {row.get('errRatio')}, over {self._spec.err_ratio}")
