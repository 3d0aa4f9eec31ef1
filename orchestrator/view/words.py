"""Texts for people: times, nodes, slots, attempts, shapes, and advice on a failure or an incident. Then the time line
of every slot, what kept nodes and slots from working, and the history of shapes and of failures."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from shlex import quote
from typing import Any

from orchestrator.command_hints import command
from orchestrator.events import NOISE
from orchestrator.ledger.reader import LedgerReader
from orchestrator.paths import RunPaths
from orchestrator.policy.model import Attempt, Node, Shape, Slot, SlotId, State, describe_place
from orchestrator.reasons import Reason
from worker.text import and_more, plural


def clock(t: float) -> str:
    """Time of day on the controller's clock."""
    return time.strftime("%H:%M:%S", time.localtime(t))


def duration(seconds: float | None) -> str:
    """Duration as text: 8 s, 2 min 05 s, 3 h 10 min."""
    if seconds is None:
        return "unknown"
    s = max(0, round(seconds))
    if s < 60:
        return f"{s} s"
    if s < 3600:
        return f"{s // 60} min {s % 60:02d} s"
    return f"{s // 3600} h {s % 3600 // 60:02d} min"


WIDE = 1.6
"""If the ends of an estimate are further apart than this factor, we show a range."""


def left_words(low_s: float, mid_s: float, high_s: float) -> str:
    """`about 2 min 05 s`, or `1 min 10 s to 4 min 00 s` if the estimate is uncertain."""
    if high_s > WIDE * low_s:
        low, high = duration(_round(low_s)), duration(_round(high_s))
        return f"{low} to {high}" if low != high else f"about {low}"
    return f"about {duration(_round(mid_s))}"


def wait_words(awaited: Sequence[str]) -> str:
    """`, not counting the wait for n1 and the queue of pool`; "" if nothing is awaited."""
    return f", not counting the wait for {and_more(awaited, 3)}" if awaited else ""


def _round(seconds: float) -> float:
    """Seconds, rounded to what is significant."""
    s = max(1.0, seconds)
    return s if s < 120 else round(s / 5) * 5 if s < 600 else round(s / 60) * 60


def worked_words(sessions: Sequence[Sequence[float]]) -> str:
    """`1 min 30 s`, or `1 min 30 s (over 3 sessions from Nov 21 18:02 to Nov 22 09:14)`; "" before the first."""
    took = duration(sum(end - start for start, end in sessions))
    if len(sessions) < 2:
        return took if sessions else ""
    first, last = (time.strftime("%b %d %H:%M", time.localtime(t)) for t in (sessions[0][0], sessions[-1][1]))
    return f"{took} (over {len(sessions)} sessions from {first} to {last})"


def slot_words(state: State, node: str, slot: str) -> str:
    """Name of a slot, with its host and GPU if they are known and differ from node and slot."""
    known = state.slot(node, slot)
    return describe_place(known.gpu.place, state.nodes) if known is not None else f"{node} slot {slot}"


_NODE_WORDS = {
    "away": "{name} is being prepared ({slots}{lease}){because}",
    "joined": "{name} joined with {slots}",
    "trouble": "{name} is in trouble; we try it again{because}",
    "busy": "{name} is occupied; we wait for it{because}",
    "shared": "{name} is occupied and shared, so its times may be too long{because}",
    "draining": "{name} is draining",
    "lost": "{name} was given up{because}",
    "gone": "the lease {name} ended ({why})",
}


def node_words(node: Node, to: str, why: str) -> str:
    """Sentence on a change of a node (an entry of its history)."""
    lease = f", lease {node.lease} on {node.host}" if node.lease else ""
    slots, because = plural(len(node.slots), "slot"), f": {why}" if why else ""
    return _NODE_WORDS[to].format(name=node.name, slots=slots, lease=lease, because=because, why=why)


