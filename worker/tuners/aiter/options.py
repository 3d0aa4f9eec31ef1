"""Options of the tuner `aiter`, in a spec and of a node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Options:
    """Each option with its default. 0 or empty: AITER's own, or what its version needs."""

    family: str = ""
    """Known before the first group, so that modules are built before anything is claimed."""
    root: str = ""
    """AITER's tree or package, where it is not found by itself."""
    warmup: int = 0
    iters: int = 0
    batch: int = 0
    """Shapes that AITER takes at once."""
    tuner_timeout: float = 0.0
    """Seconds that a shape may take; 0: as long as there is progress."""
    split_k: bool = False
    tuner_args: tuple[str, ...] = ()
    """Further arguments for the script, each flag checked against those it has."""
    watch: bool = True
    """Watch candidates one by one (worker/tuners/aiter/drive/progress.py)."""
    warm: bool = True
    """Build modules with a tiny shape before anything is measured."""

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Options:
        """Raises ValueError with every fault: unknown option, wrong type, value out of range."""
        faults: list[str] = []
        values: dict[str, Any] = {}
        known = [f.name for f in fields(cls)]
        for name, value in raw.items():
            if name not in known:
                faults.append(f"unknown option {name!r} (there are {', '.join(known)})")
            elif name in ("family", "root"):
                _check(isinstance(value, str), f"{name} is {value!r}, no text", faults)
            elif name in ("split_k", "watch", "warm"):
                _check(isinstance(value, bool), f"{name} is {value!r}, neither true nor false", faults)
            elif name == "tuner_args":
                words = [value] if isinstance(value, str) else value
                good = isinstance(words, (list, tuple)) and all(isinstance(w, str) and w for w in words)
                _check(good, f"tuner_args is {value!r}, no list of words", faults)
                value = tuple(words) if good else ()
            elif name == "tuner_timeout":
                good = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1e6
                _check(good, f"tuner_timeout is {value!r}, no number of seconds", faults)
            else:
                good = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 1_000_000
                _check(good, f"{name} is {value!r}, no whole number", faults)
            values[name] = value
        if faults:
            raise ValueError("bad options for the tuner aiter: " + "; ".join(faults))
        return cls(**values)


def _check(good: bool, fault: str, faults: list[str]) -> None:
    if not good:
        faults.append(fault)
