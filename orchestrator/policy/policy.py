"""The policy of a run: events in, decisions out. No clock, no socket, no file.

The controller's loop gives `Policy.handle` each event. It applies the event (apply.py), and then asks for a decision
(decide.py) and applies that, until there is none. `decide` changes nothing, so a journal of events and decisions that
is applied in order gives the same state as having lived through it. The other methods only tell what the state means
for the loop and for leased_nodes.py.
"""

from __future__ import annotations

from orchestrator.events import Decision, Event
from orchestrator.policy.apply import apply
from orchestrator.policy.decide import decide, suits
from orchestrator.policy.model import Attempt, Node, Slot, State
from orchestrator.policy.sentences import describe_lack_of_slots
from orchestrator.policy.settings import PolicySettings


class Policy:
    """Policy of one run. Not thread-safe: one loop owns it."""

    def __init__(self, settings: PolicySettings | None = None) -> None:
        self.state = State(settings or PolicySettings())

    def handle(self, event: Event, now: float) -> list[Decision]:
        """Apply an event; return the decisions that follow, in order. `now` in epoch seconds."""
        apply(self.state, event, now)
        decisions = []
        decision = decide(self.state, now)
        while decision is not None:
            apply(self.state, decision, now)
            decisions.append(decision)
            decision = decide(self.state, now)
        return decisions

    @property
    def done(self) -> bool:
        """Return whether every shape is settled."""
        return not self.state.pending

    @property
    def stuck(self) -> str | None:
        """Sentence on the lack of slots to work on; None while there is one, or nothing is to be done."""
        if not self.state.pending or self.state.stopped:
            return None
        return describe_lack_of_slots(self.state)

    def outstanding(self) -> list[Attempt]:
        """Attempts sent and not over, in the order they were sent; to be read only."""
        return [self.state.attempts[a] for a in self.state.open_attempts]

    def backlog_s(self) -> float:
        """Estimated seconds on one slot of all unsettled shapes; 0 if no new work is started."""
        return 0.0 if self.state.stopped else self.state.left_s

    def slots_without_lease(self) -> int:
        """The number of slots of nodes without a lease that take work now or soon. It changes when nodes join, drain or
        are lost."""
        return sum(not self.state.nodes[slot.node].lease for slot in self.state.usable.values())

    @property
    def has_waiting(self) -> bool:
        """Return whether a shape waits: for a slot, or unclaimed in an inbox."""
        state = self.state
        if state.waiting or state.isolated:
            return True
        return any(state.attempts[a].state == "sent" for a in state.open_attempts)

    def hosts_needed(self) -> int:
        """The number of hosts that the run needs: one more than it has, if no slot suits a shape that faulted and waits
        for one. Else 0: no shape needs another host."""
        state = self.state
        for shape in (state.shapes[s] for s in state.isolated):
            if not shape.faults:
                continue
            bad_places = {fault.place for fault in shape.faults}
            slots = state.usable.values()
            if state.usable.keys() <= bad_places or not any(suits(state, shape, slot) for slot in slots):
                return len(state.hosts) + 1
        return 0

    def idle_nodes(self) -> list[str]:
        """Joined nodes with nothing to do: everything that was sent there is over."""
        joined = [node for node in self.state.nodes.values() if node.state == "joined"]
        return [node.name for node in joined if not any(s.running or s.queued for s in node.slots.values())]

    def quarantined_hosts(self, now: float) -> list[str]:
        """Hosts on which every known slot is in quarantine beyond `now`."""
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
    return bool(slot.gpu.quarantine_why) and slot.gpu.quarantined_until > now