def slot_change(state: State, slot: Slot, to: str, why: str, until: float = 0.0) -> str:
    """Sentence on a change of a slot (an entry of its history). `until`: the end of a current quarantine."""
    name, place = f"{slot.node} slot {slot.name}", slot_words(state, slot.node, slot.name)
    also = f" ({place})" if place != name else ""
    match to:
        case "quarantined":
            return f"{name}{also} quarantined" + (f" until {clock(until)}" if until else "") + f": {why}"
        case "lost":
            return f"{name} was lost: {why}"
        case "canary failed":
            return f"{name}: the canary failed: {why}"
        case _:
            return f"{name} is {to}"


def leases_words(leases: Sequence[tuple[str, str]]) -> str:
    """`2 leases are queued: 17 (Priority), 18`."""
    words = and_more([f"{id_} ({why})" if why else id_ for id_, why in leases], 3)
    return f"{plural(len(leases), 'lease is', 'leases are')} queued: {words}"


def end_of(state: State, a: Attempt, named: Callable[[int], str]) -> str:
    """Sentence on the end of an attempt."""
    where = f" on {a.node} slot {a.slot}" if a.started_at is not None else ""
    if a.outcome is None:
        return f"attempt {a.id}{where} was {'lost' if a.is_lost else 'taken back unclaimed'}" + _because(a.detail)
    at = f" at {named(a.in_flight)}" if a.in_flight is not None else ""
    after = f" after {a.seconds:.1f} s" if a.seconds > 0 else ""
    return f"attempt {a.id}{where} ended{after}: {a.outcome.message}{at}" + _because(a.detail)


def _because(detail: str) -> str:
    return f": {detail}" if detail else ""


def settled_words(shape: Shape, done: str = "tuned") -> str:
    """State of a shape, and why; `done`: the word for a shape that has a result."""
    if shape.state == "tuned":
        sure = ", unconfirmed" if shape.confirmed is False else ""
        return f"{done}{sure}" + _because(shape.detail)
    if shape.state == "failed" and shape.reason is not None:
        sure = "" if shape.confirmed or shape.reason.is_verdict else ", unconfirmed"
        return f"failed ({shape.reason.value}{sure})" + _because(shape.detail)
    return shape.state


INCIDENTS = {
    "trouble": "Its measurements were kept. If this happens often, look at the link and at sshd.",
    "away": "Its work went elsewhere. Check it with: {check}",
    "ended": "Its work went elsewhere. There is nothing to do.",
    "busy": "We wait until it is free. To share or skip it: --busy share, --busy skip.",
    "shared": "Measure there again when nobody else uses it.",
    "quarantine": "Its work went elsewhere. Before you trust it again, look at the GPU's health ({status}), the driver"
    " and the image.",
    "gone": "Its worker could not be started again: look at its container's log on the node.",
    "canary": "The slot did not compute its known answer, so it gets no work. Look at the GPU, driver and image.",
}
"""Advice on an incident of a node or slot, by its kind in the timeline; see `incident_advice`."""
LEASE_TROUBLE = "Its measurements were kept. If this happens often, look at what the scheduler says of its machine."
"""The advice on `trouble` of a lease: the scheduler leads to it, no sshd."""
STREAM_ENDED = (
    "Its measurements were kept. The process that sends its records was ended there (by docker kill, a restart of"
    " Docker, ...); the link is not the cause."
)
"""The advice on `trouble` in which the command on the node had an exit code, which a broken link never gives."""


def incident_advice(incident: Span, node: Node, paths: RunPaths) -> str:
    """Advice on an incident, with commands for this run."""
    if incident.kind == "trouble" and node.lease:
        return LEASE_TROUBLE
    if incident.kind == "trouble" and "the stream ended: ended with code" in incident.text:
        return STREAM_ENDED
    check = command(f"nodes check -i {quote(str(paths.inventory))}")
    return INCIDENTS[incident.kind].format(check=check, status=command(f"status {paths.named}"))


