"""Plan of a run, as `tune --plan` shows it: the work by its shared key, the expected end, and notes on risks.

Planning makes units, which one process tunes as a whole; the policy deals groups of them while the run goes on
(orchestrator/policy/decide.py).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from orchestrator.events import WorkAdded
from orchestrator.planning.cost import CostModel
from orchestrator.planning.estimate import Range, seconds_left
from orchestrator.planning.roofline import tiers
from orchestrator.shapes.model import Shape, describe, operand_bytes
from worker.families import Family
from worker.text import and_more, plural
from worker.tuners.catalog import recorded_tuner

GROUPS = 4
"""Groups of a slot in a run, about: what set-ups the estimate counts."""


def make_work(
    shapes: Sequence[Shape],
    family: Family,
    cost: CostModel,
    *,
    tuner: str = "",
    values: Mapping[int, float] | None = None,
) -> list[WorkAdded]:
    """Put every shape into exactly one unit; those that share every key column but M are listed together.

    The tuner says which shapes are one unit (TunerSpec.unit), and whether several of these lists may share a process
    (TunerSpec.mixes). A shape on which a kernel of it may fault (TunerSpec.risk) has a process of its own. With
    `values` by shape id, only shapes of about the same one share a process, and the most valuable go first.
    """
    spec, at, of = recorded_tuner(tuner), family.key_names.index(family.m_column), values or {}
    costs, tier = cost.shape_costs(shapes, family), tiers({s.id: of[s.id] for s in shapes} if of else {})
    rows: dict[tuple[int, tuple[int | str, ...], bool], dict[object, list[Shape]]] = {}
    for s in sorted(shapes, key=lambda s: (s.key[at], s.id)):
        key = s.key_dict(family)
        alone = spec.risk is not None and bool(spec.risk(family.name, key))
        row = rows.setdefault((tier.get(s.id, 0), (*s.key[:at], *s.key[at + 1 :]), alone), {})
        unit = s.id if alone or spec.unit is None else spec.unit(family.name, key)
        row.setdefault(unit, []).append(s)
    out = [
        WorkAdded(
            f"{t}{'!' if alone else ''}{'' if spec.mixes or alone else describe(shared)}",
            tuple(tuple(s.id for s in unit) for unit in units.values()),
            tuple(tuple(round(costs[s.id], 4) for s in unit) for unit in units.values()),
            t,
            alone,
            cost.setup_s,
            spec.mixes,
        )
        for (t, shared, alone), units in rows.items()
    ]
    return sorted(out, key=lambda w: (w.tier, -seconds_of(w), w.units[0]))


def seconds_of(work: WorkAdded) -> float:
    """Estimated seconds of the work on one slot, without set-ups."""
    return sum(map(sum, work.costs_s))


@dataclass(frozen=True, slots=True)
class Plan:
    """`work` in the order in which it begins; `cost_s` is its estimate with set-ups, `end_s` when the run ends.

    `nodes`: slots by node or pool; `leases`: the most leases of each pool. `range_s`: nine of ten runs end between
    these. `first_guess`: nothing like it was measured yet. `known`: False if nobody measured the tuner on this chip;
    then the document has null for seconds.
    """

    family: str
    tuner: str
    gfx: str
    cu_num: int
    asked: int
    work: tuple[WorkAdded, ...]
    skipped: tuple[int, ...]
    cost_s: float
    end_s: float
    nodes: Mapping[str, int]
    cost_source: str
    notes: tuple[str, ...]
    range_s: tuple[float, float] = (0.0, 0.0)
    first_guess: bool = False
    leases: Mapping[str, int] = field(default_factory=dict)
    known: bool = True
    waits_for: tuple[str, ...] = ()
    """Occupied nodes and queues of pools. The estimate begins when they are free."""

    @property
    def todo(self) -> int:
        """Shapes to tune."""
        return self.asked - len(self.skipped)

    def to_json(self) -> dict[str, Any]:
        """Document of `tune --plan --json`; seconds are rounded to milliseconds."""
        raw = asdict(self)
        del raw["known"]
        raw["todo"] = self.todo
        raw["cost_s"] = self._seconds(self.cost_s)
        raw["end_s"] = self._seconds(self.end_s)
        raw["range_s"] = [round(s, 3) for s in self.range_s] if self.known else None
        raw["work"] = [
            {"units": w.units, "tier": w.tier, "alone": w.alone, "cost_s": self._seconds(seconds_of(w))}
            for w in self.work
        ]
        return raw

    def _seconds(self, seconds: float) -> float | None:
        return round(seconds, 3) if self.known else None


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
    leases: Mapping[str, int] | None = None,
) -> Plan:
    """Plan the shapes for `nodes` (name to number of slots); `leases` as in `Plan`, `values` as in `make_work`."""
    work, slots = make_work(todo, family, cost, tuner=tuner, values=values), sum(nodes.values())
    longest = max((sum(unit) for w in work for unit in w.costs_s), default=0.0)
    alone, units = sum(len(w.units) for w in work if w.alone), sum(len(w.units) for w in work)
    kinds = {w.kind for w in work if not w.alone}
    groups = alone + min(units - alone, max(len(kinds), GROUPS * slots if slots > 1 else 1))
    total = sum(map(seconds_of, work)) + groups * cost.setup_s
    start = Range(cost.start_s / cost.spread, cost.start_s, cost.start_s * cost.spread)
    first = longest + cost.setup_s
    waiting = [first, *[(total - first) / (groups - 1)] * (groups - 1)] if groups > 1 else [total] * groups
    end = seconds_left(waiting, slots, spread=cost.spread, start=start)
    return Plan(
        family=family.name,
        tuner=tuner,
        gfx=gfx,
        cu_num=cu_num,
        asked=len(todo) + len(skipped),
        work=tuple(work),
        skipped=tuple(s.id for s in skipped),
        cost_s=total,
        end_s=end.mid_s if end else 0.0,
        nodes=dict(nodes),
        cost_source=cost.source,
        notes=tuple(notes),
        range_s=(end.low_s, end.high_s) if end else (0.0, 0.0),
        first_guess=cost.is_guess,
        leases=leases or {},
        known=cost.known,
    )


def queue_of(pool: str) -> str:
    """The queue of a pool in words."""
    return f"the queue of {pool}"


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

    They are tried all the same: they fail with the tuner's own message, and the estimate leaves them out.
    """
    if not memory:
        return []
    size = operand_bytes(family)
    large = sorted((-size(s.key), s.id, s.key) for s in shapes if size(s.key) > memory)
    named = [f"{describe(key)} ({-less / GIB:,.0f} GiB)" for less, _, key in large]
    have = f"the operands of {plural(len(large), 'shape')} do not fit into the device's memory of"
    return [f"{have} {memory / GIB:,.0f} GiB, and will fail: {and_more(named, SHOWN)}"] if large else []
