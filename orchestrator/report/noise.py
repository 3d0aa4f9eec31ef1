"""The noise of a run, for its page: how far its winners' times can be trusted, and each slot's canaries and clocks.

Canaries are small kernels with a known answer, which each slot runs between its groups.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from statistics import median
from typing import Any, TypeGuard

import numpy as np

from orchestrator.ledger.reader import Report
from orchestrator.pages import Document
from orchestrator.policy.model import Slot, SlotId, State
from orchestrator.report.figures import five_numbers, rounded
from orchestrator.report.measured import Winner
from orchestrator.view.sentences import describe_slot
from orchestrator.view.slot_speed import flags
from orchestrator.view.timeline import slot_order

EDGES = (0.0, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, float("inf"))
"""Edges of the histograms' bins, as shares."""


def noise(winners: Iterable[Winner], state: State, reports: Mapping[str, Report]) -> Document:
    """The noise of the winners. `spread`: half the interquartile range over the median. `repeat`: how far a winner's
    last time is from its first, as a share. `close`: winners whose lead over the best other kernel is within their
    spread; `judged`: winners for which that is known. `slots`: see `_slot_row`.
    """
    repeats = []
    close = 0
    judged = 0
    spreads: dict[SlotId, list[float]] = defaultdict(list)
    for winner in winners:
        if winner.first_us is not None:
            repeats.append(abs(winner.us / winner.first_us - 1.0))
        if winner.spread is None or winner.spread < 0:
            continue
        spreads[winner.node, winner.slot].append(winner.spread)
        if winner.runner_up_us is not None:
            judged += 1
            if winner.runner_up_us <= winner.us * (1.0 + winner.spread):
                close += 1
    readings = _readings_by_slot(state, reports)
    slots = sorted(state.slots, key=lambda slot: slot_order(slot.id))
    return {
        "edges": [*EDGES[:-1], None],
        "spread": _summarize([*chain(*spreads.values())]),
        "repeat": _summarize(repeats),
        "close": close,
        "judged": judged,
        "slots": [_slot_row(slot, spreads[slot.id], readings[slot.id]) for slot in slots],
    }


def _summarize(shares: list[float]) -> Document:
    """n, median, p90, max, and `bins`: the histogram by EDGES; only n if there are no shares."""
    if not shares:
        return {"n": 0}
    middle, high, most = np.quantile(shares, (0.5, 0.9, 1.0)).tolist()
    return {
        "n": len(shares),
        "median": rounded(middle, 3),
        "p90": rounded(high, 3),
        "max": rounded(most, 3),
        "bins": np.histogram(shares, EDGES)[0].tolist(),
    }


def _readings_by_slot(state: State, reports: Mapping[str, Report]) -> dict[SlotId, list[Document]]:
    """Readings of each slot's GPU by the workers, as `{"temperature_c": {"junction": 61}, "clock_mhz": 2100, ...}`."""
    readings: dict[SlotId, list[Document]] = defaultdict(list)
    for id_, report in reports.items():
        attempt = state.attempts.get(id_)
        if attempt is not None:
            readings[attempt.node, attempt.slot] += report.conditions.values()
    return readings


def _slot_row(slot: Slot, spreads: Sequence[float], readings: Sequence[Document]) -> list[Any]:
    """[node, slot, winners, their median spread, the canary's median us, its range over that, hottest C, lowest clock,
    highest clock] of a slot, None for what is not known. The clocks are in MHz."""
    temperatures: list[float] = []
    clocks: list[float] = []
    for reading in readings:
        sensors = reading.get("temperature_c")
        if isinstance(sensors, dict):
            temperatures += filter(_is_number, sensors.values())
        clock = reading.get("clock_mhz")
        if _is_number(clock):
            clocks.append(clock)
    spread = five_numbers(spreads)
    canary = five_numbers([us for us in slot.canary_us if us > 0])
    canary_us = canary.get("median")
    canary_range = None
    if canary_us and canary["n"] > 1:
        canary_range = (canary["max"] - canary["min"]) / canary_us
    return [
        *slot.id,
        spread["n"],
        rounded(spread.get("median"), 3),
        rounded(canary_us, 4),
        rounded(canary_range, 3),
        rounded(max(temperatures, default=None), 3),
        rounded(min(clocks, default=None), 4),
        rounded(max(clocks, default=None), 4),
    ]


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


MOST_POINTS = 4000
"""Most timed canaries on the page; the latest of each slot."""


def compare_canaries(state: State, start: float) -> list[Document]:
    """A document for each slot, as `{"name": "n1 slot 0", "flag": "slow (...)", "points": [[61.5, 1.002, 0.998]]}`.
    A point has seconds since `start`, and compute and memory time over the median of the slots of its device (None if
    unknown)."""
    timed = {slot.id: slot.timed_canaries for slot in state.slots if slot.timed_canaries}
    usual_compute = _usual_times(timed.values(), "compute_us")
    usual_memory = _usual_times(timed.values(), "memory_us")
    standing_out = flags(state)
    points_of_slot = max(1, MOST_POINTS // max(1, len(timed)))
    documents = []
    for id_ in sorted(timed, key=slot_order):
        points = [
            [
                rounded(t - start, 5),
                _over_usual(canary.compute_us, usual_compute.get(canary.device)),
                _over_usual(canary.memory_us, usual_memory.get(canary.device)),
            ]
            for t, canary in timed[id_][-points_of_slot:]
        ]
        documents.append({"name": describe_slot(state, *id_), "flag": standing_out.get(id_, ""), "points": points})
    return documents


def _usual_times(slots: Iterable[Sequence[tuple[float, Any]]], name: str) -> dict[str, float]:
    """The median over the slots of each device of their median times. `slots`: `Slot.timed_canaries` of each."""
    by_device: dict[str, list[float]] = defaultdict(list)
    for canaries in slots:
        known = [getattr(canary, name) for _, canary in canaries if getattr(canary, name) > 0]
        if known:
            by_device[canaries[-1][1].device].append(median(known))
    return {device: median(times) for device, times in by_device.items()}


def _over_usual(us: float, usual: float | None) -> float | None:
    return rounded(us / usual, 4) if us > 0 and usual else None
