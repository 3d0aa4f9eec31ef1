"""Options of a bench, from `spec.options` and node.json. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from worker.bench.repeats import EXTRA, RUNS, WITHIN, Rule

BATCHED = tuple(
    f"aiter-bmm-{name}" for name in ("bf16", "a8w8", "a8w8-prequant", "afp4wfp4", "a16wfp4")
)  # the five of AITER's batched Triton GEMMs
OWN = "own-triton"
BACKENDS = (OWN, "torch", "aiter", "aiter-triton", "aiter-gluon", *BATCHED)
ALIASES = {"triton": (OWN,), "gluon": ("aiter-gluon",), "aiter-batched": BATCHED}
TIMERS = ("events", "rocprof")
ENV_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}\Z")


@dataclass(frozen=True, slots=True)
class Env:
    """A software stack: an interpreter on the node; "" is the worker's own."""

    name: str = ""
    python: str = ""


@dataclass(frozen=True, slots=True)
class Options:
    """Each option with its default; docs/reference/commands.md explains them."""

    backends: tuple[str, ...] = ("torch",)
    envs: tuple[Env, ...] = (Env(),)
    runs: int = RUNS
    extra: int = EXTRA
    within: float = WITHIN
    sample_s: float = 0.2
    """Seconds that the timing of one run may take."""
    timer: str = "events"
    kernel: str = ""
    """rocprof: a regular expression for the names of the kernels that count."""
    seed: int = 0
    rotate_mb: int = 0
    """Memory that the copies of the operands span; 0 means 256 on a CPU, 512 on a GPU."""
    first: int = 0
    """Number of the first run: a later pass over the same shapes goes on counting."""
    table: str = ""
    """Text of a tuned table that is in force for the backend aiter."""
    winners: Mapping[str, str] = field(default_factory=dict)
    """Backend own-triton: the name of the tuned candidate by shape (its key's values, joined by x)."""
    candidates: int = 6
    """Backend own-triton, where a shape has no winner: how many of the model's first candidates are tried."""
    gluon: Mapping[str, str] = field(default_factory=dict)
    """Backend aiter-gluon: files that overlay the tree, by their path in it."""

    @property
    def rule(self) -> Rule:
        return Rule(self.runs, self.extra, self.within)

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Options:
        """Raises ValueError with every fault."""
        faults: list[str] = []
        values: dict[str, Any] = {}
        known = {f.name: f for f in fields(cls)}
        for name, value in raw.items():
            if name not in known:
                faults.append(f"unknown option {name!r} (there are {', '.join(known)})")
                continue
            try:
                values[name] = _CHECKS[name](value)
            except (ValueError, TypeError, KeyError) as e:
                faults.append(f"{name}: {e}")
        if faults:
            raise ValueError("bad options for bench: " + "; ".join(faults))
        return cls(**values)


def backends(value: Any) -> tuple[str, ...]:
    """Names of backends, aliases resolved, each once. Raises ValueError naming those there are."""
    words = value.split(",") if isinstance(value, str) else list(value)
    out: dict[str, None] = {}
    for word in (str(w).strip() for w in words):
        names = ALIASES.get(word, (word,))
        if not set(names) <= set(BACKENDS):
            raise ValueError(f"{word!r} is no backend (there are {', '.join((*BACKENDS, *ALIASES))})")
        out |= dict.fromkeys(names)
    if not out:
        raise ValueError("no backend is named")
    return tuple(out)


def _envs(value: Any) -> tuple[Env, ...]:
    made = [Env(str(v["name"]), str(v["python"])) for v in value]
    for env in made:
        if env.name and not ENV_NAME.match(env.name):
            raise ValueError(f"{env.name!r} is no name for an environment")
    if len({e.name for e in made}) != len(made):
        raise ValueError("two environments have the same name")
    return tuple(made) or (Env(),)


def _whole(low: int, high: int) -> Any:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"{value!r} is no whole number from {low} to {high}")
        return value

    return check


def _number(low: float, high: float) -> Any:
    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise ValueError(f"{value!r} is no number from {low:g} to {high:g}")
        return float(value)

    return check


def _pattern(value: Any) -> str:
    try:
        re.compile(str(value))
    except re.error as e:
        raise ValueError(f"{value!r} is no regular expression: {e}") from e
    return str(value)


def _timer(value: Any) -> str:
    if value not in TIMERS:
        raise ValueError(f"{value!r} is no timer (there are {', '.join(TIMERS)})")
    return str(value)


def _texts(value: Any) -> dict[str, str]:
    return {str(k): str(v) for k, v in dict(value).items()}


_CHECKS: dict[str, Any] = {
    "backends": backends, "envs": _envs, "runs": _whole(1, 20), "extra": _whole(0, 20), "within": _number(0.001, 1.0),
    "sample_s": _number(0.001, 60.0), "timer": _timer, "kernel": _pattern, "seed": _whole(0, 2**31),
    "rotate_mb": _whole(0, 1 << 20), "first": _whole(0, 1000), "table": str, "winners": _texts,
    "candidates": _whole(1, 100), "gluon": _texts,
}  # fmt: skip
