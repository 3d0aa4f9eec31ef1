"""Reduces files of measurements to what `analyze` needs: the fastest valid row of each shape and backend.

`analyze` calls `reduce_files`, which reads each file chunk by chunk because a profile may have millions of rows, then
`join_files`. Both work on frames with the columns `gfx`, `cu_num`, those of the family's key, `backend`, `us` (NaN: no
valid row), `err`, `kernel`, and a count of the rows that were left out for each reason of COUNTED.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pandas as pd

from orchestrator.backend_names import backend_name
from orchestrator.clean import text as clean
from orchestrator.errors import InputError
from orchestrator.files.faults import escaped
from orchestrator.results.measurement_csv import US, CleanLines, chunks, measurement_columns
from orchestrator.results.measurements import InputTable
from orchestrator.tables.keys import GFX_OF_CU_NUM
from worker.families import Column, Family
from worker.text import plural

COUNTED = ("no_time", "not_finite", "error_ratio")
"""The reasons why rows of a shape are left out; counts are kept in this order."""
DEVICE = ["gfx", "cu_num"]
"""The columns that name the device of a row."""
MAX_GROUPS = 1_000_000
"""Shapes times backends. More is not a tuning result, and would not fit the memory."""
_MAX_INT = 2**31 - 1


def reduce_files(tables: Sequence[InputTable], family: Family, limit: float) -> list[ReducedFile]:
    """Read all files, two at a time. `limit`: the largest error ratio that counts. Raises InputError."""
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda table: ReducedFile(table, family, limit), tables))


def join_files(files: Sequence[ReducedFile], family: Family, notes: list[str]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The fastest valid row of each device, shape and backend of all files; and the rows beyond the error ratio."""
    best = pd.concat([file.best for file in files])
    wrong = pd.concat([file.wrong for file in files])
    _adopt_unknown_device(best, wrong, family, notes)
    keys = [*family.key_names, "backend"]
    fastest = keep_fastest(best, [*DEVICE, *keys])
    return fastest.sort_values(keys), wrong


class ReducedFile:
    """A file, read and reduced. Raises InputError if it is damaged, or has more groups than a tuning result can have.

    `best`: one row for each shape and backend, its fastest valid one, with the counts of those left out. `wrong`: the
    rows beyond the error ratio, the largest errors first. `rows`: how many measurements were read. `no_shape`: how many
    of them lack a part of the key.
    """

    def __init__(self, table: InputTable, family: Family, limit: float) -> None:
        self.table = table
        self.family = family
        self.limit = limit
        self.rows = 0
        self.no_shape = 0
        self.lines = CleanLines(table.path, len(table.header))
        self._columns = measurement_columns(table.header, family)
        keys = [name for name in (*family.key_names, *DEVICE) if name in self._columns.keys | self._columns.roles]
        by = [*keys, "backend"]
        self.best = self.wrong = pd.DataFrame(columns=[*by, "us", "err", "kernel", *COUNTED])
        best, wrong = self._read(by)
        if best:
            self.best = keep_fastest(pd.concat(best), by)
            self.wrong = pd.concat(wrong)
        self.best = _complete_columns(self.best, family)
        self.wrong = _complete_columns(self.wrong, family).sort_values(
            ["backend", "err", "us"], ascending=[True, False, True], na_position="first"
        )
        if len(self.best) > MAX_GROUPS:
            raise InputError(
                f"{escaped(str(table.path))}: has more than {MAX_GROUPS} shapes and backends: these are not tuning"
                " results"
            )

    def _read(self, by: list[str]) -> tuple[list[pd.DataFrame], list[pd.DataFrame]]:
        """The fastest rows of each part of the file, and its rows beyond the error ratio. Counts the rows."""
        best = []
        wrong = []
        for chunk in chunks(self.lines, self._columns, self.family):
            for part in self._split_by_backend(chunk):
                rows = self._mark_left_out(part)
                wrong.append(rows[rows.error_ratio])
                rows.loc[rows.no_time | rows.not_finite | rows.error_ratio, "us"] = float("nan")
                best.append(keep_fastest(rows, by))
        return best, wrong

    def _split_by_backend(self, chunk: pd.DataFrame) -> Iterator[pd.DataFrame]:
        """The measurements of a chunk as one frame; those of a wide benchmark, which has a column of times for each
        backend, as a frame for each."""
        optional = ("err", "kernel", "kernel_id")
        rows = chunk[[name for name in (*self.family.key_names, *DEVICE, *optional) if name in chunk]]
        rows = rows.assign(**{name: float("nan") for name in optional if name not in chunk})
        for backend in self._columns.wide:
            yield rows.assign(backend=backend, us=chunk[backend + US])
        if not self._columns.wide:
            yield rows.assign(**_candidate_columns(chunk, self.family), us=chunk["us"])

    def _mark_left_out(self, rows: pd.DataFrame) -> pd.DataFrame:
        """The rows that have a whole key, with a column for each reason of COUNTED, true in the rows that have it."""
        whole = pd.Series(True, rows.index)
        for column in self.family.columns:
            if column.name in rows:
                whole &= _is_legal(rows[column.name], column)
        self.rows += len(rows)
        self.no_shape += len(rows) - int(whole.sum())
        rows = rows[whole]
        no_time = ~(rows.us > 0)
        infinite = rows.us == float("inf")
        wrong: pd.Series | bool = False
        if "err" in self._columns.roles:
            wrong = ~(no_time | infinite | rows.err.between(0, self.limit))
        return rows.assign(no_time=no_time, not_finite=infinite, error_ratio=wrong)


