"""The fastest valid row of each backend on each shape, gathered from all files.

sources = find_sources(["results/"], runs=Path("runs"))
table = backend_table(sources)
for shape in table.shapes:
    shape.best["asm"].tflops, shape.winner, shape.ratio("asm")
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pandas as pd

from orchestrator.analysis.backends.read import CleanLines, Layout, chunks, layout
from orchestrator.analysis.backends.sources import InputTable, InputTables
from orchestrator.analysis.backends.table import (
    COUNTED,
    BackendTable,
    Best,
    InputFile,
    ShapeBest,
    Wrong,
    counted,
    device_text,
    key_text,
)
from orchestrator.errors import InputError
from orchestrator.ledger.clean import text as clean
from orchestrator.planning.roofline import Device
from orchestrator.tables.backends import AITERS, KNOWN, UNKNOWN, order, owned
from orchestrator.tables.faults import escaped
from orchestrator.tables.tuned import GFX_OF_CU_NUM
from worker import without_gc
from worker.families import Column, Family, backend_of
from worker.families.backends import TRITON
from worker.text import plural

TFLOPS_OFF = 0.05
"""A tflops column may differ by so much from 2*M*N*K / us before a note names it."""
MAX_GROUPS = 1_000_000
"""Shapes times backends. More is not a tuning result, and would not fit the memory."""
UNNAMED: Device = ("", None)
_DEVICE = ["gfx", "cu_num"]


def backend_table(sources: InputTables, err_ratio: float | None = None) -> BackendTable:
    """Reads all sources and keeps the best of each backend on each shape.

    `err_ratio`: the largest share of wrong elements that counts (default: the family's in AITER). fmoe is not judged:
    its columns hold text in percent, of measures that changed. Raises InputError.
    """
    family = sources.family
    limit = family.aiter.err_ratio if err_ratio is None else err_ratio
    notes = list(sources.notes)
    with without_gc(), ThreadPoolExecutor(2) as threads:
        files = list(threads.map(lambda source: _File(source, family, limit), sources.files))
        notes += (note for f in files for note in f.lines.notes())
        groups, wrong = (pd.concat(parts) for parts in zip(*((f.groups, f.wrong) for f in files), strict=True))
        _adopt_unknown_device(groups, wrong, family, notes)
        by = [*_DEVICE, *family.key_names, "backend"]
        groups = _reduced(groups, by).sort_values(by[2:])
        shapes, odd = _shapes(groups, wrong, family)
    if odd:
        notes.append(
            f"{len(odd)} best rows have a tflops column more than {TFLOPS_OFF:.0%} off what their shape and us give (as"
            f" {odd[0]}): the computed one counts"
        )
    devices, there = {s.device for s in shapes}, {s.key for s in shapes}
    device = devices.pop() if len(devices) == 1 else UNNAMED
    shapes += [ShapeBest(device, key) for key in dict.fromkeys(sources.requested) if key not in there]
    left_out_of = groups.groupby("backend")[list(COUNTED)].sum()
    left_out = {reason: int(left_out_of[reason].sum()) for reason in COUNTED}
    left_out |= {"no_shape": sum(f.no_shape for f in files), "malformed": sum(f.lines.malformed for f in files)}
    if not shapes and not any(left_out.values()):
        raise InputError([f"there are no rows in {', '.join(s.name for s in sources.files[:5])}", *notes])
    by_backend = {b: counted(counts) for b, *counts in left_out_of.itertuples() if any(counts)}
    return BackendTable(
        family, limit,
        tuple(sorted(shapes, key=lambda s: (s.device[0], s.device[1] or 0, s.key))),
        tuple(sorted(groups[groups.us.notna()].backend.unique(), key=order)),
        left_out, {b: by_backend[b] for b in sorted(by_backend, key=order)},
        tuple(InputFile(f.source.name, f.source.size, f.rows, f.lines.malformed) for f in files),
        tuple(notes), sources.title, sources.device_names,
    )  # fmt: skip


def _shapes(groups: pd.DataFrame, wrong: pd.DataFrame, family: Family) -> tuple[list[ShapeBest], list[str]]:
    """The shapes, and a text on each tflops column that is off."""
    names = [*_DEVICE, *family.key_names]
    keys = pd.concat([groups[names], wrong[names]])
    at = keys.groupby(names).ngroup().to_numpy()  # numbers from 0, in the order of devices and keys
    counts = groups[list(COUNTED)].groupby(at[: len(groups)]).sum().to_numpy().tolist()
    every = _rows(keys.iloc[np.unique(at, return_index=True)[1]], *names)
    shapes = [
        ShapeBest((gfx, cu_num or None), tuple(key), c) for (gfx, cu_num, *key), c in zip(every, counts, strict=True)
    ]
    flops = [family.flops(dict(zip(family.key_names, s.key, strict=True))) for s in shapes]
    odd: list[str] = []
    for i, (backend, us, kernel, err, tflops) in zip(
        at, _rows(groups, "backend", "us", "kernel", "err", "tflops"), strict=False
    ):
        if us is not None:
            shapes[i].best[backend] = Best(backend, us, made := flops[i] / us / 1e6, kernel, err)
            if tflops is not None and _differs(made, tflops):
                odd.append(f"{key_text(family, shapes[i].key)}: {tflops:g} there, {made:.4g} computed")
    for i, row in zip(at[len(groups) :], _rows(wrong, "backend", "kernel", "err", "us"), strict=True):
        shapes[i].wrong.append(Wrong(*row))
    return shapes, odd


def _rows(frame: pd.DataFrame, *columns: str) -> Iterable[tuple[Any, ...]]:
    """The rows as tuples, None for NaN."""
    cells = (frame[c].astype(object).where(frame[c].notna(), None).tolist() for c in columns)
    return zip(*cells, strict=True)


def _differs(made: float, column: float) -> bool:
    """Returns True if the column is off by more than TFLOPS_OFF and by more than the rounding of its last digit."""
    off = abs(column - made)
    return off > TFLOPS_OFF * made and off > 0.5 * 10.0 ** -len(repr(column).partition(".")[2])


def _adopt_unknown_device(groups: pd.DataFrame, wrong: pd.DataFrame, family: Family, notes: list[str]) -> None:
    """Rows without gfx and cu_num belong to the one device that there is."""
    known = {(gfx, cu_num or None) for gfx, cu_num in groups[_DEVICE].drop_duplicates().itertuples(index=False)}
    homeless = groups[(groups.gfx == "") & (groups.cu_num == 0)][list(family.key_names)].drop_duplicates()
    known -= {UNNAMED}
    if not known or homeless.empty:
        return
    shapes = plural(len(homeless), "shape")
    if len(known) > 1:
        names = ", ".join(device_text(d) for d in sorted(known, key=str))
        notes.append(f"{shapes} without a named device: kept apart from {names}")
        return
    (device,) = known
    for frame in (groups, wrong):
        frame.loc[(frame.gfx == "") & (frame.cu_num == 0), _DEVICE] = device[0], device[1] or 0
    notes.append(f"{shapes} came without gfx and cu_num: taken as {device_text(device)}")


class _File:
    """A file, read and reduced.

    `groups`: a row a shape and backend, with its fastest valid row and the counts of those left out; `wrong`: the rows
    beyond the error ratio, the largest errors first.
    """

    def __init__(self, source: InputTable, family: Family, limit: float) -> None:
        self.source, self.family, self.limit = source, family, limit
        self.rows = self.no_shape = 0
        self.lines = CleanLines(source.path, len(source.header))
        found = layout(source.header, family)
        self.judged = "err" in found.at
        by = [c for c in (*family.key_names, *_DEVICE) if c in found.keys | found.at] + ["backend"]
        empty = pd.DataFrame(columns=[*by, "us", "err", "tflops", "kernel", *COUNTED])
        groups, wrong = [], []
        for chunk in chunks(self.lines, found, family):
            for part in self._parts(chunk, found):
                rows = self._judged(part)
                wrong.append(rows[rows.error_ratio])
                rows.loc[rows.no_time | rows.not_finite | rows.error_ratio, "us"] = float("nan")
                groups.append(_reduced(rows, by))
        self.groups = _named(_reduced(pd.concat(groups), by) if groups else empty, family)
        self.wrong = _named(pd.concat(wrong) if wrong else empty, family).sort_values(
            ["backend", "err", "us"], ascending=[True, False, True], na_position="first"
        )
        if len(self.groups) > MAX_GROUPS:
            what = f"has more than {MAX_GROUPS} shapes and backends: these are not tuning results"
            raise InputError(f"{escaped(str(source.path))}: {what}")

    def _parts(self, chunk: pd.DataFrame, found: Layout) -> Iterable[pd.DataFrame]:
        """The measurements of a chunk: one frame, or of a wide benchmark one for each backend."""
        rows = chunk[[c for c in (*self.family.key_names, *_DEVICE, "err", "kernel", "tflops") if c in chunk]]
        rows = rows.assign(**{c: float("nan") for c in ("err", "kernel", "tflops") if c not in chunk})
        for wide in found.wide:
            tflops = chunk[f"{wide.backend}_tflops"] if wide.tflops is not None else float("nan")
            yield rows.assign(backend=wide.backend, us=chunk[f"{wide.backend}_us"], tflops=tflops)
        if not found.wide:
            yield rows.assign(backend=_backends(chunk, self.family), us=chunk["us"])

    def _judged(self, rows: pd.DataFrame) -> pd.DataFrame:
        """The rows that have a whole key, with a column for each reason to leave a row out."""
        whole = pd.Series(True, rows.index)
        for column in self.family.columns:
            if column.name in rows:
                whole &= _sound(rows[column.name], column)
        self.rows += len(rows)
        self.no_shape += len(rows) - int(whole.sum())
        rows = rows[whole]
        no_time, infinite = ~(rows.us > 0), rows.us == float("inf")
        wrong = ~(no_time | infinite | rows.err.between(0, self.limit)) if self.judged else False
        return rows.assign(no_time=no_time, not_finite=infinite, error_ratio=wrong)


def _reduced(rows: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """One row for each combination of `by`: the fastest one, of equals always the same, with the sums of the counts."""
    groups = rows.groupby(by, sort=False, observed=True, dropna=False)
    of = groups.ngroup().to_numpy()
    least = groups["us"].transform("min")
    candidate = ((rows["us"] == least) | least.isna()).to_numpy()
    sums = {c: np.bincount(of, rows[c])[of[candidate]].astype(int) for c in COUNTED}
    return rows[candidate].assign(**sums).sort_values(["us", "kernel", "err"]).drop_duplicates(by)


def _named(rows: pd.DataFrame, family: Family) -> pd.DataFrame:
    """The same with all columns of device and key, texts cleaned and spelled as the family spells them."""
    for c in family.columns:
        legal = {v.lower(): v for v in c.legal}
        if c.name not in rows:
            rows[c.name] = int(c.default or 0) if c.kind == "int" else c.default or ""
        elif c.kind == "int":
            rows[c.name] = rows[c.name].astype("int64")
        else:
            rows[c.name] = _texts(rows[c.name], legal)
    rows["kernel"] = _texts(rows["kernel"])
    cu_num = rows["cu_num"] if "cu_num" in rows else pd.Series(0, rows.index)
    rows["cu_num"] = cu_num.where(cu_num.between(1, 2**31 - 1), 0).astype("int64")
    of_chip = rows["cu_num"].map(GFX_OF_CU_NUM).fillna("")
    rows["gfx"] = _texts(rows["gfx"]).where(lambda gfx: gfx != "", of_chip) if "gfx" in rows else of_chip
    return rows


def _texts(cells: pd.Series, legal: Mapping[str, str] | None = None) -> pd.Series:
    cells = cells.astype(object).fillna("")
    texts = {cell: str(cell) for cell in cells.unique()}  # pandas makes bools of True and False
    return cells.map({cell: (legal or {}).get(text.lower()) or clean(text) for cell, text in texts.items()})


def _sound(cells: pd.Series, column: Column) -> pd.Series:
    if column.kind == "text":
        return cells.notna()
    if column.legal:
        return cells.isin([int(v) for v in column.legal])
    return cells.between(1, 2**31 - 1) & (pd.api.types.is_integer_dtype(cells) or cells % 1 == 0)


def _backends(chunk: pd.DataFrame, family: Family) -> pd.Series | str:
    """The backend of each row, found once for each combination of kernel, number and libtype."""
    cells = [c for c in ("kernel", "kernel_id", "libtype") if c in chunk]
    if not cells:
        return backend_name(family)
    combination = np.zeros(len(chunk), int)
    for c in cells:
        combination = combination * (len(chunk[c].cat.categories) + 1) + chunk[c].cat.codes.to_numpy()
    which, _ = pd.factorize(combination)
    texts = chunk[cells].iloc[pd.Series(which).drop_duplicates().index].astype(object).fillna("").astype(str)
    names = [backend_name(family, **dict(zip(cells, row, strict=True))) for row in texts.itertuples(index=False)]
    return pd.Series(pd.Categorical(names).take(which), chunk.index)


def backend_name(family: Family, kernel: str = "", kernel_id: str = "", libtype: str = "") -> str:
    """The backend of a row by the worker's rule, named by its owner.

    A libtype calls AITER's Gluon triton; here it has its own name. Rows of our tuner triton, which is gone, are
    nobody's.
    """
    libtype, kernel = libtype.strip().lower(), kernel.strip()
    if libtype in ("", "triton") and kernel.startswith(TRITON):
        return UNKNOWN
    cells = {"libtype": libtype, "kernelName": kernel, "kernelId": kernel_id}
    found = libtype if libtype in KNOWN else backend_of(family.name, cells)
    return AITERS["gluon"] if found == "triton" and kernel == "gluon" else owned(found) or UNKNOWN
