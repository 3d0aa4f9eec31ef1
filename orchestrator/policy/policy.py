"""The policy of a run: events in, decisions out. No clock, no socket, no file.

    handle(event, now) == apply(event), then as long as there is one: decide, apply the decision

`decide` changes nothing, so a journal of events and decisions that is applied in order gives the same state as having
lived through it.

A group is the longest waiting unit and every k-th of the rest, so that each group is a mix and errors of the estimates
even out. Its size is a share of the work left for each slot (guided self-scheduling, Polychronopoulos and Kuck 1987),
but it is long enough that its set-up costs little. At the end an idle slot takes the later half of the rest of a
running group.

At the end: sentences on what waits, and on why a run has no slot left.
"""

from __future__ import annotations

import math
from operator import attrgetter

from orchestrator.events import AskCanary, Decision, Event, FailShape, Quarantine, Send, TakeBack
from orchestrator.policy import blame
from orchestrator.policy.apply import apply
from orchestrator.policy.model import Attempt, Kind, Node, Shape, Slot, State, Waiting, spot
from orchestrator.policy.settings import PolicySettings
from worker.text import and_more, plural

_tier, _seconds = attrgetter("tier"), attrgetter("seconds")  # of a kind


class Policy:
    """Policy of one run. Not thread-safe: one loop owns it."""

    def __init__(self, settings: PolicySettings | None = None) -> None:
        self.state = State(settings or PolicySettings())

    def handle(self, event: Event, now: float) -> list[Decision]:
        """Apply an event; return the decisions that follow, in order. `now` in epoch seconds."""
        apply(self.state, event, now)
        out = []
        while (decision := decide(self.state, now)) is not None:
            apply(self.state, decision, now)
            out.append(decision)
        return out

    @property
    def done(self) -> bool:
        """Return whether every shape is settled."""
        return not self.state.pending

    @property
    def stuck(self) -> str | None:
        """Sentence on the lack of slots to work on; None while there is one, or nothing is to be done."""
        return stuck(self.state) if self.state.pending and not self.state.stopped else None

    def outstanding(self) -> list[Attempt]:
        """Attempts sent and not over, in the order they were sent; to be read only."""
        return [self.state.attempts[a] for a in self.state.open]

    def backlog_s(self) -> float:
        """Estimated seconds on one slot of all unsettled shapes; 0 where no new work is started."""
        return 0.0 if self.state.stopped else self.state.left_s

    @property
    def has_waiting(self) -> bool:
        """Return whether a shape waits: for a slot, or unclaimed in an inbox."""
        state = self.state
        return bool(state.waiting or state.apart) or any(state.attempts[a].state == "sent" for a in state.open)

    def places_awaited(self) -> int:
        """Number of hosts that there must be, as a shape waits for a slot that none of those in use is: these and one
        more; 0 where none does."""
        state = self.state
        places = {slot.gpu.place: slot for slot in state.usable.values()}
        for shape in (state.shapes[s] for s in state.apart if state.shapes[s].faults):
            bad = {f.place for f in shape.faults}
            if bad.issuperset(places) or not any(suits(state, shape, slot) for slot in places.values()):
                return len(state.hosts) + 1
        return 0

    def idle_nodes(self) -> list[str]:
        """Joined nodes with nothing to do: nothing was sent there that is not over."""
        return [
            n.name
            for n in self.state.nodes.values()
            if n.state == "joined" and not any(s.running or s.queued for s in n.slots.values())
        ]

    def quarantined_hosts(self, now: float) -> list[str]:
        """Hosts on which every known slot is in quarantine, as far as its cool-down lasts beyond `now`."""
        hosts: dict[str, list[Slot]] = {}
        last_leases: dict[str, Node] = {}
        for node in self.state.nodes.values():
            if node.state == "gone":
                last_leases[node.host] = node
            else:
                hosts.setdefault(node.host, []).extend(node.slots.values())
        for host, node in last_leases.items():  # a host without a node now is judged by the last that it had
            hosts.setdefault(host, list(node.slots.values()))
        return [host for host, slots in hosts.items() if slots and all(_is_shut(slot, now) for slot in slots)]


