"""The request of a bench, shared by controller and worker: its options, the rule for repeated runs, and long texts.

A *run* is one timing of one backend on one shape (a median of many calls). We use the runbook's rule: make three runs
and take their mean, which is stable if the largest is at most 5 % of it above the least. Otherwise make up to two more,
and the three that agree best count. The worker asks `draw_rounds` what to measure next; it and `results/bench.py` judge
runs by the same `mean_of_runs`.

Long texts (the table in use, Gluon files, config sets) are put on a node once, beside the code (NodePaths.texts). The
controller replaces each by its hash with `take_texts_out`, so that run.yaml, node.json and the specs of groups only
have references `sha256:0123...`; the worker puts the texts in again with `load_texts`.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from worker.families import BATCHED, BENCHED
from worker.registry import number, option, parse_options, seconds, whole
from worker.text import did_you_mean

ALIASES = {"gluon": ("aiter-gluon",), "aiter-batched": BATCHED}
TIMERS = ("events", "rocprof")
HARMLESS = ("unavailable", "unsupported")
"""Statuses without a number that are nobody's fault."""
SIDE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}\Z")
MAX_TEXT_BYTES = 64 << 20
_REFERENCE = re.compile(r"sha256:[0-9a-f]{64}\Z")
Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True, slots=True)
class RunRule:
    """The number of runs, and when they agree."""

    runs: int = 3
    """Number of runs that have to agree."""
    extra: int = 2
    """Number of further runs that may be taken until they do."""
    within: float = 0.05
    """Runs agree if their spread ((max - min) / mean) is at most this."""


_DEFAULT_RULE = RunRule()


@dataclass(frozen=True, slots=True)
class RunMean:
    """Result of the runs of one backend on one shape."""

    us: float
    """Mean of the runs that agree best."""
    spread: float
    """(max - min) / mean of the runs that agree best."""
    used: int
    """Number of the runs that agree best."""
    taken: int
    """Number of all runs that were made."""
    status: str
    """`ok`, `unstable` (no `runs` of them agree), `short` (fewer runs than the rule wants)."""


def mean_of_runs(values: Sequence[float], rule: RunRule = _DEFAULT_RULE) -> RunMean:
    """Mean of the runs that agree best, of runs in microseconds in any order. Raises ValueError for none."""
    if not values:
        raise ValueError("no run was taken")
    ordered = sorted(values)
    if len(ordered) < rule.runs:
        return RunMean(fmean(ordered), spread(ordered), len(ordered), len(ordered), "short")
    windows = [ordered[i : i + rule.runs] for i in range(len(ordered) - rule.runs + 1)]
    best = min(windows, key=spread)
    status = "ok" if spread(best) <= rule.within else "unstable"
    return RunMean(fmean(best), spread(best), len(best), len(ordered), status)


def needs_more_runs(values: Sequence[float], rule: RunRule = _DEFAULT_RULE) -> bool:
    """Return whether there are too few runs, or they do not agree and the rule allows another."""
    if len(values) < rule.runs:
        return True
    return len(values) < rule.runs + rule.extra and mean_of_runs(values, rule).status != "ok"


def draw_rounds(
    taken: Mapping[Name, Sequence[float]], pairs: Mapping[Name, Hashable], rule: RunRule, rng: random.Random
) -> Iterator[list[Name]]:
    """Yield who runs in each round, in an order drawn anew. The caller appends to `taken` between rounds.

    The caller takes a name out of `taken` if it cannot run any more. Names that share a value of `pairs` (one backend
    on two sides) take their extra runs together, so that run i of one always has its partner.
    """
    while True:
        unfinished = {pairs[name] for name, values in taken.items() if needs_more_runs(values, rule)}
        order = [name for name in taken if pairs[name] in unfinished and len(taken[name]) < rule.runs + rule.extra]
        if not order:
            return
        rng.shuffle(order)
        yield order


def spread(values: Sequence[float]) -> float:
    """(max - min) / mean; 0 for a single value."""
    return (max(values) - min(values)) / fmean(values) if values else 0.0


