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

from orchestrator.planning.plan import cut
from orchestrator.scheduling.model import SlotId
from orchestrator.simulation.faults_file import read_faults, with_faults
from orchestrator.simulation.plan import Faults, SimGroup, SimPlan

DATA = Path(__file__).parent / "data" / "aiter_winners.csv.gz"
FAULTS = Path(__file__).parents[1] / "examples" / "faults.yaml"
"""All that goes wrong in a night."""
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
"""A candidate takes so much longer than the winner, on average."""
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


def workload(job: str, seed: int, *, faults: bool) -> Workload:
    """The shapes are the same for every seed; the cost model's errors, slow slots and faults are the seed's."""
    rng = random.Random(f"{job} {seed}")
    kinds = _few() if job == "few" else _tables() if job == "tables" else _two_thousand()
    nodes = {"n01": SLOTS} if job == "few" else {f"n{i:02d}": SLOTS for i in range(1, NODES + 1)}
    seconds = {i: s for kind in kinds for s, i in kind}
    guessed = []
    for kind in kinds:
        off = math.exp(rng.uniform(math.log(0.5), math.log(2.0)))
        guessed.append([(s * off, i) for s, i in kind])
    if job == "groups":
        parts = [(SETUP_S + sum(s for s, _ in kind), tuple(i for _, i in kind)) for kind in guessed]
    else:
        parts = cut(guessed, SETUP_S, sum(nodes.values()))
    groups = tuple(
        SimGroup(f"g{n:04d}", ids, tuple(seconds[i] for i in ids), estimate)
        for n, (estimate, ids) in enumerate(parts, 1)
    )
    places: list[SlotId] = [(n, str(s)) for n, count in nodes.items() for s in range(count)]
    slow = dict.fromkeys(rng.sample(places, round(SLOW_SHARE * len(places))), SLOW)
    plan = SimPlan(nodes, groups, Faults(), seed, setup_s=SETUP_S, cold_s=COLD_S, slow=slow)
    if faults:
        plan = with_faults(replace(plan, faults=Faults(resumes=8)), read_faults(FAULTS))
    guilty = frozenset((*plan.faults.poison, *plan.faults.wedges))
    return Workload(plan, seconds, guilty, kinds, job == "groups")


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
    """Consecutive shapes of at most so many seconds together, or one shape that takes longer."""
    first, filled = 0, 0.0
    for at, (seconds, _) in enumerate(kind):
        if at > first and filled + seconds > most:
            yield kind[first:at]
            first, filled = at, 0.0
        filled += seconds
    yield kind[first:]
