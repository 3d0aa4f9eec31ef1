"""Text of a config file: read with the place of every bucket, changed so that only the changed buckets differ.

AITER's 342 shipped files have no one form (indents of 2 and 4, some without a newline at the end, some hand-made), so
a change splices new buckets into the file's own text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.text import clean

Bucket = dict[str, Any]
MAX_BYTES = 1 << 20
"""The largest shipped file has 6 KB."""
_BUCKET = re.compile(r"M_(LEQ|GEQ)_([1-9]\d{0,9})\Z")
_SPACE = re.compile(r"[ \t\r\n]*")


class ConfigFileError(ValueError):
    """A config file that cannot be used; the message begins with `file:line:column`."""

    def __init__(self, path: Path | str, text: str, at: int, why: str) -> None:
        line = text.count("\n", 0, at) + 1
        super().__init__(f"{path}:{line}:{at - text.rfind(chr(10), 0, at)}: {why}")


@dataclass(frozen=True, slots=True)
class Entry:
    """A top-level key: `start` of the key in the text, `begin` and `end` of its value."""

    key: str
    value: Any
    start: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A file as read. `entries` in their order, keys that are no bucket among them."""

    path: Path
    text: str
    entries: tuple[Entry, ...]

    @property
    def buckets(self) -> dict[str, Bucket]:
        """The buckets by name, in order; keys with other values (`_note`) are left out."""
        return {e.key: e.value for e in self.entries if is_bucket(e.key)}

    @property
    def others(self) -> dict[str, Any]:
        """Top-level keys that are no bucket."""
        return {e.key: e.value for e in self.entries if not is_bucket(e.key)}

    def line(self, key: str) -> int:
        """Line of a top-level key, from 1; 0 where there is none."""
        return next((self.text.count("\n", 0, e.start) + 1 for e in self.entries if e.key == key), 0)


def is_bucket(key: str) -> bool:
    """True for `any`, `M_LEQ_x` and `M_GEQ_x`."""
    return key == "any" or _BUCKET.match(key) is not None


def bound_of(bucket: str) -> tuple[str, int]:
    """(`LEQ` or `GEQ`, x) of a bucket's name, (`any`, 0) for `any`. Raises ValueError for other keys."""
    found = _BUCKET.match(bucket)
    if found:
        return found[1], int(found[2])
    if bucket == "any":
        return "any", 0
    raise ValueError(f"{clean(bucket, 40)!r} is no bucket: M_LEQ_x, M_GEQ_x or any")


def _order(bucket: str) -> tuple[int, int]:
    """Place of a bucket in a shipped file: M_LEQ_x ascending, M_GEQ_x ascending, any."""
    side, bound = bound_of(bucket)
    return ("LEQ", "GEQ", "any").index(side), bound


def read(path: Path) -> ConfigFile:
    """A config file. Raises ConfigFileError for its content, OSError where it cannot be read."""
    raw = path.read_bytes()
    if len(raw) > MAX_BYTES:
        raise ConfigFileError(path, "", 0, f"has {len(raw)} bytes, more than a config can have")
    try:
        return parse(raw.decode(), path)
    except UnicodeDecodeError as e:
        raise ConfigFileError(path, raw[: e.start].decode(errors="replace"), e.start, "is no UTF-8 text") from e


def parse(text: str, path: Path = Path("config")) -> ConfigFile:
    """A config file of its text. Raises ConfigFileError: no JSON object, a key twice, a bucket that is no object."""
    decoder = json.JSONDecoder(object_pairs_hook=_unique)
    entries: list[Entry] = []

    def fail(at: int, why: str) -> ConfigFileError:
        return ConfigFileError(path, text, at, why)

    def skip(at: int, expected: str) -> int:
        at = _space(text, at)
        if text[at : at + 1] not in expected or at >= len(text):
            raise fail(at, f"expected {' or '.join(expected)}")
        return at

    def value(at: int) -> tuple[Any, int]:
        try:
            return decoder.raw_decode(text, at)
        except json.JSONDecodeError as e:
            raise fail(e.pos, f"no JSON: {e.msg}") from e
        except ValueError as e:
            raise fail(at, str(e)) from e

    at = skip(0, "{") + 1
    if text[_space(text, at) : _space(text, at) + 1] == "}":
        at = _space(text, at)
    else:
        while True:
            start = skip(at, '"')
            key, at = value(start)
            begin = _space(text, skip(at, ":") + 1)
            content, end = value(begin)
            if any(e.key == key for e in entries):
                raise fail(start, f"{clean(key, 40)!r} is there twice; the last one would count")
            if is_bucket(key) and not isinstance(content, dict):
                raise fail(begin, f"{key} is no object")
            entries.append(Entry(key, content, start, begin, end))
            at = skip(end, ",}")
            if text[at] == "}":
                break
            at += 1
    rest = _space(text, at + 1)
    if rest < len(text):
        raise fail(rest, "there is something behind the end")
    return ConfigFile(path, text, tuple(entries))


def changed(source: ConfigFile, buckets: Mapping[str, Bucket]) -> str:
    """The file's text with those buckets in place of its own, new ones at their place in the order; the rest of the
    text stays as it is, unknown keys too. A bucket's keys keep the order that they are given in."""
    unit = _unit(source.text)
    text = source.text
    for entry in reversed(source.entries):
        if entry.key in buckets and entry.value != buckets[entry.key]:
            text = text[: entry.begin] + _value(buckets[entry.key], unit) + text[entry.end :]
    for name in sorted((b for b in buckets if not any(e.key == b for e in source.entries)), key=_order):
        text = _inserted(parse(text, source.path), name, buckets[name], unit)
    return text


def written(buckets: Mapping[str, Bucket], indent: int = 4) -> str:
    """Text of a new file in the form of most of AITER's: one indent a level, a newline at the end."""
    ordered = {name: buckets[name] for name in sorted(buckets, key=_order)}
    return json.dumps(ordered, indent=indent) + "\n"


def _inserted(source: ConfigFile, name: str, bucket: Bucket, unit: str) -> str:
    line = f"{json.dumps(name)}: {_value(bucket, unit)}"
    text = source.text
    after = next((e for e in source.entries if is_bucket(e.key) and _order(e.key) > _order(name)), None)
    if after:
        return f"{text[: after.start]}{line},\n{unit}{text[after.start :]}"
    if not source.entries:
        return f"{{\n{unit}{line}\n}}\n"
    end = source.entries[-1].end
    return f"{text[:end]},\n{unit}{line}{text[end:]}"


def _value(bucket: Bucket, unit: str) -> str:
    return json.dumps(bucket, indent=unit).replace("\n", f"\n{unit}")


def _unit(text: str) -> str:
    """One level's indent in a text."""
    found = re.search(r'\n([ \t]+)"', text)
    return found[1] if found else " " * 4


def _space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _unique(pairs: list[tuple[str, Any]]) -> Bucket:
    out = dict(pairs)
    if len(out) != len(pairs):
        twice = next(k for i, (k, _) in enumerate(pairs) if k in {p[0] for p in pairs[:i]})
        raise ValueError(f"{clean(twice, 40)!r} is there twice; the last one would count")
    return out
