"""Faults for a simulation from a YAML list (docs/explanation/scheduling.md): read, and drawn for a plan by its seed."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from orchestrator.errors import InputError
from orchestrator.reasons import Reason
from orchestrator.scheduling.model import SlotId
from orchestrator.simulation.plan import Outage, Poison, Sickness, SimLease, SimPlan, Span
from orchestrator.tables.faults import did_you_mean, escaped, shown
from orchestrator.tables.open import read_bytes

MAX_BYTES = 1 << 20
Number = Annotated[float, Field(ge=0.0)] | Annotated[str, Field(pattern=r"^\d+(\.\d+)?%$")]
Moment = Number | tuple[Number, Number]
"""Seconds, or a percentage of the lower bound without faults; of two, a value between is drawn."""
FOREVER = float("inf")


class Entry(BaseModel):
    """One item of the list. Shapes and nodes that are not named are drawn, each once while there are enough."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal[
        "poison", "wedge", "kills_worker", "kills_node", "sick", "lost", "link", "lease_ends", "drain", "controller"
    ]
    shapes: tuple[int, ...] = ()
    share: float = Field(0.0, ge=0.0, le=1.0)
    count: int = Field(1, ge=1)
    one_group: bool = False
    reason: Reason = Reason.FAULT
    chance: float = Field(1.0, gt=0.0, le=1.0)
    node: str = ""
    slot: str = ""
    """`all`: every slot of the node."""
    at: Moment = 0.0
    seconds: Moment | None = None
    canary: bool = True
    largest: float = Field(0.0, ge=0.0, le=1.0)
    salvage: bool = False


def read_faults(path: Path) -> list[Entry]:
    """The entries of a file. Raises InputError with every fault."""
    where = escaped(str(path))
    try:
        raw = yaml.safe_load(read_bytes(path, MAX_BYTES, InputError))
        return TypeAdapter(list[Entry]).validate_python(raw)
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        raise InputError(f"{where}:{mark.line + 1 if mark else 1}: is no valid YAML") from e
    except ValidationError as e:
        raise InputError(list(dict.fromkeys(_fault(where, d) for d in e.errors(include_url=False)))) from e


def _fault(where: str, detail: Mapping[str, Any]) -> str:
    at, keys, legal = detail["loc"][:1], detail["loc"][1:2], Entry.model_fields
    what = f"{detail['msg']} (it is {shown(str(detail['input']))})"
    if detail["type"] == "extra_forbidden":
        what = f"unknown key{did_you_mean(str(keys[0]), legal)} (legal: {', '.join(legal)})"
    return ": ".join((where, *(f"entry {i + 1}" for i in at), *map(str, keys), what))


def with_faults(plan: SimPlan, entries: Sequence[Entry], gone: Collection[str] = ()) -> SimPlan:
    """The plan with the entries' faults beside its own. Those of nodes of `gone` are left out. Raises InputError."""
    draw = _Draw(plan, entries)
    faults, leases = plan.faults, dict(plan.leases)
    for number, e in enumerate(entries, 1):
        if e.node and e.node in gone:
            continue
        try:
            if e.kind == "lease_ends":
                name, at, _ = draw.node(e), *draw.times(e)
                leases[name] = SimLease(name, tuple(map(str, range(plan.nodes[name]))), until=at, cause="time_limit")
                continue
            field, more = draw.fault(e)
        except LookupError as x:
            raise InputError(f"entry {number} of the faults ({e.kind}): {x.args[0]}") from x
        have = getattr(faults, field)
        joined: Any = {**have, **more} if isinstance(have, Mapping) else type(have)((*have, *more))
        faults = replace(faults, **{field: joined})
    return replace(plan, faults=faults, leases=leases)