def _is_shut(slot: Slot, now: float) -> bool:
    """Return whether the slot's GPU is in quarantine beyond `now`."""
    return bool(slot.gpu.shut) and slot.gpu.until > now


def decide(state: State, now: float) -> Decision | None:
    """The next decision; None: nothing is to be done. Apply it before the next is asked for."""
    for end in state.ripe.values():
        has_result = isinstance(end, FailShape) and state.shapes[end.shape].noisy
        return blame.keep_result(state.shapes[end.shape], end.detail) if has_result else end
    for slot_id, reason in state.to_shut.items():
        return blame.quarantine(state, state.nodes[slot_id[0]].slots[slot_id[1]], reason, now)
    if (verdict := blame.judge(state, now)) is not None:
        return verdict
    if not state.stopped and (canary := _canary(state, now)) is not None:
        return canary
    for attempt in state.to_recall:
        return TakeBack(attempt, state.attempts[attempt].node)
    return None if state.stopped else next_work(state)


def _canary(state: State, now: float) -> AskCanary | Quarantine | None:
    """Ask slots whose quarantine is over, and those of a node that is back, for a canary; one that is not answered
    counts as failed."""
    for slot_id in state.to_ask:
        return AskCanary(*slot_id, f"canary-{len(state.canaries)}")
    for (node, name), at in state.timers.items():
        slot = state.nodes[node].slots[name]
        if at > now or (slot.canary and slot.running is not None):
            continue
        if slot.canary:
            return blame.quarantine(state, slot, f"no answer to its canary for {state.settings.canary_s:.0f} s", now)
        if state.nodes[node].state == "joined":
            return AskCanary(node, name, f"canary-{len(state.canaries)}")
    return None


def next_work(state: State) -> Send | TakeBack | None:
    """The next group to send, or to take back for an idle slot. None: no slot can get more."""
    if not state.idle and not state.low:
        return None
    able = [*state.idle.values(), *state.low.values()] if state.apart else []
    clean = [slot for slot in able if not slot.gpu.row]
    for shapes in sorted(state.apart.values(), key=lambda shapes: len(state.shapes[shapes[0]].losses)):
        shape = state.shapes[shapes[0]]
        for slot in clean if _has_clean(state, shape) else able:
            if suits(state, shape, slot):
                return _send(state, slot, shapes)
    for host, shapes in state.twice.values():
        for slot in state.idle.values():
            fits = slot.gpu.place[0] != host and not slot.gpu.row and not slot.doubtful
            if fits and suits(state, state.shapes[shapes[0]], slot):
                return _send(state, slot, shapes)
    if state.waiting:
        for slot in state.idle.values():
            return _send(state, slot, deal(state, slot))
        per_slot, alone = state.waiting_s / max(1, len(state.usable)), len(state.usable) == 1
        if alone or per_slot > state.settings.ahead_s / 6:  # near the end, work sent ahead is only taken back
            for slot in state.low.values():
                if (alone or slot.ahead_s < per_slot) and not slot.doubtful:
                    return _send(state, slot, deal(state, slot))
        return None
    if not state.idle:
        return None
    return _spare(state) or (_end_of_another(state, next(iter(state.idle.values()))) if state.shares_end else None)


def _send(state: State, slot: Slot, shapes: tuple[int, ...]) -> Send:
    return Send(f"g{state.next_seq:04d}", slot.node, slot.name, state.next_seq, shapes)


def suits(state: State, shape: Shape, slot: Slot) -> bool:
    """Return whether a suspect shape may run on the slot: on another node than before if there is one, else on another
    slot, else again here; slots whose last attempt ended well come first. A node runs only one lost shape at a time, so
    that the next loss names its culprit. If few hosts are left, lost shapes run after all other work."""
    node = state.nodes[slot.node]
    few = len(state.hosts) < state.settings.few_hosts
    if shape.losses and (slot.running is not None or (few and state.waiting)):
        return False
    if shape.losses and any(_is_suspect(state, a) for s in node.slots.values() for a in (s.running, *s.queued)):
        return False
    if len(shape.ends) >= state.settings.fresh_after and state.may_grow and node.lease and node.used:
        return False
    bad = {f.place for f in shape.faults}
    if not bad:
        return True
    hosts, place = {host for host, _ in bad}, slot.gpu.place
    if len(state.hosts) > sum(host in state.hosts for host in hosts):
        return place[0] not in hosts and not (slot.gpu.row and _has_clean(state, shape))
    if len(state.usable) > sum(p in state.usable for p in bad):
        return place not in bad
    return place not in bad or not state.may_grow


