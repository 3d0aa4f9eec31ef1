"""Plan of a run, as `tune --plan` shows it: groups, the nodes' shares, the expected end, and notes on risks.

Groups are the shapes that share every key column but M, cut so that the run is expected to end soonest.

Few groups, as each costs a set-up, and even ends, as slots wait for the last. Long groups come first, short ones last
(guided self-scheduling, Polychronopoulos and Kuck 1987): a group takes a share of what is left for each slot. Several
shares and lower bounds are tried; the plan with the soonest expected end is taken, where the costs of kinds are off by
up to a factor of two either way. No group is more than half of a slot's share, so that an underestimated one does not
hold up the run alone.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from orchestrator.planning.cost import CostModel
from orchestrator.planning.estimate import Range, seconds_left
from orchestrator.planning.value import tiers
from orchestrator.shapes import Shape, describe
from orchestrator.shapes.model import operand_bytes
from worker.families import Family
from worker.text import and_more, plural
from worker.tuners.catalog import recorded_tuner


@dataclass(frozen=True, slots=True)
class Group:
    """Work of one attempt: shape ids in the order of M, and the estimated seconds on one slot. `value`: the highest of
    its shapes', where they have any."""

    id: str
    shapes: tuple[int, ...]
    cost_s: float
    value: float = 0.0


def make_groups(
    shapes: Sequence[Shape],
    family: Family,
    cost: CostModel,
    slots: int,
    *,
    tuner: str = "",
    values: Mapping[int, float] | None = None,
) -> list[Group]:
    """Put every shape into exactly one group, the longest group first (equal ones: the first in the file first).

    A shape on which a kernel of the tuner's may fault (TunerSpec.risk) is a group of its own; others are cut by
    `cut`. With `values` by shape id, shapes of a group have about the same one, and the most valuable comes first.
    """
    at = family.key_names.index(family.m_column)
    risk = recorded_tuner(tuner).risk
    costs, of = cost.shape_costs(shapes, family), values or {}
    tier_of = tiers({s.id: of[s.id] for s in shapes}) if of else {}
    by_key: dict[tuple[int | str, ...], list[Shape]] = {}
    for s in shapes:
        alone = (s.id,) if risk is not None and risk(family.name, s.key_dict(family)) else ()
        tier = (tier_of[s.id],) if of else ()
        by_key.setdefault((*s.key[:at], *s.key[at + 1 :], *alone, *tier), []).append(s)
    for members in by_key.values():
        members.sort(key=lambda s: (-of.get(s.id, 0.0), s.key[at], s.id))
    parts = cut([[(costs[s.id], s.id) for s in members] for members in by_key.values()], cost.setup_s, slots)
    width = max(4, len(str(len(parts))))
    best = [max((of.get(i, 0.0) for i in ids), default=0.0) for _, ids in parts]
    ordered = sorted(zip(best, parts, strict=True), key=lambda p: -p[0])
    return [Group(f"g{n:0{width}d}", ids, seconds, value) for n, (value, (seconds, ids)) in enumerate(ordered, 1)]


Kind = Sequence[tuple[float, int]]
"""(seconds, shape id) of shapes that may be one group, in the order of M."""
Piece = tuple[float, int, int, int]
"""Seconds with the set-up, number of the kind, first and last + 1 of its shapes."""

SMALLEST_CUT_S = 5.0
"""A group below this is never cut: its end is near anyway."""
SHARES = (2.0, 3.0, 4.0, 6.0)
"""A group takes at most one over so much of what is left for each slot ..."""
LEAST = (0.25, 0.125, 0.5, 1.0)
"""... and, where there is enough, at least this part of what the first one takes."""
WORTH = 0.01
"""Part by which more groups must end the run sooner."""
OFF = 2.0
"""The cost of a kind may be off by this factor to either side."""
STEPS, MOST_DRAWS = 250_000, 24
"""Groups whose ends are computed in all, about; and draws at most."""


