"""Kernels' names in the modules that a tree has built: `aiter/jit/<module>.so`, read as bytes."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from functools import cache
from pathlib import Path

MAX_BYTES = 4 << 30


class Built:
    """The built modules of a package."""

    def __init__(self, package: Path) -> None:
        self._folder = package / "jit"
        self.names = cache(self._names)

    def _names(self, module: str, wanted: frozenset[str]) -> frozenset[str] | None:
        """Which of the wanted kernels the module holds; None where it is not built, or holds none (stripped)."""
        path = self._folder / f"{module}.so"
        try:
            size = path.stat().st_size
            if not path.is_file() or not 0 < size <= MAX_BYTES:
                return None
            with path.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return frozenset(_held(data, wanted)) or None
        except OSError:
            return None


def _held(data: mmap.mmap, wanted: Iterable[str]) -> Iterable[str]:
    """As text that ends there, or as a part of a C++ symbol, which has the name's length before it."""
    for name in wanted:
        raw = name.encode()
        if data.find(raw + b"\0") >= 0 or data.find(str(len(raw)).encode() + raw) >= 0:
            yield name
