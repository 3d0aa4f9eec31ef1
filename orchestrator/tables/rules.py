"""The rule list for rows of tuned tables: AITER's own rules, and those of the build that is to serve them.

AITER's are those of `validate_tuned_csv.py` of ROCm/aiter at e4048607a5 (2026-08-22), which looks at one family,
carried over to all; and what the families' lookups and `pandas.read_csv` do with a cell. An error: AITER does not
start, does not use the row, or uses a row that says nothing true of its time. A warning: the row is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.tables.tuned import KERNEL_NAMES, Key, kernel_of, no_gfx, number_of
from worker.families import NULLS, Column, Family, backend_of
from worker.text import Finding, Level

if TYPE_CHECKING:
    from orchestrator.tables.check import Build

Broken = tuple[str, Level, str]
"""(rule, level, what is wrong with the row)."""
TOLERANCE = 0.05
"""The largest share by which tflops may differ from 2*M*N*K/us; AITER's validator has the same."""
SMALLEST_TOKENS = 16
"""The least number of tokens whose work AITER's fmoe tuner counts, in most of its rows."""
PERCENT_LIMIT = 0.1
"""AITER's limit for the error of a stage of fmoe."""
REBUILD = "build: rebuild"
HELD = frozenset(("error ratio", "gfx", "hipblaslt", "us"))
"""Rules that are warnings for a table alone, and errors for one that is about to be served."""
CU_NUMS: Mapping[str, tuple[int, ...]] = {"gfx942": (304, 228, 80), "gfx950": (256, 128)}
"""Compute units of whole GPUs: MI300X and MI325X, MI300A, MI308X; MI350X and MI355X, MI350P. A partition has a half, a
quarter or an eighth of them."""
FIX = "mend the row, or delete it"
FIXES: Mapping[str, str] = {
    "bom": "save the file without a byte order mark",
    "build: cannot": "tune the shape again with this build, or delete the row",
    "build: unread": "name a complete checkout, or the image itself",
    REBUILD: "start once with AITER_REBUILD=1, or build the image with this table",
    "chip": "write the gfx and cu_num of the GPU that the row was tuned on",
    "columns": "let `db merge` write the table anew, with today's columns",
    "duplicate": "keep the faster row, in the file that has it (`publish` does so)",
    "error ratio": "tune the shape again: a kernel with that many wrong elements must not win",
    "family": "leave it out, or name its family with --family",
    "header": "use the columns of the build's own table, in their order",
    "hipblaslt": "tune the shape again without hipBLASLt, or delete the row",
    "line ends": "write LF: `git add --renormalize FILE`, or `sed -i 's/\\r$//' FILE`",
    "mixed": "delete the row: AITER has no such kernel",
    "order": "sort the rows by gfx, cu_num, N, M, K",
    "provenance": "merge the run again, if its origin matters",
    "tflops": "compute it from us",
    "us": "measure the row again, or delete it",
}  # fmt: skip
"""The way out by rule; FIX for the others."""


def fix_of(finding: Finding) -> str:
    """The way out of a finding. Line 1 is the header, and line 0 stands for the file."""
    others = FIX if finding.line > 1 else "mend the header"
    return FIXES.get(finding.rule, others)