def replace_texts(options: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """The options with each long text (table, Gluon files, config sets) replaced by what `change` makes of it."""
    changed = dict(options)
    if changed.get("table"):
        changed["table"] = change(changed["table"])
    if changed.get("gluon"):
        changed["gluon"] = {path: change(text) for path, text in changed["gluon"].items()}
    sides = []
    for side in changed.get("sides") or ():
        sides.append({**side, "configs": change(side["configs"])} if side.get("configs") else side)
    if sides:
        changed["sides"] = sides
    return changed


def take_texts_out(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the options with references in place of texts, and the texts by their hash."""
    texts: dict[str, str] = {}

    def take(text: str) -> str:
        digest = hashlib.sha256(text.encode()).hexdigest()
        texts[digest] = text
        return f"sha256:{digest}"

    return replace_texts(options, take), texts


def load_texts(options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The options, with references replaced by their texts, which lie in `folder`. Raises ValueError."""
    return replace_texts(options, lambda text: _load_text(text, folder) if is_reference(text) else text)


def is_reference(value: object) -> bool:
    """Return whether an option's value refers to a text."""
    return isinstance(value, str) and bool(_REFERENCE.match(value))


def _load_text(reference: str, folder: Path) -> str:
    digest = reference.removeprefix("sha256:")
    try:
        with (folder / digest).open("rb") as f:
            data = f.read(MAX_TEXT_BYTES + 1)
    except OSError as e:
        raise ValueError(f"the text {folder / digest} of the options cannot be read: {e.strerror or e}") from e
    if hashlib.sha256(data).hexdigest() != digest:
        raise ValueError(f"the text {folder / digest} of the options has changed since it was sent: its hash differs")
    return data.decode()


@dataclass(frozen=True, slots=True)
class Side:
    """One of the things compared: an interpreter, an image, or a config set of AITER's Triton GEMMs."""

    name: str = ""
    python: str = ""
    """Interpreter on the node; "" is the worker's own."""
    image: str = ""
    """Image of the worker."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the side's processes."""
    configs: str | None = None
    """Text of the config set (worker/bench/config_set.py), "" for the tree as it is, None if no sets are compared."""


def parse_backends(value: Any) -> tuple[str, ...]:
    """Names of backends, aliases resolved, each once. Raises ValueError naming those there are."""
    if not isinstance(value, (str, list, tuple)):
        raise ValueError("not a list of backends")
    names: dict[str, None] = {}
    for word in value.split(",") if isinstance(value, str) else value:
        names |= dict.fromkeys(_resolve_backend(str(word).strip()))
    if not names:
        raise ValueError("no backend is named")
    return tuple(names)


def _resolve_backend(word: str) -> tuple[str, ...]:
    names = ALIASES.get(word, (word,))
    if not set(names) <= set(BENCHED):
        legal = (*BENCHED, *ALIASES)
        raise ValueError(f"{word!r} is not a backend{did_you_mean(word, legal)} (there are {', '.join(legal)})")
    return names


def _parse_sides(value: Any) -> tuple[Side, ...]:
    try:
        sides = [Side(**{**side, "variables": _parse_texts(side.get("variables", {}))}) for side in value]
    except (TypeError, AttributeError) as e:
        raise ValueError("not a list of {name, python, image, variables, configs}") from e
    for side in sides:
        if side.name and not SIDE_NAME.match(side.name):
            raise ValueError(f"{side.name!r} cannot name a side")
    if len({side.name for side in sides}) != len(sides):
        raise ValueError("two sides have the same name")
    return tuple(sides) or (Side(),)


def _parse_pattern(value: Any) -> str:
    try:
        re.compile(str(value))
    except re.error as e:
        raise ValueError(f"not a regular expression: {e}") from e
    return str(value)


def _parse_timer(value: Any) -> str:
    if value not in TIMERS:
        raise ValueError(f"not a timer (there are {', '.join(TIMERS)})")
    return str(value)


def _parse_texts(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ValueError("not a mapping")
    return {str(name): str(text) for name, text in value.items()}


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Each option with its default; docs/reference/commands.md explains them."""

    backends: tuple[str, ...] = option((), parse_backends)
    """Empty: those of AITER's Triton GEMMs if one of the sides has AITER, else torch."""
    sides: tuple[Side, ...] = option((Side(),), _parse_sides)
    runs: int = option(_DEFAULT_RULE.runs, whole(1, 20))
    extra: int = option(_DEFAULT_RULE.extra, whole(0, 20))
    within: float = option(_DEFAULT_RULE.within, number(0.001, 1.0))
    sample_s: float = option(0.2, seconds(0.001, 60.0))
    """Seconds that the timing of one run may take."""
    timer: str = option("events", _parse_timer)
    warmup: int = option(0, whole(0, 1000))
    iters: int = option(0, whole(0, 10_000))
    """A run is the mean of `iters` calls after `warmup`, on the same operands, as in the FP4 guide. 0: our method."""
    kernel: str = option("", _parse_pattern)
    """rocprof: a regular expression for the names of the kernels that count."""
    seed: int = option(0, whole(0, 2**31))
    rotate_mb: int = option(0, whole(0, 1 << 20))
    """Memory that the copies of the operands span; 0 means 256 on a CPU, 512 on a GPU."""
    first: int = option(0, whole(0, 1000))
    """Number of the first run: a later pass over the same shapes goes on counting."""
    table: str = option("", str)
    """Text of the tuned table that the backend aiter uses."""
    gluon: Mapping[str, str] = field(default_factory=dict, metadata={"rule": _parse_texts})
    """Backend aiter-gluon: texts of files that overlay the tree, by their path in it."""

    @property
    def rule(self) -> RunRule:
        return RunRule(self.runs, self.extra, self.within)

    @property
    def timed(self) -> str:
        """Says how a run is timed, for its rows."""
        return f"{self.timer}, mean of {self.iters} calls after {self.warmup}" if self.iters else self.timer

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> BenchOptions:
        """Raises ValueError with every fault."""
        return parse_options(cls, "bench", raw)
