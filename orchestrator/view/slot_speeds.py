"""GPUs of a run beside each other, by the times of two known kernels on each slot: which are slow, hot or power-capped.

Times of a slot say how fast it is now, never how fast a candidate would be elsewhere: no winner is scaled by them.
Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import harmonic_mean, median

from orchestrator.events import CanaryTimed
from orchestrator.policy.model import SlotId, State

FEW = 3
"""Slots of a device below which none is called an outlier: of two that differ either may be the odd one."""
SIGMAS = 5.0
"""Robust standard deviations (1.4826 MAD) beyond the median, and at least so much of it:"""
SLOW, HOT_C, CAPPED = 0.03, 10.0, 0.02
LEAST_SIGMA, LEAST_SIGMA_C = 0.005, 1.0
LATEST = 9
"""The times of a slot that count: those of its state now."""


@dataclass(frozen=True, slots=True)
class SlotSpeed:
    """A slot beside those of the same device. `compute`, `memory`: its median time over theirs; None where unknown.

    `flag`: why it stands out (`slow (compute 8.1 % over the median of 8 slots)`), "" where it does not.
    """

    compute: float | None
    memory: float | None
    flag: str

    @property
    def pace(self) -> float:
        """Time that work takes there, over the usual one."""
        known = [x for x in (self.compute, self.memory) if x is not None]
        return sum(known) / len(known) if known else 1.0


def speeds(state: State) -> dict[SlotId, SlotSpeed]:
    """Each slot with timed canaries, beside those of its device."""
    by_device: dict[str, dict[SlotId, list[CanaryTimed]]] = defaultdict(dict)
    for slot in (s for n in state.nodes.values() for s in n.slots.values() if s.timed):
        last = [r for _, r in slot.timed[-LATEST:]]
        by_device[last[-1].device][slot.id] = [r for r in last if r.device == last[-1].device]
    return {slot: speed for slots in by_device.values() for slot, speed in _speeds(slots).items()}


def flags(state: State) -> dict[SlotId, str]:
    """Slots that stand out, and why."""
    return {slot: s.flag for slot, s in sorted(speeds(state).items()) if s.flag}


def usual_pace(speeds: Mapping[SlotId, SlotSpeed]) -> float:
    """Time that work takes on average where each slot takes as much as it can, over the usual one."""
    return float(harmonic_mean([max(0.1, s.pace) for s in speeds.values()])) if speeds else 1.0


def outliers(values: Mapping[SlotId, float], least: float, sigma: float) -> set[SlotId]:
    """Slots whose value is above the median by more than `least` and SIGMAS robust standard deviations.

    The deviation is 1.4826 MAD, at least `sigma`. None where there are fewer than FEW slots.
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
