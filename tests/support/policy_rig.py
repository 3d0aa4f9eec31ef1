"""A policy with a journal around it, and short names for the events that tests feed it."""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator import events as ev
from orchestrator.policy import Policy, PolicySettings
from orchestrator.reasons import Reason


class Rig:
    """Each call hands one event in and returns the decisions; `now` is moved by hand."""

    def __init__(self, settings: PolicySettings | None = None) -> None:
        self.settings = settings
        self.policy = Policy(settings)
        self.now = 1000.0
        self.journal: list[tuple[float, ev.Record]] = []

    def do(self, event: ev.Event) -> list[ev.Decision]:
        decisions = self.policy.handle(event, self.now)
        if not isinstance(event, ev.Tick):
            self.journal.append((self.now, event))
        self.journal += [(self.now, d) for d in decisions]
        return decisions

    def replayed(self) -> Policy:
        """A fresh policy that has read the journal."""
        fresh = Policy(self.settings)
        for t, record in self.journal:
            fresh.apply(record, t)
        return fresh

    # --- events -------------------------------------------------------------------------------------------------------

    def node(self, name: str, slots: int = 1) -> list[ev.Decision]:
        """Join and pass all canaries."""
        out = self.do(ev.NodeJoined(name, tuple(str(i) for i in range(slots))))
        for i in range(slots):
            out += self.canary(name, str(i))
        return out

    def lease(self, name: str, host: str, gpus: str = "0") -> list[ev.Decision]:
        """A lease of these GPUs (a letter each) of the host joins; all its canaries pass."""
        slots = tuple(str(i) for i in range(len(gpus)))
        out = self.do(ev.NodeExpected(name, slots, host, tuple(gpus), f"job-{name}", "pool"))
        out += self.do(ev.NodeJoined(name, slots))
        for slot in slots:
            out += self.canary(name, slot)
        return out

    def ended(self, name: str, cause: str = "preempted", *, charged: bool = False) -> list[ev.Decision]:
        return self.do(ev.LeaseEnded(name, cause, cause.upper(), charged))

    def group(self, name: str, shapes: Iterable[int], cost_s: float = 60.0) -> list[ev.Decision]:
        return self.do(ev.GroupAdded(name, tuple(shapes), cost_s))

    def canary(self, node: str, slot: str = "0", *, ok: bool = True) -> list[ev.Decision]:
        return self.do(ev.CanaryPassed(node, slot, 100.0) if ok else ev.CanaryFailed(node, slot, "wrong answer"))

    def start(self, attempt: str, node: str, slot: str = "0", shape: int | None = None) -> list[ev.Decision]:
        out = self.do(ev.AttemptStarted(attempt, node, slot))
        return out + (self.shape(attempt, shape) if shape is not None else [])

    def shape(self, attempt: str, shape: int) -> list[ev.Decision]:
        return self.do(ev.ShapeStarted(attempt, shape))

    def tuned(self, attempt: str, *shapes: int) -> list[ev.Decision]:
        return [d for s in shapes for d in self.do(ev.ShapeTuned(attempt, s))]

    def end(self, attempt: str, outcome: Reason = Reason.DONE, in_flight: int | None = None) -> list[ev.Decision]:
        return self.do(ev.AttemptEnded(attempt, outcome, in_flight, "detail", 1.0))

    def fault(self, attempt: str, in_flight: int | None, outcome: Reason = Reason.FAULT) -> list[ev.Decision]:
        """A bad end, and the canary of the worker after it."""
        a = next(a for a in self.policy.outstanding() if a.id == attempt)
        return self.end(attempt, outcome, in_flight) + self.canary(a.node, a.at or a.slot or "0")

    def lost(self, node: str) -> list[ev.Decision]:
        return self.do(ev.NodeLost(node, "silent"))

    def taken(self, attempt: str, *, won: bool = True) -> list[ev.Decision]:
        return self.do(ev.AttemptTaken(attempt, won))

    def tick(self, seconds: float = 0.0) -> list[ev.Decision]:
        self.now += seconds
        return self.do(ev.Tick())

    # --- looking ------------------------------------------------------------------------------------------------------

    def outstanding(self) -> dict[str, tuple[str, str | None]]:
        """Attempt -> (node, slot)."""
        return {a.id: (a.node, a.at or a.slot) for a in self.policy.outstanding()}


def of(kind: type[ev.Record], decisions: Iterable[ev.Record]) -> list[ev.Record]:
    return [d for d in decisions if isinstance(d, kind)]


def sends(decisions: Iterable[ev.Record]) -> list[tuple[str, str, str | None]]:
    """(attempt, node, slot) of each Send."""
    return [(d.attempt, d.node, d.slot) for d in decisions if isinstance(d, ev.Send)]


def fails(decisions: Iterable[ev.Record]) -> list[tuple[int, Reason, bool]]:
    """(shape, reason, confirmed) of each FailShape."""
    return [(d.shape, d.reason, d.confirmed) for d in decisions if isinstance(d, ev.FailShape)]


def kinds(decisions: Iterable[ev.Record]) -> list[str]:
    return [type(d).__name__ for d in decisions]


def proven_nodes() -> Rig:
    """A rig whose nodes a, b and c have tuned a shape each (11, 12, 13)."""
    rig = Rig()
    for node in ("a", "b", "c"):
        rig.node(node)
    for shape in (11, 12, 13):
        rig.group(f"g{shape}", [shape])
    for attempt, (node, _) in rig.outstanding().items():
        rig.start(attempt, node)
        rig.tuned(attempt, int(attempt[1:3]))
        rig.end(attempt)
    return rig
