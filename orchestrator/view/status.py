"""Computes the status of a run from its state. The live view, `status` and `status --json` show it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile
from statistics import harmonic_mean, median
from typing import Any

from orchestrator.events import CanaryTimed
from orchestrator.ledger.reader import Counts, LedgerReader
from orchestrator.paths import RunConfig
from orchestrator.planning.estimate import MOST_SCHEDULED, Measured, Range, UnderWay, seconds_left
from orchestrator.planning.plan import GROUPS, queue_of
from orchestrator.policy.model import Attempt, Node, Slot, SlotId, State
from orchestrator.shapes.model import describe
from orchestrator.view.words import node_words, slot_words, worked_words
from worker.tuners.catalog import recorded_tuner

FEW = 3
"""With fewer slots of a device than this, we call none an outlier: if two differ, either may be the odd one."""
SIGMAS = 5.0
"""An outlier is beyond the median by this many robust standard deviations (1.4826 MAD), and by at least SLOW or CAPPED
of the median, or HOT_C degrees."""
SLOW, HOT_C, CAPPED = 0.03, 10.0, 0.02
LEAST_SIGMA, LEAST_SIGMA_C = 0.005, 1.0
LATEST = 9
"""Only this many of a slot's latest times count: older ones say little about its state now."""


@dataclass(frozen=True, slots=True)
class SlotSpeed:
    """A slot compared with the others of its device. `compute`, `memory`: its median time over theirs; None if unknown.

    `flag`: why it stands out (`slow (compute 8.1 % over the median of 8 slots)`), "" if it does not.
    """

    compute: float | None
    memory: float | None
    flag: str

    @property
    def pace(self) -> float:
        """The time that work takes there, relative to the usual time."""
        known = [x for x in (self.compute, self.memory) if x is not None]
        return sum(known) / len(known) if known else 1.0


def speeds(state: State) -> dict[SlotId, SlotSpeed]:
    """The speed of each slot with timed canaries, compared with the others of its device."""
    by_device: dict[str, dict[SlotId, list[CanaryTimed]]] = defaultdict(dict)
    for slot in (s for n in state.nodes.values() for s in n.slots.values() if s.timed_canaries):
        last = [r for _, r in slot.timed_canaries[-LATEST:]]
        by_device[last[-1].device][slot.id] = [r for r in last if r.device == last[-1].device]
    return {slot: speed for slots in by_device.values() for slot, speed in _speeds(slots).items()}


def flags(state: State) -> dict[SlotId, str]:
    """Slots that stand out, and why."""
    return {slot: s.flag for slot, s in sorted(speeds(state).items()) if s.flag}


def outliers(values: Mapping[SlotId, float], least: float, sigma: float) -> set[SlotId]:
    """Slots whose value is above the median by more than `least` and SIGMAS robust standard deviations.

    The deviation is 1.4826 MAD, at least `sigma`. With fewer than FEW slots the set is empty.
    """
    if len(values) < FEW:
        return set()
    middle = median(values.values())
    spread = max(sigma, 1.4826 * median(abs(v - middle) for v in values.values()))
    return {slot for slot, v in values.items() if v - middle > max(least, SIGMAS * spread)}


def _speeds(slots: Mapping[SlotId, list[CanaryTimed]]) -> dict[SlotId, SlotSpeed]:
    compute, memory = (_over_median(slots, name) for name in ("compute_us", "memory_us"))
    warm, caps = (_medians(slots, name) for name in ("temperature_c", "power_cap_w"))
    slow = [outliers(x, SLOW, LEAST_SIGMA) for x in (compute, memory)]
    hot, n = outliers(warm, HOT_C, LEAST_SIGMA_C), len(slots)
    cap = median(caps.values()) if len(caps) >= FEW else 0.0
    out = {}
    for slot in slots:
        words = []
        if any(slot in s for s in slow):
            both = (("compute", compute.get(slot)), ("memory", memory.get(slot)))
            over = ", ".join(f"{name} {100 * (x - 1):.1f} %" for name, x in both if x is not None)
            words.append(f"slow ({over} over the median of {n} slots)")
        if slot in hot:
            words.append(f"hot ({warm[slot]:.0f} C, median {median(warm.values()):.0f} C)")
        if slot in caps and caps[slot] < (1 - CAPPED) * cap:
            words.append(f"power-capped ({caps[slot]:.0f} W, median {cap:.0f} W)")
        out[slot] = SlotSpeed(compute.get(slot), memory.get(slot), ", ".join(words))
    return out


