"""A heap of items whose keys change: finding the least is O(log n), changing a key too (stale entries are skipped)."""

from __future__ import annotations

import heapq
from collections.abc import Generator

Key = tuple[float, ...]


class KeyedHeap:
    """Items (text) with a key each; the smallest key comes first. Make keys unique, so that order is certain."""

    __slots__ = ("_heap", "_keys")

    def __init__(self) -> None:
        self._heap: list[tuple[Key, str]] = []
        self._keys: dict[str, Key] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, item: str) -> bool:
        return item in self._keys

    def set(self, item: str, key: Key) -> None:
        if self._keys.get(item) == key:
            return
        self._keys[item] = key
        heapq.heappush(self._heap, (key, item))
        if len(self._heap) > 64 + 4 * len(self._keys):
            self._heap = [(k, i) for i, k in self._keys.items()]
            heapq.heapify(self._heap)

    def discard(self, item: str) -> None:
        self._keys.pop(item, None)

    def first(self) -> str | None:
        """The item with the smallest key."""
        while self._heap:
            key, item = self._heap[0]
            if self._keys.get(item) == key:
                return item
            heapq.heappop(self._heap)
        return None

    def walk(self) -> Generator[str, None, None]:
        """Items by rising key; close it (or exhaust it) before changing a key. Costs as far as one goes."""
        seen: list[tuple[Key, str]] = []
        last: str | None = None
        try:
            while self._heap:
                entry = heapq.heappop(self._heap)
                if self._keys.get(entry[1]) == entry[0] and entry[1] != last:
                    seen.append(entry)
                    last = entry[1]
                    yield entry[1]
        finally:
            for entry in seen:
                heapq.heappush(self._heap, entry)

    def items(self) -> list[tuple[Key, str]]:
        """All, in order."""
        return sorted((k, i) for i, k in self._keys.items())
