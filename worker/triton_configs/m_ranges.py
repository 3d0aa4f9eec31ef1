"""Ranges of M in config files: the M that each key of an engine's file serves, and files by which every M gets the
config meant for it. Pure.

A file of vLLM or SGLang has an entry for some M (`{"16": {...}, "64": {...}}`). The engine takes the entry whose key is
nearest to M; of two that are equally near, the one that stands first in the file. Files are written ascending, so that
a tie goes to the lower key. `ranges_served` says what a file's keys serve, `merge_ranges` puts winners into a file's
ranges, and `entries_of` makes a file of ranges. AITER's files have buckets with bounds instead of keys:
`resolve.bucket_ranges` says which M each of those gets.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

USUAL_KEYS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
"""The keys that the engines' own scripts tune."""


class MRange(NamedTuple):
    """The M from `first` to `last`, both included: `MRange(57, 80)`. Without an end `last` is None."""

    first: int
    last: int | None


class ConfigRange(NamedTuple):
    """A range of M that gets one config: `ConfigRange(57, 80, {"BLOCK_SIZE_M": 64, ...}, key=64)`."""

    first: int
    last: int | None
    """None for no end."""
    values: Any
    """The config."""
    key: int
    """The key that its entry has in a file, if the file can be written so that this key serves just this range."""

    def holds(self, m: int) -> bool:
        """True for an M of the range."""
        return self.first <= m and (self.last is None or m <= self.last)


def ranges_served(keys: Iterable[int]) -> dict[int, MRange]:
    """The M that each key serves in an ascending file: `(8, 16)` gives `{8: (1, 12), 16: (13, None)}`.

    The last key serves all M above. A key that serves no M is missing.
    """
    ranges: dict[int, MRange] = {}
    ordered = sorted(set(keys))
    first = 1
    for key, next_key in itertools.pairwise(ordered):
        last = (key + next_key) // 2
        if last >= first:
            ranges[key] = MRange(first, last)
        first = last + 1
    if ordered:
        ranges[ordered[-1]] = MRange(first, None)
    return ranges


def range_at(ranges: Sequence[ConfigRange], m: int) -> ConfigRange:
    """The first of the ranges that holds M."""
    return next(config_range for config_range in ranges if config_range.holds(m))


def ranges_from_starts(starts: Mapping[int, tuple[Any, int]]) -> list[ConfigRange]:
    """Ranges by their first M, ascending, with (config, key) of each. A range ends where the next begins."""
    firsts = list(starts)
    lasts = [first - 1 for first in firsts[1:]]
    return [ConfigRange(first, last, *starts[first]) for first, last in zip(firsts, [*lasts, None], strict=True)]


def merge_ranges(old: Sequence[ConfigRange], winners: Sequence[ConfigRange]) -> list[ConfigRange]:
    """The old ranges, which hold every M, with the winners' ranges in their place."""
    starts = {config_range.first for config_range in (*old, *winners)}
    starts |= {winner.last + 1 for winner in winners if winner.last}
    for winner in winners:
        if winner.last:
            starts -= set(range(winner.first + 1, winner.last + 1))
    merged: dict[int, tuple[Any, int]] = {}
    for m in sorted(starts):
        config_range = range_at([*winners, *old], m)
        merged[m] = (config_range.values, config_range.key)
    return ranges_from_starts(merged)


def entries_of(ranges: Sequence[ConfigRange]) -> dict[int, Any]:
    """The entries of a file by key, ascending, by which every M gets its range's config.

    `ranges` follow each other from M = 1. A range gets its own key. If the change to the next range does not lie half
    way between their keys, the last M before it and the first M behind it are keys as well.
    """
    entries: dict[int, Any] = {}
    keys: list[int] = []
    for config_range in ranges:
        key = config_range.key if config_range.holds(config_range.key) else config_range.first
        keys.append(key)
        entries[key] = config_range.values
    for i, (config_range, after) in enumerate(itertools.pairwise(ranges)):
        is_half_way = (keys[i] + keys[i + 1]) // 2 == config_range.last
        if config_range.values != after.values and config_range.last is not None and not is_half_way:
            entries[config_range.last] = config_range.values
            entries[after.first] = after.values
    return dict(sorted(entries.items()))