def _medians(slots: Mapping[SlotId, list[CanaryTimed]], name: str) -> dict[SlotId, float]:
    known = {slot: [v for r in seen if (v := getattr(r, name)) > 0] for slot, seen in slots.items()}
    return {slot: float(median(values)) for slot, values in known.items() if values}


def _over_median(slots: Mapping[SlotId, list[CanaryTimed]], name: str) -> dict[SlotId, float]:
    medians = _medians(slots, name)
    usual = median(medians.values()) if medians else 1.0
    return {slot: v / usual for slot, v in medians.items()}


@dataclass(slots=True)
class SlotStatus:
    """One slot. `doing`: the shape that it measures now, since `since` (epoch seconds)."""

    slot: str
    state: str = "starting"
    attempt: str | None = None
    doing: str = ""
    since: float = 0.0
    device: str = ""
    gpu: dict[str, Any] | None = None
    """Reading of its GPU from the live poll (docs/explanation/measurement.md), None if unknown."""


@dataclass(slots=True)
class NodeStatus:
    """One node. state: preparing, ready, busy, draining, slow (reachable, but it did not answer in time), unreachable
    or quarantined; for a lease also queued or ended."""

    name: str
    state: str = "preparing"
    slots: list[SlotStatus] = field(default_factory=list)
    tuned: int = 0
    failed: int = 0
    detail: str = ""
    log: list[str] = field(default_factory=list)
    """Last lines of its log."""
    lease: str = ""
    """If the node is a lease: the scheduler's id of it. `host`: its machine. `ends_at`: when its time limit ends it."""
    host: str = ""
    ends_at: float = 0.0
    """Epoch seconds, 0 for never."""
    live: dict[str, Any] | None = None
    """Answer of the live poll: `at` (epoch seconds), `error`, `slow`, `load`, `containers`, `gpus`; None: not polled.
    """

    @property
    def running(self) -> int:
        """Slots that work on an attempt."""
        return sum(1 for s in self.slots if s.attempt)


def done_word(tuner: str) -> str:
    """The word for a shape that has a result. A bench only measures and does not tune."""
    return "measured" if tuner and recorded_tuner(tuner).side_by_side else "tuned"


@dataclass(slots=True)
class RunStatus:
    """One run. state: planned, preparing, running, finished, interrupted or cancelled."""

    run: str
    state: str
    counts: Counts
    nodes: list[NodeStatus] = field(default_factory=list)
    rate_per_min: float | None = None
    """Shapes tuned per minute, over the last minutes."""
    eta_s: float | None = None
    eta_range_s: tuple[float, float] | None = None
    """In nine of ten runs the end comes between these."""
    started: float | None = None
    """Time at which the run was requested."""
    worked_s: float | None = None
    """Seconds in which a controller drove the run. Time between two sessions does not count."""
    worked: str = ""
    """`worked_s` as text."""
    sessions: int = 0
    controller: str = ""
    family: str = ""
    tuner: str = ""
    standing_out: list[str] = field(default_factory=list)
    """Sentences about slots that are slow, hot or power-capped compared with the others."""
    files: list[dict[str, Any]] = field(default_factory=list)
    """Result files: path, bytes, when written (epoch seconds)."""
    waits_for: list[str] = field(default_factory=list)
    """Occupied nodes and queues of pools; `eta_s` does not count the wait for them."""

    @property
    def done(self) -> str:
        """The word for a shape that has a result. A bench does not tune."""
        return done_word(self.tuner)

    def to_json(self) -> dict[str, Any]:
        """The document of `status --json`."""
        nodes = []
        for n in self.nodes:
            raw = asdict(n)
            raw["slots"], raw["slot_states"], raw["running"] = len(n.slots), raw["slots"], n.running
            nodes.append(raw)
        rest = ("started", "sessions", "controller", "family", "tuner", "standing_out", "files")
        return {
            "run": self.run, "state": self.state, "shapes": self.counts.to_json(), "nodes": nodes,
            "eta_s": None if self.eta_s is None else round(self.eta_s, 1),
            "eta_range_s": None if self.eta_range_s is None else [round(x, 1) for x in self.eta_range_s],
            "rate_per_min": None if self.rate_per_min is None else round(self.rate_per_min, 2),
            "worked_s": None if self.worked_s is None else round(self.worked_s, 1),
            **{n: getattr(self, n) for n in rest},
        }  # fmt: skip


