"""Registry of engines: what inventory, deployment, checks and commands need to know of each, by name.

A built-in engine is a module of orchestrator/engine with a `SPEC`: `engine/NAME/spec.py` or `engine/NAME.py`. Every
other one comes from an installed package, by an entry point `NAME = "package.module:SPEC"` in the group
`gemmfleet.engines`; entry points are read for names that are not built in only. A spec is cheap to import.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

GROUP = "gemmfleet.engines"
"""The group of entry points."""
OK, WARNING, UNUSABLE = "ok", "warning", "unusable"
RANK = {OK: 0, WARNING: 1, UNUSABLE: 2}
"""Levels of a finding from good to bad."""

_HERE = Path(__file__).parent / "engine"
_NAME = re.compile(r"[a-z][a-z0-9_]{0,30}\Z")


class EngineNotFoundError(LookupError):
    """No engine has this name, or the package that has it is broken."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding on a node. `way_out`: what the user can do about it, "" where it is ok."""

    level: str
    about: str
    what: str
    way_out: str = ""

    def __str__(self) -> str:
        return f"{self.what}: {self.way_out}" if self.way_out else self.what


def _nothing(*_: Any) -> tuple[()]:
    return ()


def _no_env(node: Any) -> Mapping[str, str]:
    return {}


def _never(node: Any) -> bool:
    return False


def _no_options(options: Mapping[str, Any]) -> None:
    if options:
        raise ValueError(f"unknown option {', '.join(map(repr, options))} (there are none)")


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine as the registry knows it.

    `node` in a signature is the inventory's node (orchestrator/inventory/model.py), `facts` its facts
    (orchestrator/nodes/facts.py), `plan` its NodePlan (orchestrator/dispatch/deploy.py): rooms above this one.
    """

    name: str
    """As in `engine: NAME`."""
    scripts: Mapping[str, str | Path]
    """Scripts of a node folder -> their template: a name in `templates/`, or the path of a file of the package.
    There must be launch.sh, tune.sh and follow.sh."""
    create: Callable[[Any, Any, Callable[[str], None]], Any]
    """(plan, transport, progress) -> Engine (orchestrator/engine/base.py); `progress` is called with words."""
    needs: frozenset[str] = frozenset()
    """Commands among flock, setsid, timeout, tar and find without which a node is unusable."""
    sections: tuple[str, ...] = ()
    """Options of a node that are for this engine alone, such as `image` and `docker`."""
    parse_options: Callable[[Mapping[str, Any]], object] = _no_options
    """Check `engine_options:` of a node. Raises ValueError with every fault."""
    conflicts: Callable[[Any], Iterable[tuple[tuple[str, ...], str]]] = _nothing
    """(node) -> (path of the option below the node, problem and way out) of options that do not fit together."""
    preflight: Callable[[Any, Any], Iterable[Finding]] = _nothing
    """(node, facts) -> findings of its own."""
    container: Callable[[Any, str], Any] | None = None
    """(node, run) -> options of the containers, where workers run in an image: DockerOptions."""
    env: Callable[[Any], Mapping[str, str]] = _no_env
    """(node) -> environment of the workers beyond the node's `env:`, references and all."""
    isolates: Callable[[Any], bool] = _never
    """(node) -> whether a worker sees its slot's GPU alone, under the number 0."""

    @property
    def runs_images(self) -> bool:
        """Whether workers run in the node's `image:`."""
        return self.container is not None


@cache
def built_in() -> tuple[str, ...]:
    """Names of the engines of orchestrator/engine, sorted."""
    files = {p.stem for p in _HERE.iterdir() if p.suffix == ".py" or (p / "spec.py").is_file()}
    return tuple(sorted(n for n in files - {"__init__", "base"} if _module(n)))


def names() -> tuple[str, ...]:
    """Names that `engine:` takes: built-in ones, then those of installed packages (which are not imported)."""
    return (*built_in(), *sorted({e.name for e in _entry_points()} - set(built_in())))


@cache
def find_engine(name: str) -> EngineSpec:
    """The spec of an engine. Raises EngineNotFoundError."""
    if module := _module(name):
        spec: EngineSpec = importlib.import_module(module).SPEC
        return spec
    found = next((e for e in _entry_points() if e.name == name), None)
    if found is None:
        raise EngineNotFoundError(f"there is no engine {name!r}")
    try:
        loaded = found.load()
    except Exception as e:
        raise EngineNotFoundError(f"the engine {name} ({found.value}) cannot be imported: {e}") from e
    if not isinstance(loaded, EngineSpec) or loaded.name != name:
        raise EngineNotFoundError(f"{found.value} is not the EngineSpec of an engine {name}")
    return loaded


def _module(name: str) -> str:
    """Module of a built-in engine's SPEC, "" where there is none."""
    if name == "base" or not _NAME.match(name):
        return ""
    if (_HERE / name / "spec.py").is_file():
        return f"orchestrator.engine.{name}.spec"
    return f"orchestrator.engine.{name}" if (_HERE / f"{name}.py").is_file() else ""


def _entry_points() -> tuple[importlib.metadata.EntryPoint, ...]:
    return tuple(importlib.metadata.entry_points(group=GROUP))
