"""Keys of an engine's config file: the M that each serves, and keys by which every M gets the config meant for it.

An engine takes the entry whose key is nearest to M; of two that are equally near the one that stands first in the
file. Files are written ascending, so that a tie goes to the lower key. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

USUAL_KEYS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
"""The keys that the engines' own scripts tune."""


CAPTURE_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
"""The batches of decoding that vLLM captures as graphs by default, to which it pads (0.33.0, vllm/config/vllm.py)."""
PREFILL_CHUNKS = (512, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 8192)
"""M of prefill: the usual keys above the capture sizes, and what lies between them."""


class Segment(NamedTuple):
    """A range of M that gets the same values. `last`: None for no end; `key`: the key that it would have."""

    first: int
    last: int | None
    values: Any
    key: int

    def holds(self, m: int) -> bool:
        """True for an M of the range."""
        return self.first <= m and (self.last is None or m <= self.last)


def ranges_served(keys: Iterable[int]) -> dict[int, tuple[int, int | None]]:
    """The M that each key serves in an ascending file, (first, last); last is None for the last key. One that serves
    none is missing."""
    ranges: dict[int, tuple[int, int | None]] = {}
    ordered = sorted(set(keys))
    first = 1
    for key, next_key in itertools.pairwise(ordered):
        last = (key + next_key) // 2
        if last >= first:
            ranges[key] = (first, last)
        first = last + 1
    if ordered:
        ranges[ordered[-1]] = (first, None)
    return ranges


def entries_of(segments: Sequence[Segment]) -> dict[int, Any]:
    """The entries of a file by key, ascending, by which every M gets its segment's values.

    `segments` follow each other from M = 1. A segment gets its own key; where the change to the next does not lie half
    way between their keys, the last M before it and the first behind it are keys as well.
    """
    entries: dict[int, Any] = {}
    keys: list[int] = []
    for segment in segments:
        key = segment.key if segment.holds(segment.key) else segment.first
        keys.append(key)
        entries[key] = segment.values
    for i, (segment, after) in enumerate(itertools.pairwise(segments)):
        is_half_way = (keys[i] + keys[i + 1]) // 2 == segment.last
        if segment.values != after.values and segment.last is not None and not is_half_way:
            entries[segment.last] = segment.values
            entries[after.first] = after.values
    return dict(sorted(entries.items()))
