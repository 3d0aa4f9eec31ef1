"""The policy of a run: events in, decisions out. No clock, no socket, no file.

    handle(event, now) == apply(event), then as long as there is one: decide, apply the decision

`decide` changes nothing, so a journal of events and decisions that is applied in order gives the same state as having
lived through it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields

from orchestrator.events import AskCanary, Decision, Event, Quarantine, Record, TakeBack
from orchestrator.policy import blame
from orchestrator.policy.apply import apply
from orchestrator.policy.model import Attempt, State
from orchestrator.policy.settings import PolicySettings
from orchestrator.policy.supply import next_work, suits
from orchestrator.policy.why import stuck, why


def decide(state: State, now: float) -> Decision | None:
    """The next decision; None: nothing is to be done. Apply it before the next is asked for."""
    for end in state.ripe.values():
        return end
    for slot_id, reason in state.to_shut.items():
        return blame.quarantine(state, state.nodes[slot_id[0]].slots[slot_id[1]], reason, now)
    verdict = blame.judge(state, now) if state.held else None
    if verdict is not None:
        return verdict
    if not state.stopped:
        canary = _canary(state, now)
        if canary is not None:
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


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of the run in shapes. `stuck`: why no slot is left to work on, where that is so."""

    total: int
    tuned: int
    failed: int
    running: int
    pending: int
    stopped: bool
    done: bool
    stuck: str | None


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

    def apply(self, record: Record, t: float) -> None:
        """Apply a record without deciding anything: for the replay of a journal."""
        apply(self.state, record, t)

    def progress(self) -> Progress:
        """Counts of shapes. `running`: slots at work, a shape each."""
        state = self.state
        pending = state.pending
        running = min(state.running, pending)
        return Progress(
            len(state.shapes), state.tuned, state.failed, running, pending - running, state.stopped, not pending,
            stuck(state) if pending and not state.stopped else None,
        )  # fmt: skip

    def outstanding(self) -> list[Attempt]:
        """Attempts sent and not over, in the order they were sent; to be read only."""
        return [self.state.attempts[a] for a in self.state.open]

    def is_outstanding(self, attempt: str) -> bool:
        return attempt in self.state.open

    def why(self, what: str | int) -> str:
        """One sentence: where a group (by its attempt) or a shape is, and what it waits for."""
        return why(self.state, what)

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
        picky = [state.shapes[s] for s in state.apart if state.shapes[s].faults]
        places = {slot.gpu.place: slot for slot in state.usable.values()}
        for shape in picky:
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

    def quarantined_hosts(self, now: float = 0.0) -> list[str]:
        """Hosts on which every known slot is in quarantine, as far as its cool-down lasts beyond `now`."""
        hosts: dict[str, list[bool]] = {}
        for n in self.state.nodes.values():
            shut = [bool(s.gpu.shut) and s.gpu.until > now for s in n.slots.values()]
            if n.state != "gone":
                hosts.setdefault(n.host, []).extend(shut)
        for n in self.state.nodes.values():
            if n.host not in hosts:  # only leases that are over were there: the last of them counts
                hosts[n.host] = [bool(s.gpu.shut) and s.gpu.until > now for s in n.slots.values()]
        return [host for host, shut in hosts.items() if shut and all(shut)]

    def digest(self) -> str:
        """Hash of the whole state: equal ones decide equally. Costs O(state): for tests."""
        parts = [getattr(self.state, f.name) for f in fields(State) if f.name != "settings"]
        return hashlib.sha256(repr(parts).encode()).hexdigest()
