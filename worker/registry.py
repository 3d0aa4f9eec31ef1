"""Finds tuners and engines by name (`Registry`), and checks their options (`option`, `parse_options`).

A built-in one is a module with a `SPEC` in our package: `NAME/spec.py` or `NAME.py`. All others come from installed
packages, by an entry point `NAME = "package.module:SPEC"`. Entry points are read only for names that are not built in,
and imported when they are looked up. worker/tuners/catalog.py is the registry of tuners.

The options of a tuner are a dataclass whose fields carry the rule of their values:

    @dataclass(frozen=True)
    class MyOptions:
        warmup: int = option(5, whole(0, 100))

    parse_options(MyOptions, "mine", {"warmup": 3})
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from worker.text import did_you_mean

if TYPE_CHECKING:
    import importlib.metadata

Spec = TypeVar("Spec")
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,30}\Z")


def entry_points(group: str) -> tuple[importlib.metadata.EntryPoint, ...]:
    """Entry points of installed packages in a group."""
    import importlib.metadata  # email, zipfile and more: not for the help of a command

    return tuple(importlib.metadata.entry_points(group=group))


@dataclass(frozen=True)
class Registry(Generic[Spec]):
    """The specs of one kind, such as `tuner`."""

    kind: str
    """For messages."""
    spec: type[Spec]
    package: str
    """Our package with the built-in ones, such as `worker.tuners`,"""
    folder: Path
    """and its folder."""
    group: str
    """The group of entry points."""
    without_spec: tuple[str, ...]
    """Modules of the package that are no spec."""
    error: type[LookupError]
    """The exception for an unknown name."""

    def built_in(self) -> tuple[str, ...]:
        """Built-in names, sorted."""
        names = {path.stem.replace("_", "-") for path in self.folder.iterdir()}
        return tuple(sorted(name for name in names if self._module(name)))

    def from_packages(self) -> tuple[str, ...]:
        """Names from installed packages, sorted. The packages are not imported."""
        names = {entry_point.name for entry_point in entry_points(self.group)}
        return tuple(sorted(names - set(self.built_in())))

    def find(self, name: str) -> Spec:
        """The spec with that name. Raises `error` if the name is unknown, or its package is broken."""
        if not _NAME.match(name):
            raise self.error(f"{name!r} is not the name of {self._a}")
        module = self._module(name)
        if module:
            built_in: Spec = importlib.import_module(module).SPEC
            return built_in
        for entry_point in entry_points(self.group):
            if entry_point.name == name:
                return self._load(entry_point)
        raise self.error(f"there is no {self.kind} {name!r}")

    def _load(self, entry_point: importlib.metadata.EntryPoint) -> Spec:
        name = entry_point.name
        path = entry_point.value
        try:
            loaded: Any = entry_point.load()
        except Exception as e:
            raise self.error(f"the {self.kind} {name} ({path}) cannot be imported: {e}") from e
        if not isinstance(loaded, self.spec) or getattr(loaded, "name", "") != name:
            raise self.error(f"{path} is not the {self.spec.__name__} of {self._a} {name}")
        package = getattr(loaded, "worker_package", None)
        if package is not None and package != path.partition(":")[0].partition(".")[0]:
            raise self.error(f"{path}: worker_package is not its package, so nodes would not get it")
        return loaded

    @property
    def _a(self) -> str:
        """`a tuner`, `an engine`."""
        return f"{'an' if self.kind[0] in 'aeiou' else 'a'} {self.kind}"

    def _module(self, name: str) -> str:
        """The module of a built-in SPEC, "" if the name is not built in."""
        if name in self.without_spec or "_" in name or not _NAME.match(name):
            return ""
        stem = name.replace("-", "_")  # `aiter-triton` lies in aiter_triton
        if (self.folder / stem / "spec.py").is_file():
            return f"{self.package}.{stem}.spec"
        return f"{self.package}.{stem}" if (self.folder / f"{stem}.py").is_file() else ""


OptionRule = Callable[[Any], Any]
"""Takes a value as typed, returns the one that the option stores. Raises ValueError ("not a whole number")."""
T = TypeVar("T")


def option(default: Any, rule: OptionRule) -> Any:
    """A dataclass field with a default and the rule of its values."""
    return field(default=default, metadata={"rule": rule})


def whole(least: int, most: int | None = None) -> OptionRule:
    """Rule: a whole number in a range."""

    def rule(value: Any) -> int:
        if type(value) is not int or value < least or (most is not None and value > most):
            raise ValueError(f"not a whole number from {least}" + ("" if most is None else f" to {most}"))
        return value

    return rule


def number(least: float, most: float, what: str = "a number") -> OptionRule:
    """Rule: a number in a range."""

    def rule(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
            raise ValueError(f"not {what} from {least:g} to {most:g}")
        return float(value)

    return rule


def seconds(least: float, most: float) -> OptionRule:
    """Rule: a number of seconds in a range."""
    return number(least, most, "a number of seconds")


def boolean(value: Any) -> bool:
    """Rule: true or false."""
    if not isinstance(value, bool):
        raise ValueError("neither true nor false")
    return value


def text(value: Any) -> str:
    """Rule: text."""
    if not isinstance(value, str):
        raise ValueError("no text")
    return value


def parse_options(cls: type[T], tuner: str, raw: Mapping[str, Any]) -> T:
    """Make the options of class `cls` of a tuner. Raises ValueError that lists every fault: unknown option, wrong type,
    value out of range.

    A class with the options `min_samples` and `max_samples` gets them in order.
    """
    rules = {f.name: f.metadata["rule"] for f in fields(cls)}  # type: ignore[arg-type]
    faults: list[str] = []
    values: dict[str, Any] = {}
    for name, value in raw.items():
        if name not in rules:
            faults.append(f"unknown option {name!r}{did_you_mean(name, rules)} (there are {', '.join(rules)})")
            continue
        try:
            values[name] = rules[name](value)
        except ValueError as e:
            faults.append(f"{name} is {value!r}, {e}")
    if not faults:
        options = cls(**values)
        if getattr(options, "max_samples", 0) >= getattr(options, "min_samples", 0):
            return options
        faults = ["max_samples is less than min_samples"]
    raise ValueError(f"bad options for the tuner {tuner}: " + "; ".join(faults))
