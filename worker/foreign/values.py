"""Python values as JSON and back, by their types: what is not of the type is a ValueError that names the place.

`runner.py` encodes the arguments of a call, `answer.py` decodes them in the other process and encodes the answer, and
`runner.py` decodes that by the return type of the function:

    decode({"names": ["a", 7]}, dict[str, list[str]], "the answer")
    # ValueError: the answer.names[1] is not str, but 7

Types: None, bool, int, float, str, Path, Any, Literal, unions, lists, tuples, dictionaries, dataclasses and NamedTuples
of these. `Sequence` reads as a list and `Mapping` as a dictionary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def encode(value: Any) -> Any:
    """The value with records as objects and paths as text, for `json.dumps`. A path becomes absolute, because the other
    process has another current folder."""
    if isinstance(value, Path):
        return str(value.absolute())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): encode(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [encode(inner) for inner in value]
    return value


def decode_arguments(function: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
    """The arguments of a call, by the annotations of the function's parameters."""
    kinds = get_type_hints(function)
    kinds.pop("return", None)
    if len(arguments) > len(kinds):
        raise ValueError(f"{function.__qualname__} takes {len(kinds)} arguments with annotations")
    return [decode(value, kind, name) for value, (name, kind) in zip(arguments, kinds.items(), strict=False)]


def decode(value: Any, kind: Any, place: str) -> Any:
    """The value that `encode` took apart. Raises ValueError if it is not of this type; `place` is its name there."""
    origin = get_origin(kind) or kind
    if origin is Any:
        return value
    if origin in (Union, UnionType):
        return _decode_union(value, get_args(kind), place)
    if origin is Literal:
        _require(value in get_args(kind), value, f"one of {get_args(kind)}", place)
        return value
    if dataclasses.is_dataclass(origin) or hasattr(origin, "_fields"):
        return _decode_record(value, origin, place)
    if origin in (list, Sequence):
        _require(isinstance(value, list), value, "a list", place)
        return [decode(inner, get_args(kind)[0], f"{place}[{i}]") for i, inner in enumerate(value)]
    if origin is tuple:
        return _decode_tuple(value, get_args(kind), place)
    if origin in (dict, Mapping):
        _require(isinstance(value, dict), value, "an object", place)
        key_kind, inner_kind = get_args(kind)
        return {_decode_key(k, key_kind, place): decode(v, inner_kind, f"{place}.{k:.40}") for k, v in value.items()}
    return _decode_plain(value, origin, place)


def _decode_plain(value: Any, kind: type, place: str) -> Any:
    if kind is float and type(value) is int:
        return float(value)
    expected = str if kind is Path else kind
    _require(type(value) is expected, value, expected.__name__, place)
    if expected is str and not value.isascii():
        _require(not any("\ud800" <= letter <= "\udfff" for letter in value), value, "text", place)
    return Path(value) if kind is Path else value


def _decode_key(key: str, kind: type, place: str) -> Any:
    if kind is not int:
        return decode(key, kind, place)
    _require(key.removeprefix("-").isdecimal() and len(key) < 20, key, "a number", place)
    return int(key)


def _decode_union(value: Any, kinds: Sequence[Any], place: str) -> Any:
    for kind in kinds:
        try:
            return decode(value, kind, place)
        except ValueError:
            continue
    names = " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds if kind is not NoneType)
    raise ValueError(f"{place} is not {names}, but {_describe(value)}")


def _decode_tuple(value: Any, kinds: Sequence[Any], place: str) -> tuple[Any, ...]:
    _require(isinstance(value, list), value, "a list", place)
    if len(kinds) == 2 and kinds[1] is ...:
        kinds = [kinds[0]] * len(value)
    _require(len(value) == len(kinds), value, f"{len(kinds)} values", place)
    return tuple(decode(v, kind, f"{place}[{i}]") for i, (v, kind) in enumerate(zip(value, kinds, strict=True)))


def _decode_record(value: Any, kind: Any, place: str) -> Any:
    """A dataclass is an object with exactly its fields, a NamedTuple the list of them."""
    hints = get_type_hints(kind)
    if hasattr(kind, "_fields"):
        return kind(*_decode_tuple(value, [hints[name] for name in kind._fields], place))
    names = [f.name for f in dataclasses.fields(kind)]
    is_whole = isinstance(value, dict) and sorted(value) == sorted(names)
    _require(is_whole, value, f"an object with {', '.join(names)}", place)
    return kind(**{name: decode(value[name], hints[name], f"{place}.{name}") for name in names})


def _require(condition: bool, value: Any, expected: str, place: str) -> None:
    if not condition:
        raise ValueError(f"{place} is not {expected}, but {_describe(value)}")


def _describe(value: Any) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    return ascii(value)[:80]
