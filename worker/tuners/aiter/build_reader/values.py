"""Values of the part of Python that AITER's instance lists are written in, and what may be done with them."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_STEPS = 20_000_000
MAX_DEPTH = 60
MAX_SIZE = 1_000_000


class NoValueError(ValueError):
    """A part of a module that cannot be evaluated here."""


@dataclass(slots=True)
class Class:
    """A class of the module: its fields in order with their defaults, and its methods."""

    name: str
    fields: dict[str, Callable[[], Any] | None] = field(default_factory=dict)
    methods: dict[str, Function] = field(default_factory=dict)
    properties: set[str] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Instance:
    """An object of such a class."""

    of: Class
    values: dict[str, Any]


@dataclass(slots=True, eq=False)
class Function:
    """A function or lambda with the names around it."""

    node: ast.FunctionDef | ast.Lambda
    names: dict[str, Any]


class Returned(Exception):
    def __init__(self, value: Any) -> None:
        self.value = value


class Broken(Exception):
    pass


class Continued(Exception):
    pass


BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv, ast.Mod: operator.mod, ast.BitOr: operator.or_, ast.BitAnd: operator.and_,
}  # fmt: skip
COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip
UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_
}  # fmt: skip
METHODS: dict[type, frozenset[str]] = {
    str: frozenset(
        (
            "join",
            "lower",
            "upper",
            "split",
            "strip",
            "startswith",
            "endswith",
            "replace",
            "removeprefix",
            "removesuffix",
        )
    ),
    list: frozenset(("append", "extend", "insert", "copy", "index", "count", "reverse", "pop")),
    dict: frozenset(("items", "keys", "values", "get", "setdefault", "update", "copy", "pop")),
    set: frozenset(("add", "update", "union", "copy", "discard")),
    tuple: frozenset(("index", "count")),
}
"""What may be called of which value."""
PLAIN = (int, float, str, bool, type(None))


class Scope(dict[str, Any]):
    """Names of a function or comprehension, with those around it behind them."""

    def __init__(self, outer: Mapping[str, Any]) -> None:
        super().__init__()
        self._outer = outer

    def __missing__(self, name: str) -> Any:
        return self._outer[name]