@dataclass(frozen=True, slots=True)
class RowRules:
    """The rules for the rows of one table. `err_ratio`: what AITER's tuner lets pass. `build` is to serve them."""

    family: Family
    header: tuple[str, ...]
    err_ratio: float = 0.05
    build: Build | None = None

    def __call__(self, cells: Sequence[str], key: Key | None = None) -> Iterator[Broken]:
        """The rules that a row of stripped cells breaks. `key`: None where the cells have none."""
        for rule, level, text in self._broken(cells, key):
            yield rule, "error" if self.build and rule in HELD else level, text

    def _broken(self, cells: Sequence[str], key: Key | None) -> Iterator[Broken]:
        has = f"has {len(cells)} cells, the header {len(self.header)}"
        row = dict(zip(self.header, [*cells, *[""] * (len(self.header) - len(cells))], strict=False))
        if len(cells) > len(self.header):
            yield "cells", "error", f"{has}: pandas does not read the file"
        else:
            if len(cells) < len(self.header):
                level: Level = "warning" if self.header.index("us") < len(cells) else "error"
                yield "cells", level, f"{has}: pandas fills it up at the end"
            for rule in (self._time, self._kernel, self._error, *([self._figures] if len(cells) == len(row) else [])):
                yield from rule(row)
            if key is not None:
                yield from self._key(row, key)
        if key is not None and self.build is not None:
            yield from self._built(row, key, self.build)

    def _key(self, row: Mapping[str, str], key: Key) -> Iterator[Broken]:
        if fault := no_gfx(key):
            yield "gfx", "warning", f"{fault}: AITER never selects it"
        for column in self.family.columns:
            yield from _cell(column, row[column.name])

    def _built(self, row: Mapping[str, str], key: Key, build: Build) -> Iterator[Broken]:
        answer, gfx, cu_num = build.answer(self.family, key, row), str(key[0]), int(key[1])
        if answer.standing != "loads":
            level: Level = "warning" if answer.standing == "rebuild" else "error"
            why = answer.why if answer.standing != "rebuild" else f"{row.get('kernelName', '')} {answer.why}"
            yield f"build: {answer.standing}", level, why
        if backend_of(self.family.name, row) == "hipblaslt":
            yield "hipblaslt", "error", "is a solution of hipBLASLt: numbers and names differ between its versions"
        parts = {n // d for n in CU_NUMS.get(gfx, ()) for d in (1, 2, 4, 8)}
        if gfx and build.chips and gfx not in build.chips:
            yield "chip", "error", f"gfx is {gfx[:20]}, which this AITER does not know"
        elif cu_num and parts and cu_num not in parts:
            text = f"cu_num is {cu_num}: no {gfx} has that many compute units, so no lookup finds the row"
            yield "chip", "error", text

    def _time(self, row: Mapping[str, str]) -> Iterator[Broken]:
        text = row["us"]
        us = number_of(text)
        if us is not None and us > 0:
            return
        if self.family.aiter.hand_written and (us == 0 or text.lower() == "inf"):
            yield "us", "warning", f"us is {text[:40]}: AITER uses the row, but anything beats it, or nothing"
        else:
            yield "us", "error", f"us is {text[:40] or 'empty'}: not a time"

    def _kernel(self, row: Mapping[str, str]) -> Iterator[Broken]:
        there = [n for n in KERNEL_NAMES if n in row]
        name = kernel_of(row)
        if there and not name:
            yield "kernel", "error", f"{there[0]} is empty: AITER has nothing to call"
            return
        libtype = row.get("libtype", "").lower()
        by_name = backend_of(self.family.name, {n: row[n] for n in there})
        if name and not by_name and not backend_of(self.family.name, row):
            yield "kernel", "warning", f"{name[:80]}: is a name of no known pattern"
        elif libtype == "gluon":
            text = "AITER's dispatch knows no libtype gluon: write triton, with gluon as kernelName"
            yield "libtype", "error", text
        elif libtype not in NULLS and by_name and not _agree(libtype, by_name):
            yield "libtype", "warning", f"libtype is {libtype[:40]}, but {name[:80]} looks like {by_name}"

    def _error(self, row: Mapping[str, str]) -> Iterator[Broken]:
        names = ("err1", "err2") if self.family.err_column == "err1" else (self.family.err_column,)
        for name in names:
            text = row.get(name, "")
            if text in NULLS:
                continue
            percent = text.endswith("%")
            value = number_of(text.rstrip("%"))
            share = value / 100 if value is not None and percent else value
            limit = max(self.err_ratio, PERCENT_LIMIT) if len(names) > 1 else self.err_ratio
            if share is None or not 0 <= share <= limit:
                yield "error ratio", "warning", f"{name} is {text[:40]}, the limit of the tuner {limit:g}"

    def _figures(self, row: Mapping[str, str]) -> Iterator[Broken]:
        us, written = number_of(row["us"]), number_of(row.get("tflops", ""))
        if written is None or not us or us <= 0:
            return
        try:
            expected = [self.family.flops(row) / us / 1e6]
            if self.family.two_stages and int(row["token"]) < SMALLEST_TOKENS:
                expected.append(expected[0] * SMALLEST_TOKENS / int(row["token"]))
        except (ValueError, KeyError, ZeroDivisionError):
            return
        if not any(_near(written, x, row["tflops"], us, row["us"]) for x in expected):
            yield "tflops", "warning", f"tflops is {row['tflops'][:20]}, from its us follow {expected[0]:.4g}"


def _cell(column: Column, text: str) -> Iterator[Broken]:
    if column.kind == "int" and not column.legal:
        if (number_of(text) or 0) < 1:
            yield "key", "error", f"{column.name} is {text[:40]}: no shape has that"
    elif text in column.legal or (column.kind == "int" and number_of(text) in [float(v) for v in column.legal]):
        return
    elif text.lower() in (v.lower() for v in column.legal):
        yield "spelling", "warning", f"{column.name} is {text[:40]}: AITER writes it otherwise"
    else:
        what = f"{column.name} is {text[:40]!r}: AITER evaluates it as Python, and it is not one of its values"
        yield "eval", "error", what


def _agree(libtype: str, by_name: str) -> bool:
    """CK-Tile is a part of CK, and some tables call its kernels ck."""
    return libtype == by_name or {libtype, by_name} <= {"ck", "cktile"}


def _near(written: float, expected: float, text: str, us: float, us_text: str) -> bool:
    """Within 5 %, or within half of the last digit that was printed, of the figure itself or of us."""
    if abs(written - expected) <= TOLERANCE * expected or abs(written - expected) <= half_digit(text):
        return True
    digit = half_digit(us_text)
    return expected * us / (us + digit) <= written <= (expected * us / (us - digit) if us > digit else math.inf)


def half_digit(text: str) -> float:
    """Half a unit of the last printed digit: 0.005 of "1.25"."""
    mantissa, _, exponent = text.lower().partition("e")
    decimals = len(mantissa.partition(".")[2])
    try:
        return float(0.5 * 10.0 ** (int(exponent or 0) - decimals))
    except (ValueError, OverflowError):
        return 0.0
