"""A simulated node: its folder (inbox, claims, event file) and one worker a slot, on the simulator's clock.

Behaves as worker.agent.loop does: claims the first spec it may, closes what it had claimed when it starts again, proves
itself by a canary at the start and after each fault, and claims nothing but a canary after one that failed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from orchestrator import events as ev
from orchestrator.reasons import Reason
from tests.simulator.plan import SimPlan


class Clock(Protocol):
    """Services of the simulator to a node."""

    now: float
    winners: dict[tuple[str, int], tuple[str, ...]]

    def later(self, seconds: float, do: Callable[[], None]) -> None: ...
    def written(self, node: SimNode) -> None: ...
    def follows(self, node: SimNode) -> bool: ...


@dataclass(slots=True)
class SimSpec:
    """A spec in an inbox; `shapes` empty: a canary."""

    seq: int
    attempt: str
    slot: str | None
    shapes: tuple[int, ...]


@dataclass(slots=True)
class SimWorker:
    """A slot's worker. `life` changes with each death and start: what an earlier life had planned does not happen."""

    slot: str
    state: str = "off"
    life: int = 0
    spec: SimSpec | None = None
    in_flight: int | None = None
    began: float = 0.0
    warm: bool = False
    wedged: float = 0.0
    """Time until which no canary passes."""


