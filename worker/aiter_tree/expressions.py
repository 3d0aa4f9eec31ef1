"""Values and expressions of the part of Python that AITER's instance lists are written in; see `evaluate`."""

from __future__ import annotations

import ast
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_STEPS = 20_000_000
MAX_DEPTH = 60
MAX_SIZE = 1_000_000

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
"""Methods that may be called, by type."""
PLAIN = (int, float, str, bool, type(None))


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


class Scope(dict[str, Any]):
    """Names of a function or comprehension, with those around it behind them."""

    def __init__(self, outer: Mapping[str, Any]) -> None:
        super().__init__()
        self._outer = outer

    def __missing__(self, name: str) -> Any:
        return self._outer[name]


class Expressions(ABC):
    """Evaluator of expressions, given names. Counts its steps."""

    names: dict[str, Any]

    def __init__(self) -> None:
        self._steps = self._depth = 0

    @abstractmethod
    def _body(self, body: Iterable[ast.stmt], names: dict[str, Any]) -> None:
        """Statements, one after another."""

    @abstractmethod
    def _assign(self, target: ast.expr, value: Any, names: dict[str, Any]) -> None:
        """Give a value to what stands left of `=`."""

    def attribute(self, value: Any, name: str) -> Any:
        """A field or property of an instance. Raises NoValueError."""
        if isinstance(value, Instance):
            if name in value.values:
                return value.values[name]
            method = value.of.methods.get(name)
            if method is not None and name in value.of.properties:
                return self._call_function(method, [value], {})
        raise NoValueError(f"there is no value for .{name}")

    # --- expressions --------------------------------------------------------------------------------------------

    def _value(self, node: ast.expr, names: dict[str, Any]) -> Any:
        self._step()
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return self._look(node.id, names)
            case ast.List() | ast.Tuple() | ast.Set():
                found = list(self._elements(node.elts, names))
                return (
                    found if isinstance(node, ast.List) else tuple(found) if isinstance(node, ast.Tuple) else set(found)
                )
            case ast.Dict():
                return self._dictionary(node, names)
            case ast.JoinedStr():
                return "".join(self._formatted(v, names) for v in node.values)
            case ast.BinOp():
                return self._binary(node.op, self._value(node.left, names), self._value(node.right, names))
            case ast.UnaryOp() if type(node.op) in UNARY:
                return UNARY[type(node.op)](self._value(node.operand, names))
            case ast.BoolOp():
                return self._either(node, names)
            case ast.Compare():
                return self._compare(node, names)
            case ast.IfExp():
                return self._value(node.body if self._value(node.test, names) else node.orelse, names)
            case ast.Subscript():
                return self._subscript(node, names)
            case ast.Attribute():
                return self.attribute(self._value(node.value, names), node.attr)
            case ast.Call():
                return self._called(node, names)
            case ast.Lambda():
                return Function(node, names)
            case ast.ListComp() | ast.GeneratorExp():
                return [self._value(node.elt, inner) for inner in self._inner(node.generators, names)]
            case ast.SetComp():
                return {self._value(node.elt, inner) for inner in self._inner(node.generators, names)}
            case ast.DictComp():
                inners = self._inner(node.generators, names)
                return {self._value(node.key, i): self._value(node.value, i) for i in inners}
        raise NoValueError(f"line {node.lineno}: no rule for {type(node).__name__}")

    def _elements(self, nodes: Iterable[ast.expr], names: dict[str, Any]) -> Iterator[Any]:
        for node in nodes:
            if isinstance(node, ast.Starred):
                yield from self._iterate(self._value(node.value, names))
            else:
                yield self._value(node, names)

    def _dictionary(self, node: ast.Dict, names: dict[str, Any]) -> dict[Any, Any]:
        out: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            found = self._value(value, names)
            if key is None:
                if not isinstance(found, dict):
                    raise NoValueError("unpacks what is no dictionary")
                out |= found
            else:
                out[self._value(key, names)] = found
        return out

    def _formatted(self, node: ast.expr, names: dict[str, Any]) -> str:
        if isinstance(node, ast.FormattedValue):
            if node.format_spec is not None:
                raise NoValueError(f"line {node.lineno}: no rule for a format")
            return self._text(self._value(node.value, names))
        return self._text(self._value(node, names))

    def _binary(self, op: ast.operator, a: Any, b: Any) -> Any:
        if type(op) not in BINARY or not all(isinstance(v, (int, float, str, list, tuple, dict, set)) for v in (a, b)):
            raise NoValueError(f"no rule for {type(op).__name__} of these")
        if isinstance(op, ast.Mod) and isinstance(a, str):
            raise NoValueError("no rule for a format")
        if isinstance(op, ast.Mult):
            sizes = [len(v) for v in (a, b) if not isinstance(v, (int, float))]
            counts = [v for v in (a, b) if isinstance(v, int)]
            if sizes and counts and sizes[0] * counts[0] > MAX_SIZE:
                raise NoValueError("is too large")
        return BINARY[type(op)](a, b)

    def _either(self, node: ast.BoolOp, names: dict[str, Any]) -> Any:
        value: Any = None
        for part in node.values:
            value = self._value(part, names)
            if bool(value) is isinstance(node.op, ast.Or):
                return value
        return value

    def _compare(self, node: ast.Compare, names: dict[str, Any]) -> bool:
        left = self._value(node.left, names)
        for op, part in zip(node.ops, node.comparators, strict=True):
            right = self._value(part, names)
            if not COMPARE[type(op)](left, right):
                return False
            left = right
        return True

    def _subscript(self, node: ast.Subscript, names: dict[str, Any]) -> Any:
        owner = self._value(node.value, names)
        if not isinstance(owner, (dict, list, tuple, str)):
            raise NoValueError(f"line {node.lineno}: is no collection")
        if isinstance(node.slice, ast.Slice):
            ends = (node.slice.lower, node.slice.upper, node.slice.step)
            return owner[slice(*(self._value(e, names) if e else None for e in ends))]
        return owner[self._value(node.slice, names)]

    def _inner(self, generators: list[ast.comprehension], names: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if not generators:
            yield names
            return
        first, *rest = generators
        for item in self._iterate(self._value(first.iter, names)):
            inner = Scope(names)
            self._assign(first.target, item, inner)
            if all(self._value(test, inner) for test in first.ifs):
                yield from self._inner(rest, inner)

    # --- calls --------------------------------------------------------------------------------------------------

    def _called(self, node: ast.Call, names: dict[str, Any]) -> Any:
        args = list(self._elements(node.args, names))
        kwargs: dict[str, Any] = {}
        for k in node.keywords:
            value = self._value(k.value, names)
            kwargs |= {k.arg: value} if k.arg is not None else value
        if isinstance(node.func, ast.Attribute):
            named = ast.unparse(node.func)
            if named in self.names:  # one of _builtins, by the name of its module
                return self._call(self.names[named], args, kwargs)
            owner, name = self._value(node.func.value, names), node.func.attr
            if isinstance(owner, Instance) and name in owner.of.methods:
                return self._call_function(owner.of.methods[name], [owner, *args], kwargs)
            if name not in METHODS.get(type(owner), ()):
                raise NoValueError(f"line {node.lineno}: no rule for .{name}()")
            if name == "join":
                args = [[self._text(a) for a in self._iterate(args[0])]]
            done = getattr(owner, name)(*args, **kwargs)
            return list(done) if name in ("items", "keys", "values") else done
        return self._call(self._value(node.func, names), args, kwargs)

    def _call(self, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if isinstance(function, Class):
            return self._make(function, args, kwargs)
        if isinstance(function, Function):
            return self._call_function(function, args, kwargs)
        if callable(function):  # one of _builtins or of `given`
            return function(*args, **kwargs)
        raise NoValueError("calls what is no function")

    def _make(self, of: Class, args: list[Any], kwargs: dict[str, Any]) -> Instance:
        if len(args) > len(of.fields) or not kwargs.keys() <= of.fields.keys():
            raise NoValueError(f"{of.name} has no such fields")
        values = dict(zip(of.fields, args, strict=False)) | kwargs
        for name, default in of.fields.items():
            if name not in values:
                if default is None:
                    raise NoValueError(f"{of.name} lacks {name}")
                values[name] = default()
        out = Instance(of, values)
        if "__post_init__" in of.methods:
            self._call_function(of.methods["__post_init__"], [out], {})
        return out

    def _call_function(self, function: Function, args: list[Any], kwargs: dict[str, Any]) -> Any:
        spec, node = function.node.args, function.node
        names: dict[str, Any] = Scope(function.names)
        order = [a.arg for a in (*spec.posonlyargs, *spec.args)]
        for name, default in zip(order[len(order) - len(spec.defaults) :], spec.defaults, strict=True):
            names[name] = self._value(default, function.names)
        for a, only in zip(spec.kwonlyargs, spec.kw_defaults, strict=True):
            if only is not None:
                names[a.arg] = self._value(only, function.names)
        if spec.vararg is not None:
            names[spec.vararg.arg] = tuple(args[len(order) :])
        elif len(args) > len(order):
            raise NoValueError("is called with too many values")
        extra = {k: v for k, v in kwargs.items() if k not in (*order, *(a.arg for a in spec.kwonlyargs))}
        if spec.kwarg is not None:
            names[spec.kwarg.arg] = extra
        elif extra:
            raise NoValueError("is called with names that it lacks")
        names.update(zip(order, args, strict=False))
        names.update({k: v for k, v in kwargs.items() if k not in extra})
        self._depth += 1
        try:
            if self._depth > MAX_DEPTH:
                raise NoValueError("goes too deep")
            if isinstance(node, ast.Lambda):
                return self._value(node.body, names)
            self._body(node.body, names)
        except Returned as e:
            return e.value
        finally:
            self._depth -= 1
        return None

    # --- small parts --------------------------------------------------------------------------------------------

    def _look(self, name: str, names: Mapping[str, Any]) -> Any:
        try:
            return names[name]
        except KeyError:
            raise NoValueError(f"{name} has no value here") from None

    def _step(self) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise NoValueError("takes too many steps")

    def _iterate(self, value: Any) -> Iterator[Any]:
        if not isinstance(value, (list, tuple, set, dict, str, range)):
            raise NoValueError("goes through what is no collection")
        if len(value) > MAX_SIZE:
            raise NoValueError("is too large")
        for item in list(value):
            self._step()
            yield item

    def _text(self, value: Any) -> str:
        if not isinstance(value, (*PLAIN, list, tuple)):
            raise NoValueError("is no text")
        return str(value)
