"""A policy with a journal around it, and short names for the events that tests feed it.

Tests speak of shapes: the rig knows the attempt that has each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import fields
from typing import TypeVar

from orchestrator import events as ev
from orchestrator.policy import Policy, PolicySettings
from orchestrator.policy.apply import apply
from orchestrator.policy.model import Attempt, Shape
from orchestrator.policy.sentences import describe_wait
from orchestrator.reasons import Reason

R = TypeVar("R", bound=ev.Record)


class Rig:
    """Each call hands events in and returns the decisions; `now` is moved by hand."""

    def __init__(self, settings: PolicySettings | None = None) -> None:
        self.settings = settings or PolicySettings(ahead_s=60.0)  # the shapes of tests take 20 to 60 s
        self.policy = Policy(self.settings)
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
            apply(fresh.state, record, t)
        return fresh

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

    def work(self, *shapes: int, cost_s: float = 60.0, kind: str = "k", **more: object) -> list[ev.Decision]:
        """Add shapes of one kind. Each is a unit of `cost_s` seconds."""
        units, costs = tuple((s,) for s in shapes), tuple((cost_s,) for _ in shapes)
        return self.do(ev.WorkAdded(kind, units, costs, **more))  # type: ignore[arg-type]

    def singles(self, *shapes: int, cost_s: float = 60.0) -> list[ev.Decision]:
        """Add shapes that do not share a process."""
        return self.work(*shapes, cost_s=cost_s, kind="single", alone=True)

    def canary(self, node: str, slot: str = "0", *, ok: bool = True) -> list[ev.Decision]:
        return self.do(ev.CanaryPassed(node, slot, 100.0) if ok else ev.CanaryFailed(node, slot, "wrong answer"))

    def start(self, shape: int) -> list[ev.Decision]:
        """Its attempt, if it has not begun, and the shape itself."""
        a = self.attempt(shape)
        out = self.do(ev.AttemptStarted(a.id, a.node, a.slot)) if a.state == "sent" else []
        return out + self.do(ev.ShapeStarted(a.id, shape))

    def tune(self, *shapes: int) -> list[ev.Decision]:
        """Start the shapes and tune them; an attempt with all its shapes tuned ends."""
        out = []
        for s in shapes:
            a = self.attempt(s)
            out += self.start(s) + self.do(ev.ShapeTuned(a.id, s))
            if all(i in a.landed for i in a.shapes):
                out += self.do(ev.AttemptEnded(a.id, Reason.DONE, None, "", 1.0))
        return out

    def incomplete(self, shape: int, *blocked: str, earlier: Iterable[str] = ()) -> list[ev.Decision]:
        """A result without some candidates; its attempt ends."""
        a = self.attempt(shape)
        names, old = tuple((c,) for c in blocked), tuple((c,) for c in earlier)
        out = self.start(shape) + self.do(ev.ShapeTuned(a.id, shape, names, old))
        return out + self.do(ev.AttemptEnded(a.id, Reason.DONE, None, "", 1.0))

    def fault(self, shape: int, outcome: Reason = Reason.FAULT, *, known: bool = True) -> list[ev.Decision]:
        """A bad end at the shape, and the canary of the worker after it."""
        return self.bad_end(shape, outcome, known=known) + self.canary(*self.at(shape))

    def bad_end(self, shape: int, outcome: Reason = Reason.FAULT, *, known: bool = True) -> list[ev.Decision]:
        a = self.attempt(shape)
        self._at = (a.node, a.slot)
        out = self.do(ev.AttemptStarted(a.id, a.node, a.slot)) if a.state == "sent" else []
        return out + self.do(ev.AttemptEnded(a.id, outcome, shape if known else None, "detail", 1.0))

    def at(self, shape: int) -> tuple[str, str]:
        """Place where the shape just ended badly."""
        return self._at

    def lost(self, node: str) -> list[ev.Decision]:
        return self.do(ev.NodeLost(node, "silent"))

    def tick(self, seconds: float = 0.0) -> list[ev.Decision]:
        self.now += seconds
        return self.do(ev.Tick())

    def shape(self, shape: int) -> Shape:
        return self.policy.state.shapes[shape]

    def attempt(self, shape: int) -> Attempt:
        """The latest attempt that is not over and has the shape."""
        found = [a for a in self.policy.outstanding() if shape in a.shapes]
        assert found, describe_wait(self.policy.state, shape)
        return found[-1]

    def where(self, shape: int) -> str:
        """`n1` or `n1/2` (not slot 0) of that attempt; "" where it waits."""
        for a in reversed(self.policy.outstanding()):
            if shape in a.shapes:
                return a.node if a.slot == "0" else f"{a.node}/{a.slot}"
        return ""


def digest(policy: Policy) -> str:
    """Hash of the whole state: equal ones decide equally."""
    parts = [getattr(policy.state, f.name) for f in fields(policy.state) if f.name != "settings"]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def of(kind: type[R], decisions: Iterable[ev.Record]) -> list[R]:
    return [d for d in decisions if isinstance(d, kind)]


def groups(decisions: Iterable[ev.Record]) -> list[tuple[str, tuple[int, ...]]]:
    """(node, shapes) of each Send."""
    return [(d.node, d.shapes) for d in decisions if isinstance(d, ev.Send)]


def fails(decisions: Iterable[ev.Record]) -> list[tuple[int, Reason, bool]]:
    """(shape, reason, confirmed) of each FailShape."""
    return [(d.shape, d.reason, d.confirmed) for d in decisions if isinstance(d, ev.FailShape)]


def proven_nodes(*names: str) -> Rig:
    """A rig whose nodes (a, b and c by default) have each tuned a shape of its own: 101, 102, ..."""
    rig, names = Rig(), names or ("a", "b", "c")
    for name in names:
        rig.node(name)
    shapes = range(101, 101 + len(names))
    rig.singles(*shapes)
    rig.tune(*shapes)
    return rig
