"""The measurements of each shape, and how reliable they are: spread, repeats, close calls, slots that differ.

They are updated from the ledger's new rows (rows are only ever added).
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import geometric_mean, median
from typing import Any

import numpy as np

from orchestrator.families import backend_name, label
from orchestrator.ledger.reader import LedgerReader, Report
from orchestrator.planning.roofline import Chip, chip_of, roof_of
from orchestrator.policy.model import State
from orchestrator.shapes.model import Key, element_type
from worker.families import Family

MOST_BACKENDS = 12
"""Most backends that are shown separately, whatever names nodes send. The rest are `other`."""

_CHUNK = 20_000
_NEW = """SELECT id, shape, us, status, kernel_id, kernel_name, libtype, extra
    FROM rows WHERE id>? ORDER BY id LIMIT ?"""
_WINNERS = """SELECT id, shape, attempt, node, slot, us, bw, spread, kernel_id, kernel_name, libtype, gfx, cu_num, extra
    FROM rows WHERE winner=1 AND id>? ORDER BY id"""
_BESIDE = """SELECT us, kernel_name, libtype FROM rows
    WHERE attempt=? AND shape=? AND us>0 AND status='ok' AND winner=0 ORDER BY id"""


@dataclass(slots=True)
class Tried:
    """The candidates of one shape. `best`: backend -> the lowest us of its correct candidates."""

    candidates: int = 0
    best: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Winner:
    """The row that settled a shape.

    `median_us`: of the attempt's correct candidates. `runner_up_us`: the best of them with another kernel. `first_us`:
    the winner's first time, before it was measured again. Each is None if there is no such time. `noisy`: see
    LedgerReader.noise.
    """

    node: str
    slot: str
    us: float
    tflops: float
    bw: float | None
    spread: float | None
    kernel: str
    backend: str
    gfx: str
    cu_num: int | None
    median_us: float | None
    runner_up_us: float | None
    first_us: float | None
    noisy: bool


class Measurements:
    """The measurements of a run. `update` reads the new rows; call it inside a snapshot of the ledger."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.keys: dict[int, Key] = {}
        self.tried: dict[int, Tried] = defaultdict(Tried)
        self.winners: dict[int, Winner] = {}
        self._settled_by: dict[int, str] = {}
        self.backends: set[str] = set()
        self._row = self._won = 0
        self._open: list[tuple[Any, ...]] = []
        """Winners from attempts that have not settled their shape (yet)."""

    def update(self, ledger: LedgerReader) -> None:
        if not self.keys:
            self.keys = ledger.keys
        while chunk := ledger.query(_NEW, (self._row, _CHUNK)):
            for row in chunk:
                self._take(*row[1:])
            self._row = chunk[-1][0]
        shapes, rows = ledger.replayed.shapes, self._open + ledger.query(_WINNERS, (self._won,))
        self._open = [r for r in rows if shapes[r[1]].state != "tuned"]  # their attempts may settle them yet
        for number, shape, attempt, *rest in rows:
            s, self._won = shapes[shape], max(self._won, number)
            if s.state == "tuned" and s.attempt == attempt and self._settled_by.get(shape) != attempt:
                self._settled_by[shape] = attempt
                self.winners[shape] = self._winner(ledger, shape, attempt, *rest)

    def flops(self, shape: int) -> float:
        """Floating-point operations of the shape."""
        return self.family.flops(dict(zip(self.family.key_names, self.keys[shape], strict=True)))

    def _take(
        self, shape: int, us: float, status: str, number: int | None, kernel: str, libtype: str, extra: str | None
    ) -> None:
        tried = self.tried[shape]
        tried.candidates += 1
        if us > 0 and status == "ok":
            backend = self._backend(libtype, kernel or _first_stage(extra), number)
            old = tried.best.get(backend)
            if old is None or us < old:
                tried.best[backend] = us

    def _winner(
        self, ledger: LedgerReader, shape: int, attempt: str, node: str, slot: str, us: float, bw: float | None,
        spread: float | None, number: int | None, kernel: str, libtype: str, gfx: str, cu_num: int | None,
        extra: str | None,
    ) -> Winner:  # fmt: skip
        beside = ledger.query(_BESIDE, (attempt, shape))
        own = [us for us, *of in beside if of == [kernel, libtype]]
        rivals = [us for us, *of in beside if of != [kernel, libtype]]
        name = kernel or _first_stage(extra)
        return Winner(
            node=node, slot=slot, us=us,
            # we do not trust the tuner's column, and compute the value from shape and time
            tflops=self.flops(shape) / us / 1e6,
            bw=bw, spread=spread, kernel=name,
            backend=self._backend(libtype, name, number), gfx=gfx, cu_num=cu_num,
            median_us=median(own + rivals) if beside else None, runner_up_us=min(rivals, default=None),
            first_us=next(iter(own), None), noisy=ledger.noise(attempt, shape) > 0,
        )  # fmt: skip

    def _backend(self, libtype: str, kernel: str, number: int | None) -> str:
        found = _name_of(self.family.name, kernel, "" if number is None else str(number), libtype)
        if found not in self.backends and len(self.backends) >= MOST_BACKENDS:
            found = "other"
        self.backends.add(found)
        return found


