"""The noise of a run: how far the times of its winners can be trusted, and each slot's canaries and clocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

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
    spread; `judged`: winners for which that is known.
    """
    spreads: list[float] = []
    repeats: list[float] = []
    close = judged = 0
    spreads_by_slot: dict[SlotId, list[float]] = defaultdict(list)
    for winner in winners:
        if winner.spread is not None and winner.spread >= 0:
            spreads.append(winner.spread)
            spreads_by_slot[winner.node, winner.slot].append(winner.spread)
            if winner.runner_up_us is not None:
                judged += 1
                if winner.runner_up_us <= winner.us * (1.0 + winner.spread):
                    close += 1
        if winner.first_us is not None:
            repeats.append(abs(winner.us / winner.first_us - 1.0))
    return {
        "edges": [None if edge == float("inf") else edge for edge in EDGES],
        "spread": _summarize(spreads),
        "repeat": _summarize(repeats),
        "close": close,
        "judged": judged,
        "slots": _slot_rows(spreads_by_slot, state, reports),
    }


def _summarize(shares: list[float]) -> Document:
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


def _slot_rows(
    spreads: Mapping[SlotId, Sequence[float]], state: State, reports: Mapping[str, Report]
) -> list[list[Any]]:
    """A row for each slot: node, slot, winners, median spread, the canary's median us and its range over that, hottest
    C, lowest and highest clocks."""
    temperatures: dict[SlotId, list[float]] = defaultdict(list)
    clocks: dict[SlotId, list[float]] = defaultdict(list)
    for id_, report in reports.items():
        attempt = state.attempts.get(id_)
        if attempt is None:
            continue
        for reading in report.conditions.values():
            temperatures[attempt.node, attempt.slot] += _temperatures(reading)
            clock = reading.get("clock_mhz")
            if isinstance(clock, (int, float)) and not isinstance(clock, bool):
                clocks[attempt.node, attempt.slot].append(float(clock))
    rows: list[list[Any]] = []
    slots = _all_slots(state)
    for place in sorted(slots, key=slot_order):
        spread = five_numbers(spreads.get(place, []))
        canary = five_numbers([us for us in slots[place].canary_us if us > 0])
        usual = canary.get("median")
        reach = (canary["max"] - canary["min"]) / usual if usual and canary["n"] > 1 else None
        rows.append(
            [
                *place,
                spread["n"],
                rounded(spread.get("median"), 3),
                rounded(usual, 4),
                rounded(reach, 3),
                rounded(max(temperatures[place], default=None), 3),
                rounded(min(clocks[place], default=None), 4),
                rounded(max(clocks[place], default=None), 4),
            ]
        )
    return rows


def _temperatures(reading: Mapping[str, Any]) -> list[float]:
    """The degrees of a reading's sensors, such as {"temperature_c": {"junction": 61, "memory": 58}}."""
    sensors = reading.get("temperature_c")
    if not isinstance(sensors, dict):
        return []
    return [degrees for degrees in sensors.values() if isinstance(degrees, (int, float))]


def _all_slots(state: State) -> dict[SlotId, Slot]:
    return {slot.id: slot for node in state.nodes.values() for slot in node.slots.values()}


MOST_POINTS = 4000
"""Most timed canaries on the page; the latest of each slot."""


def compare_canaries(state: State, start: float) -> list[Document]:
    """One document for each slot: name, flag and points. A point has seconds since `start`, and compute and memory time
    over the median of the slots of its device (None if unknown)."""
    timed = {id_: slot.timed_canaries for id_, slot in _all_slots(state).items() if slot.timed_canaries}
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
