"""Sentences for the user: on each record of the journal, and on what to do about a failure or incident."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from orchestrator import events as ev
from orchestrator.command_hints import command
from orchestrator.nodes.occupancy import busy_sentence
from orchestrator.reasons import Reason
from worker.text import and_more, plural


def clock(t: float) -> str:
    """Time of day on the controller's clock."""
    return time.strftime("%H:%M:%S", time.localtime(t))


def _counted(candidates: Sequence[object]) -> str:
    return plural(len(candidates), "candidate")


def _left_out(record: ev.ShapeTuned | ev.ShapeRefused) -> str:
    if not record.withheld:
        return ""
    more = " or more" if record.cut else ""
    return f"; left out because they faulted: {_counted(record.withheld)}{more}"


def node_slot(node: str, slot: str) -> str:
    return f"{node} slot {slot}"


def sentence(
    record: ev.Record,
    named: Callable[[int], str | None] = lambda shape: None,
    place: str = "",
    spot: Callable[[str, str], str] = node_slot,
) -> str:
    """`named` gives the name of a shape, None where there is none of that number; `place`: where its attempt ran;
    `spot`: the name of a slot (`Places.spot`)."""

    def name(shape: int) -> str:
        return named(shape) or f"shape {shape}"

    where = f" on {place}" if place else ""

    match record:
        case ev.WorkAdded(_, units, costs):
            n = plural(sum(map(len, units)), "shape")
            return f"{n} planned, estimated {sum(map(sum, costs)):.1f} s"
        case ev.Send(attempt, node, slot, _, shapes):
            return f"group {attempt} ({plural(len(shapes), 'shape')}) sent to {node} slot {slot}"
        case ev.AttemptStarted(attempt, node, slot):
            return f"attempt {attempt} started on {node} slot {slot}"
        case ev.ShapeStarted(attempt, shape):
            return f"{name(shape)} in flight ({attempt})"
        case ev.ShapeTuned(attempt, shape):
            return f"{name(shape)} tuned ({attempt})" + _left_out(record)
        case ev.ShapeRefused(attempt, shape, reason, detail):
            return f"{name(shape)}: {reason.message()}: {detail} ({attempt})" + _left_out(record)
        case ev.SettleShape(shape, attempt, confirmed, detail):
            return f"{name(shape)} tuned by {attempt}" + ("" if confirmed else ", unconfirmed") + f": {detail}"
        case ev.AttemptEnded(attempt, outcome, in_flight, detail, seconds):
            at = f" at {name(in_flight)}" if in_flight is not None and named(in_flight) else ""
            after = f" ended after {seconds:.1f} s" if seconds > 0 else " ended"
            return f"attempt {attempt}{where}{after}: {outcome.message()}{at}" + (f": {detail}" if detail else "")
        case ev.AttemptTaken(attempt, won):
            how = "taken back unclaimed" if won else "claimed before it could be taken back"
            return f"attempt {attempt} was {how}"
        case ev.TakeBack(attempt, node):
            return f"attempt {attempt} is to be taken back from {node}"
        case ev.FailShape(shape, reason, detail, _, confirmed):
            sure = "" if confirmed or reason.is_verdict else " (unconfirmed)"
            return f"{name(shape)} failed: {reason.message()}{sure}: {detail}"
        case ev.RetryAsked(shapes):
            return f"retry of {plural(len(shapes), 'failed shape')} requested"
        case ev.NodeExpected(node, slots, host, _, lease):
            of = (f", lease {lease}" if lease else "") + (f" on {host}" if host else "")
            return f"{node} is being prepared ({plural(len(slots), 'slot')}{of})"
        case ev.NodeJoined(node, slots):
            return f"{node} joined with {plural(len(slots), 'slot')}"
        case ev.NodeTroubled(node, detail, since):
            return f"{node} is in trouble since {clock(since)}, and is tried again: {detail}"
        case ev.NodeLost(node, detail):
            return f"{node} was given up: {detail}"
        case ev.LeaseEnded(node, cause, detail, charged):
            why = f"{cause.replace('_', ' ')}: {detail}" if detail else cause.replace("_", " ")
            return f"the lease {node} ended ({why})" + ("; what was in flight is taken as lost" if charged else "")
        case ev.LeasesQueued(pool, leases):
            if not leases:
                return f"{pool}: no lease is queued"
            words = and_more([f"{id_} ({why})" if why else id_ for id_, why in leases], 3)
            return f"{pool}: {plural(len(leases), 'lease is', 'leases are')} queued: {words}"
        case ev.FleetMayGrow(more):
            return "more leases may come" if more else "no more leases will come"
        case ev.NodeDraining(node):
            return f"{node} is draining"
        case ev.NodeBusy(node, doing, detail):
            return busy_sentence(node, doing, detail)
        case ev.SlotLost(node, slot, detail):
            return f"{node} slot {slot} was lost: {detail}"
        case ev.CanaryPassed(node, slot, us):
            return f"{node} slot {slot}: the canary passed ({us:.0f} us)"
        case ev.CanaryTimed(node, slot, compute, memory):
            return f"{node} slot {slot}: timed canary, compute {compute:.1f} us, memory {memory:.1f} us"
        case ev.CanaryFailed(node, slot, detail):
            return f"{node} slot {slot}: the canary failed: {detail}"
        case ev.Quarantine(node, slot, why, until):
            also = f" ({spot(node, slot)})" if spot(node, slot) != node_slot(node, slot) else ""
            return f"{node} slot {slot}{also} quarantined until {clock(until)}: {why}"
        case ev.AskCanary(node, slot, _):
            return f"a canary of {node} slot {slot} was requested"
        case ev.StopAsked(why):
            return f"no further work is started: {why}" if why else "stop requested"
        case ev.Resumed(epoch):
            return f"a controller took over the run (epoch {epoch})"
        case _:
            return type(record).__name__