_name_of = lru_cache(_CHUNK)(backend_name)


def _first_stage(extra: str | None) -> str:
    """The kernel of fmoe's first stage, whose rows have no kernelName."""
    return str(json.loads(extra).get("kernelName1", "")) if extra else ""


def rounded(x: float | None, digits: int = 5) -> float | None:
    """`x` with `digits` digits; None if it is not finite, because JSON has no such numbers."""
    if x is None or not math.isfinite(x):
        return None
    out = float(f"{x:.{digits}g}")
    return int(out) if out.is_integer() and abs(out) < 1e15 else out


def geomean(xs: Sequence[float]) -> float | None:
    """The geometric mean of positive numbers; None for an empty list."""
    return geometric_mean(xs) if xs else None


def five_numbers(xs: Sequence[float]) -> dict[str, Any]:
    """n, min, q1, median, q3, max, geomean; only n if there are no numbers."""
    if not xs:
        return {"n": 0}
    found = map(rounded, np.quantile(xs, (0.0, 0.25, 0.5, 0.75, 1.0)).tolist())
    out = dict(zip(("min", "q1", "median", "q3", "max"), found, strict=True))
    return {"n": len(xs), **out, "geomean": rounded(geomean(xs)) if min(xs) > 0 else None}


EDGES = (0.0, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, float("inf"))
"""Edges of the histograms' bins, as shares."""


def noise(winners: Iterable[Winner], state: State, reports: Mapping[str, Report]) -> dict[str, Any]:
    """The noise of the winners. `spread`: half the interquartile range over the median. `repeat`: how far a winner's
    last time is from its first, as a share. `close`: winners whose lead over the best other kernel is within their
    spread.
    """
    spreads: list[float] = []
    repeats: list[float] = []
    close = judged = 0
    by_slot: dict[tuple[str, str], list[float]] = defaultdict(list)
    for w in winners:
        if w.spread is not None and w.spread >= 0:
            spreads.append(w.spread)
            by_slot[w.node, w.slot].append(w.spread)
            if w.runner_up_us is not None:
                judged += 1
                close += w.runner_up_us <= w.us * (1.0 + w.spread)
        if w.first_us is not None:
            repeats.append(abs(w.us / w.first_us - 1.0))
    return {
        "edges": [None if e == float("inf") else e for e in EDGES],
        "spread": _summed(spreads),
        "repeat": _summed(repeats),
        "close": close,
        "judged": judged,
        "slots": _slots(by_slot, state, reports),
    }


def _summed(shares: list[float]) -> dict[str, Any]:
    if not shares:
        return {"n": 0}
    found = (rounded(x, 3) for x in np.quantile(shares, (0.5, 0.9, 1.0)).tolist())
    out = dict(zip(("median", "p90", "max"), found, strict=True))
    return {"n": len(shares), **out, "bins": np.histogram(shares, EDGES)[0].tolist()}


def _slots(by_slot: dict[tuple[str, str], list[float]], state: State, reports: Mapping[str, Report]) -> list[list[Any]]:
    """A row for each slot: node, slot, winners, median spread, the canary's median us and its range over that, hottest
    C, lowest and highest clocks."""
    heat: dict[tuple[str, str], float] = {}
    clocks: dict[tuple[str, str], list[float]] = defaultdict(list)
    for id_, report in reports.items():
        a = state.attempts.get(id_)
        place = (a.node, a.slot) if a is not None else ("", "")
        for reading in report.conditions.values():
            warm = reading.get("temperature_c")
            degrees = [x for x in warm.values() if isinstance(x, (int, float))] if isinstance(warm, dict) else []
            heat[place] = max([heat.get(place, float("-inf")), *degrees])
            clock = reading.get("clock_mhz")
            if isinstance(clock, (int, float)) and not isinstance(clock, bool):
                clocks[place].append(float(clock))
    out: list[list[Any]] = []
    slots = {s.id: s for n in state.nodes.values() for s in n.slots.values()}
    for place in sorted(slots, key=lambda p: (p[0], len(p[1]), p[1])):
        spread = five_numbers(by_slot.get(place, []))
        canary = five_numbers([us for us in slots[place].canary_us if us > 0])
        usual = canary.get("median")
        reach = (canary["max"] - canary["min"]) / usual if usual and canary["n"] > 1 else None
        seen = clocks.get(place, [])
        out.append(
            [*place, spread["n"], rounded(spread.get("median"), 3), rounded(usual, 4), rounded(reach, 3),
             rounded(heat.get(place), 3), rounded(min(seen, default=None), 4), rounded(max(seen, default=None), 4)]
        )  # fmt: skip
    return out


