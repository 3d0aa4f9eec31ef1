"""The slots of a run beside each other: the times of their canaries, as the page draws them."""

from __future__ import annotations

from statistics import median
from typing import Any

from orchestrator.analysis.report.measured import rounded
from orchestrator.run.view.places import Places

MOST_POINTS = 4000
"""Timed canaries of the page; of each slot the latest."""


def beside_each_other(places: Places, start: float) -> list[dict[str, Any]]:
    """A document a slot: name, flag, and points: seconds since `start`, compute and memory time over the median of the
    slots of its device (None where unknown)."""
    times, flags = places.timed.of, places.timed.flags()
    each = max(1, MOST_POINTS // max(1, len(times)))
    usual: dict[tuple[str, str], float] = {}
    for name in ("compute_us", "memory_us"):
        by: dict[str, list[float]] = {}
        for seen in times.values():
            known = [v for _, r in seen if (v := getattr(r, name)) > 0]
            by.setdefault(seen[-1][1].device, []).extend([median(known)] if known else [])
        usual |= {(name, device): median(values) for device, values in by.items() if values}

    def over(r: Any, name: str) -> float | None:
        us, middle = getattr(r, name), usual.get((name, r.device))
        return rounded(us / middle, 4) if us > 0 and middle else None

    return [
        {
            "name": places.spot(*slot),
            "flag": flags.get(slot, ""),
            "points": [
                [rounded(t - start, 5), over(r, "compute_us"), over(r, "memory_us")] for t, r in list(seen)[-each:]
            ],
        }
        for slot, seen in sorted(times.items(), key=lambda s: (s[0][0], len(s[0][1]), s[0][1]))
    ]
