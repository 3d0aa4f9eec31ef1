"""The fixed workload of `fleet_sim`: shapes of AITER's tables with what tuning them takes, a fleet, and its faults."""

from __future__ import annotations

import csv
import gzip
import io
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from orchestrator.policy.model import SlotId
from tests.simulator.plan import Faults, Outage, Poison, Sickness, SimGroup, SimLease, SimPlan, Span

DATA = Path(__file__).parent / "data" / "aiter_winners.csv.gz"
GROUPS = 2000
NODES, SLOTS = 16, 8
COLD_S, SETUP_S = 25.0, 12.0
"""AITER's practice: a first process on a GPU, and every further one."""
SLOW_SHARE, SLOW = 0.1, 1.3
CANDIDATES = {
    "a4w4_blockscale": 53, "a8w8_blockscale": 52, "a8w8_bpreshuffle": 159, "batched_bf16": 86, "a16w16": 120,
    "fmoe": 80,
}  # fmt: skip
"""Candidates of a shape, about (without split-K); 111 executions of each, and 0.12 s that a candidate costs besides."""
EXECUTIONS, CANDIDATE_S, SHAPE_S = 111, 0.12, 2.0
OFF_WINNER = 2.5
"""On average a candidate takes this many times as long as the winner."""
JOBS = ("groups", "tables", "few")

Kind = list[tuple[float, int]]
"""(true seconds, shape id) of shapes that could be one group, in the order of M."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A plan for the simulator, with what a bound and a verdict need to know."""

    plan: SimPlan
    seconds: Mapping[int, float]
    guilty: frozenset[int]
    """Shapes that may fail by right."""
    kinds: Sequence[Kind]
    whole: bool
    """Groups are given: no planner may part them."""


def workload(job: str, seed: int, *, faults: bool, mixes: bool = True) -> Workload:
    """The shapes are the same for every seed; the cost model's errors, slow slots and faults are the seed's. Not
    `mixes`: a process has shapes of one group only, as the tuner aiter's."""
    rng = random.Random(f"{job} {seed}")
    kinds = _few() if job == "few" else _tables() if job == "tables" else _two_thousand()
    nodes = {"n01": SLOTS} if job == "few" else {f"n{i:02d}": SLOTS for i in range(1, NODES + 1)}
    seconds = {i: s for kind in kinds for s, i in kind}
    guessed = []
    for kind in kinds:
        off = math.exp(rng.uniform(math.log(0.5), math.log(2.0)))
        guessed.append([(s * off, i) for s, i in kind])
    groups = tuple(
        SimGroup(
            f"g{n:04d}",
            tuple(i for _, i in kind),
            tuple(seconds[i] for _, i in kind),
            sum(s for s, _ in guess),
            whole=job == "groups",
        )
        for n, (kind, guess) in enumerate(zip(kinds, guessed, strict=True), 1)
    )
    places: list[SlotId] = [(n, str(s)) for n, count in nodes.items() for s in range(count)]
    slow = dict.fromkeys(rng.sample(places, round(SLOW_SHARE * len(places))), SLOW)
    plan = SimPlan(nodes, groups, Faults(), seed, setup_s=SETUP_S, cold_s=COLD_S, slow=slow, mixes=mixes)
    if faults:
        plan = with_a_bad_night(plan)
    guilty = frozenset((*plan.faults.poison, *plan.faults.wedges))
    return Workload(plan, seconds, guilty, kinds, job == "groups")