@dataclass(frozen=True, slots=True)
class Roofs:
    """Rooflines of a run's shapes. `chip` is None if it is unknown or there are several; `note` gives the reason."""

    family: Family
    chip: Chip | None
    note: str

    @classmethod
    def of(cls, family: Family, devices: Sequence[Mapping[str, Any]]) -> Roofs:
        """The rooflines for `devices`, which workers and tuners describe by gfx, cu_num and device."""
        found = {(str(d.get("gfx", "")), d.get("cu_num")) for d in devices}
        if len(found) != 1:
            why = "The devices differ, so there is no common roof." if found else "No device is known yet."
            return cls(family, None, why)
        names = [str(d.get("device", "")) for d in devices]
        chip, note = chip_of(found.pop(), names)
        if chip is None:
            note = "No data sheet is known for this device, so there is no roof."
        return cls(family, chip, note.replace(" (--chip corrects it)", ""))

    def document(self, keys: Mapping[int, Key]) -> dict[str, Any] | None:
        """The roof to draw: the one for the most common type."""
        if self.chip is None:
            return None
        typed = element_type(self.family)
        kinds = Counter(t[0] for key in keys.values() if (t := typed(key)) is not None)
        kind = next((k for k, _ in kinds.most_common() if k in self.chip.peaks), None)
        if kind is None:
            return None
        return {
            "device": self.chip.name, "format": kind.upper(), "tflops": self.chip.peaks[kind],
            "tbs": self.chip.bandwidth, "source": self.chip.source,
        }  # fmt: skip


COLUMNS = (
    "id", "key", "state", "backend", "kernel", "us", "tflops", "bw", "intensity", "share", "spread", "candidates",
    "median_us", "runner_up_us", "old_us", "node", "slot", "attempt", "reason", "detail", "best",
)  # fmt: skip
"""Cells of a row. `key`: the key columns that differ. `intensity`: operations per byte. `share`: of the roof. `best`:
TFLOPS by backend, in the backends' order."""


def columns(family: Family, keys: Mapping[int, Key]) -> dict[str, Any]:
    """The columns of the page. `row`: COLUMNS. `key`: the key columns that are shown. `same`: values that all shapes
    share."""
    seen = [set(values) for values in zip(*keys.values(), strict=True)] or [set[int | str]()] * len(family.key_names)
    same = {
        name: next(iter(values), "")
        for name, values, column in zip(family.key_names, seen, family.columns, strict=True)
        if column.kind == "text" and len(values) < 2
    }
    return {"row": list(COLUMNS), "key": [n for n in family.key_names if n not in same], "same": same}


def shape_rows(
    ledger: LedgerReader,
    measured: Measurements,
    backends: list[str],
    old: Mapping[int, float],
    roofs: Roofs,
) -> list[list[Any]]:
    """One row for each shape, in the order of the shapes file."""
    shown = columns(measured.family, measured.keys)["key"]
    at = [measured.family.key_names.index(n) for n in shown]
    state_ = ledger.replayed
    flying = {state_.attempts[s.running].current for n in state_.nodes.values() for s in n.slots.values() if s.running}
    nothing = Tried()
    rows: list[list[Any]] = []
    for s in ledger.shapes():
        w, tried = measured.winners.get(s.id), measured.tried.get(s.id, nothing)
        state = "running" if s.state == "pending" and s.id in flying else s.state
        reason = "unconfirmed" if s.state == "tuned" and s.confirmed is False else s.reason or ""
        reason = "noisy" if w and w.noisy and not reason else reason
        flops, times = measured.flops(s.id), [tried.best.get(b) for b in backends] if tried.best else []
        best = [rounded(flops / us / 1e6, 4) if us else None for us in times]
        intensity, share = _under_roof(roofs, w, s.key) if w else (None, None)
        rows.append(
            [
                s.id, [s.key[i] for i in at], state, w.backend if w else "", w.kernel[:300] if w else "",
                rounded(w.us) if w else None, rounded(w.tflops, 4) if w else None, rounded(w.bw, 4) if w else None,
                intensity, share, rounded(w.spread, 3) if w else None,
                tried.candidates, rounded(w.median_us) if w else None, rounded(w.runner_up_us) if w else None,
                rounded(old.get(s.id)), s.node, s.slot, s.attempt, reason, s.detail[:600], best,
            ]
        )  # fmt: skip
    return rows


def _under_roof(roofs: Roofs, w: Winner, key: Key) -> tuple[float | None, float | None]:
    """(operations per byte, share of the roof). Without a roof the intensity is computed from the row's bw (GB/s)."""
    roof = roof_of(roofs.family, key, roofs.chip) if roofs.chip else None
    if roof is None:
        return (rounded(1000.0 * w.tflops / w.bw, 4) if w.bw else None), None
    return rounded(roof.intensity, 4), rounded(w.tflops / roof.tflops, 3)


def by_backend(measured: Measurements) -> list[dict[str, Any]]:
    """Each backend's best TFLOPS over the shapes that it could do, and how many it won. Most wins come first."""
    rates: dict[str, list[float]] = {b: [] for b in measured.backends}
    won = dict.fromkeys(rates, 0)
    for shape, tried in measured.tried.items():
        flops = measured.flops(shape)
        for backend, us in tried.best.items():
            rates[backend].append(flops / us / 1e6)
    for w in measured.winners.values():
        won[w.backend] += 1
    out = [{"name": b, "label": label(b), "won": won[b], **five_numbers(xs)} for b, xs in rates.items()]
    return sorted(out, key=lambda b: (-b["won"], -b["n"], b["name"]))
