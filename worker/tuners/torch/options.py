"""The tuner's options: what `spec.options` may hold. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Options:
    """Each option with its default; docs/reference/tuners.md explains them."""

    budget_s_per_shape: float = 3.5
    """Seconds for all of a shape: inputs, checks, measuring, re-rank."""
    min_samples: int = 7
    max_samples: int = 101
    threads: tuple[int, ...] = ()
    """CPU thread counts to try; empty means all cores, half of them, and one."""
    seed: int = 0
    rotate_mb: int = 0
    """Memory that the copies of the operands span; 0 means 256 on a CPU, 512 on a GPU."""
    predequant: bool = True
    """Whether candidates may keep W dequantised (those with `predequant` in their name)."""

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Options:
        """Raises ValueError with every fault: unknown option, wrong type, value out of range."""
        faults: list[str] = []
        values: dict[str, Any] = {}
        known = [f.name for f in fields(cls)]
        for name, value in raw.items():
            if name not in known:
                faults.append(f"unknown option {name!r} (there are {', '.join(known)})")
            elif name == "threads":
                counts = value if isinstance(value, (list, tuple)) else [value]
                if counts == [None]:
                    counts = []
                if not all(_whole(c) and 1 <= c <= 9999 for c in counts):
                    faults.append(f"threads is {value!r}, not a list of numbers from 1 to 9999")
                else:
                    values[name] = tuple(dict.fromkeys(counts))
            elif name == "budget_s_per_shape":
                if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.05 <= value <= 3600:
                    faults.append(f"budget_s_per_shape is {value!r}, not a number of seconds from 0.05 to 3600")
                else:
                    values[name] = float(value)
            elif name == "predequant":
                if not isinstance(value, bool):
                    faults.append(f"predequant is {value!r}, neither true nor false")
                else:
                    values[name] = value
            elif not _whole(value) or value < (1 if name.endswith("samples") else 0):
                faults.append(f"{name} is {value!r}, not a whole number")
            else:
                values[name] = value
        if faults:
            raise ValueError("bad options for the tuner torch: " + "; ".join(faults))
        options = cls(**values)
        if options.max_samples < options.min_samples:
            raise ValueError("bad options for the tuner torch: max_samples is less than min_samples")
        return options


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
