"""Python's own functions that AITER's instance lists use, for our values."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

from worker.tuners.aiter.build_reader.values import Instance, NoValueError


def builtins(
    call: Callable[[Any, list[Any], dict[str, Any]], Any],
    each: Callable[[Any], Iterator[Any]],
    text: Callable[[Any], str],
    get: Callable[[Any, str], Any],
) -> dict[str, Any]:
    """By name. The caller gives what calls a function, goes through a collection, makes a text, takes an attribute."""

    def attribute(value: Any, name: str, *default: Any) -> Any:
        try:
            return get(value, name)
        except NoValueError:
            if default:
                return default[0]
            raise

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
        "getattr": attribute, "iter": lambda v: v, "next": first, "copy": copied, "deepcopy": copied,
        "replace": replaced, "product": lambda *v, **k: list(itertools.product(*map(each, v), **k)),
        "print": lambda *v, **k: None, "copy.copy": copied, "copy.deepcopy": copied,
        "dataclasses.replace": replaced, "re.compile": lambda pattern, *flags: text(pattern),
        "re.escape": lambda value: re.escape(text(value)),
    }  # fmt: skip