def advice(reason: Reason, run: str, node: str) -> list[str]:
    """Sentences on what to do about a failure; `run` as it is named on a command line."""
    logs = command(f"logs {run}") + (f" --node {node}" if node else "")
    retry = command(f"retry {run} --reason {reason.value}")
    return [text.format(logs=logs, retry=retry) for text in reason.advice]


MOST_SEGMENTS = 20_000
"""More would be too small to see and too many to send: neighbours of one kind become one."""
LONG_PAUSE = 0.15
"""A share of the whole: where nothing happened for longer (a controller that was away over night), time is cut."""
_KINDS = {
    Reason.DONE: "done",
    Reason.CANCELLED: "cancelled",
    Reason.LEASE_ENDED: "cancelled",
    Reason.WORKER_DIED: "lost",
    Reason.NODE_LOST: "lost",
}
"""Kind of an attempt by the reason of its end; the other reasons are faults."""


def kind_of(a: Attempt) -> str:
    """Kind of an attempt that a worker began: running, done, cancelled, lost or fault."""
    if a.outcome is None:
        return "running" if a.state == "started" else "lost"
    return _KINDS.get(a.outcome, "fault")


_NODE = {"trouble": "trouble", "busy": "busy", "shared": "shared"}
_NODE |= {"away": "preparing", "lost": "away", "gone": "ended"}
MOMENTS = ("canary", "shared")
"""Kinds of spans that are marks on the page."""
_SLOT = {"quarantined": "quarantine", "lost": "gone", "canary failed": "canary"}


@dataclass(slots=True)
class Span:
    """Interval in which a node or slot did not work. kind: preparing, trouble, away, busy, ended or released (a lease),
    quarantine, gone; or a moment: canary (it failed), shared (others use the node too)."""

    node: str
    slot: str | None
    start: float
    kind: str
    text: str
    end: float | None = None


def spans(state: State, node: str) -> list[Span]:
    """Intervals in which the node or a slot of it did not work, in order of time; made of their histories."""
    n, out = state.nodes[node], list[Span]()
    for i, (t, to, why) in enumerate(n.history):
        kind = "released" if to == "gone" and why.startswith("released") else _NODE.get(to)
        if kind is not None:
            out.append(Span(node, None, t, kind, node_words(n, to, why), _end(n.history, i, t)))
    for slot in n.slots.values():
        for i, (t, to, why) in enumerate(slot.history):
            kind = _SLOT.get(to)
            if kind is not None and not (kind == "gone" and n.state == "gone"):
                text = slot_change(state, slot, to, why)
                out.append(Span(node, slot.name, t, kind, text, _end(slot.history, i, t)))
    return sorted(out, key=lambda s: s.start)


_MOMENTS = ("canary failed", "shared", "draining")
"""Entries of a history after which the state before them goes on."""


def _end(history: list[tuple[float, str, str]], i: int, start: float) -> float | None:
    if history[i][1] in _MOMENTS:
        return start
    return next((t for t, to, _ in history[i + 1 :] if to not in _MOMENTS), None)


def incidents_of(state: State, node: str) -> list[Span]:
    """Spans of a node for which there is advice. A quarantine tells of the failed canary with which it began."""
    found = [s for s in spans(state, node) if s.kind in INCIDENTS]
    told = {(s.slot, s.start) for s in found if s.kind == "quarantine"}
    return [s for s in found if s.kind != "canary" or (s.slot, s.start) not in told]


def lanes(state: State) -> dict[SlotId, list[Attempt]]:
    """The attempts of each slot, in the order in which they began; slots that there are, each."""
    out: dict[SlotId, list[Attempt]] = {s.id: [] for n in state.nodes.values() for s in n.slots.values()}
    for a in state.attempts.values():
        if a.started_at is not None:
            out[a.node, a.slot].append(a)
    for lane in out.values():
        lane.sort(key=lambda a: a.started_at or 0.0)
    return dict(sorted(out.items(), key=lambda p: (p[0][0], len(p[0][1]), p[0][1])))


