"""Counting the misses in logs: streamed, plain or gzip, most frequent first."""

from __future__ import annotations

import gzip
import io
import os
import stat
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from orchestrator.errors import InputError
from orchestrator.families import get_family
from orchestrator.shapes.sources.misslog import MARKS, Keys, Miss, of_family, read_line
from orchestrator.tables.faults import escaped
from worker.families import FAMILIES
from worker.text import plural

MAX_LINE = 64 * 1024
MAX_SHAPES = 1_000_000
Key = tuple[int | str, ...]


@dataclass(slots=True)
class Misses:
    """What logs say: by family each key with how many lines told of it, first seen first; and what was odd."""

    counts: dict[str, Counter[Key]] = field(default_factory=dict)
    lines: int = 0
    unknown: int = 0
    """Lines of a family that could not be told."""
    odd: Counter[str] = field(default_factory=Counter)
    """Lines that could not be read, by reason."""
    notes: list[str] = field(default_factory=list)

    @property
    def families(self) -> list[str]:
        """Those with a shape, the one with the most lines first."""
        return sorted(self.counts, key=lambda f: -self.counts[f].total())

    def ranked(self, family: str, top: int | None = None, least: int = 1) -> list[tuple[Key, int]]:
        """(key, lines) of a family, most frequent first, equals in the order of first sight."""
        found = self.counts.get(family, Counter()).most_common(top)
        return [(key, n) for key, n in found if n >= least]


class Counting:
    """Takes lines one by one; `done` gives what they said. `family`: what lines are of that do not tell."""

    def __init__(self, family: str | None = None) -> None:
        self._family = family
        self._keys = {name: Keys(f) for name, f in FAMILIES.items()}
        self._bare: Counter[Key] = Counter()
        self._told: set[tuple[str, ...]] = set()
        self.found = Misses()

    def line(self, raw: bytes) -> None:
        """One line of a log."""
        self.found.lines += 1
        if not any(mark in raw for mark in MARKS):
            return
        try:
            miss = read_line(raw.decode("utf-8", "replace"))
            if miss is not None:
                self._count(miss)
        except ValueError as e:
            self.found.odd[str(e)] += 1

    def _count(self, miss: Miss) -> None:
        miss = of_family(miss, self._family or "")
        if not miss.family:
            self.found.unknown += 1
            return
        key = self._keys[miss.family].key(miss)
        if miss.bare:
            self._bare[key] += 1
            return
        if miss.told_again:
            self._told.add(tuple(miss.values[c] for c in ("M", "N", "K")))
        self._add(miss.family, key, 1)

    def _add(self, family: str, key: Key, n: int) -> None:
        counts = self.found.counts.setdefault(family, Counter())
        counts[key] += n
        if len(counts) > MAX_SHAPES:
            raise InputError(f"more than {MAX_SHAPES} shapes of {family}: these are no logs of one workload")

    def done(self) -> Misses:
        """What the lines said. A line that left out dtypes counts where no other told them."""
        left = {k: n for k, n in self._bare.items() if tuple(map(str, k[:3])) not in self._told}
        for key, n in left.items():
            self._add("a16w16", key, n)
        if left:
            rest = ", ".join(f"{c.name} {c.default}" for c in get_family("a16w16").columns if c.default)
            self.found.notes.append(f"{plural(len(left), 'shape')} of a16w16 without types: taken as {rest}")
        self._bare.clear()
        return self.found


def count_misses(logs: Iterable[str | Path], family: str | None = None) -> Misses:
    """The misses in all `logs` (`-`: standard input). Raises InputError where a log cannot be read."""
    counting = Counting(family)
    for log in logs:
        try:
            with _opened(log) as stream:
                for line in _lines(stream):
                    counting.line(line)
        except (EOFError, zlib.error, gzip.BadGzipFile) as e:
            counting.found.notes.append(
                f"{escaped(str(log))}: the gzip data breaks off or is damaged ({e}); read so far"
            )
        except OSError as e:
            raise InputError(f"{escaped(str(log))}: cannot be read: {e.strerror or e}") from e
        except ValueError as e:  # a NUL in the path
            raise InputError(f"{escaped(str(log))}: {e}") from e
    return counting.done()


def _lines(stream: IO[bytes]) -> Iterator[bytes]:
    while line := stream.readline(MAX_LINE):
        yield line


@contextmanager
def _opened(log: str | Path) -> Iterator[IO[bytes]]:
    """A log as a stream of bytes, unpacked where it is gzip; a pipe will do, a device will not."""
    if str(log) == "-":
        yield sys.stdin.buffer
        return
    with open(log, "rb") as f:
        if not (stat.S_ISREG(mode := os.fstat(f.fileno()).st_mode) or stat.S_ISFIFO(mode)):
            raise InputError(f"{escaped(str(log))}: is no file that could be a log")
        if f.peek(2)[:2] == b"\x1f\x8b":
            with gzip.open(f) as unpacked, io.BufferedReader(unpacked, 1 << 20) as buffered:
                yield buffered
        else:
            yield f