GOING = ("planned", "preparing", "running")


def state_now(kept: str, *, driven: bool) -> str:
    """State of a run. Without a living controller it is interrupted, whatever the ledger says (`kept`). `driven`: a
    controller holds the run's lock."""
    if kept in ("preparing", "running") and not driven:
        return "interrupted"  # its controller died
    return kept


SPREAD = 5.0
"""The spread of estimates if there is no model."""


@dataclass(frozen=True, slots=True)
class RunHeader:
    """Facts about a run that are not in its state. `nodes`: slots of each node of the inventory. `named`: gives a
    shape's name. `start_s`, `spread`, `known`: from the cost model of its plan.
    """

    run: str
    family: str
    tuner: str
    created: float
    total: int
    skipped: int
    nodes: Mapping[str, tuple[str, ...]]
    named: Callable[[int], str]
    start_s: float = 0.0
    spread: float = SPREAD
    known: bool = True

    @classmethod
    def of(cls, ledger: LedgerReader, config: RunConfig, nodes: Mapping[str, tuple[str, ...]]) -> RunHeader:
        """The header of a run in a ledger."""
        cost = ledger.meta("cost", {})
        return cls(
            config.run, config.family, config.tuner, config.created, len(ledger.keys), len(ledger.skipped()), nodes,
            names_of(ledger), cost.get("start_s", 0.0), cost.get("spread", SPREAD), cost.get("known", True),
        )  # fmt: skip


def names_of(ledger: LedgerReader) -> Callable[[int], str]:
    """Names of a run's shapes as the user knows them."""
    keys = ledger.keys
    return lambda shape: describe(keys[shape]) if shape in keys else f"shape {shape}"


def sessions_until(state: State, end: float | None) -> list[list[float]]:
    """[begin, end] of each controller. The latest ends at `end` (now, or when it ended), or else at its last record."""
    *before, last = state.sessions or [[]]
    return [*before, [last[0], max(last[1], end or 0.0)]] if last else []


def time_left(state: State, about: RunHeader, now: float, *, driven: bool) -> Range | None:
    """Seconds until the last shape is settled. If nobody drives the run, seconds from its resume.

    None if all are settled, or if nobody measured this tuner on this chip and the run has no result yet.
    """
    if not about.known and not state.tuned_at:
        return None
    pace = {slot: s.pace for slot, s in speeds(state).items()}
    # each slot takes as much of the work as it can
    usual = float(harmonic_mean([max(0.1, p) for p in pace.values()])) if pace else 1.0
    over = Measured()
    for a in state.attempts.values():
        # an attempt that only refused shapes does not show how long measuring takes
        has_result = any(state.shapes[i].state == "tuned" for i in a.landed)
        if a.state == "over" and has_result and a.started_at is not None:
            took = a.moved_at - a.started_at
            done_s = state.setup_s + a.cost_s - a.left_s
            over.add(pace.get((a.node, a.slot), 1.0) * done_s, min(took, a.seconds) if a.seconds > 0 else took)
    at_work = [state.attempts[s.running] for n in state.nodes.values() for s in n.slots.values() if s.running]
    slots = _slots(state)
    running = [
        _under_way(state, a, now, pace.get((a.node, a.slot), 1.0))
        for a in at_work
        if driven and state.unsettled(a.shapes)
    ]
    return seconds_left(
        _waiting(state, at_work if driven else [], usual, slots), slots, spread=about.spread, running=running,
        over=over, start=_start(state, about, now, driven),
    )  # fmt: skip