def _has_clean(state: State, shape: Shape) -> bool:
    """Return whether a node where the shape did not fault has a slot whose last attempt ended well. If so, the shape
    must go to such a slot."""
    hosts = {f.place[0] for f in shape.faults}
    return bool(hosts) and len(state.clean) > sum(state.hosts[host][1] for host in hosts if host in state.hosts)


def _is_suspect(state: State, attempt: str | None) -> bool:
    return attempt is not None and bool(state.shapes[state.attempts[attempt].shapes[0]].losses)


def deal(state: State, slot: Slot) -> tuple[int, ...]:
    """The next group for the slot. A doubtful slot gets the shortest unit, because a fault costs least there."""
    kinds = [kind for kind in state.kinds.values() if kind.waiting]  # a large run has thousands
    first = min(map(_tier, kinds))
    kinds = [kind for kind in kinds if kind.tier == first]
    if slot.doubtful:
        return max(kind.waiting[-1] for kind in kinds)[2]
    s, free = state.settings, max(1, len(state.free))
    share, setups = (s.share, s.floor_setups) if state.shares_end else (s.share_apart, s.floor_apart)
    room = state.waiting_s / (share * max(1, len(state.usable)))
    room = max(room, min(setups * state.setup_s, state.waiting_s / free))
    if len(state.usable) == 1 and not state.may_grow:
        room = state.waiting_s  # nobody waits for the end of a group
    # first the kind with the longest unit if that alone is longer than a group, else the one with the most work left
    long = [kind for kind in kinds if -kind.waiting[0][0] > room]
    kind = max(long, key=lambda kind: (-kind.waiting[0][0], kind.seconds)) if long else max(kinds, key=_seconds)
    if kind.alone:
        return kind.waiting[0][2]
    if not state.shares_end:  # as few groups as possible, all about equal
        room = kind.seconds / math.ceil(kind.seconds / max(room, 1e-9) - 1e-6)
    return tuple(i for unit in _sample(kind, room) for i in unit[2])


def _sample(kind: Kind, room: float) -> list[Waiting]:
    """The longest unit of the kind, and every k-th of the rest up to `room` seconds."""
    waiting = kind.waiting
    out = [waiting[0]]
    room += waiting[0][0]
    if room <= 0 or len(waiting) == 1:
        return out
    step = max(1.0, (kind.seconds + waiting[0][0]) / room)
    at = step
    while at < len(waiting) + step - 1 and room > 0:
        unit = waiting[min(int(at), len(waiting) - 1)]
        if unit is not out[-1]:
            out.append(unit)
            room += unit[0]
        at += step
    return out


def _spare(state: State) -> TakeBack | None:
    """Take back the last group in the inbox of the slot with the most work, for an idle slot."""
    if state.taking >= len(state.idle):
        return None
    full = (slot for slot in state.usable.values() if slot.queued and slot.running is not None)
    for slot in sorted(full, key=lambda slot: -slot.ahead_s):
        a = state.attempts[slot.queued[-1]]
        if not a.taking and not _is_picky(state.shapes[a.shapes[0]]):  # else it might move back and forth
            return TakeBack(a.id, a.node)
    return None


