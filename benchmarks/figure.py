"""One measured number and the bound it is held to."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """`value` must be at most `bound`, both in `unit`; `how` says what was measured and against what."""

    name: str
    value: float
    bound: float
    unit: str
    how: str

    @property
    def holds(self) -> bool:
        return self.value <= self.bound


def show(figures: Sequence[Figure]) -> None:
    """A Markdown table, with the machine it was measured on."""
    print(f"\nmeasured on {_cpu()}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    print("| what | measured | bound | of the bound | how |")
    print("|---|---:|---:|---:|---|")
    for f in figures:
        mark = "" if f.holds else " **over**"
        share = f"{100 * f.value / f.bound:.0f} %{mark}"
        print(f"| {f.name} | {f.value:.4g} {f.unit} | {f.bound:.4g} {f.unit} | {share} | {f.how} |")


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as f:
            names = [line.split(":", 1)[1].strip() for line in f if line.startswith("model name")]
        return names[0] if names else platform.machine()
    except OSError:
        return platform.machine()
