"""Plan of a run, as `tune --plan` shows it: the work by its shared key, the expected end, and notes on risks.

`controller/prepare.py` calls `make_plan` once, before anything is written. `make_work` lists the shapes by every key
column but M. Each list becomes a `WorkAdded` of the journal, with the ids of its shapes by unit: ((1, 2), (3,)).
Planning makes units, which one process tunes as a whole; the policy deals groups of them while the run goes on
(orchestrator/policy/decide.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from orchestrator.events import WorkAdded
from orchestrator.planning.cost import CostModel
from orchestrator.planning.estimate import Range, seconds_left
from orchestrator.planning.worth import value_tiers
from orchestrator.shapes.model import Shape, describe, operand_bytes
from worker.families import Family
from worker.text import and_more, plural
from worker.tuners.catalog import recorded_tuner

GROUPS = 4
"""The estimate counts the set-ups of about this many groups for each slot."""
MAX_SHAPES = 3
"""Shapes that a note names."""
GIB = 2.0**30
"""Bytes."""


class WorkList(NamedTuple):
    """The common properties of the units in one list of work: the class of their value, every key column but M, and
    whether each has a process of its own."""

    tier: int
    shared_key: tuple[int | str, ...]
    alone: bool

    def kind(self, *, mixes: bool) -> str:
        """Lists of one kind may share a process: `0`; `0!` for alone; with the shared key if the tuner mixes none."""
        if self.alone:
            return f"{self.tier}!"
        return f"{self.tier}{'' if mixes else describe(self.shared_key)}"


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
    spec = recorded_tuner(tuner)
    costs_s = {shape: round(seconds, 4) for shape, seconds in cost.shape_costs(shapes, family).items()}
    tier_of = value_tiers({shape.id: values[shape.id] for shape in shapes}) if values else {}
    m_index = family.key_names.index(family.m_column)
    ids_by_list_and_unit: dict[WorkList, dict[object, list[int]]] = defaultdict(lambda: defaultdict(list))
    for shape in sorted(shapes, key=lambda shape: (shape.key[m_index], shape.id)):
        key = shape.key_dict(family)
        alone = spec.risk is not None and bool(spec.risk(family.name, key))
        shared_key = (*shape.key[:m_index], *shape.key[m_index + 1 :])
        unit: object = shape.id  # by default each shape is a unit of its own
        if spec.unit is not None and not alone:
            unit = spec.unit(family.name, key)
        ids_by_list_and_unit[WorkList(tier_of.get(shape.id, 0), shared_key, alone)][unit].append(shape.id)
    work = []
    for work_list, units_of_list in ids_by_list_and_unit.items():
        units = tuple(map(tuple, units_of_list.values()))
        work.append(
            WorkAdded(
                kind=work_list.kind(mixes=spec.mixes),
                units=units,
                costs_s=tuple(tuple(costs_s[shape] for shape in unit) for unit in units),
                tier=work_list.tier,
                alone=work_list.alone,
                setup_s=cost.setup_s,
                shares_end=spec.mixes,
            )
        )
    return sorted(work, key=lambda added: (added.tier, -seconds_of(added), added.units[0]))


def seconds_of(work: WorkAdded) -> float:
    """Estimated seconds of the work on one slot, without set-ups."""
    return sum(map(sum, work.costs_s))


@dataclass(frozen=True, slots=True)
class Plan:
    """A planned run. `make_plan` makes it; the caller sets `notes`, `leases` and `waits_for`."""

    family: str
    tuner: str
    gfx: str
    cu_num: int
    asked: int
    """Number of the user's shapes, the skipped ones among them."""
    work: tuple[WorkAdded, ...]
    """In the order in which it begins."""
    skipped: tuple[int, ...]
    """Ids of shapes."""
    cost_s: float
    """Estimated seconds of slots, with set-ups."""
    end_s: float
    """Seconds until the run ends, most likely."""
    nodes: Mapping[str, int]
    """Slots by node or pool."""
    cost_source: str
    notes: tuple[str, ...] = ()
    range_s: tuple[float, float] = (0.0, 0.0)
    """Nine of ten runs end between these."""
    first_guess: bool = False
    """Nothing like it was measured yet."""
    leases: Mapping[str, int] = field(default_factory=dict)
    """The most leases of each pool."""
    known: bool = True
    """False if nobody measured the tuner on this chip; then the document has null for seconds."""
    waits_for: tuple[str, ...] = ()
    """Occupied nodes and queues of pools. The estimate begins when they are free."""

    @property
    def todo(self) -> int:
        """Shapes to tune."""
        return self.asked - len(self.skipped)

    def to_json(self) -> dict[str, Any]:
        """Document of `tune --plan --json`; seconds are rounded to milliseconds."""
        # not asdict, which would copy the work of each shape, to be replaced below
        raw = {part.name: getattr(self, part.name) for part in fields(self) if part.name != "known"}
        raw["todo"] = self.todo
        raw["cost_s"] = self._seconds(self.cost_s)
        raw["end_s"] = self._seconds(self.end_s)
        raw["range_s"] = [self._seconds(seconds) for seconds in self.range_s] if self.known else None
        raw["work"] = [
            {"units": work.units, "tier": work.tier, "alone": work.alone, "cost_s": self._seconds(seconds_of(work))}
            for work in self.work
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
    chip: tuple[str, int],
    skipped: Sequence[Shape] = (),
    values: Mapping[int, float] | None = None,
) -> Plan:
    """Plan the shapes for `nodes` (name to number of slots) with `chip`, (gfx, cu_num); `values` as in `make_work`. The
    caller adds notes, leases, and what the run waits for."""
    work = make_work(todo, family, cost, tuner=tuner, values=values)
    slots = sum(nodes.values())
    groups = _count_groups(work, slots)
    total = sum(map(seconds_of, work)) + groups * cost.setup_s
    longest = max((sum(unit) for units in work for unit in units.costs_s), default=0.0)
    waiting = _expected_groups(groups, total, longest + cost.setup_s)
    start = Range(cost.start_s / cost.spread, cost.start_s, cost.start_s * cost.spread)
    end = seconds_left(waiting, slots, spread=cost.spread, start=start)
    gfx, cu_num = chip
    return Plan(
        family=family.name,
        tuner=tuner,
        gfx=gfx,
        cu_num=cu_num,
        asked=len(todo) + len(skipped),
        work=tuple(work),
        skipped=tuple(shape.id for shape in skipped),
        cost_s=total,
        end_s=end.mid_s if end else 0.0,
        nodes=dict(nodes),
        cost_source=cost.source,
        range_s=(end.low_s, end.high_s) if end else (0.0, 0.0),
        first_guess=cost.is_guess,
        known=cost.known,
    )