@dataclass(slots=True)
class SimNode:
    """One node. The event file outlives power cuts; the controller has read `read` of it."""

    name: str
    plan: SimPlan
    clock: Clock
    rng: random.Random
    seconds: dict[int, float]
    silent: dict[int, int]
    workers: dict[str, SimWorker] = field(default_factory=dict)
    inbox: list[SimSpec] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    blocked: dict[tuple[str, int, int], bool] = field(default_factory=dict)
    """Blocked candidates: (slot, shape, candidate) -> whether it was seen on a second slot."""
    news: list[Callable[[], object]] = field(default_factory=list)
    """Changes of blocked candidates that the next spec carries."""
    file: list[ev.Event] = field(default_factory=list)
    read: int = 0
    powered: bool = True
    gone: bool = False
    """The node was a lease, which has ended."""
    linked: bool = True
    session: int = 0
    deaths: list[tuple[float, str, bool]] = field(default_factory=list)
    """(time, why, whether a controller was following the node then, and knew of what had ended badly)."""

    def write(self, event: ev.Event) -> None:
        self.file.append(event)
        self.clock.written(self)

    def put(self, spec: SimSpec) -> None:
        for tell in self.news:
            tell()
        self.news.clear()
        self.inbox.append(spec)
        for w in self.workers.values():
            self.look(w)

    def take_back(self, attempt: str) -> bool:
        before = len(self.inbox)
        self.inbox = [s for s in self.inbox if s.attempt != attempt]
        return len(self.inbox) < before

    def look(self, w: SimWorker) -> None:
        """Claim the next spec, if the worker has nothing to do and may."""
        if w.state not in ("idle", "held"):
            return
        fit = [s for s in self.inbox if s.slot in (None, w.slot) and (w.state == "idle" or not s.shapes)]
        if not fit:
            return
        spec = min(fit, key=lambda s: s.seq)
        self.inbox.remove(spec)
        if not spec.shapes:
            self.canary(w)
            return
        self.seen.add(spec.attempt)
        if self.rng.random() < self.plan.faults.rejects:
            self.write(ev.AttemptEnded(spec.attempt, Reason.REJECTED, None, "bad spec", 0.0))
            self.look(w)
            return
        w.state, w.spec, w.began = "busy", spec, self.clock.now
        self.write(ev.AttemptStarted(spec.attempt, self.name, w.slot))
        self._next_shape(w, spec, 0)

    def _after(self, w: SimWorker, seconds: float, do: Callable[[], None]) -> None:
        life = w.life
        self.clock.later(seconds, lambda: do() if w.life == life else None)

    def start(self, w: SimWorker) -> None:
        if w.state != "off" or not self.powered or w.slot in self.dead_slots():
            return
        w.life += 1
        if w.spec is not None:
            self._end(w, w.spec, Reason.WORKER_DIED, w.in_flight)
        self.canary(w)

    def dead_slots(self) -> list[str]:
        """Slots whose worker cannot be started (any more)."""
        dead, now = self.plan.faults.dead_slots, self.clock.now
        return [s for s in self.workers if dead.get((self.name, s), float("inf")) <= now]

    def stop(self, w: SimWorker) -> None:
        w.life += 1
        w.state = "off"

    def canary(self, w: SimWorker) -> None:
        w.state = "canary"
        self._after(w, self.plan.canary_s, lambda: self._proved(w))

    def _proved(self, w: SimWorker) -> None:
        sick = self.plan.faults.sick.get((self.name, w.slot))
        bad = sick is not None and not sick.canary and sick.since <= self.clock.now < sick.until
        if bad or self.clock.now < w.wedged:
            w.state = "held"
            self.write(ev.CanaryFailed(self.name, w.slot, "wrong answer"))
        else:
            w.state = "idle"
            self.write(ev.CanaryPassed(self.name, w.slot, 100.0))
        self.look(w)

    def _next_shape(self, w: SimWorker, spec: SimSpec, i: int) -> None:
        if i == len(spec.shapes):
            self._end(w, spec, Reason.DONE, None)
            w.state = "idle"
            self.look(w)
            return
        plan, setup = self.plan, 0.0
        if i == 0:
            setup = plan.setup_s if w.warm else max(plan.setup_s, plan.cold_s)
        w.warm = True
        if setup:
            self._after(w, setup, lambda: self._measure(w, spec, i))
        else:
            self._measure(w, spec, i)

    def _measure(self, w: SimWorker, spec: SimSpec, i: int) -> None:
        shape, faults = spec.shapes[i], self.plan.faults
        seconds, end = self.seconds[shape] * self.plan.slow.get((self.name, w.slot), 1.0), None
        if shape not in faults.node_killers and shape not in faults.worker_killers:
            end = self._bad_end(w, shape, alone=len(spec.shapes) == 1)
        lost = [] if end is not None else self._try_candidates(w, shape)
        if lost and len(spec.shapes) > 1:
            end = (Reason.FAULT, shape)  # one process has all of them
        w.in_flight = None if end is not None and end[1] is None else shape
        if w.in_flight is not None:
            self.write(ev.ShapeStarted(spec.attempt, shape))
        if shape in faults.node_killers:
            back = faults.node_killers[shape]
            self._after(w, faults.kill_s, lambda: self.power_cut(back, f"shape {shape}"))
        elif shape in faults.worker_killers:
            self._after(w, min(seconds, faults.kill_s), lambda: self.die(w))
        elif end is None:
            self._after(w, seconds, lambda: self._shape_done(w, spec, i, lost))
        else:
            reason = end[0]
            self._after(w, seconds / 2, lambda: self._bad(w, spec, reason))

    def _bad_end(self, w: SimWorker, shape: int, *, alone: bool) -> tuple[Reason, int | None] | None:
        faults, now = self.plan.faults, self.clock.now
        full = faults.disk_full.get(self.name)
        if full is not None and full.holds(now):
            return Reason.DISK_FULL, shape
        if faults.cancels and self.rng.random() < faults.cancels:
            return Reason.CANCELLED, shape
        sick, poison = faults.sick.get((self.name, w.slot)), faults.poison.get(shape)
        reason: Reason | None = None
        if sick is not None and sick.hits(shape, now) and not (sick.salvage and alone):
            reason = Reason.FAULT
        elif shape in faults.wedges:
            reason, w.wedged = Reason.HANG, now + faults.wedges[shape]
        elif poison is not None and self.rng.random() < poison.chance:
            reason = poison.reason
        if reason is None:
            return None
        return reason, None if self.rng.random() < faults.unknown else shape

    @property
    def _count(self) -> int:
        """Candidates of a shape."""
        return self.plan.candidates or 2

    def _blocked(self, w: SimWorker, shape: int) -> dict[int, bool]:
        """Candidates that are blocked on the slot; whether each was seen on a second slot."""
        return {
            c: sure for (slot, s, c), sure in self.blocked.items() if s == shape and (slot == w.slot or sure)
        }  # fmt: skip

    def _try_candidates(self, w: SimWorker, shape: int) -> list[int]:
        """The candidates that fault now."""
        faults, losing = self.plan.faults, self.plan.faults.losing.get((self.name, w.slot))
        sick = losing.candidates if losing is not None and losing.since <= self.clock.now < losing.until else ()
        ill = faults.sick.get((self.name, w.slot))
        if ill is not None and ill.salvage and ill.hits(shape, self.clock.now):
            sick = tuple(range(self.rng.random() < 0.5, self._count))  # all of them, or all but the first
        blocked = self._blocked(w, shape)
        return [
            c
            for c in range(self._count)
            if c not in blocked
            and (c in sick or c in faults.cursed.get(shape, ()) or (faults.flaky and self.rng.random() < faults.flaky))
        ]

    def _tell_candidates(self, w: SimWorker, spec: SimSpec, shape: int, lost: list[int]) -> None:
        blocked = self._blocked(w, shape)
        for c in lost:
            self.blocked.setdefault((w.slot, shape, c), False)
        ran = [c for c in range(self._count) if c not in lost and c not in blocked]
        earlier = [c for c, sure in blocked.items() if not sure]
        of_before = self.plan.faults.listed.get((self.name, w.slot), {}).get(shape, ())
        withheld = tuple((f"c{c}",) for c in (*lost, *earlier))
        old = tuple((f"c{c}",) for c in earlier if c in of_before)
        if not ran:
            self.write(ev.ShapeRefused(spec.attempt, shape, Reason.NO_CANDIDATE, "none ran", withheld, old))
            return
        best = min(ran, key=lambda c: self.plan.us((self.name, w.slot), shape, c))
        self.clock.winners[spec.attempt, shape] = (f"c{best}",)
        self.write(ev.ShapeTuned(spec.attempt, shape, withheld, old))

    def _shape_done(self, w: SimWorker, spec: SimSpec, i: int, lost: list[int]) -> None:
        shape = spec.shapes[i]
        if self.silent.get(shape, 0) > 0:
            self.silent[shape] -= 1
        elif shape in self.plan.faults.refused:
            self.write(ev.ShapeRefused(spec.attempt, shape, self.plan.faults.refused[shape], "it says so"))
        elif self.plan.candidates or lost:
            self._tell_candidates(w, spec, shape, lost)
        else:
            chance = self.plan.faults.noisy
            noise = (ev.NOISE,) if chance and self.rng.random() < chance else ()
            self.write(ev.ShapeTuned(spec.attempt, shape, noise, noise))
        w.in_flight = None
        self._next_shape(w, spec, i + 1)

    def _bad(self, w: SimWorker, spec: SimSpec, reason: Reason) -> None:
        self._end(w, spec, reason, w.in_flight)
        if reason.may_blame_slot:
            self.canary(w)
        else:
            w.state = "idle"
            self.look(w)

    def _end(self, w: SimWorker, spec: SimSpec, reason: Reason, in_flight: int | None) -> None:
        self.write(
            ev.AttemptEnded(spec.attempt, reason, in_flight, f"simulated {reason.value}", self.clock.now - w.began)
        )
        w.spec = w.in_flight = None

    def die(self, w: SimWorker) -> None:
        """The worker is gone; its container is started again."""
        self.stop(w)
        self.clock.later(self.plan.restart_s, lambda: self.start(w))

    def power_cut(self, back_s: float | None, why: str) -> None:
        """Everything stops at once. Written files stay."""
        if not self.powered:
            return
        self.powered = False
        # if nobody heard of an attempt's end, and the worker went on, nobody can know what it had claimed
        known = all(e.outcome is Reason.DONE for e in self.file[self.read :] if isinstance(e, ev.AttemptEnded))
        self.deaths.append((self.clock.now, why, known and self.linked and self.clock.follows(self)))
        for w in self.workers.values():
            self.stop(w)
            w.warm = False
        if back_s is not None:
            self.clock.later(back_s, self.power_on)

    def cut_off(self, seconds: float | None) -> None:
        """The link is gone, the node works on."""
        self.linked = False
        if seconds is not None:
            self.clock.later(seconds, self.link)

    def link(self) -> None:
        self.linked = True

    def power_on(self) -> None:
        self.powered = not self.gone

    @property
    def reachable(self) -> bool:
        return self.powered and self.linked
