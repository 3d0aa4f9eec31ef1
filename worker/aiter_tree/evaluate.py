"""Instance lists of AITER as values: the part of Python that they are written in, evaluated and never run.

A list is a module of dataclasses, dictionaries of them, and functions that fill those. Of the module's statements those
that cannot be evaluated (imports, paths) leave their names unknown; a use of one of these raises `NoValueError`.
Numbers, texts, lists, tuples, sets, dictionaries and the module's own classes are all that there is: no attribute of
a Python object is ever reached, and steps and sizes are limited.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from worker.aiter_tree.expressions import (
    Broken,
    Class,
    Continued,
    Expressions,
    Function,
    Instance,
    NoValueError,
    Returned,
)  # fmt: skip


def builtins(
    call: Callable[[Any, list[Any], dict[str, Any]], Any],
    each: Callable[[Any], Iterator[Any]],
    text: Callable[[Any], str],
    get: Callable[[Any, str], Any],
) -> dict[str, Any]:
    """Builtins by name, of the caller's ways to call a function, iterate, make a text, and take an attribute."""

    def attribute(value: Any, name: str, *default: Any) -> Any:
        try:
            return get(value, name)
        except NoValueError:
            if default:
                return default[0]
            raise

    def give(value: Any, name: str, new: Any) -> None:
        if not isinstance(value, Instance):
            raise NoValueError("sets an attribute of what is no instance")
        value.values[name] = new

    def copied(value: Any) -> Any:
        return Instance(value.of, dict(value.values)) if isinstance(value, Instance) else value

    def mapped(function: Any, *some: Any) -> list[Any]:
        return [call(function, list(args), {}) for args in zip(*map(each, some), strict=False)]

    def replaced(value: Instance, **changes: Any) -> Instance:
        return Instance(value.of, {**value.values, **changes})

    def keyed(function: Any, *some: Any, key: Any = None, **more: Any) -> Any:
        by = (lambda v: call(key, [v], {})) if key is not None else None
        return function(*([list(each(v)) for v in some] if len(some) == 1 else some), key=by, **more)

    def sizes(*args: int) -> range:
        return range(*args)

    def first(value: Any, *default: Any) -> Any:
        return next(each(value), *default)

    def own_fields(value: Any) -> dict[str, Any]:
        if not isinstance(value, Instance):
            raise NoValueError("is no instance")
        return value.values

    return {
        "str": text, "int": int, "float": float, "bool": bool, "len": len, "sum": sum, "abs": abs,
        "min": lambda *v, **k: keyed(min, *v, **k), "max": lambda *v, **k: keyed(max, *v, **k),
        "sorted": lambda v, **k: keyed(sorted, v, **k), "range": sizes, "any": any, "all": all,
        "enumerate": lambda v, n=0: list(enumerate(each(v), n)),
        "zip": lambda *v: list(zip(*map(each, v), strict=False)),
        "dict": lambda *v, **k: dict(*v, **k), "list": lambda *v: list(*v), "tuple": lambda *v: tuple(*v),
        "set": lambda *v: set(*v), "frozenset": lambda *v: set(*v), "vars": own_fields, "map": mapped,
        "getattr": attribute, "setattr": give, "iter": lambda v: v, "next": first, "copy": copied, "deepcopy": copied,
        "replace": replaced, "product": lambda *v, **k: list(itertools.product(*map(each, v), **k)),
        "print": lambda *v, **k: None, "copy.copy": copied, "copy.deepcopy": copied,
        "dataclasses.replace": replaced, "re.compile": lambda pattern, *flags: text(pattern),
        "re.escape": lambda value: re.escape(text(value)),
    }  # fmt: skip


