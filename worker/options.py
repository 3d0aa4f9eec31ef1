"""Parsing of a tuner's options: each field of a dataclass carries the rule of its values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field, fields
from typing import Any, TypeVar

# the value as the option holds it. Raises ValueError with what it should be ("not a whole number").
Rule = Callable[[Any], Any]
T = TypeVar("T")


def option(default: Any, rule: Rule) -> Any:
    """A dataclass field with a default and the rule of its values."""
    return field(default=default, metadata={"rule": rule})


def whole(least: int, most: int | None = None) -> Rule:
    """Rule: a whole number in a range."""

    def rule(value: Any) -> int:
        if not is_whole(value) or value < least or (most is not None and value > most):
            raise ValueError(f"not a whole number from {least}" + ("" if most is None else f" to {most}"))
        return int(value)

    return rule


def number(least: float, most: float, what: str = "a number") -> Rule:
    """Rule: a number in a range."""

    def rule(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
            raise ValueError(f"not {what} from {least:g} to {most:g}")
        return float(value)

    return rule


def seconds(least: float, most: float) -> Rule:
    """Rule: a number of seconds in a range."""
    return number(least, most, "a number of seconds")


def boolean(value: Any) -> bool:
    """Rule: true or false."""
    if not isinstance(value, bool):
        raise ValueError("neither true nor false")
    return value


def is_whole(value: Any) -> bool:
    """True for an integer (True and False are none)."""
    return isinstance(value, int) and not isinstance(value, bool)


def parse_options(cls: type[T], tuner: str, raw: Mapping[str, Any]) -> T:
    """Options of class `cls`. Raises ValueError with every fault: unknown option, wrong type, value out of range."""
    rules = {f.name: f.metadata["rule"] for f in fields(cls)}  # type: ignore[arg-type]
    faults: list[str] = []
    values: dict[str, Any] = {}
    for name, value in raw.items():
        if name not in rules:
            faults.append(f"unknown option {name!r} (there are {', '.join(rules)})")
            continue
        try:
            values[name] = rules[name](value)
        except ValueError as e:
            faults.append(f"{name} is {value!r}, {e}")
    if not faults:
        made: Any = cls(**values)
        if not hasattr(made, "max_samples") or made.max_samples >= made.min_samples:
            return made  # type: ignore[no-any-return]
        faults = ["max_samples is less than min_samples"]
    raise ValueError(f"bad options for the tuner {tuner}: " + "; ".join(faults))
