"""Reasons for the end of an attempt or the failure of a shape, with what each means for retries and blame."""

from __future__ import annotations

from enum import Enum


class Reason(Enum):
    """A reason by name; the value is what ledger, CSV and JSON show."""

    # an attempt's end
    DONE = "done"
    FAULT = "fault"
    OOM = "oom"
    HANG = "hang"
    ERROR = "error"
    NOT_DELIVERED = "not_delivered"
    DISK_FULL = "disk_full"
    CANCELLED = "cancelled"
    WORKER_DIED = "worker_died"
    NODE_LOST = "node_lost"
    LEASE_ENDED = "lease_ended"
    REJECTED = "rejected"
    # a tuner's verdict on a shape
    NO_CANDIDATE = "no_candidate"
    WRONG_RESULT = "wrong_result"
    UNSUPPORTED = "unsupported"
    # a decision of ours on a shape
    KILLS_NODES = "kills_nodes"
    OUTLIVES_LEASE = "outlives_lease"

    @property
    def is_loss(self) -> bool:
        """Return whether the worker or its node was lost: an ordinary event, counted apart from tries."""
        return self in (Reason.WORKER_DIED, Reason.NODE_LOST)

    @property
    def counts_as_try(self) -> bool:
        """Return whether it uses up one of a shape's tries."""
        return self in (
            Reason.FAULT,
            Reason.OOM,
            Reason.HANG,
            Reason.ERROR,
            Reason.NOT_DELIVERED,
            Reason.REJECTED,
        )

    @property
    def is_verdict(self) -> bool:
        """Return whether it is the tuner's verdict on a shape: final without a second slot."""
        return self in (Reason.NO_CANDIDATE, Reason.WRONG_RESULT, Reason.UNSUPPORTED)

    @property
    def fails_shapes(self) -> bool:
        """Return whether a shape can be settled as failed for it."""
        return self.counts_as_try or self.is_verdict or self in (Reason.KILLS_NODES, Reason.OUTLIVES_LEASE)

    @property
    def may_blame_slot(self) -> bool:
        """Return whether it is evidence against the slot once the shape passes elsewhere."""
        return self in (Reason.FAULT, Reason.HANG, Reason.ERROR, Reason.OOM)

    def message(self) -> str:
        """Message for the user."""
        return _MESSAGES[self]


_MESSAGES = {
    Reason.DONE: "went through all its shapes",
    Reason.FAULT: "the tuner's process died",
    Reason.OOM: "ran out of memory",
    Reason.HANG: "made no progress and was ended by the watchdog",
    Reason.ERROR: "the tuner raised an error",
    Reason.NOT_DELIVERED: "the tuner ended without a row for the shape",
    Reason.DISK_FULL: "the node's disk is full",
    Reason.CANCELLED: "was cancelled",
    Reason.WORKER_DIED: "the worker died",
    Reason.NODE_LOST: "the node was lost",
    Reason.LEASE_ENDED: "its lease ended",
    Reason.REJECTED: "the worker did not accept the spec",
    Reason.NO_CANDIDATE: "no candidate could run",
    Reason.WRONG_RESULT: "every candidate was beyond the error limit",
    Reason.UNSUPPORTED: "the tuner does not support the shape on this device",
    Reason.KILLS_NODES: "took its worker or node down every time it ran",
    Reason.OUTLIVES_LEASE: "outlives the lease it gets",
}
