"""Compares each slot with the others of its device: is it slower, hotter, or capped in its power?

The canaries of a slot (small kernels with a known answer) are timed; a slot stands out if its latest times do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from orchestrator.events import CanaryTimed
from orchestrator.policy.model import SlotId, State
from orchestrator.view.sentences import describe_slot

FEW = 3
"""With fewer slots of a device than this, we call none an outlier: if two differ, either may be the odd one."""
SIGMAS = 5.0
"""An outlier is beyond the median by this many robust standard deviations, and by at least SLOW or CAPPED of the
median, or HOTTER_C degrees."""
MAD_TO_SIGMA = 1.4826
"""The standard deviation of a normal distribution over its median absolute deviation."""
SLOW = 0.03
CAPPED = 0.02
HOTTER_C = 10.0
LEAST_SIGMA = 0.005
"""The least standard deviation of times over their median: slots that agree better than this have no outlier."""
LEAST_SIGMA_C = 1.0
"""The same for temperatures, in degrees."""
LATEST = 9
"""Only this many of a slot's latest times count: older ones say little about its state now."""


@dataclass(frozen=True, slots=True)
class SlotSpeed:
    """A slot compared with the others of its device. `compute`, `memory`: its median time over theirs; None if unknown.

    `flag`: why it stands out (`slow (compute 8.1 % over the median of 8 slots)`), "" if it does not.
    """

    compute: float | None
    memory: float | None
    flag: str

    @property
    def pace(self) -> float:
        """The time that work takes there, relative to the usual time."""
        known = [x for x in (self.compute, self.memory) if x is not None]
        return sum(known) / len(known) if known else 1.0


def compare_slots(state: State) -> dict[SlotId, SlotSpeed]:
    """The speed of each slot with timed canaries, compared with the others of its device."""
    by_device: dict[str, dict[SlotId, list[CanaryTimed]]] = defaultdict(dict)
    for slot in state.slots:
        if slot.timed_canaries:
            latest = [canary for _, canary in slot.timed_canaries[-LATEST:]]
            device = latest[-1].device
            by_device[device][slot.id] = [canary for canary in latest if canary.device == device]
    result: dict[SlotId, SlotSpeed] = {}
    for slots in by_device.values():
        result |= _compare_slots_of_device(slots)
    return result


def flags(state: State) -> dict[SlotId, str]:
    """Slots that stand out, and why."""
    return {slot: speed.flag for slot, speed in sorted(compare_slots(state).items()) if speed.flag}


def describe_flags(state: State) -> list[str]:
    """Sentences about slots that are slow, hot or power-capped."""
    return [f"{describe_slot(state, *slot)} is {why}" for slot, why in flags(state).items()]


def outliers(values: Mapping[SlotId, float], least: float, sigma: float) -> set[SlotId]:
    """Slots whose value is above the median by more than `least` and SIGMAS robust standard deviations.

    The deviation is at least `sigma`. With fewer than FEW slots the set is empty.
    """
    if len(values) < FEW:
        return set()
    middle = median(values.values())
    deviation = MAD_TO_SIGMA * median(abs(value - middle) for value in values.values())
    limit = max(least, SIGMAS * max(sigma, deviation))
    return {slot for slot, value in values.items() if value - middle > limit}


def _compare_slots_of_device(slots: Mapping[SlotId, list[CanaryTimed]]) -> dict[SlotId, SlotSpeed]:
    compute = _over_median(slots, "compute_us")
    memory = _over_median(slots, "memory_us")
    temperatures = _medians(slots, "temperature_c")
    caps = _medians(slots, "power_cap_w")
    slow = outliers(compute, SLOW, LEAST_SIGMA) | outliers(memory, SLOW, LEAST_SIGMA)
    hot = outliers(temperatures, HOTTER_C, LEAST_SIGMA_C)
    usual_cap = median(caps.values()) if len(caps) >= FEW else 0.0
    result = {}
    for slot in slots:
        reasons = []
        if slot in slow:
            reasons.append(f"slow ({_describe_times(compute.get(slot), memory.get(slot), len(slots))})")
        if slot in hot:
            reasons.append(f"hot ({temperatures[slot]:.0f} C, median {median(temperatures.values()):.0f} C)")
        if slot in caps and caps[slot] < (1 - CAPPED) * usual_cap:
            reasons.append(f"power-capped ({caps[slot]:.0f} W, median {usual_cap:.0f} W)")
        result[slot] = SlotSpeed(compute.get(slot), memory.get(slot), ", ".join(reasons))
    return result


def _describe_times(compute: float | None, memory: float | None, slots: int) -> str:
    """`compute 8.1 %, memory 0.3 % over the median of 8 slots`."""
    parts = []
    for name, ratio in (("compute", compute), ("memory", memory)):
        if ratio is not None:
            parts.append(f"{name} {100 * (ratio - 1):.1f} %")
    return f"{', '.join(parts)} over the median of {slots} slots"


def _medians(slots: Mapping[SlotId, list[CanaryTimed]], name: str) -> dict[SlotId, float]:
    """The median of a field of each slot's canaries; without slots that do not know it (0)."""
    medians = {}
    for slot, canaries in slots.items():
        known = [getattr(canary, name) for canary in canaries if getattr(canary, name) > 0]
        if known:
            medians[slot] = float(median(known))
    return medians


def _over_median(slots: Mapping[SlotId, list[CanaryTimed]], name: str) -> dict[SlotId, float]:
    medians = _medians(slots, name)
    usual = median(medians.values()) if medians else 1.0
    return {slot: v / usual for slot, v in medians.items()}
