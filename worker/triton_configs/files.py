"""Text of a config file, read with the place of its faults and written in its own form.

AITER's 342 files of e4048607a5 are `json.dumps` with an indent of their own, with or without a newline at the end, but
for three that were laid out by hand, of which a change makes the same form.
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
_SHORT = {
    "GROUP_SIZE_M": "g", "NUM_KSPLIT": "k", "num_warps": "w", "num_stages": "s", "waves_per_eu": "eu",
    "matrix_instr_nonkdim": "mfma",
}  # fmt: skip
_BUCKET = re.compile(r"M_(LEQ|GEQ)_([1-9]\d{0,9})\Z")


class ConfigFileError(ValueError):
    """A config file that cannot be used; the message begins with `file:line:column`."""


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A file as read. `document`: all of it in its order, keys that are no bucket (`_note`) too."""

    path: Path
    text: str
    document: dict[str, Any]

    @property
    def buckets(self) -> dict[str, Bucket]:
        """The buckets by name, in the file's order."""
        return {k: v for k, v in self.document.items() if is_bucket(k)}

    def line(self, key: str) -> int:
        """Line of a top-level key, from 1; 0 where there is none."""
        found = re.search(rf"{re.escape(json.dumps(key))}\s*:", self.text)
        return self.text.count("\n", 0, found.start()) + 1 if found else 0


def is_bucket(key: str) -> bool:
    """True for `any`, `M_LEQ_x` and `M_GEQ_x`."""
    return key == "any" or _BUCKET.match(key) is not None


def bound_of(bucket: str) -> tuple[str, int]:
    """(`LEQ` or `GEQ`, x) of a bucket's name, (`any`, 0) for `any`. Raises ValueError for other keys."""
    found = _BUCKET.match(bucket)
    if not found and bucket != "any":
        raise ValueError(f"{clean(bucket, 40)!r} is no bucket: M_LEQ_x, M_GEQ_x or any")
    return (found[1], int(found[2])) if found else ("any", 0)


def read(path: Path) -> ConfigFile:
    """A config file. Raises ConfigFileError for its content, OSError where it cannot be read."""
    raw = path.read_bytes()
    if len(raw) > MAX_BYTES:
        raise ConfigFileError(f"{path}:1:1: has {len(raw)} bytes, more than a config can have")
    return parse(raw.decode(errors="replace"), path)


def parse(text: str, path: Path = Path("config")) -> ConfigFile:
    """A config file of its text. Raises ConfigFileError: no JSON object, a key twice, a bucket that is no object."""
    try:
        document = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as e:
        raise ConfigFileError(f"{path}:{e.lineno}:{e.colno}: no JSON: {e.msg}") from e
    except (_Twice, RecursionError) as e:
        last = [m.start() for m in re.finditer(re.escape(json.dumps(str(e))), text)][-1:] or [0]
        line, column = text.count("\n", 0, last[0]) + 1, last[0] - text.rfind("\n", 0, last[0])
        raise ConfigFileError(
            f"{path}:{line}:{column}: {clean(str(e), 40)!r} is there twice: the last one counts"
        ) from e
    if not isinstance(document, dict):
        raise ConfigFileError(f"{path}:1:1: is no JSON object")
    file = ConfigFile(path, text, document)
    for key, value in file.buckets.items():
        if not isinstance(value, dict):
            raise ConfigFileError(f"{path}:{file.line(key)}:1: {key} is no object")
    return file


def changed(source: ConfigFile, buckets: Mapping[str, Bucket]) -> str:
    """The file's text with those buckets in place of its own, new ones at their place in the order; all other keys,
    their order and the text's form stay. A bucket's keys keep the order that they are given in."""
    document = {k: buckets.get(k, v) for k, v in source.document.items()}
    for name in sorted(buckets.keys() - document.keys(), key=_order):
        behind = [k for k in document if is_bucket(k) and _order(k) > _order(name)]
        document = {**{k: v for k, v in document.items() if k not in behind}, name: buckets[name]} | {
            k: document[k] for k in behind
        }
    return json.dumps(document, indent=indent_of(source.text)) + "\n" * source.text.endswith("\n")


def written(buckets: Mapping[str, Bucket], indent: str = " " * 4) -> str:
    """Text of a new file in the form of most of AITER's: M_LEQ_x ascending, M_GEQ_x, any; a newline at the end."""
    return json.dumps({name: buckets[name] for name in sorted(buckets, key=_order)}, indent=indent) + "\n"


def spelled(values: Mapping[str, Any]) -> str:
    """A bucket's values in a word: `16x64x256_g1_k4_w4_s2_eu2_mfma16_cg`, further keys behind it. ASCII, no commas."""
    values = dict(values)
    sizes = [str(values.pop(f"BLOCK_SIZE_{x}", "-")) for x in "MNK"]
    parts = [f"{short}{values.pop(key)}" for key, short in _SHORT.items() if key in values]
    if modifier := values.pop("cache_modifier", None):
        parts.append(str(modifier).strip("."))
    parts += [f"{key}={value}" for key, value in values.items()]
    return "_".join(["x".join(sizes), *parts]).replace(",", ";").replace(" ", "")


def indent_of(text: str) -> str:
    """One level's indent in a text; four spaces where it has none."""
    found = re.search(r'\n([ \t]+)"', text)
    return found[1] if found else " " * 4


def _order(bucket: str) -> tuple[int, int]:
    side, bound = bound_of(bucket)
    return ("LEQ", "GEQ", "any").index(side), bound


class _Twice(ValueError):
    """A key that an object has twice."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise _Twice(next(k for i, (k, _) in enumerate(pairs) if any(k == p[0] for p in pairs[:i])))
    return out


FACTOR = 1.005
SLACK_US = 0.5
IGNORED_US = 4.0
LDS_BYTES = {"gfx942": 65536, "gfx950": 163840, "gfx1250": 327680}
"""LDS of a compute unit; source: `_LDS_CAP_BYTES` in aiter/ops/triton/utils/_triton/arch_info.py at e4048607a5."""


def slower(old_us: float, new_us: float) -> bool:
    """True where an M counts as made slower: above 1.005 x old + 0.5 us. Below 4 us, timer noise decides, so nothing
    counts."""
    return max(old_us, new_us) >= IGNORED_US and new_us > FACTOR * old_us + SLACK_US