_AGAIN = "Try it again once the cause is gone: {retry}"
_LOG = "See what the tuner printed: {logs}"

_ADVICE: dict[Reason, tuple[str, ...]] = {
    Reason.FAULT: (
        "Confirmed on two slots, a candidate of this shape kills its process: report shape and detail to the kernels'"
        " authors, and leave that backend out for it.",
        "Unconfirmed, it was seen on one slot only: run it on another node before you blame the shape.",
        _LOG,
        _AGAIN,
    ),
    Reason.OOM: (
        "Make room on the device: end other programs, tune fewer shapes at once (--batch), or give the container more"
        " memory.",
        _AGAIN,
    ),
    Reason.HANG: (
        "If the shape is only slow, give it more time: --watchdog (or --tuner-timeout) in a new run.",
        _LOG,
        _AGAIN,
    ),
    Reason.ERROR: ("The detail is the tuner's own message; the lines before it are in its log.", _LOG, _AGAIN),
    Reason.NOT_DELIVERED: (
        "The tuner came to its end without a word on the shape, each time: look for it in its log.",
        _LOG,
        _AGAIN,
    ),
    Reason.REJECTED: (
        "Worker and controller do not agree on what a spec is: is the node's code of this version?",
        _AGAIN,
    ),
    Reason.NO_CANDIDATE: (
        "No kernel of this image takes the shape on this device: try a newer image, another backend, or a padded"
        " shape.",
    ),
    Reason.WRONG_RESULT: (
        "Every candidate missed the error limit. Raise it with --err-ratio only if the model bears that; a kernel that"
        " is wrong everywhere is worth a report.",
    ),
    Reason.UNSUPPORTED: (
        "The tuner cannot do this shape on this device: another tuner or family can, or the device is the wrong one.",
    ),
    Reason.KILLS_NODES: (
        "It took its worker or node down every time: keep it off shared machines, and try it alone on one that may"
        " die.",
        _LOG,
        _AGAIN,
    ),
    Reason.OUTLIVES_LEASE: (
        "Each lease ended before the shape was tuned: ask for a longer time limit (time: of the pool), or for leases"
        " that are not preempted.",
        _AGAIN,
    ),
}

_INCIDENTS = {
    "trouble": "What it measured meanwhile was kept. If it comes often, look at the link and at sshd.",
    "away": "Its work went elsewhere. Check it with: {check}",
    "ended": "Its work went elsewhere; nothing of it is needed any more.",
    "busy": "It is waited for until it is free; --busy share or skip does otherwise.",
    "quarantine": "Its work went elsewhere. Look at the GPU's health ({status}) before you trust it again.",
    "gone": "Its worker could not be started again: look at its container's log on the node.",
    "canary": "The slot did not compute its known answer, so it gets no work. Look at the GPU, driver and image.",
}
_COMMANDS = {"check": command("nodes check"), "status": command("status")}
INCIDENTS = {kind: text.format_map(_COMMANDS) for kind, text in _INCIDENTS.items()}
"""Advice on an incident of a node or slot, by the kind of its span or mark."""


def advice(reason: str, run: str, node: str = "") -> list[str]:
    """Sentences for a reason by name; `run` as it is named on a command line."""
    try:
        known = Reason(reason)
    except ValueError:
        return []
    logs = command(f"logs {run}") + (f" --node {node}" if node else "")
    retry = command(f"retry {run} --reason {reason}")
    return [text.format(logs=logs, retry=retry) for text in _ADVICE.get(known, ())]
