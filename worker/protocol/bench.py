"""The request of a bench, shared by controller and worker: options, the rule for repeated runs, and long texts.

A *run* is one timing of one backend on one shape (a median of many calls). We use the runbook's rule: make three runs
and take their mean. It is stable if they lie within 5 % of it. Otherwise make up to two more, and the three that agree
best count.

Long texts (the table in use, Gluon files, config sets) are put on a node once, beside the code (NodePaths.texts).
run.yaml, node.json and the specs of groups only have their hashes.
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

RUNS, EXTRA, WITHIN = 3, 2, 0.05
ALIASES = {"gluon": ("aiter-gluon",), "aiter-batched": BATCHED}
TIMERS = ("events", "rocprof")
HARMLESS = ("unavailable", "unsupported")  # statuses without a number that are nobody's fault
ENV_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}\Z")
MAX_BYTES = 64 << 20  # largest size of one long text
_REFERENCE = re.compile(r"sha256:[0-9a-f]{64}\Z")
Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Rule:
    """`runs` that have to agree `within` (max less min over mean), and how many `extra` may be taken for that."""

    runs: int = RUNS
    extra: int = EXTRA
    within: float = WITHIN


@dataclass(frozen=True, slots=True)
class RunMean:
    """Result of the runs. `us` is the mean of the `used` runs that agree best, `spread` their (max - min) / mean."""

    us: float
    spread: float
    used: int
    taken: int
    status: str  # `ok`, `unstable` (no `runs` of them agree), `short` (fewer runs than the rule wants)


def mean_of_runs(values: Sequence[float], rule: Rule = Rule()) -> RunMean:
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


def wants_more(values: Sequence[float], rule: Rule = Rule()) -> bool:
    """True where another run is to be taken: too few, or they do not agree and there is one left."""
    if len(values) < rule.runs:
        return True
    return len(values) < rule.runs + rule.extra and mean_of_runs(values, rule).status != "ok"


def rounds(
    taken: Mapping[Name, Sequence[float]], pairs: Mapping[Name, Hashable], rule: Rule, rng: random.Random
) -> Iterator[list[Name]]:
    """The order of each round, drawn anew; `taken` is filled by the caller between rounds.

    Who is no longer in `taken` is left out. Names that share a value of `pairs` (one backend on two sides) take
    their extra runs together, so that run i of one always has its partner.
    """
    while True:
        short = {pairs[n] for n, values in taken.items() if wants_more(values, rule)}
        order = [n for n in taken if pairs[n] in short and len(taken[n]) < rule.runs + rule.extra]
        if not order:
            return
        rng.shuffle(order)
        yield order


def spread(values: Sequence[float]) -> float:
    """(max - min) / mean; 0 for a single value."""
    return (max(values) - min(values)) / fmean(values) if values else 0.0


def with_texts(options: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """The options with each long text (table, Gluon files, config sets) replaced by what `change` makes of it."""
    out = dict(options)
    if out.get("table"):
        out["table"] = change(out["table"])
    if out.get("gluon"):
        out["gluon"] = {key: change(text) for key, text in out["gluon"].items()}
    if out.get("sides"):
        out["sides"] = [{**s, "configs": change(s["configs"])} if s.get("configs") else s for s in out["sides"]]
    return out


def lodge(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """(the options with references in place of texts, the texts by their hash)."""
    texts: dict[str, str] = {}

    def keep(text: str) -> str:
        digest = hashlib.sha256(text.encode()).hexdigest()
        texts[digest] = text
        return f"sha256:{digest}"

    return with_texts(options, keep), texts


def fetch(options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The options, with references replaced by their texts. Raises ValueError."""
    return with_texts(options, lambda text: _read(text, folder) if is_reference(text) else text)


def is_reference(value: object) -> bool:
    """Return whether an option's value refers to a text."""
    return isinstance(value, str) and bool(_REFERENCE.match(value))


