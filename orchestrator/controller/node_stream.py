"""Says what the frames of a node's stream mean: the node is up, occupied, or cannot go on.

The node's driver (node_driver.py) makes a `NodeStream` for each stream that it opens, and calls `handle` with every
frame. The node is up from the first frame on, unless its workers wait for devices that another run holds: then it is
occupied until a beat without that.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from orchestrator.controller.messages import Beat, FromStream, Message, NodeUp
from orchestrator.errors import TransportError
from orchestrator.ledger.ingest import Chunk
from orchestrator.machines.admission import NodeAdmission, Report
from orchestrator.machines.occupancy import closed_lock_occupant
from worker.protocol import ProtocolError

RECORDS_ERROR = re.compile(r"[0-9]{1,4}\.jsonl\b")
"""The begin of an error about a slot's file of records, such as `3.jsonl shrank from 900 to 0 bytes`
(worker/agent/follow.py)."""

Offsets = dict[tuple[str, str], int]
"""(stream, slot) -> the next byte to read; the stream is E for records and L for logs."""


class NodeStream:
    """One stream of a node. It posts what its frames mean to the loop."""

    def __init__(
        self,
        up: NodeUp,
        offsets: Offsets,
        admission: NodeAdmission,
        post: Callable[[Message], None],
        report_busy: Report,
    ) -> None:
        """`up`: posted once the node is up. `offsets`: moved forward with the stream, and kept for the next one.
        `report_busy`: tells the loop what we do about a node that others occupy."""
        self._node = up.node
        self._up = up
        self._offsets = offsets
        self._admission = admission
        self._post = post
        self._report_busy = report_busy
        self._is_up = False
        self._occupying_runs: tuple[str, ...] = ()
        """The other runs that hold devices of our workers, according to the last beat."""
        self._closed_lock = ""
        """The last lock that a worker could not open."""

    def handle(self, frame: Chunk | Beat) -> None:
        """Post what a frame means. Raise TransportError or ProtocolError if the stream cannot go on, and LeftOutError
        if the node is not used, because a worker cannot open a device's lock."""
        if isinstance(frame, Beat):
            self._check_records(frame)
            self._check_lock(frame)
            self._report_waiting(frame)
        if not self._is_up and not self._occupying_runs:
            self._is_up = True
            self._post(self._up)
        if isinstance(frame, Chunk):
            self._advance_offset(frame)
        self._post(FromStream(self._node, frame))

    def _check_records(self, beat: Beat) -> None:
        """Raise an error if the records of a slot can no longer be read. The slot would count as working for ever,
        since each later beat has the same error. A log that cannot be read does not matter."""
        unreadable = [error for error in beat.error.split("; ") if RECORDS_ERROR.match(error)]
        if unreadable:
            raise ProtocolError(f"{self._node}: {'; '.join(unreadable)}")

    def _check_lock(self, beat: Beat) -> None:
        """Decide once what to do about a lock that a worker cannot open."""
        if beat.closed_lock and beat.closed_lock != self._closed_lock:
            self._closed_lock = beat.closed_lock
            self._admission.decide((closed_lock_occupant(beat.closed_lock),), self._report_busy)

    def _report_waiting(self, beat: Beat) -> None:
        """Report that the workers wait for devices of other runs, or no longer do. A node that was up is prepared again
        then, which takes back the specs that were sent to it."""
        if beat.occupying_runs == self._occupying_runs:
            return
        # occupancy.py says the same of runs that it finds before our workers start
        others = f"workers of run {', '.join(beat.occupying_runs)}"
        if self._is_up:
            raise TransportError(self._node, f"its devices are held by {others}")
        self._occupying_runs = beat.occupying_runs
        if beat.occupying_runs:
            self._report_busy("wait", others)
        else:
            self._report_busy("free", "its devices are ours now")

    def _advance_offset(self, chunk: Chunk) -> None:
        key = (chunk.stream, chunk.slot)
        expected = self._offsets.get(key, 0)
        if chunk.offset != expected:
            raise ProtocolError(f"{self._node}: {key} continues at {chunk.offset}, not {expected}")
        self._offsets[key] = chunk.offset + len(chunk.data)


def follow_argument(offsets: Offsets) -> dict[str, dict[str, int]]:
    """The offsets in the form that `follow.sh --from` takes, {stream: {slot: next byte}}."""
    by_stream: dict[str, dict[str, int]] = {"E": {}, "L": {}}
    for (stream, slot), offset in offsets.items():
        by_stream[stream][slot] = offset
    return by_stream
