"""The interface of engines, and their registry. Inventory, deployment, checks and commands find an engine by name here.

Built-in engines are modules of orchestrator/engine with a `SPEC`; others come from entry points (worker/registry.py). A
spec is cheap to import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from signal import Signals
from typing import Any, Protocol

from worker.registry import Registry

GROUP = "gemmfleet.engines"
"""The group of entry points."""
OK = "ok"
WARNING = "warning"
UNUSABLE = "unusable"
RANK = {OK: 0, WARNING: 1, UNUSABLE: 2}
"""The levels of a finding (see Finding) from good to bad."""


@dataclass(frozen=True, slots=True)
class WorkerState:
    """The state of a slot's worker according to its engine: running, ended (with a code) or absent."""

    slot: str
    state: str
    code: int | None = None
    oom_killed: bool = False
    """The kernel killed one of its processes for lack of memory."""
    signal: int | None = None
    """The signal that ended it, if the engine knows that one did (Docker does; a process has code 128 + signal)."""

    @property
    def how_it_ended(self) -> str:
        """Sentence on how it ended; empty while it runs."""
        if self.state != "ended":
            return ""
        memory = "out of memory" if self.oom_killed else ""
        if self.signal is not None:
            try:
                name = Signals(self.signal).name
            except ValueError:
                name = f"signal {self.signal}"
            return f"killed by {name}" + (f" ({memory})" if memory else "")
        return f"ended with code {self.code}" + (f" ({memory})" if memory else "")


class Engine(Protocol):
    """Starts, lists and stops the workers of one node folder; nothing else."""

    def prepare(self) -> None:
        """Do the slow work before workers can start, such as pulling an image. Starts nothing."""

    def start(self, slots: Sequence[str] = (), env: Mapping[str, str] | None = None) -> None:
        """Start the workers that are not running (of all slots by default); safe to repeat."""

    def hold(self) -> None:
        """Prepare for commands that tune.sh runs while there is no worker; `tidy` undoes it."""

    def list(self) -> list[WorkerState]: ...

    def stop(self, *, kill: bool = False) -> None:
        """End all workers: ask them to finish their files and exit, or kill them. None starts again by itself."""

    def tidy(self) -> None:
        """Remove what the closed run left in the engine itself, such as containers. Files stay."""

    def close(self) -> None:
        """Close connections and free resources on this machine; the workers go on."""


class EngineNotFoundError(LookupError, ValueError):
    """No engine has this name, or its package is broken."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding on a node. `way_out` tells the user what to do; it is "" if the level is ok."""

    level: str
    about: str
    what: str
    way_out: str = ""

    def __str__(self) -> str:
        return f"{self.what}: {self.way_out}" if self.way_out else self.what


def _no_options(options: Mapping[str, Any]) -> None:
    if options:
        raise ValueError(f"unknown option {', '.join(map(repr, options))} (this engine has no options)")


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine's entry in the registry.

    In signatures, `node` is the inventory's node (orchestrator/inventory/model.py), `facts` its facts
    (orchestrator/machines/facts.py), `plan` its NodePlan (node_plan.py beside it). These modules import this one, so
    their types cannot stand here.
    """

    name: str
    """Name in `engine: NAME`."""
    scripts: Mapping[str, str | Path]
    """Scripts of a node folder -> their template: a name in `templates/`, or the path of a file of the package.
    There must be launch.sh, tune.sh and follow.sh."""
    create: Callable[[Any, Any, Callable[[str], None]], Engine]
    """(plan, transport, progress) -> the Engine of a node; it calls `progress` with a text."""
    needs: frozenset[str] = frozenset()
    """Commands among flock, setsid, timeout, tar and find without which a node is unusable."""
    sections: tuple[str, ...] = ()
    """Options of a node that only this engine has, such as `image` and `docker`."""
    parse_options: Callable[[Mapping[str, Any]], object] = _no_options
    """Check `engine_options:` of a node. Raises ValueError with every fault."""
    conflicts: Callable[[Any], Iterable[tuple[tuple[str, ...], str]]] = lambda *_: ()
    """(node) -> (path of the option below the node, problem and way out) of options that do not fit together."""
    preflight: Callable[[Any, Any], Iterable[Finding]] = lambda *_: ()
    """(node, facts) -> findings of the engine's own checks."""
    container: Callable[[Any, str], Any] | None = None
    """(node, run) -> options of the containers (DockerOptions), if workers run in an image."""
    env: Callable[[Any], Mapping[str, str]] = lambda node: {}
    """(node) -> environment of the workers beside the node's `env:`, references included."""
    isolates: Callable[[Any], bool] = lambda node: False
    """(node) -> whether a worker sees only its slot's GPU, as number 0."""
    enter: Callable[[Any], str] | None = None
    """(node) -> shell words that run the command after them in the node's `image:`, for engines whose containers we do
    not start. The shell variable `mounts` holds the folders that the command must see, `A:A,B:B`."""

    @property
    def runs_images(self) -> bool:
        """Return whether workers run in containers of the node's `image:`, which we start."""
        return self.container is not None


_NO_ENGINES = ("docker-client", "docker-containers", "docker-errors", "docker-options")
"""Modules of orchestrator/engine that hold a part of the engine `docker` and no SPEC."""
_ENGINES = Registry(
    "engine",
    EngineSpec,
    "orchestrator.engine",
    Path(__file__).parent / "engine",
    GROUP,
    _NO_ENGINES,
    EngineNotFoundError,
)


@cache
def built_in() -> tuple[str, ...]:
    """Names of the engines of orchestrator/engine, sorted."""
    return _ENGINES.built_in()


def names() -> tuple[str, ...]:
    """Names that `engine:` accepts: built-in engines, then engines of installed packages, which are not imported."""
    return (*built_in(), *_ENGINES.from_packages())


@cache
def find_engine(name: str) -> EngineSpec:
    """The spec of an engine. Raises EngineNotFoundError."""
    return _ENGINES.find(name)