class _Draw:
    """Choices that the entries leave open. Raises LookupError where nothing is left to choose from."""

    def __init__(self, plan: SimPlan, entries: Sequence[Entry]) -> None:
        self._plan, self._rng, self._span = plan, random.Random(f"{plan.seed} faults"), plan.lower_bound_s()
        self._seconds = {s: t for g in plan.groups for s, t in zip(g.shapes, g.seconds, strict=True)}
        self._shapes = [s for s in self._seconds if all(s not in e.shapes for e in entries)]
        self._nodes = [n for n in plan.nodes if all(e.node != n for e in entries)]
        self._rng.shuffle(self._shapes)
        self._rng.shuffle(self._nodes)

    def fault(self, e: Entry) -> tuple[str, Any]:
        """Field of Faults, and what is to be added to it."""
        at, seconds = self.times(e)
        until = FOREVER if seconds is None else at + seconds
        match e.kind:
            case "poison" if e.reason.is_verdict:
                return "refused", dict.fromkeys(self._some(e), e.reason)
            case "poison":
                return "poison", dict.fromkeys(self._some(e), Poison(e.reason, e.chance))
            case "wedge":
                return "wedges", dict.fromkeys(self._some(e), 300.0 if seconds is None else seconds)
            case "kills_worker":
                return "worker_killers", self._some(e)
            case "kills_node":
                return "node_killers", dict.fromkeys(self._some(e), seconds)
            case "sick":
                sickness = Sickness(e.canary, at, until, self._largest(e.largest), e.salvage)
                return "sick", dict.fromkeys(self._places(e), sickness)
            case "drain":
                return "drains", {self.node(e): at}
            case "controller":
                return "controller", (Span(at, at + 20.0 if seconds is None else until),)
        return "outages", (Outage(self.node(e), at, seconds, "link" if e.kind == "link" else "power"),)

    def times(self, e: Entry) -> tuple[float, float | None]:
        return self._moment(e.at), None if e.seconds is None else self._moment(e.seconds)

    def _moment(self, value: Moment) -> float:
        if isinstance(value, tuple):
            return self._rng.uniform(self._moment(value[0]), self._moment(value[1]))
        return float(value[:-1]) / 100.0 * self._span if isinstance(value, str) else value

    def _some(self, e: Entry) -> tuple[int, ...]:
        wrong = [s for s in e.shapes if s not in self._seconds]
        if wrong:
            raise LookupError(f"there is no shape {wrong[0]} (they count from 1 to {max(self._seconds, default=0)})")
        count, chosen = round(e.share * len(self._seconds)) or e.count, e.shapes
        if not chosen and e.one_group:
            free = {*self._shapes}
            groups = [g.shapes[:count] for g in self._plan.groups if len(g.shapes) > count]
            chosen = self._rng.choice([g for g in groups if free.issuperset(g)] or [()])
        chosen = chosen or tuple(self._shapes[:count])
        if len(chosen) < count and not e.shapes:
            raise LookupError(f"needs {count} shapes, and {len(self._shapes)} are left: take fewer")
        self._shapes = [s for s in self._shapes if s not in {*chosen}]
        return chosen

    def node(self, e: Entry) -> str:
        if e.node and e.node not in self._plan.nodes:
            raise LookupError(f"there is no node {shown(e.node)}{did_you_mean(e.node, self._plan.nodes)}")
        self._nodes = self._nodes or list(self._plan.nodes)  # more entries than nodes: some have two faults
        return e.node or self._nodes.pop()

    def _places(self, e: Entry) -> list[SlotId]:
        name = self.node(e)
        slots = [str(s) for s in range(self._plan.nodes[name])]
        if e.slot not in ("", "all", *slots):
            raise LookupError(f"node {name} has no slot {shown(e.slot)} (slots: {', '.join(slots)})")
        return [(name, s) for s in slots if e.slot in (s, "all")] or [(name, self._rng.choice(slots))]

    def _largest(self, share: float) -> frozenset[int] | None:
        """The shapes that take longest, None for all."""
        by = sorted(self._seconds, key=lambda s: -self._seconds[s])
        return frozenset(by[: max(1, round(share * len(by)))]) if share else None
