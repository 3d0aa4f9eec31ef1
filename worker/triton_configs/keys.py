"""Keys of an engine's config file: the M that each serves, and keys by which every M gets the config meant for it.

An engine takes the entry whose key is nearest to M; of two that are equally near the one that stands first in the
file. Files are written ascending, so that a tie goes to the lower key. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

USUAL_KEYS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
"""The keys that the engines' own scripts tune."""

# (first M, last M or None, values, the key that it would have)
Segment = tuple[int, int | None, Any, int]


def served(keys: Iterable[int]) -> dict[int, tuple[int, int | None]]:
    """The M that each key serves in an ascending file, (first, last); last is None for the last key. One that serves
    none is missing."""
    ordered = sorted(set(keys))
    lasts = [(a + b) // 2 for a, b in itertools.pairwise(ordered)]
    found = zip(ordered, (1, *(last + 1 for last in lasts)), (*lasts, None), strict=True)
    return {key: (first, last) for key, first, last in found if last is None or last >= first}


def written(segments: Sequence[Segment]) -> dict[int, Any]:
    """The keys of a file, ascending, with their values, by which every M gets its segment's.

    `segments` follow each other from M = 1. A segment gets its own key; where the change to the next does not lie half
    way between their keys, the last M before it and the first behind it are keys as well.
    """
    keys = [own if first <= own and (last is None or own <= last) else first for first, last, _, own in segments]
    found = {key: values for key, (_, _, values, _) in zip(keys, segments, strict=True)}
    for i, ((_, last, values, _), (first, _, behind, _)) in enumerate(itertools.pairwise(segments)):
        if values != behind and last is not None and (keys[i] + keys[i + 1]) // 2 != last:
            found |= {last: values, first: behind}
    return dict(sorted(found.items()))