def cut(kinds: Sequence[Kind], setup: float, slots: int) -> list[tuple[float, tuple[int, ...]]]:
    """(seconds with the set-up, shape ids) of every group, the longest first; one shape is never cut."""
    slots = max(1, slots)
    order = sorted((k for k in kinds if k), key=lambda k: (-sum(c for c, _ in k), k[0][1]))
    if slots == 1 or all(len(k) == 1 for k in order):
        whole = [(setup + sum(c for c, _ in k), tuple(i for _, i in k)) for k in order]
        return sorted(whole, key=lambda p: (-p[0], p[1][0]))
    sums = [list(itertools.accumulate((c for c, _ in k), initial=0.0)) for k in order]
    steps = max(len(order), 4 * slots)
    ways = list(itertools.product(SHARES, LEAST))[: max(1, STEPS // steps)]
    rng = random.Random(1)
    count = max(2, min(MOST_DRAWS, STEPS // (len(ways) * steps)))
    draws = [[OFF ** rng.uniform(-1.0, 1.0) for _ in order] for _ in range(count)]
    best: list[Piece] = []
    least = math.inf
    tried = set[int]()
    for share, last in ways:
        pieces = sorted(_pieces(sums, setup, slots, share, last), key=lambda p: (-p[0], order[p[1]][p[2]][1]))
        same = hash(tuple(p[1:] for p in pieces))
        if same in tried:
            continue
        tried.add(same)
        end = _expected_end(pieces, draws, setup, slots)
        if end < least * (1 - WORTH) or (len(pieces) < len(best) and end < least * (1 + WORTH)):
            best, least = pieces, min(end, least)
    return [(seconds, tuple(i for _, i in order[k][a:b])) for seconds, k, a, b in best]


def _pieces(sums: Sequence[Sequence[float]], setup: float, slots: int, share: float, last: float) -> Iterator[Piece]:
    """Every kind's shapes in pieces, the first kind first; `sums` are running sums of their seconds, from 0."""
    left = sum(s[-1] for s in sums) + setup * len(sums)
    floor = max(SMALLEST_CUT_S, last * left / (slots * share))
    for number, seconds in enumerate(sums):
        at, end = 0, len(seconds) - 1
        while at < end:
            most = max(floor, left / (slots * share))
            rest = setup + seconds[end] - seconds[at]
            until = end
            if rest > most:
                # in as few pieces as it takes, all about equal
                even = (rest - setup) / math.ceil((rest - setup) / max(most - setup, 1e-9)) if most > setup else 0.0
                until = min(end, max(at + 1, bisect_right(seconds, seconds[at] + even * (1 + 1e-9)) - 1))
            piece = setup + seconds[until] - seconds[at]
            yield piece, number, at, until
            left -= piece
            at = until


def _expected_end(pieces: Sequence[Piece], draws: Sequence[Sequence[float]], setup: float, slots: int) -> float:
    """Mean end over draws of the kinds' true costs, each slot taking the next piece when it is free.

    A piece of one shape cannot be cut: its end says nothing about the plan, only the work in it does.
    """
    total = 0.0
    for off in draws:
        free = [0.0] * slots
        end = 0.0
        for seconds, kind, first, until in pieces:
            at = free[0] + setup + (seconds - setup) * off[kind]
            heapq.heapreplace(free, at)
            if until - first > 1 and at > end:
                end = at
        total += max(end, sum(free) / slots)
    return total / len(draws)


@dataclass(frozen=True, slots=True)
class NodeShare:
    """Share of a node, if everything took as long as estimated."""

    node: str
    slots: int
    groups: int
    shapes: int
    cost_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Groups, longest first; `cost_s` is the sum of their estimates, `end_s` when the run would be over.

    `range_s`: nine of ten runs end between these. `first_guess`: nothing like it was measured yet.
    """

    family: str
    tuner: str
    gfx: str
    cu_num: int
    asked: int
    groups: tuple[Group, ...]
    skipped: tuple[int, ...]
    cost_s: float
    end_s: float
    nodes: tuple[NodeShare, ...]
    cost_source: str
    notes: tuple[str, ...]
    range_s: tuple[float, float] = (0.0, 0.0)
    first_guess: bool = False

    @property
    def todo(self) -> int:
        """Shapes to tune."""
        return self.asked - len(self.skipped)

    def to_json(self) -> dict[str, Any]:
        """Document of `tune --plan --json`; seconds are rounded to milliseconds."""
        raw = asdict(self)
        raw["todo"] = self.todo
        raw["cost_s"], raw["end_s"] = round(self.cost_s, 3), round(self.end_s, 3)
        raw["range_s"] = [round(s, 3) for s in self.range_s]
        for part in (*raw["groups"], *raw["nodes"]):
            part["cost_s"] = round(part["cost_s"], 3)
        return raw


def make_plan(
    todo: Sequence[Shape],
    family: Family,
    cost: CostModel,
    nodes: Mapping[str, int],
    *,
    tuner: str,
    gfx: str,
    cu_num: int,
    skipped: Sequence[Shape] = (),
    notes: Sequence[str] = (),
    values: Mapping[int, float] | None = None,
) -> Plan:
    """Group, cut and order the shapes for `nodes` (name to number of slots); `values` as in `make_groups`."""
    slots = [name for name, n in nodes.items() for _ in range(n)]
    groups = make_groups(todo, family, cost, len(slots), tuner=tuner, values=values)
    where = _assign(groups, max(1, len(slots)))
    start = Range(cost.start_s / cost.spread, cost.start_s, cost.start_s * cost.spread)
    end = seconds_left([g.cost_s for g in groups], len(slots), spread=cost.spread, start=start)
    per_node = {name: [0, 0, 0.0] for name in nodes}
    for group, slot in zip(groups, where, strict=True):
        if slots:
            share = per_node[slots[slot]]
            share[0] += 1
            share[1] += len(group.shapes)
            share[2] += group.cost_s
    shares = tuple(NodeShare(name, nodes[name], int(g), int(s), c) for name, (g, s, c) in per_node.items())
    return Plan(
        family=family.name,
        tuner=tuner,
        gfx=gfx,
        cu_num=cu_num,
        asked=len(todo) + len(skipped),
        groups=tuple(groups),
        skipped=tuple(s.id for s in skipped),
        cost_s=sum(g.cost_s for g in groups),
        end_s=end.mid_s if end else 0.0,
        nodes=shares,
        cost_source=cost.source,
        notes=tuple(notes),
        range_s=(end.low_s, end.high_s) if end else (0.0, 0.0),
        first_guess=cost.is_guess,
    )


def _assign(groups: Sequence[Group], slots: int) -> list[int]:
    """Slot of each group in list scheduling, the longest first: at most 4/3 of the best possible end (Graham 1969)."""
    free = [(0.0, i) for i in range(slots)]
    where: list[int] = []
    for g in groups:
        at, slot = heapq.heappop(free)
        heapq.heappush(free, (at + g.cost_s, slot))
        where.append(slot)
    return where


SHOWN = 3
"""Shapes that a note names."""


def risk_notes(family: Family, keys: Iterable[tuple[int | str, ...]], tuner: str = "aiter") -> list[str]:
    """Sentence for each class of risk, with its first shapes; none for a tuner without such classes."""
    risk = recorded_tuner(tuner).risk
    if risk is None:
        return []
    count, first = Counter[str](), defaultdict[str, list[str]](list)
    for key in keys:
        if words := risk(family.name, dict(zip(family.key_names, key, strict=True))):
            count[words] += 1
            if count[words] <= SHOWN:
                first[words].append(describe(key))
    return [
        f"{plural(n, 'shape')} ({', '.join(first[words])}{', ...' if n > SHOWN else ''}): {words}: kernels may"
        f" fault there, so the tuner {tuner} runs {'each' if n > 1 else 'it'} alone"
        for words, n in count.items()
    ]


GIB = 2.0**30


def memory_note(shapes: Sequence[Shape], family: Family, memory: int | None) -> list[str]:
    """A note that names shapes whose operands alone exceed `memory` bytes (of the largest device); else nothing.

    They are tried all the same: they fail with the tuner's own message, and cost one attempt each.
    """
    if not memory:
        return []
    size = operand_bytes(family)
    large = [(size(s.key), s) for s in shapes if size(s.key) > memory]
    if not large:
        return []
    large.sort(key=lambda found: (-found[0], found[1].id))
    named = [f"{describe(s.key)} ({bytes_ / GIB:,.0f} GiB)" for bytes_, s in large]
    have = f"the operands of {plural(len(large), 'shape')} do"
    return [
        f"{have} not fit into the device's memory of {memory / GIB:,.0f} GiB, and will fail: {and_more(named, SHOWN)}"
    ]