class Module(Expressions):
    """A module's names after its statements. `given`: what stands for names that it imports, values or functions."""

    def __init__(self, tree: ast.Module, given: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.given = dict(given or {})
        self.names: dict[str, Any] = {**builtins(self._call, self._iterate, self._text, self.attribute), **self.given}
        for statement in tree.body:
            self._lenient(statement)

    def get(self, name: str) -> Any:
        """A name's value. Raises NoValueError."""
        return self._look(name, self.names)

    def call(self, name: str, **kwargs: Any) -> Any:
        """Result of a function of the module. Raises NoValueError, and Python errors for values that do not fit."""
        return self._call(self.get(name), [], kwargs)

    # --- statements ---------------------------------------------------------------------------------------------

    def _lenient(self, node: ast.stmt) -> None:
        try:
            self._statement(node, self.names)
        except (NoValueError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError, AttributeError):
            for name in _assigned(node):
                if name not in self.given:
                    self.names.pop(name, None)

    def _body(self, body: Iterable[ast.stmt], names: dict[str, Any]) -> None:
        for node in body:
            self._statement(node, names)

    def _statement(self, node: ast.stmt, names: dict[str, Any]) -> None:
        self._step()
        match node:
            case ast.Assign():
                value = self._value(node.value, names)
                for target in node.targets:
                    self._assign(target, value, names)
            case ast.AnnAssign():
                if node.value is not None:
                    self._assign(node.target, self._value(node.value, names), names)
            case ast.AugAssign(target=ast.Name(id=name)):
                names[name] = self._binary(node.op, self._look(name, names), self._value(node.value, names))
            case ast.FunctionDef():
                names[node.name] = Function(node, names)
            case ast.ClassDef():
                names[node.name] = self._class(node, names)
            case ast.Expr():
                if not isinstance(node.value, ast.Constant):
                    self._value(node.value, names)
            case ast.If():
                self._body(node.body if self._value(node.test, names) else node.orelse, names)
            case ast.For():
                self._for(node, names)
            case ast.Return():
                raise Returned(self._value(node.value, names) if node.value else None)
            case ast.Raise():
                raise NoValueError(f"line {node.lineno}: it refuses these values")
            case ast.Break():
                raise Broken
            case ast.Continue():
                raise Continued
            case ast.Assert() | ast.Pass() | ast.Import() | ast.ImportFrom():
                pass
            case _:
                raise NoValueError(f"line {node.lineno}: no rule for {type(node).__name__}")

    def _for(self, node: ast.For, names: dict[str, Any]) -> None:
        for item in self._iterate(self._value(node.iter, names)):
            self._assign(node.target, item, names)
            try:
                self._body(node.body, names)
            except Broken:
                return
            except Continued:
                continue
        self._body(node.orelse, names)

    def _assign(self, target: ast.expr, value: Any, names: dict[str, Any]) -> None:
        if isinstance(target, ast.Name):
            names[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            for one, part in zip(target.elts, list(self._iterate(value)), strict=True):
                self._assign(one, part, names)
        elif isinstance(target, ast.Subscript):
            owner = self._value(target.value, names)
            if not isinstance(owner, (dict, list)):
                raise NoValueError("assigns into what is neither dictionary nor list")
            owner[self._value(target.slice, names)] = value
        elif isinstance(target, ast.Attribute):
            owner = self._value(target.value, names)
            if not isinstance(owner, Instance):
                raise NoValueError("sets an attribute of what is no instance")
            owner.values[target.attr] = value
        else:
            raise NoValueError(f"no rule to assign to {type(target).__name__}")

    def _class(self, node: ast.ClassDef, names: dict[str, Any]) -> Class:
        out = Class(node.name)
        for base in node.bases:
            known = self._value(base, names)
            if isinstance(known, Class):
                out.fields |= known.fields
                out.methods |= known.methods
                out.properties |= known.properties
        for part in node.body:
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                out.fields[part.target.id] = self._default(part.value, names)
            elif isinstance(part, ast.FunctionDef):
                out.methods[part.name] = Function(part, names)
                if any(isinstance(d, ast.Name) and "property" in d.id for d in part.decorator_list):
                    out.properties.add(part.name)
        return out

    def _default(self, node: ast.expr | None, names: dict[str, Any]) -> Callable[[], Any] | None:
        if node is None:
            return None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "field":
            keywords = {k.arg: k.value for k in node.keywords}
            if "default_factory" in keywords:
                factory = keywords["default_factory"]
                return lambda: self._call(self._value(factory, names), [], {})
            node = keywords.get("default")
            if node is None:
                return None
        default = node
        return lambda: self._value(default, names)


def _assigned(node: ast.stmt) -> set[str]:
    """The names that a statement gives values to, wherever in it."""
    out = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        out = {node.name}
    return out