def timeline(state: State, named: Callable[[int], str], start: float, end: float) -> dict[str, Any]:
    """Seconds from `start`. `lanes`: node, slot, segments (start, end or null, kind, attempt, group, tuned, outcome,
    shape, detail); `spans`: node, slot or null, start, end or null, kind, text; `marks`: t, kind, text, node, slot."""

    def at(t: float | None) -> float | None:
        return None if t is None else round(max(0.0, t - start), 1)

    by_slot = lanes(state)
    gap = (end - start) / 500.0 if sum(map(len, by_slot.values())) > MOST_SEGMENTS else 0.0
    found = sorted((s for n in state.nodes for s in spans(state, n)), key=lambda s: s.start)
    tuned: dict[str, int] = defaultdict(int)
    for s in state.shapes.values():
        if s.state == "tuned":
            tuned[s.attempt] += 1
    return {
        "start": round(start, 1),
        "length": at(end),
        "lanes": [[*slot, list(_segments(lane, gap, tuned, named, at))] for slot, lane in by_slot.items()],
        "spans": [
            [s.node, s.slot, at(s.start), at(s.end), s.kind, s.text[:300]] for s in found if s.kind not in MOMENTS
        ],
        "marks": sorted(
            [at(b), "controller", f"a controller took over the run (epoch {n})", "", ""]
            for n, (b, _) in enumerate(state.sessions, 1)
        ) + [[at(s.start), s.kind, s.text[:300], s.node, s.slot] for s in found if s.kind in MOMENTS],
        "pauses": [[at(a), at(b)] for a, b in _pauses(state, by_slot, start, end)],
        "coarse": bool(gap),
    }  # fmt: skip


def _segments(
    lane: list[Attempt], gap: float, tuned: dict[str, int], named: Callable[[int], str], at: Callable[..., Any]
) -> Iterator[list[Any]]:
    """Neighbours that ended well and are too short to be seen become one, named after the first."""
    kept: list[Any] = []
    for a in lane:
        kind, start, end = kind_of(a), at(a.started_at), at(a.ended_at)
        if kept and kept[2] == kind == "done" and gap and end - kept[0] < 4 * gap and start - kept[1] < gap:
            kept[1], kept[5] = end, kept[5] + tuned[a.id]
            continue
        if kept:
            yield kept
        flight = named(a.in_flight) if a.in_flight is not None and kind != "done" else ""
        outcome = a.outcome.value if a.outcome else "node_lost" if a.is_lost else ""
        kept = [start, end, kind, a.id, a.id, tuned[a.id], outcome, flight, a.detail[:300]]
    if kept:
        yield kept


def _pauses(
    state: State, by_slot: dict[SlotId, list[Attempt]], start: float, end: float
) -> Iterator[tuple[float, float]]:
    """Long whiles without a segment or a mark of the controller."""
    busy = [(a.started_at or 0.0, a.ended_at or end) for lane in by_slot.values() for a in lane]
    reached = start
    for a, b in sorted([*busy, *((begin, begin) for begin, _ in state.sessions)]):
        if a - reached > LONG_PAUSE * (end - start):
            yield reached, a
        reached = max(reached, b)


Step = tuple[float, str, str]
"""Time, words and kind: of a span or an attempt, `sent`, `begun`, `taken`, `settled` or `reading`."""


def went_wrong(state: State, s: Shape) -> bool:
    """Return whether the shape failed, is unconfirmed, or an attempt ended badly at it."""
    ended = (state.attempts[a] for a in s.attempts)
    return s.state == "failed" or s.confirmed is False or any(a.in_flight == s.id and _is_bad(a) for a in ended)


def _is_bad(a: Attempt) -> bool:
    return a.outcome is not None and (a.outcome.may_blame_slot or a.outcome.is_loss)