def with_a_bad_night(plan: SimPlan) -> SimPlan:
    """The plan with everything that goes wrong in a bad night. The plan's seed draws shapes, nodes, slots and times.

    Each fault of a node or slot hits a node of its own while there are enough nodes. Times are shares of the plan's
    lower bound.
    """
    rng, span = random.Random(f"{plan.seed} faults"), plan.lower_bound_s()
    seconds = {s: t for g in plan.groups for s, t in zip(g.shapes, g.seconds, strict=True)}
    shapes, nodes = list(seconds), list(plan.nodes)
    rng.shuffle(shapes)
    rng.shuffle(nodes)
    pair = rng.choice([g.shapes[:2] for g in plan.groups if len(g.shapes) > 2])
    shapes = [s for s in shapes if s not in pair]
    longest = sorted(seconds, key=lambda s: -seconds[s])[: max(1, round(0.05 * len(seconds)))]
    sick: dict[SlotId, Sickness] = {}

    def some(count: int) -> list[int]:
        taken = shapes[:count]
        del shapes[:count]
        return taken

    def node() -> str:
        if not nodes:
            nodes.extend(plan.nodes)
        return nodes.pop()

    def at(low: float, high: float) -> float:
        return rng.uniform(low * span, high * span)

    def fall_sick(sickness: Sickness) -> None:
        name = node()
        sick[name, rng.choice([str(s) for s in range(plan.nodes[name])])] = sickness

    poison = dict.fromkeys([*pair, *some(round(0.03 * len(seconds)))], Poison())
    poison |= dict.fromkeys(some(5), Poison(chance=0.3))
    wedges = dict.fromkeys(some(1), 300.0)
    fall_sick(Sickness(since=at(0.0, 0.5)))
    fall_sick(Sickness(only=frozenset(longest)))
    fall_sick(Sickness(since=at(0.0, 0.5), salvage=True))
    since, whole = at(0.0, 0.5), node()
    sick.update({(whole, str(s)): Sickness(since=since) for s in range(plan.nodes[whole])})
    lost = Outage(node(), at(0.1, 0.8), None)
    back = Outage(node(), 0.0, at(0.1, 0.3))
    lease = node()
    leases = {lease: SimLease(lease, tuple(map(str, range(plan.nodes[lease]))), until=at(0.6, 0.9), cause="time_limit")}
    links = [Outage(node(), at(0.1, 0.8), rng.uniform(10.0, 300.0), "link") for _ in range(2)]
    dies = at(0.2, 0.5)
    faults = Faults(
        poison=poison,
        wedges=wedges,
        sick=sick,
        outages=(lost, back, *links),
        controller=(Span(dies, dies + 20.0),),
        resumes=8,
    )
    return replace(plan, faults=faults, leases=leases)


def _tables() -> list[Kind]:
    """Every (family, N, K) of AITER's tables with all its M."""
    out: dict[tuple[str, str, str], Kind] = {}
    with gzip.open(DATA, "rb") as f:
        rows = csv.DictReader(io.TextIOWrapper(f))
        for number, r in enumerate(rows, 1):
            count = CANDIDATES[r["family"]]
            measuring = EXECUTIONS * OFF_WINNER * float(r["us"]) * 1e-6
            kind = out.setdefault((r["family"], r["N"], r["K"]), [])
            kind.append((SHAPE_S + count * (CANDIDATE_S + measuring), number))
    return list(out.values())


def _few() -> list[Kind]:
    """96 shapes over six (N, K): ten seconds each."""
    return [[(10.0, 16 * k + m + 1) for m in range(16)] for k in range(6)]


@cache
def _two_thousand() -> list[Kind]:
    return _pieces(_tables(), GROUPS)


def _pieces(kinds: list[Kind], count: int) -> list[Kind]:
    """Kinds cut into consecutive pieces of about equal seconds, `count` in all."""
    low, high = 0.0, sum(s for kind in kinds for s, _ in kind)
    pieces: list[Kind] = []
    for _ in range(60):
        most = (low + high) / 2
        found = [piece for kind in kinds for piece in _within(kind, most)]
        low, high = (most, high) if len(found) > count else (low, most)
        pieces = found if len(found) <= count else pieces
    pieces.sort(key=lambda p: (-len(p), p[0][1]))
    for i in range(count - len(pieces)):
        half = len(pieces[i]) // 2
        pieces.append(pieces[i][half:])
        pieces[i] = pieces[i][:half]
    return pieces


def _within(kind: Kind, most: float) -> Iterator[Kind]:
    """Consecutive shapes that take at most `most` seconds together, or one shape that takes longer."""
    first, filled = 0, 0.0
    for at, (seconds, _) in enumerate(kind):
        if at > first and filled + seconds > most:
            yield kind[first:at]
            first, filled = at, 0.0
        filled += seconds
    yield kind[first:]