def keep_fastest(rows: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """One row for each combination of `by`: the fastest one, of equals always the same, with the sums of the counts."""
    groups = rows.groupby(by, sort=False, observed=True, dropna=False)
    number = groups.ngroup().to_numpy()
    least = groups["us"].transform("min")  # NaN if no row of the group is valid: then all rows stay candidates
    is_fastest = ((rows["us"] == least) | least.isna()).to_numpy()
    sums = {name: np.bincount(number, rows[name])[number[is_fastest]].astype(int) for name in COUNTED}
    return rows[is_fastest].assign(**sums).sort_values(["us", "kernel", "err"]).drop_duplicates(by)


def _complete_columns(rows: pd.DataFrame, family: Family) -> pd.DataFrame:
    """The rows with every column of device and key, texts cleaned and spelled as the family spells them. Changes and
    returns `rows`."""
    for column in family.columns:
        name = column.name
        if name not in rows:
            rows[name] = int(column.default or 0) if column.kind == "int" else column.default or ""
        elif column.kind == "int":
            rows[name] = rows[name].astype("int64")
        else:
            rows[name] = _texts(rows[name], {value.lower(): value for value in column.legal})
    rows["kernel"] = _texts(rows["kernel"], {})
    # Older tables name no gfx; the number of CUs tells the chip.
    cu_num = rows["cu_num"] if "cu_num" in rows else pd.Series(0, rows.index)
    rows["cu_num"] = cu_num.where(cu_num.between(1, _MAX_INT), 0).astype("int64")
    gfx_of_cu_num = rows["cu_num"].map(GFX_OF_CU_NUM).fillna("")
    if "gfx" in rows:
        gfx = _texts(rows["gfx"], {})
        rows["gfx"] = gfx.where(gfx != "", gfx_of_cu_num)
    else:
        rows["gfx"] = gfx_of_cu_num
    return rows


def _texts(cells: pd.Series, spellings: Mapping[str, str]) -> pd.Series:
    """The cells as clean texts, "" for none. `spellings`: legal texts by their lower case."""
    cells = cells.astype(object).fillna("")
    texts = {}
    for cell in cells.unique():
        text = str(cell)  # pandas makes bools of True and False
        texts[cell] = spellings.get(text.lower()) or clean(text)
    return cells.map(texts).astype(object)


def _is_legal(cells: pd.Series, column: Column) -> pd.Series:
    """Return which cells of a key column hold a legal value."""
    if column.kind == "text":
        return cells.notna()
    if column.legal:
        return cells.isin([int(value) for value in column.legal])
    return cells.between(1, _MAX_INT) & (pd.api.types.is_integer_dtype(cells) or cells % 1 == 0)


def _candidate_columns(chunk: pd.DataFrame, family: Family) -> dict[str, Any]:
    """Columns `backend` and `kernel`, made once for each combination of kernel, number and libtype."""
    names = [name for name in ("kernel", "kernel_id", "libtype") if name in chunk]
    if not names:
        return {"backend": backend_name(family.name)}
    # A profile has millions of rows and few kernels: give each combination of categories a number, and parse each once.
    code = np.zeros(len(chunk), int)
    for name in names:
        categories = chunk[name].cat
        code = code * (len(categories.categories) + 1) + categories.codes.to_numpy()
    combination, _ = pd.factorize(code)
    firsts = pd.Series(combination).drop_duplicates().index
    texts = chunk[names].iloc[firsts].astype(object).fillna("").astype(str)
    backends = []
    kernels = []
    for row in texts.itertuples(index=False):
        cells = dict(zip(names, row, strict=True))
        backends.append(backend_name(family.name, **cells))
        number = cells.get("kernel_id")
        kernels.append(cells.get("kernel") or (f"kernelId {number}" if number else ""))
    return {
        "backend": pd.Series(pd.Categorical(backends).take(combination), chunk.index),
        "kernel": pd.Series(pd.Categorical(kernels).take(combination), chunk.index),
    }


def _adopt_unknown_device(best: pd.DataFrame, wrong: pd.DataFrame, family: Family, notes: list[str]) -> None:
    """Give the rows without gfx and cu_num the device of all others, if those have one alone. Adds a note on what was
    done."""
    devices = {(gfx, cu_num or None) for gfx, cu_num in best[DEVICE].drop_duplicates().itertuples(index=False)}
    devices -= {("", None)}
    unknown = best[_has_no_device(best)][list(family.key_names)].drop_duplicates()
    if not devices or unknown.empty:
        return
    shapes = plural(len(unknown), "shape")
    names = ", ".join(device_text(*device) for device in sorted(devices, key=str))
    if len(devices) > 1:
        notes.append(f"{shapes} without a named device: kept apart from {names}")
        return
    [(gfx, cu_num)] = devices
    for frame in (best, wrong):
        frame.loc[_has_no_device(frame), DEVICE] = gfx, cu_num or 0
    notes.append(f"{shapes} came without gfx and cu_num: taken as {names}")


def _has_no_device(rows: pd.DataFrame) -> pd.Series:
    return (rows.gfx == "") & (rows.cu_num == 0)


def device_text(gfx: str, cu_num: int | None) -> str:
    """`gfx950 with 256 CUs`."""
    cus = f" with {cu_num} CUs" if cu_num else ""
    return f"{gfx or 'unknown chip'}{cus}"