def shape_steps(state: State, s: Shape) -> list[Step]:
    """One step for each attempt that a worker began with the shape in it and that concerned it, and for its end."""
    steps, unclaimed = [], 0
    for a in (state.attempts[x] for x in s.attempts):
        if a.started_at is None:
            if any(x.attempt == a.id for x in s.losses):
                steps.append(
                    (a.ended_at or a.sent_at, f"{a.id} on {a.node} slot {a.slot} was lost with its node", kind_of(a))
                )
            else:
                unclaimed += a.state == "over"
            continue
        where, took = f"{a.id} on {a.node} slot {a.slot}", f" after {a.seconds:.1f} s" if a.seconds > 0 else ""
        t = a.ended_at or a.current_at or a.started_at
        if s.id in a.landed:
            n = max((len(f.blocked - {NOISE}) for f in s.faults if f.attempt == a.id), default=0)
            result = "the tuner's verdict" if s.reason and s.reason.is_verdict else "a result"
            without = f", without {plural(n, 'candidate')} that faulted" if n else ""
            noise = ", whose time is noise" if s.noisy == a.id else ""
            steps.append((t, f"{where}: {result}{without}{noise}", kind_of(a)))
        elif a.in_flight == s.id and a.outcome is not None:
            why = f": {a.detail}" if a.detail else ""
            steps.append((t, f"{where} ended at it{took}: {a.outcome.message}{why}", kind_of(a)))
        elif a.state == "started":
            flying = a.current == s.id
            words = "in flight" if flying else "not its turn yet"
            steps.append((a.current_at if flying else a.started_at, f"{where}: {words}", kind_of(a)))
        else:
            ended = "its node was lost" if a.is_lost else a.outcome.message if a.outcome else "it was taken back"
            steps.append((t, f"{where} ended before it was measured: {ended}", kind_of(a)))
    if unclaimed:
        first = state.attempts[s.attempts[0]].sent_at
        steps.append((first, f"{plural(unclaimed, 'attempt')} went back unclaimed", "taken"))
    if s.state != "pending":
        steps.append((s.settled_at, s.state, "settled"))
    return sorted(steps, key=lambda step: step[0])


MOST_SHAPES = 200
"""The most of a reason that are listed one by one; all are in the table."""
MOST_INCIDENTS = 200


def failures(ledger: LedgerReader, named: Callable[[int], str], run: str) -> list[dict[str, Any]]:
    """Failures by reason, the most frequent first. `run`: its name on a command line."""
    state, by_reason = ledger.replayed, defaultdict[str, list[dict[str, Any]]](list)
    failed, nodes = ledger.failed(), dict[str, str]()
    for f in failed:
        shapes = by_reason[f.reason or ""]
        nodes.setdefault(f.reason or "", f.node)
        if len(shapes) < MOST_SHAPES:
            shapes.append(
                {
                    "id": f.id, "shape": named(f.id), "detail": f.detail, "confirmed": bool(f.confirmed),
                    "where": f"{f.node} slot {f.slot}" if f.node else "", "attempts": f.attempts,
                    "verdict": Reason(f.reason).is_verdict,
                    "story": [[round(t, 1), text] for t, text, _ in shape_steps(state, state.shapes[f.id])],
                }
            )  # fmt: skip
    return [
        {
            "reason": reason, "count": n, "message": Reason(reason).message,
            "advice": advice(Reason(reason), run, nodes[reason]), "shapes": by_reason[reason],
        }
        for reason, n in ledger.failures().items()
    ]  # fmt: skip


def incidents(state: State, paths: RunPaths) -> list[dict[str, Any]]:
    """Incidents of nodes and slots, oldest first: outages, quarantines, failed canaries."""
    found = sorted((s for n in state.nodes for s in incidents_of(state, n)), key=lambda s: s.start)
    return [
        {"t": round(s.start, 1), "end": None if s.end is None else round(s.end, 1), "kind": s.kind, "text": s.text,
         "advice": incident_advice(s, state.nodes[s.node], paths)}
        for s in found[-MOST_INCIDENTS:]
    ]  # fmt: skip