def _read(reference: str, folder: Path) -> str:
    digest = reference.removeprefix("sha256:")
    try:
        with (folder / digest).open("rb") as f:
            data = f.read(MAX_BYTES + 1)
    except OSError as e:
        raise ValueError(f"the text {folder / digest} of the options cannot be read: {e.strerror or e}") from e
    if hashlib.sha256(data).hexdigest() != digest:
        raise ValueError(f"the text {folder / digest} of the options has changed since it was sent: its hash differs")
    return data.decode()


@dataclass(frozen=True, slots=True)
class Side:
    """One of the things compared: an interpreter on the node ("": the worker's own), an image of the worker, or a
    config set of AITER's Triton GEMMs; with environment variables of its own.

    `configs` is the set's text (worker/bench/backends.py), "" for the tree as it is, None where no sets are
    compared.
    """

    name: str = ""
    python: str = ""
    image: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    configs: str | None = None


def backends(value: Any) -> tuple[str, ...]:
    """Names of backends, aliases resolved, each once. Raises ValueError naming those there are."""
    if not isinstance(value, (str, list, tuple)):
        raise ValueError("not a list of backends")
    words = value.split(",") if isinstance(value, str) else value
    out, legal = dict[str, None](), (*BENCHED, *ALIASES)
    for word in (str(w).strip() for w in words):
        names = ALIASES.get(word, (word,))
        if not set(names) <= set(BENCHED):
            raise ValueError(f"{word!r} is not a backend{did_you_mean(word, legal)} (there are {', '.join(legal)})")
        out |= dict.fromkeys(names)
    if not out:
        raise ValueError("no backend is named")
    return tuple(out)


def _sides(value: Any) -> tuple[Side, ...]:
    try:
        made = [Side(**{**v, "variables": _texts(v.get("variables", {}))}) for v in value]
    except (TypeError, AttributeError) as e:
        raise ValueError("not a list of {name, python, image, variables, configs}") from e
    if bad := next((s.name for s in made if s.name and not ENV_NAME.match(s.name)), None):
        raise ValueError(f"{bad!r} cannot name a side")
    if len({s.name for s in made}) != len(made):
        raise ValueError("two sides have the same name")
    return tuple(made) or (Side(),)


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

    # empty: those of AITER's Triton GEMMs where one of the sides has AITER, else torch
    backends: tuple[str, ...] = option((), backends)
    sides: tuple[Side, ...] = option((Side(),), _sides)
    runs: int = option(RUNS, whole(1, 20))
    extra: int = option(EXTRA, whole(0, 20))
    within: float = option(WITHIN, number(0.001, 1.0))
    sample_s: float = option(0.2, seconds(0.001, 60.0))  # seconds that the timing of one run may take
    timer: str = option("events", _timer)
    # as in the FP4 guide: a run is the mean of `iters` calls after `warmup`, on the same operands; 0: our method
    warmup: int = option(0, whole(0, 1000))
    iters: int = option(0, whole(0, 10_000))
    kernel: str = option("", _pattern)  # rocprof: a regular expression for the names of the kernels that count
    seed: int = option(0, whole(0, 2**31))
    # memory that the copies of the operands span; 0 means 256 on a CPU, 512 on a GPU
    rotate_mb: int = option(0, whole(0, 1 << 20))
    # number of the first run: a later pass over the same shapes goes on counting
    first: int = option(0, whole(0, 1000))
    table: str = option("", str)  # text of the tuned table that the backend aiter uses
    # backend aiter-gluon: files that overlay the tree, by their path in it
    gluon: Mapping[str, str] = field(default_factory=dict, metadata={"rule": _texts})

    @property
    def rule(self) -> Rule:
        return Rule(self.runs, self.extra, self.within)

    @property
    def timed(self) -> str:
        """Says how a run is timed, for its rows."""
        return f"{self.timer}, mean of {self.iters} calls after {self.warmup}" if self.iters else self.timer

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Options:
        """Raises ValueError with every fault."""
        return parse_options(cls, "bench", raw)
