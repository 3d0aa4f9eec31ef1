"""The tuner's options: what `spec.options` may hold. Needs neither torch nor triton."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

FAST, EXHAUSTIVE = "fast", "exhaustive"


@dataclass(frozen=True, slots=True)
class Options:
    """Each option with its default; docs/reference/tuners.md explains them."""

    search: str = FAST
    budget_s_per_shape: float = 0.0
    """Seconds from a shape's start until no further candidate is begun; 0 means as long as the search takes."""
    max_candidates: int = 0
    """Of the legal candidates only so many, the best by the model; 0 means all."""
    compilers: int = 0
    """Compile processes; 0 means the slot's share of the usable cores less one, at least one."""
    min_samples: int = 5
    max_samples: int = 31
    seed: int = 0
    rotate_mb: int = 256
    """Memory that the copies of the operands span."""
    compile_timeout_s: float = 90.0
    hang_s: float = 30.0
    """The measuring process is ended when it says nothing for so long while it has work."""
    cache_mb: int = 2048
    """What compiled kernels may take on the disk, for one source, version and device."""
    only: tuple[str, ...] = ()
    """Names of the only candidates to try; empty means all legal ones."""
    hints: bool = True
    """Whether winners of earlier runs and neighbouring shapes come first."""

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Options:
        """Raises ValueError with every fault: unknown option, wrong type, value out of range."""
        known = {f.name: f for f in fields(cls)}
        faults = [f"unknown option {name!r} (there are {', '.join(known)})" for name in raw if name not in known]
        values: dict[str, Any] = {}
        for name in known:
            if name not in raw:
                continue
            fault = _fault(name, raw[name])
            if fault:
                faults.append(fault)
            values[name] = _KINDS[name](raw[name]) if name in _KINDS and not fault else raw[name]
        if faults:
            raise ValueError("bad options for the tuner triton: " + "; ".join(faults))
        options = cls(**values)
        if options.max_samples < options.min_samples:
            raise ValueError("bad options for the tuner triton: max_samples is less than min_samples")
        return options


_SECONDS = {"budget_s_per_shape": (0.0, 86400.0), "compile_timeout_s": (1.0, 3600.0), "hang_s": (0.5, 3600.0)}
_KINDS: dict[str, Callable[[Any], Any]] = {**dict.fromkeys(_SECONDS, float), "only": tuple}
_WHOLE = {
    "max_candidates": (0, 1_000_000),
    "compilers": (0, 1024),
    "min_samples": (1, 100_000),
    "max_samples": (1, 100_000),
    "seed": (0, 2**63),
    "rotate_mb": (0, 65536),
    "cache_mb": (1, 1_048_576),
}


def _fault(name: str, value: object) -> str:
    """What is wrong with the value of an option, "" where nothing is."""
    if name == "search":
        return "" if value in (FAST, EXHAUSTIVE) else f"search is {value!r}, neither {FAST} nor {EXHAUSTIVE}"
    if name == "only":
        names = isinstance(value, (list, tuple)) and all(isinstance(v, str) for v in value)
        return "" if names else f"only is {value!r}, not a list of names of candidates"
    if name == "hints":
        return "" if isinstance(value, bool) else f"hints is {value!r}, neither true nor false"
    if name in _SECONDS:
        low, high = _SECONDS[name]
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if number and low <= value <= high:  # type: ignore[operator]
            return ""
        return f"{name} is {value!r}, not a number of seconds from {low:g} to {high:g}"
    least, most = _WHOLE[name]
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
        return ""
    return f"{name} is {value!r}, not a whole number from {least} to {most}"
