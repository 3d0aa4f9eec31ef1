"""The reasons why an attempt ends or a shape fails, and everything that the program knows about each."""

from __future__ import annotations

from enum import Enum

from worker.protocol import SHAPE_VERDICTS


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
    # a tuner's verdict on a shape (worker/protocol/records.py)
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
        """Return whether it uses up one of the shape's tries."""
        return self.may_blame_slot or self in (Reason.NOT_DELIVERED, Reason.REJECTED)

    @property
    def is_verdict(self) -> bool:
        """Return whether it is the tuner's verdict on a shape, which is final without a second slot."""
        return self.value in SHAPE_VERDICTS

    @property
    def fails_shapes(self) -> bool:
        """Return whether a shape can be settled as failed for this reason."""
        return self.counts_as_try or self.is_verdict or self in (Reason.KILLS_NODES, Reason.OUTLIVES_LEASE)

    @property
    def may_blame_slot(self) -> bool:
        """Return whether it counts against the slot if the shape passes elsewhere."""
        return self in (Reason.FAULT, Reason.HANG, Reason.ERROR, Reason.OOM)

    @property
    def message(self) -> str:
        """Return what happened, in words."""
        return _WORDS[self][0]

    @property
    def advice(self) -> tuple[str, ...]:
        """Sentences for the user, with {logs} and {retry} for commands."""
        return _WORDS[self][1:]


_AGAIN = "Try it again once the cause is gone: {retry}"
_LOG = "See what the tuner printed: {logs}"
_WORDS: dict[Reason, tuple[str, ...]] = {
    Reason.DONE: ("went through all its shapes",),
    Reason.FAULT: (
        "the tuner's process died",
        "Confirmed on two slots, a candidate of this shape kills its process: report shape and detail to the kernels'"
        " authors, and leave that backend out for it.",
        "Unconfirmed, it was seen on one slot only: run it on another node before you blame the shape.",
        _LOG,
        _AGAIN,
    ),
    Reason.OOM: (
        "ran out of memory",
        "Make room on the device: end other programs, tune fewer shapes at once (--batch), or give the container more"
        " memory.",
        _AGAIN,
    ),
    Reason.HANG: (
        "made no progress and was ended by the watchdog",
        "If the shape is only slow, give it more time: --watchdog (or --tuner-timeout) in a new run.",
        _LOG,
        _AGAIN,
    ),
    Reason.ERROR: (
        "the tuner raised an error",
        "The detail is the tuner's own message; the lines before it are in its log.",
        _LOG,
        _AGAIN,
    ),
    Reason.NOT_DELIVERED: (
        "the tuner ended without a row for the shape",
        "The tuner exited without a result for this shape, each time. See its log.",
        _LOG,
        _AGAIN,
    ),
    Reason.DISK_FULL: ("the node's disk is full",),
    Reason.CANCELLED: ("was cancelled",),
    Reason.WORKER_DIED: ("the worker died",),
    Reason.NODE_LOST: ("the node was lost",),
    Reason.LEASE_ENDED: ("its lease ended",),
    Reason.REJECTED: (
        "the worker did not accept the spec",
        "The worker and the controller read specs differently. Check that the node has this version of the code.",
        _AGAIN,
    ),
    Reason.NO_CANDIDATE: (
        "no candidate could run",
        "No kernel of this image takes the shape on this device: try a newer image, another backend, or a padded"
        " shape.",
    ),
    Reason.WRONG_RESULT: (
        "every candidate was beyond the error limit",
        "Every candidate missed the error limit. Raise it with --err-ratio only if the model bears that; a kernel that"
        " is wrong everywhere is worth a report.",
    ),
    Reason.UNSUPPORTED: (
        "the tuner does not support the shape on this device",
        "The tuner cannot do this shape on this device: another tuner or family can, or the device is the wrong one.",
    ),
    Reason.KILLS_NODES: (
        "took its worker or node down every time it ran",
        "It took its worker or node down every time: keep it off shared machines, and try it alone on one that may"
        " die.",
        _LOG,
        _AGAIN,
    ),
    Reason.OUTLIVES_LEASE: (
        "outlives the lease it gets",
        "Each lease ended before the shape was tuned: ask for a longer time limit (time: of the pool), or for leases"
        " that are not preempted.",
        _AGAIN,
    ),
}
"""The message of each, and the advice."""
