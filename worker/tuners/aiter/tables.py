"""Reads the CSV files that one AITER process writes, and finds the shape of ours that a line or a key belongs to.

The tuned table has a line for each shape, AITER's winner; the profile has one for each candidate, with the same
columns:

    gfx,cu_num,M,N,K,kernelId,splitK,us,kernelName,tflops,bw,errRatio
    gfx950,256,16,512,1024,3,0,12.5,a4w4_blockscale_x,1.34,95.2,0.01

AITER rewrites both after every batch, not atomically, so we may read half a file. A line counts only with its newline
and all its cells, and lines once read are kept. tracker.py calls `Tables.read` again and again; journal.py uses
`ShapeKeys` for the keys in the shim's records.
"""

from __future__ import annotations

import csv
import io
import itertools
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from worker.families import Family
from worker.protocol import Row
from worker.tuners.aiter.rows import to_row

_MEASURED = frozenset(("us", "us1", "us2", "tflops", "bw", "errRatio", "err_ratio", "err", "err1", "err2"))
"""Columns of AITER's files that do not name a candidate."""

WHOLE_AFTER_S = 1.0
"""AITER has written its files to the end if they have not changed for this long."""

Cells = dict[str, str]
Keys = Mapping[int, Mapping[str, int | str]]
"""The key columns of each shape, by our id of it."""


class ShapeKeys:
    """Finds the shape for a key that AITER prints or has in a table."""

    def __init__(self, columns: tuple[str, ...], keys: Keys) -> None:
        self._cells: dict[int, Cells] = {}
        for shape, key in keys.items():
            self._cells[shape] = {column: str(key[column]).strip() for column in columns if column in key}

    def of_cells(self, printed: Cells) -> int | None:
        """The id of the shape in a line of a table; None if it is not ours, or could be two of ours."""
        return _only([shape for shape, ours in self._cells.items() if _agree(printed, ours)])

    def of_values(self, printed: tuple[str, ...]) -> int | None:
        """The same for the values of a key in the shim's record: `("gfx950", "256", "16", "512", "1024")`."""
        return _only([shape for shape, ours in self._cells.items() if _is_key_of(printed, tuple(ours.values()))])


def _only(shapes: list[int]) -> int | None:
    """The one shape of the list, None for none or several."""
    return shapes[0] if len(shapes) == 1 else None


def _agree(printed: Cells, ours: Cells) -> bool:
    """True if the columns that both have are the same; an older AITER has fewer columns."""
    common = [column for column in ours if column in printed]
    return bool(common) and all(_is_same(printed[column], ours[column]) for column in common)


def _is_key_of(printed: tuple[str, ...], ours: tuple[str, ...]) -> bool:
    """True if the printed values are ours. Gfx and cu_num may stand before them, and the last ones may be missing:
    columns of text that are younger than the image. So all sizes, with which ours begin, have to be there."""
    sizes = sum(1 for _ in itertools.takewhile(str.isdigit, ours))
    for chip_columns in (2, 1, 0):
        values = printed[chip_columns:]
        if len(values) >= max(1, sizes) and all(map(_is_same, values, ours)):
            return True
    return False


def _is_same(theirs: str, ours: str) -> bool:
    theirs = theirs.strip()
    if theirs.lower() == ours.lower():
        return True
    if ours.isdigit():
        return theirs == f"{ours}.0"  # some tables turn numbers into floats
    # enums print in several ways (<QuantType.per_Token: 2>, QuantType.per_Token), and 1x128 stands for 128x128
    return ours in theirs or (ours.endswith("per_128x128") and "per_1x128" in theirs)


class Tables:
    """Rows of one process's files so far, by shape; a file that shrinks or breaks takes nothing back."""

    def __init__(self, family: Family, columns: tuple[str, ...], keys: Keys, err_limit: float) -> None:
        """`columns`: those of the untuned CSV, by our names. `err_limit`: the largest errRatio of an `ok`."""
        self._family = family
        self._err_limit = err_limit
        self._keys = ShapeKeys(columns, keys)
        self._our_names = dict(zip(family.to_aiter(columns), columns, strict=True))
        self._stamps: dict[Path, tuple[int, int]] = {}
        """Time and size of each file as it was read last."""
        self._profile: dict[int, dict[tuple[str, ...], Row]] = {}
        """Rows of the profile by shape and candidate."""
        self.tuned: dict[int, Row] = {}
        """AITER's winner of each shape."""
        self._changed_at = time.monotonic()
        """The time at which a file was seen to change last."""
        self.devices: set[tuple[str, str]] = set()
        """(gfx, cu_num) as AITER wrote them; gfx is "" if its tables have no such column."""

    def read(self, tuned: Path, profile: Path) -> bool:
        """Take in what is new in the files; True if there was anything."""
        has_news = False
        for shape, cells in self._new_lines(tuned):
            row = to_row(self._family, cells, self._err_limit)
            if self.tuned.get(shape) != row:
                self.tuned[shape] = row
                has_news = True
            self.devices.add((cells.get("gfx", ""), cells.get("cu_num", "")))
        for shape, cells in self._new_lines(profile):
            rows = self._profile.setdefault(shape, {})
            candidate = tuple(cell for name, cell in cells.items() if name not in _MEASURED)
            if candidate not in rows:
                rows[candidate] = to_row(self._family, cells, self._err_limit)
                has_news = True
        return has_news

    @property
    def are_whole(self) -> bool:
        """False while AITER may be writing the files, so that lines may be missing that were there before."""
        return time.monotonic() - self._changed_at >= WHOLE_AFTER_S

    def candidates(self, shape: int) -> list[Row]:
        """The rows of the profile file, in its order."""
        return list(self._profile.get(shape, {}).values())

    def _new_lines(self, path: Path) -> Iterator[tuple[int, Cells]]:
        """The lines of our shapes in a file that changed."""
        if not path.exists():
            return
        info = path.stat()
        stamp = (info.st_mtime_ns, info.st_size)
        if self._stamps.get(path) == stamp:
            return
        self._stamps[path] = stamp
        self._changed_at = time.monotonic()
        for cells in _read_cells(path):
            printed = {ours: cells[theirs] for theirs, ours in self._our_names.items() if theirs in cells}
            shape = self._keys.of_cells(printed)
            if shape is not None:
                yield shape, cells


def _read_cells(path: Path) -> Iterator[Cells]:
    """The whole lines of a CSV by header name, cells stripped."""
    data = path.read_bytes()
    lines = csv.reader(io.StringIO(data[: data.rfind(b"\n") + 1].decode(errors="replace")))
    header = [name.strip() for name in next(lines, [])]
    for line in lines:
        if len(line) == len(header):
            yield {name: cell.strip() for name, cell in zip(header, line, strict=True) if name}
