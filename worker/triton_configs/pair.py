"""The config of both products of fused experts as one flat config, and the entries of the two files that hold it. Pure.

SGLang reads the first product's config from `NAME.json` and the second's from `NAME_down.json`. Here the two are one
config, so that it is measured, ranked, cut and merged as any other. `ServingEngine.config` joins the entries that a
server reads; a kernel source splits a config before it launches, and a merge before it writes the two files.

    {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, ...}                           one config for both products
    {"BLOCK_SIZE_M": 64, ..., "down.BLOCK_SIZE_N": 256, ..., "down.USE_TMA": True}                      a pair

Both products share one sorting of the tokens, and so BLOCK_SIZE_M. Without a file `_down` SGLang takes the first
product's config without TMA for the second. A config without keys that begin with `down.` means the same here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

DOWN = "down."
"""The beginning of the second product's keys."""
USE_TMA = "USE_TMA"
"""The key by which a product loads its operands through TMA descriptors."""
BLOCK_SIZE_M = "BLOCK_SIZE_M"
Values = dict[str, Any]
"""A config: `{"BLOCK_SIZE_M": 64, ...}`."""
Key = TypeVar("Key", int, str)


def split_pair(values: Mapping[str, Any]) -> tuple[Values, Values]:
    """The entries of the file and of the file `_down`."""
    up = {key: value for key, value in values.items() if not key.startswith(DOWN)}
    down = {key.removeprefix(DOWN): value for key, value in values.items() if key.startswith(DOWN)}
    if not down:
        return up, without_tma(up)
    return up, {BLOCK_SIZE_M: up[BLOCK_SIZE_M], **down}


def split_entries(entries: Mapping[Key, Values]) -> tuple[dict[Key, Values], dict[Key, Values]]:
    """The entries of the file and of the file `_down`, by key."""
    up_entries: dict[Key, Values] = {}
    down_entries: dict[Key, Values] = {}
    for key, values in entries.items():
        up_entries[key], down_entries[key] = split_pair(values)
    return up_entries, down_entries


def join_pair(up: Mapping[str, Any], down: Mapping[str, Any] | None) -> Values:
    """The config of two entries; None: there is no file `_down`."""
    values = dict(up)
    if not values.get(USE_TMA):
        values = without_tma(values)
    if down is None or _is_default_down(up, down):
        return values
    for key, value in down.items():
        is_plain = key == USE_TMA and not value
        if key != BLOCK_SIZE_M and not is_plain:
            values[DOWN + key] = value
    return values


def _is_default_down(up: Mapping[str, Any], down: Mapping[str, Any]) -> bool:
    """True for the entry that SGLang's second product has without a file of its own."""
    return not down.get(USE_TMA) and without_tma({**down, BLOCK_SIZE_M: up[BLOCK_SIZE_M]}) == without_tma(up)


def needs_down_file(values: Mapping[str, Any]) -> bool:
    """True for a config that one file cannot say. SGLang hands TMA of a lone file on to the second product, which would
    be another config."""
    return USE_TMA in values or any(key.startswith(DOWN) for key in values)


def without_tma(values: Mapping[str, Any]) -> Values:
    """The values as a launcher of SGLang gets them, which is told of TMA apart."""
    return {key: value for key, value in values.items() if key != USE_TMA}