def _waiting(state: State, at_work: list[Attempt], usual: float, slots: int) -> list[float]:
    """Estimates of waiting units, each with its part of a set-up. We assume that units which may share a process form a
    few groups for each slot. In a large run all units but the longest count as equally long."""
    kinds = state.kinds.values()
    units = sum(len(k.waiting) for k in kinds)
    shared = units - sum(len(k.waiting) for k in kinds if k.alone)
    part = min(shared, GROUPS * slots if slots > 1 else 1) / max(1, shared)
    if state.pending > MOST_SCHEDULED:
        seconds = state.left_s - sum(a.left_s for a in at_work) + state.setup_s * (units - shared + part * shared)
        longest = max((-k.waiting[0][0] for k in kinds if k.waiting), default=0.0)
        rest = max(0.0, seconds - longest) / max(1, units - 1)
        return [usual * longest, *[usual * rest] * (units - 1)][:units]
    held = {i for a in at_work for i in a.shapes}
    left = [s for s in state.shapes.values() if s.state == "pending" and s.id not in held]
    return [usual * (s.cost_s + state.setup_s * (1.0 if state.kinds[s.kind].alone else part)) for s in left]


def _under_way(state: State, a: Attempt, now: float, pace: float) -> UnderWay:
    """Progress of an open attempt. `pace`: how long work takes on its slot, relative to the usual time."""
    begun, first = a.started_at or 0.0, 0.0 if a.landed else state.setup_s
    current = state.shapes.get(a.current) if a.current is not None else None
    done_s = state.setup_s + a.cost_s - a.left_s if a.landed else 0.0
    session = state.sessions[-1][0] if state.sessions else 0.0
    return UnderWay(
        estimate_s=pace * (done_s + first + a.left_s),
        done_s=pace * done_s,
        # an attempt that ran while there was no controller does not count: the times of its shapes are unknown
        took_s=0.0 if begun < session or not a.landed else a.moved_at - begun,
        since_s=max(0.0, now - max(a.moved_at, session)),
        next_s=pace * (first + current.cost_s) if current is not None and current.state == "pending" else 0.0,
    )


def _slots(state: State) -> int:
    """Number of slots that take work now or soon; if no slot does, the number of all slots."""
    return len(state.usable) or sum(len(n.slots) for n in state.nodes.values()) or 1


def _start(state: State, about: RunHeader, now: float, driven: bool) -> Range | None:
    """Seconds until the first slot can begin, if none has begun."""
    if driven and any(s.running or s.state == "ready" for n in state.nodes.values() for s in n.slots.values()):
        return None
    gone = max(0.0, now - state.sessions[-1][0]) if driven and state.sessions else 0.0
    # an overdue start may take the same time again
    mid = max(about.start_s - gone, 0.2 * gone)
    return Range(0.5 * mid, mid, 2.0 * mid)


RATE_WINDOW_S = 300.0


def rate_per_min(state: State, now: float) -> float | None:
    """Shapes tuned per minute over the last minutes in which a controller drove the run."""
    first = next((a.started_at for a in state.attempts.values() if a.started_at is not None), None)
    if not state.sessions or first is None:
        return None
    since = max(now - RATE_WINDOW_S, state.sessions[-1][0], first)
    n = sum(1 for _ in takewhile(lambda t: t > since, reversed(state.tuned_at)))
    return n * 60.0 / (now - since) if n and now > since else None


