"""One measured number and the bound it is held to."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """`value` must be at most `bound` (or at least), both in `unit`; `how` says what was measured and against what."""

    name: str
    value: float
    bound: float
    unit: str
    how: str
    at_least: bool = False

    @property
    def holds(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    @property
    def share(self) -> str:
        """The value as a part of its bound, and whether it is on the wrong side of it."""
        part = f"{100 * self.value / self.bound:.0f} %" if self.bound else "-"
        return part if self.holds else f"{part} **broken**"


class LeftOutError(Exception):
    """A benchmark cannot run on this machine; the text says what it needs."""


def show(figures: Sequence[Figure], left_out: Sequence[str] = (), failed: Sequence[str] = ()) -> None:
    """A Markdown table, with the machine it was measured on; then what is broken, failed or missing."""
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    print(f"\nmeasured on {_cpu()}, {os.cpu_count()} cores (load {load}), Python {platform.python_version()}\n")
    print("| what | measured | bound | of the bound | how |")
    print("|---|---:|---:|---:|---|")
    for f in figures:
        limit = f"{'at least ' if f.at_least else ''}{_number(f.bound)} {f.unit}"
        print(f"| {f.name} | {_number(f.value)} {f.unit} | {limit} | {f.share} | {f.how} |")
    broken = [f.name for f in figures if not f.holds]
    print(f"\n{len(figures) - len(broken)} of {len(figures)} bounds hold")
    for word, items in (("bound broken", broken), ("failed", failed), ("left out", left_out)):
        for item in items:
            print(f"{word}: {item}")


def _number(x: float) -> str:
    """The number with up to four significant digits."""
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.4g}"


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as f:
            names = [line.split(":", 1)[1].strip() for line in f if line.startswith("model name")]
        return names[0] if names else platform.machine()
    except OSError:
        return platform.machine()
