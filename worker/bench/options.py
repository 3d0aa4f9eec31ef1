"""Options of a bench, from `spec.options` and node.json. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from worker.families.backends import BATCHED, BENCHED, OWN
from worker.protocol.repeats import EXTRA, RUNS, WITHIN, Rule
from worker.tuners.common.options import number, option, parse_options, seconds, whole

ALIASES = {"triton": (OWN,), "gluon": ("aiter-gluon",), "aiter-batched": BATCHED}
TIMERS = ("events", "rocprof")
ENV_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}\Z")


@dataclass(frozen=True, slots=True)
class Env:
    """A software stack: an interpreter on the node; "" is the worker's own."""

    name: str = ""
    python: str = ""


def backends(value: Any) -> tuple[str, ...]:
    """Names of backends, aliases resolved, each once. Raises ValueError naming those there are."""
    if not isinstance(value, (str, list, tuple)):
        raise ValueError("not a list of backends")
    words = value.split(",") if isinstance(value, str) else value
    out: dict[str, None] = {}
    for word in (str(w).strip() for w in words):
        names = ALIASES.get(word, (word,))
        if not set(names) <= set(BENCHED):
            raise ValueError(f"{word!r} is no backend (there are {', '.join((*BENCHED, *ALIASES))})")
        out |= dict.fromkeys(names)
    if not out:
        raise ValueError("no backend is named")
    return tuple(out)


def _envs(value: Any) -> tuple[Env, ...]:
    try:
        made = [Env(str(v["name"]), str(v["python"])) for v in value]
    except (TypeError, KeyError) as e:
        raise ValueError("not a list of {name, python}") from e
    for env in made:
        if env.name and not ENV_NAME.match(env.name):
            raise ValueError(f"{env.name!r} is no name for an environment")
    if len({e.name for e in made}) != len(made):
        raise ValueError("two environments have the same name")
    return tuple(made) or (Env(),)


def _pattern(value: Any) -> str:
    try:
        re.compile(str(value))
    except re.error as e:
        raise ValueError(f"not a regular expression: {e}") from e
    return str(value)


def _timer(value: Any) -> str:
    if value not in TIMERS:
        raise ValueError(f"not a timer (there are {', '.join(TIMERS)})")
    return str(value)


def _texts(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ValueError("not a mapping")
    return {str(k): str(v) for k, v in value.items()}


@dataclass(frozen=True, slots=True)
class Options:
    """Each option with its default; docs/reference/commands.md explains them."""

    backends: tuple[str, ...] = option(("torch",), backends)
    envs: tuple[Env, ...] = option((Env(),), _envs)
    runs: int = option(RUNS, whole(1, 20))
    extra: int = option(EXTRA, whole(0, 20))
    within: float = option(WITHIN, number(0.001, 1.0))
    sample_s: float = option(0.2, seconds(0.001, 60.0))
    """Seconds that the timing of one run may take."""
    timer: str = option("events", _timer)
    kernel: str = option("", _pattern)
    """rocprof: a regular expression for the names of the kernels that count."""
    seed: int = option(0, whole(0, 2**31))
    rotate_mb: int = option(0, whole(0, 1 << 20))
    """Memory that the copies of the operands span; 0 means 256 on a CPU, 512 on a GPU."""
    first: int = option(0, whole(0, 1000))
    """Number of the first run: a later pass over the same shapes goes on counting."""
    table: str = option("", str)
    """Text of a tuned table that is in force for the backend aiter."""
    winners: Mapping[str, str] = field(default_factory=dict, metadata={"rule": _texts})
    """Backend own-triton: the name of the tuned candidate by shape (its key's values, joined by x)."""
    candidates: int = option(6, whole(1, 100))
    """Backend own-triton, where a shape has no winner: how many of the model's first candidates are tried."""
    gluon: Mapping[str, str] = field(default_factory=dict, metadata={"rule": _texts})
    """Backend aiter-gluon: files that overlay the tree, by their path in it."""

    @property
    def rule(self) -> Rule:
        return Rule(self.runs, self.extra, self.within)

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Options:
        """Raises ValueError with every fault."""
        return parse_options(cls, "bench", raw)
