"""AITER's rules for a row of a tuned table, each with what breaks where it is not kept. Pure.

From `validate_tuned_csv.py` of ROCm/aiter at e4048607a5 (2026-08-22), which looks at one family, carried over to all;
and from what the families' lookups and `pandas.read_csv` do with a cell. An error: AITER does not start, does not use
the row, or uses a row that says nothing true of its time. A warning: the row is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from orchestrator.tables.tuned import KERNEL_NAMES, NULLS, KeyFault, kernel_of, key_of, number_of
from worker.families import Column, Family, backend_of

Severity = Literal["error", "warning"]
Broken = tuple[str, Severity, str]
"""(rule, level, what is wrong with the row)."""
TOLERANCE = 0.05
"""tflops may differ by so much from 2*M*N*K/us, as AITER's validator has it."""
SMALLEST_TOKENS = 16
"""AITER's fmoe tuner counts the work of at least so many tokens in most of its rows."""
LARGEST_TB = 50.0
"""No chip moves so many TB/s, so that a larger bw is in GB/s."""
PERCENT_LIMIT = 0.1
"""AITER's limit for the error of a stage of fmoe."""


@dataclass(frozen=True, slots=True)
class RowRules:
    """The rules for the rows of one table. `err_ratio`: what AITER's tuner lets pass."""

    family: Family
    header: tuple[str, ...]
    err_ratio: float = 0.05

    def __call__(self, cells: Sequence[str]) -> Iterator[Broken]:
        """The rules that a row of stripped cells breaks."""
        if len(cells) > len(self.header):
            yield (
                "cells",
                "error",
                f"has {len(cells)} cells, the header {len(self.header)}: pandas does not read the file",
            )
            return
        row = dict(zip(self.header, [*cells, *[""] * (len(self.header) - len(cells))], strict=True))
        short = len(cells) < len(self.header)
        if short:
            text = f"has {len(cells)} cells, the header {len(self.header)}: pandas fills it up at the end"
            yield "cells", "warning" if self.header.index("us") < len(cells) else "error", text
        for rule in (self._key, self._time, self._kernel, self._error):
            yield from rule(row)
        if not short:
            yield from self._tflops(row)
            if written_in_tb(row):
                text = (
                    f"bw is {row['bw'][:20]}, in TB/s as in two of AITER's tables (45ef6f313f); its tuners write GB/s"
                )
                yield "bw", "warning", text

    def _key(self, row: Mapping[str, str]) -> Iterator[Broken]:
        try:
            key = key_of(row, self.family)
        except KeyFault as e:
            yield "key", "error", str(e)
            return
        if not key[0]:
            none = f", and none follows from cu_num {key[1]}" if key[1] else ""
            yield "gfx", "warning", f"names no gfx{none}: AITER never selects it"
        for column in self.family.columns:
            yield from _cell(column, row[column.name])

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

    def _tflops(self, row: Mapping[str, str]) -> Iterator[Broken]:
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


def written_in_tb(row: Mapping[str, str]) -> bool:
    """True where a row's bw fits its shape and time in TB/s, and not in GB/s.

    Its bytes lie between those of 4-bit operands and a 16-bit output, and those of 32 bits throughout; no row of
    AITER's tables is beyond. False for a family without M, N, K.
    """
    bw, us = number_of(row.get("bw", "")), number_of(row.get("us", ""))
    if bw is None or not 0 < bw < LARGEST_TB or us is None or us <= 0:
        return False
    m, n, k, b = (number_of(row.get(c, "")) for c in ("M", "N", "K", "B"))
    if m is None or n is None or k is None:
        return False
    least, most = ((m * k + n * k) * width + m * n * out for width, out in ((0.5, 2), (4, 4)))
    gb = (b or 1.0) / us / 1e3
    return bw < 0.9 * least * gb and 0.9 * least * gb <= 1e3 * bw <= 1.1 * most * gb


def _cell(column: Column, text: str) -> Iterator[Broken]:
    if column.kind == "int" and not column.legal:
        if (number_of(text) or 0) < 1:
            yield "key", "error", f"{column.name} is {text[:40]}: no shape has that"
    elif text in column.legal or (column.kind == "int" and number_of(text) in [float(v) for v in column.legal]):
        return
    elif text.lower() in (v.lower() for v in column.legal):
        yield "spelling", "warning", f"{column.name} is {text[:40]}: AITER writes it otherwise"
    else:
        yield (
            "eval",
            "error",
            f"{column.name} is {text[:40]!r}: AITER evaluates it as Python, and it is none of its values",
        )


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
