"""A config file of AITER's: read with the places of its faults, its buckets, and its text with some of them changed.

    {"M_LEQ_16": {"BLOCK_SIZE_M": 16, ..., "NUM_KSPLIT": 1}, "any": {"BLOCK_SIZE_M": 64, ...}}

A bucket is the config for a range of M; `resolve.bucket_for` says for which.
AITER's 342 files of e4048607a5 are `json.dumps` with an indent of their own, with or without a newline at the end, but
for three that were laid out by hand; a changed file is written in the same form, and faults are told by their place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.text import clean
from worker.triton_configs.pair import DOWN

Bucket = dict[str, Any]
"""A config: `{"BLOCK_SIZE_M": 16, ..., "NUM_KSPLIT": 1}`."""
MAX_BYTES = 1 << 20
"""The largest shipped file has 6 KB."""
INDENT = " " * 4
_LETTERS = {
    "GROUP_SIZE_M": "g",
    "NUM_KSPLIT": "k",
    "num_warps": "w",
    "num_stages": "s",
    "waves_per_eu": "eu",
    "matrix_instr_nonkdim": "mfma",
}
"""Letters of keys in `spell_values`."""
_BUCKET = re.compile(r"M_(LEQ|GEQ)_([1-9]\d{0,9})\Z")


class ConfigFileError(ValueError):
    """A config file that cannot be used; the message begins with `file:line:column`."""


class _RepeatedKeyError(ValueError):
    """A key that an object has twice."""


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A file as read."""

    path: Path
    text: str
    document: dict[str, Any]
    """All of it in its order, with the keys that are no bucket (`_note`)."""

    @property
    def buckets(self) -> dict[str, Bucket]:
        """The buckets by name, in the file's order."""
        return {key: value for key, value in self.document.items() if is_bucket(key)}

    def line_of(self, key: str) -> int:
        """Line of a top-level key, counted from 1; 0 if the file does not have the key."""
        match = re.search(rf"{re.escape(json.dumps(key))}\s*:", self.text)
        if match is None:
            return 0
        return self.text.count("\n", 0, match.start()) + 1


def is_bucket(key: str) -> bool:
    """True for `any`, `M_LEQ_x` and `M_GEQ_x`."""
    return key == "any" or _BUCKET.match(key) is not None


def bound_of(bucket: str) -> tuple[str, int]:
    """(`LEQ` or `GEQ`, x) of a bucket's name, (`any`, 0) for `any`. Raises ValueError for other keys."""
    if bucket == "any":
        return "any", 0
    match = _BUCKET.match(bucket)
    if match is None:
        raise ValueError(f"{clean(bucket, 40)!r} is not the name of a bucket: write M_LEQ_x, M_GEQ_x or any")
    return match[1], int(match[2])


def read_config_file(path: Path) -> ConfigFile:
    """A config file. Raises ConfigFileError for its content, OSError where it cannot be read."""
    content = path.read_bytes()
    if len(content) > MAX_BYTES:
        raise ConfigFileError(f"{path}:1:1: has {len(content)} bytes, more than a config can have")
    return parse_config_file(content.decode(errors="replace"), path)


def parse_config_file(text: str, path: Path = Path("config")) -> ConfigFile:
    """A config file of its text. Raises ConfigFileError if the text or a bucket is not a JSON object, or a key is there
    twice."""
    try:
        document = json.loads(text, object_pairs_hook=_without_repeated_keys)
    except json.JSONDecodeError as e:
        raise ConfigFileError(f"{path}:{e.lineno}:{e.colno}: no JSON: {e.msg}") from e
    except _RepeatedKeyError as e:
        line, column = _last_place(text, json.dumps(str(e)))
        key = clean(str(e), 40)
        raise ConfigFileError(f"{path}:{line}:{column}: {key!r} is there twice: the last one counts") from e
    except (ValueError, RecursionError) as e:  # a number of more digits than Python reads
        raise ConfigFileError(f"{path}:1:1: no JSON: {e}") from e
    if not isinstance(document, dict):
        raise ConfigFileError(f"{path}:1:1: is no JSON object")
    file = ConfigFile(path, text, document)
    for key, value in file.buckets.items():
        if not isinstance(value, dict):
            raise ConfigFileError(f"{path}:{file.line_of(key)}:1: {key} is not a JSON object")
    return file


def _without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for key, value in pairs:
        if key in document:
            raise _RepeatedKeyError(key)
        document[key] = value
    return document


def _last_place(text: str, part: str) -> tuple[int, int]:
    """(line, column) of the last occurrence of a part; of the beginning if the text spells it in another way."""
    start = max(0, text.rfind(part))
    return text.count("\n", 0, start) + 1, start - text.rfind("\n", 0, start)


def text_with_buckets(source: ConfigFile, buckets: Mapping[str, Bucket]) -> str:
    """The file's text with those buckets in place of its own, new ones at their place in the order; all other keys,
    their order and the text's form stay. A bucket's keys keep the order that they are given in."""
    document = {key: buckets.get(key, value) for key, value in source.document.items()}
    for name in sorted(buckets.keys() - document.keys(), key=_order):
        document = _inserted(document, name, buckets[name])
    return json_in_form_of(source.text, document)


def _inserted(document: Mapping[str, Any], name: str, bucket: Bucket) -> dict[str, Any]:
    """The document with a new bucket; the buckets that come after it move behind it, and behind all other keys."""
    later = [key for key in document if is_bucket(key) and _order(key) > _order(name)]
    inserted = {key: value for key, value in document.items() if key not in later}
    inserted[name] = bucket
    for key in later:
        inserted[key] = document[key]
    return inserted


def text_of_buckets(buckets: Mapping[str, Bucket], indent: str = INDENT) -> str:
    """Text of a new file in the form of most of AITER's: M_LEQ_x ascending, M_GEQ_x, any; a newline at the end."""
    return json.dumps({name: buckets[name] for name in sorted(buckets, key=_order)}, indent=indent) + "\n"


def spell_values(values: Mapping[str, Any]) -> str:
    """A bucket's values in a word: `16x64x256_g1_k4_w4_s2_eu2_mfma16_cg`, further keys behind it. ASCII, no commas."""
    down = {key.removeprefix(DOWN): value for key, value in values.items() if key.startswith(DOWN)}
    values = {key: value for key, value in values.items() if not key.startswith(DOWN)}
    sizes = [str(values.pop(f"BLOCK_SIZE_{axis}", "-")) for axis in "MNK"]
    parts = ["x".join(sizes)]
    for key, letters in _LETTERS.items():
        if key in values:
            parts.append(f"{letters}{values.pop(key)}")
    modifier = values.pop("cache_modifier", None)
    if modifier:
        parts.append(str(modifier).strip("."))
    parts += [f"{key}={value}" for key, value in values.items()]
    if down:
        parts.append(f"down_{spell_values(down)}")
    return "_".join(parts).replace(",", ";").replace(" ", "")


def json_in_form_of(text: str, document: Mapping[str, Any]) -> str:
    """A document as JSON with the indent of a file's text, and with a newline at the end if that has one. `text`: ""
    for a new file."""
    new_text = json.dumps(document, indent=indent_of(text))
    return f"{new_text}\n" if not text or text.endswith("\n") else new_text


def indent_of(text: str) -> str:
    """One level's indent in a text; four spaces where it has none."""
    match = re.search(r'\n([ \t]+)"', text)
    return match[1] if match else INDENT


def _order(bucket: str) -> tuple[int, int]:
    side, bound = bound_of(bucket)
    return ("LEQ", "GEQ", "any").index(side), bound