def run_status(state: State, about: RunHeader, word: str, now: float, *, end: float | None = None) -> RunStatus:
    """The status of a run now. `word`: from `state_now`. `end`: when its controller ended, None if one drives it."""
    going = word in ("preparing", "running")
    if word == "running" and not any(n.state == "joined" for n in state.nodes.values()) and not state.running:
        word = "preparing"
    sessions = sessions_until(state, now if going else end)
    s = RunStatus(
        about.run, word, Counts.of(state, about.total, about.skipped), started=about.created, family=about.family,
        tuner=about.tuner, sessions=len(sessions), worked_s=sum(b - a for a, b in sessions) if sessions else None,
        worked=worked_words(sessions), standing_out=flag_words(state),
    )  # fmt: skip
    names = dict.fromkeys((*about.nodes, *state.nodes))
    s.nodes = [_node(state, about, name) for name in names]
    for node in s.nodes if word == "finished" else ():
        if node.state == "preparing":  # the work ended before it was needed
            node.state, node.slots = "ended", [replace(slot, state="ended") for slot in node.slots]
    for pool, leases in state.queued_leases.items() if going else ():
        s.nodes += [NodeStatus(f"{pool}, lease {id_}", "queued", detail=why, lease=id_) for id_, why in leases]
    s.rate_per_min = rate_per_min(state, now) if going else None
    left = time_left(state, about, now, driven=going) if word in (*GOING, "interrupted") else None
    if left is not None:
        s.eta_s = left.mid_s
        s.eta_range_s = left.low_s, left.high_s
    elif not going or about.known:
        s.eta_s = 0.0
    s.waits_for = awaited(state) if going else []
    return s


def awaited(state: State) -> list[str]:
    """Nodes that are occupied by others, and pools with leases in their scheduler's queue."""
    nodes = [n.name for n in state.nodes.values() if n.state == "busy"]
    return [*nodes, *(queue_of(pool) for pool, leases in state.queued_leases.items() if leases)]


def flag_words(state: State) -> list[str]:
    """Sentences about slots that are slow, hot or power-capped."""
    return [f"{slot_words(state, *slot)} is {why}" for slot, why in flags(state).items()]


_STATES = {"away": "preparing", "joined": "ready", "busy": "preparing", "lost": "unreachable", "gone": "ended"}


def node_state(node: Node) -> str:
    """The state of a node as people see it: preparing, ready, unreachable, draining or ended."""
    if node.draining and node.state != "gone":
        return "draining"
    if node.state == "joined" and node.history[-1][1] == "trouble":
        return "unreachable"
    return _STATES[node.state]


def node_detail(node: Node) -> str:
    """The trouble of a node in words, "" if all is well."""
    if node.state == "gone" or node.state == "busy":
        return node_words(node, node.state, node.why)
    return node.why


def _node(state: State, about: RunHeader, name: str) -> NodeStatus:
    node = state.nodes.get(name)
    slots = {
        x: node.slots.get(x) if node else None for x in (*about.nodes.get(name, ()), *(node.slots if node else ()))
    }
    out = NodeStatus(name, slots=[_slot(state, about, x, slot) for x, slot in slots.items()])
    if node is None:
        return out
    out.tuned, out.failed, out.state, out.detail = node.tuned, node.failed, node_state(node), node_detail(node)
    if out.state == "ready" and out.running:
        out.state = "busy"
    if out.slots and all(x.state == "quarantined" for x in out.slots):
        out.state = "quarantined"
    out.detail = out.detail or next((s.why for s in node.slots.values() if s.why), "")
    if node.lease:
        out.lease, out.host, out.ends_at = node.lease, node.host, node.ends_at
    return out


def _slot(state: State, about: RunHeader, name: str, slot: Slot | None) -> SlotStatus:
    if slot is None:
        return SlotStatus(name)
    a = state.attempts.get(slot.running or "")
    if a is None and state.nodes[slot.node].state == "gone":
        return SlotStatus(name, "ended")
    if a is None:
        sick = slot.state == "starting" and slot.canary_failed
        return SlotStatus(name, "canary failed" if sick else "idle" if slot.state == "ready" else slot.state)
    if a.current is None:
        return SlotStatus(name, "busy", a.id, a.id, a.moved_at)
    return SlotStatus(name, "busy", a.id, f"{about.named(a.current)}  ({a.id})", a.current_at)