def _count_groups(work: Sequence[WorkAdded], slots: int) -> int:
    """About how many groups the policy will deal, whose set-ups the estimate counts."""
    alone = 0
    together = 0
    kinds = set()
    for added in work:
        if added.alone:
            alone += len(added.units)
        else:
            together += len(added.units)
            kinds.add(added.kind)
    wanted = GROUPS * slots if slots > 1 else 1
    return alone + min(together, max(len(kinds), wanted))


def _expected_groups(groups: int, total_s: float, longest_s: float) -> list[float]:
    """Seconds of each group: that of the longest unit, and the rest in equal parts."""
    if groups < 2:
        return [total_s] * groups
    return [longest_s] + [(total_s - longest_s) / (groups - 1)] * (groups - 1)


def queue_of(pool: str) -> str:
    """The queue of a pool in words."""
    return f"the queue of {pool}"


def risk_notes(family: Family, keys: Iterable[tuple[int | str, ...]], tuner: str = "aiter") -> list[str]:
    """Sentence for each class of risk, with its first shapes; none for a tuner without such classes."""
    risk = recorded_tuner(tuner).risk
    if risk is None:
        return []
    keys_by_risk: dict[str, list[tuple[int | str, ...]]] = defaultdict(list)
    for key in keys:
        words = risk(family.name, family.named_key(key))
        if words:
            keys_by_risk[words].append(key)
    notes = []
    for words, risky in keys_by_risk.items():
        named = ", ".join(map(describe, risky[:MAX_SHAPES]))
        if len(risky) > MAX_SHAPES:
            named += ", ..."
        what = f"{plural(len(risky), 'shape')} ({named}): {words}: kernels may fault there"
        notes.append(f"{what}, so the tuner {tuner} runs {'each' if len(risky) > 1 else 'it'} alone")
    return notes


def memory_note(shapes: Sequence[Shape], family: Family, memory: int | None) -> list[str]:
    """A note that names shapes whose operands alone exceed `memory` bytes (of the largest device); else nothing.

    They are tried all the same: they fail with the tuner's own message, and the estimate leaves them out.
    """
    if not memory:
        return []
    size = operand_bytes(family)
    large = [shape for shape in shapes if size(shape.key) > memory]
    if not large:
        return []
    large.sort(key=lambda shape: (-size(shape.key), shape.id))
    named = [f"{describe(shape.key)} ({size(shape.key) / GIB:,.0f} GiB)" for shape in large]
    what = f"the operands of {plural(len(large), 'shape')} do not fit into the device's memory"
    return [f"{what} of {memory / GIB:,.0f} GiB, and will fail: {and_more(named, MAX_SHAPES)}"]
