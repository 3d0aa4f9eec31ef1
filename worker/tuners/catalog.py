"""The registry of tuners: everything that the controller and the worker know about each tuner, by name.

Built-in tuners are modules of this package with a `SPEC`; others come from entry points (worker/registry.py). On a node
the same look-up works without pip, because the controller ships the package and its entry point beside the worker's
code (`TunerSpec.worker_package`).

A spec is cheap to import: no torch, no triton, no numpy. Standard library only.

To add a tuner, write `NAME.py` here (or `NAME/spec.py` and the modules that it needs) with a SPEC and a class after
worker/tuners/base.py, its chapter in docs/reference/tuners.md, and its tests. If it has kernels of its own, name the
beginning of their names in worker/families.py, so that no table of AITER's ever gets one. replay.py is the shortest
example. Its rates, once they are measured, go into orchestrator/planning/rates.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from worker.registry import Registry

if TYPE_CHECKING:
    from worker.tuners.base import Tuner

GROUP = "gemmfleet.tuners"
"""The group of entry points."""


class TunerNotFoundError(LookupError):
    """No tuner has this name, or the package that has it is broken."""


class CostGuess(NamedTuple):
    """Seconds, if nothing was measured yet (orchestrator/planning/cost.py has the formula)."""

    setup_s: float
    """Seconds of a group, beside those of its shapes."""
    shape_s: float
    """Seconds of a shape, beside those of its size."""
    flop_s: float
    """Seconds of each operation of a shape."""
    weight_s: float
    """Seconds of each element of a shape's weights."""
    start_s: float
    """From the command to the first group."""


class Flag(NamedTuple):
    """An option of a tuner that `gemmfleet tune` has as a flag. Tuners with the same option share the flag."""

    option: str
    """Name among the tuner's options."""
    flag: str
    """Such as `--warmup`."""
    kind: type[int | float | str | bool | list[str]]
    """Type of the value; bool: a switch; list: a repeatable text."""
    help: str
    """One line without the tuner's name."""
    minimum: float | None = None
    metavar: str | None = None


AGAIN = Flag(
    "again", "--again", int, "Rank again, up to N times, where the winner leads by less than 3 standard errors.", 0, "N"
)
"""The flag of tuners that rank their leaders."""


def _no_check(options: Mapping[str, Any]) -> None:
    if options:
        raise ValueError(f"unknown option {', '.join(map(repr, options))} (this tuner has no options)")


@dataclass(frozen=True, slots=True)
class TunerSpec:
    """A tuner's entry in the registry."""

    name: str
    """Name in `--tuner NAME`: lower-case letters, digits, hyphens (underscores in a built-in one's module)."""
    tuner_class: str
    """`package.module:Class` of the tuner (worker/tuners/base.py). It is imported by `make_tuner`, on the node."""
    parse_options: Callable[[Mapping[str, Any]], object] = _no_check
    """Check the options of `tune`. Raises ValueError with every fault. Called on the controller, before anything
    starts."""
    families: Callable[[Mapping[str, Any]], tuple[str, ...]] | None = None
    """Families that it has candidates for with these options. None: any family."""
    why_not: Mapping[str, str] = field(default_factory=dict)
    """Reasons for which it has none for a family that users may expect, by family."""
    cost_guess: CostGuess | None = None
    """Guess of a shape's cost before anything was measured, for a tuner of a package. Built-in tuners have measured
    rates instead (orchestrator/planning/rates.py)."""
    slower_families: Mapping[str, float] = field(default_factory=dict)
    """Factors on the cost of a shape, by family."""
    cost_factor: Callable[[Mapping[str, Any]], float] = lambda options: 1.0
    """Factor on the time of a shape with these options."""
    start_limits: tuple[float, float] | None = None
    """Seconds (until ready, until the canary answered) where they are longer than the worker's usual."""
    software: str = ""
    """Package whose kernels it measures on the node's device: aiter, torch, vllm, sglang; "" if there is no device."""
    keeps_cache: bool = False
    """Keeps something on the node beyond the run (GEMMFLEET_CACHE)."""
    keeps_reproductions: bool = False
    """Its attempts leave reproductions of faults, which are copied into the run folder."""
    wants_family: bool = False
    """Its options on a node name the run's family, as `family`."""
    wants_counts: bool = False
    """Its options name the calls of each shape of the workload, as `counts`, where the shapes file has a column
    `count`."""
    wants_captures: bool = False
    """Its option `topk_ids` is a folder of routings that a server captured, which reach it as the text `captured`."""
    err_ratio: Callable[[str], float] = lambda family: 0.05
    """(family) -> largest share of wrong elements of a winner."""
    flags: tuple[Flag, ...] = ()
    """Options that `gemmfleet tune` has as flags; the others are given by -O NAME=VALUE."""
    produces: Literal["aiter", "own", "configs", ""] = ""
    """Kernels in its rows: `aiter`, which AITER's dispatch loads; `own`, which it does not; `configs`, which no table
    names but config files in AITER's tree; "" where rows decide."""
    risk: Callable[[str, Mapping[str, int | str]], str] | None = None
    """(family, key) -> why a kernel may fault on the shape, so that it runs in a group of its own; "" for none.
    None: on no shape."""
    unit: Callable[[str, Mapping[str, int | str]], object] | None = None
    """(family, key) -> what shapes that differ only in M must have in common to be one unit, which one process tunes as
    a whole. None: each shape is one."""
    mixes: bool = False
    """A process may tune shapes of several (N, K), and may be ended between two shapes."""
    version: Callable[[str, Mapping[str, Any]], str] = lambda name, device: str(device.get(name) or "")
    """(name, device facts of a slot) -> what must be the same for two rows to come from one version; "" for unknown."""
    own_command: str = ""
    """Command line that runs it where that is not `tune`."""
    side_by_side: bool = False
    """Its rows are backends side by side and no candidates of a search."""
    worker_package: str = ""
    """Top-level package with the tuner, which is shipped to nodes beside the worker; "" for a built-in tuner."""


_TUNERS = Registry(
    "tuner", TunerSpec, "worker.tuners", Path(__file__).parent, GROUP, ("base", "catalog"), TunerNotFoundError
)


@cache
def built_in() -> tuple[str, ...]:
    """Names of the tuners of this package, sorted."""
    return _TUNERS.built_in()


def built_in_for_tune() -> tuple[str, ...]:
    """Names of the built-in tuners that have no command of their own."""
    return tuple(name for name in built_in() if not find_tuner(name).own_command)


def names() -> tuple[str, ...]:
    """Names that `--tuner` takes: built-in ones, then those of installed packages (which are not imported)."""
    return (*built_in_for_tune(), *_TUNERS.from_packages())


@cache
def find_tuner(name: str) -> TunerSpec:
    """The spec of a tuner. Raises TunerNotFoundError."""
    return _TUNERS.find(name)


@lru_cache(1000)
def recorded_tuner(name: str) -> TunerSpec:
    """The spec of a tuner that a file or an older run names. If it is not installed here, a spec without facts."""
    try:
        return find_tuner(name)
    except TunerNotFoundError:
        return TunerSpec(name, tuner_class="")


def make_tuner(name: str) -> Tuner:
    """A new tuner that is not opened yet. Raises TunerNotFoundError."""
    module, _, class_name = find_tuner(name).tuner_class.partition(":")
    tuner: Tuner = getattr(importlib.import_module(module), class_name)()
    return tuner