def _end_of_another(state: State, slot: Slot) -> Send | None:
    """Send an idle slot the later half of the rest of the running group that has the most work, the last unit first."""
    if not state.single:
        return None
    best: Attempt | None = None
    for other in state.usable.values():
        if other.running is not None:
            a = state.attempts[other.running]
            more = a.single and (best is None or a.left_s > best.left_s)
            if more and any(_may_copy(state, s) for s in reversed(a.shapes)):
                best = a
    if best is None:
        return None
    units: dict[int, list[int]] = {}
    for s in best.shapes:
        if _may_copy(state, s):
            units.setdefault(state.shapes[s].unit, []).append(s)
    half = list(units.values())[len(units) // 2 :]
    return _send(state, slot, tuple(s for unit in reversed(half) for s in unit))


def _may_copy(state: State, s: int) -> bool:
    shape = state.shapes[s]
    return not _is_picky(shape) and shape.state == "pending" and shape.copies < 2 and shape.apart is None


def _is_picky(shape: Shape) -> bool:
    return bool(shape.faults or shape.losses or shape.ends)


def stuck(state: State) -> str | None:
    """Sentence on why no slot is left; None while something runs or a slot may come, or come back."""
    if state.usable or state.may_grow or state.open or state.held:
        return None
    if not state.nodes:
        return "no node came, and none is expected any more" if state.may_grow is False else None
    reasons = dict[str, list[str]]()
    gone = [n for n in state.nodes.values() if n.state == "gone"]
    over = [f"{plural(len(gone), 'lease')} ended, the last one {last.name}" for last in gone[-1:]]
    for n in (n for n in state.nodes.values() if n.state != "gone"):
        if n.state in ("away", "busy"):
            return None
        if n.state == "lost":
            reasons.setdefault("lost", []).append(n.name)
        elif n.draining:
            reasons.setdefault("draining", []).append(n.name)
        else:
            for s in n.slots.values():
                if s.state == "quarantined" and s.gpu.strikes < state.settings.max_strikes:
                    return None
                what = s.state + (f" ({s.why})" if s.why else "")
                reasons.setdefault(what, []).append(f"{n.name} slot {s.name}")
    said = (f"{and_more(of, 4)} {'is' if len(of) == 1 else 'are'} {what}" for what, of in reasons.items())
    return "; ".join((*over, *said))


def why(state: State, what: int) -> str:
    """Sentence on where a pending shape is, and what it waits for; it does not name the shape."""
    shape = state.shapes[what]
    for id_ in reversed(shape.attempts):
        if id_ in state.open:
            return whereabouts(state, state.attempts[id_])
    head = "it waits"
    if state.stopped:
        return f"{head}: the run is stopped"
    if what in state.held:
        where = " and ".join(dict.fromkeys(spot(f.place, state.nodes) for f in shape.faults))
        return f"{head} for its verdict, until {where} tuned something else: only then are its faults evidence"
    able = [s for n in state.nodes.values() if n.state == "joined" and not n.draining for s in n.slots.values()]
    able = [s for s in able if s.state == "ready"]
    if not able:
        return f"{head}: {stuck(state) or _not_ready(state)}"
    if shape.apart is None or any(suits(state, shape, s) for s in able):
        return f"{head} for its turn: every slot has enough ahead"
    if shape.losses and not shape.faults:
        return f"{head}: a worker or node was lost with it, and one such shape runs on a node at a time"
    if not shape.faults:
        return f"{head} for a lease on which nothing ran yet: {plural(len(shape.ends), 'lease')} ended under it"
    where = ", ".join(dict.fromkeys(spot(f.place, state.nodes) for f in shape.faults))
    wrong = "its time was noise" if shape.noisy else "it went wrong"
    return f"{head} for a slot other than {where}, where {wrong}"


def whereabouts(state: State, a: Attempt) -> str:
    """Sentence on where an attempt is that is not over."""
    if a.state == "started":
        return f"attempt {a.id} runs on {a.node} slot {a.slot}"
    if a.taking:
        return f"attempt {a.id} is being taken back from {a.node}"
    before = state.slot_of(a).queued.index(a.id)
    return f"attempt {a.id} is in the inbox of {a.node} slot {a.slot} with {plural(before, 'other')} before it"


def _not_ready(state: State) -> str:
    if not state.nodes:
        return "no node has joined yet"
    reasons = [f"{n.name} {_state_of(n)}" for n in state.nodes.values() if n.state != "gone"]
    if not reasons:
        return "every lease has ended, and another is awaited"
    return "no slot takes work now (" + ", ".join(reasons) + ")"


def _state_of(n: Node) -> str:
    if n.state != "joined":
        return {"lost": "is lost", "busy": "waits for others"}.get(n.state, "is being prepared")
    if n.draining:
        return "is draining"
    return "slots: " + ", ".join(f"{s.name} {s.state}" for s in n.slots.values())
