"""The rules for single rows of tuned tables: AITER's own rules, and those of the build that is to serve them.

`check.py` and `publish/aiter_rows.py` give the cells of each row to `RowRules.broken`. A new rule is one more `yield`
in a method of `RowRules`, and its way out a line of `FIXES`.
AITER's are those of `validate_tuned_csv.py` of ROCm/aiter at e4048607a5 (2026-08-22), which looks at one family,
carried over to all; and what the families' lookups and `pandas.read_csv` do with a cell. An error: AITER does not
start, does not use the row, or uses a row that says nothing true of its time. A warning: the row is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from orchestrator.tables.aiter_build import Build
from orchestrator.tables.keys import MAX_SHOWN, Key, missing_gfx, number_of
from orchestrator.tables.row_kernels import KERNEL_NAMES, MAX_NAME, kernel_of
from orchestrator.tables.table import fill_up
from worker.families import NULLS, Column, Family, backend_of
from worker.text import Finding, Level, plural


class BrokenRule(NamedTuple):
    """A rule that a row breaks, and what is wrong with the row: `("us", "error", "us is 0: not a time")`."""

    rule: str
    level: Level
    text: str


TOLERANCE = 0.05
"""The largest share by which tflops may differ from 2*M*N*K/us; AITER's validator has the same."""
SMALLEST_TOKENS = 16
"""The least number of tokens whose work AITER's fmoe tuner counts, in most of its rows."""
PERCENT_LIMIT = 0.1
"""AITER's limit for the error of a stage of fmoe."""
REBUILD = "build: rebuild"
ERRORS_IF_SERVED = frozenset(("error ratio", "gfx", "hipblaslt", "us"))
"""Rules that are warnings for a table alone, and errors for one that is about to be served."""
CU_NUMS: Mapping[str, tuple[int, ...]] = {"gfx942": (304, 228, 80), "gfx950": (256, 128)}
"""Compute units of whole GPUs: MI300X and MI325X, MI300A, MI308X; MI350X and MI355X, MI350P. A partition has a half, a
quarter or an eighth of them."""
PARTITIONS = (1, 2, 4, 8)
"""The numbers of parts that a GPU can be divided into."""
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
    """The rules for the rows of one table."""

    family: Family
    header: tuple[str, ...]
    err_ratio: float = 0.05
    """The largest share of wrong elements that AITER's tuner lets pass."""
    build: Build | None = None
    """The build that is to serve the rows, None for any AITER."""

    def broken(self, cells: Sequence[str], key: Key | None = None) -> Iterator[BrokenRule]:
        """The rules that a row of stripped cells breaks. `key`: None where the cells have none."""
        for rule in self._broken(cells, key):
            is_error = self.build is not None and rule.rule in ERRORS_IF_SERVED
            yield rule._replace(level="error") if is_error else rule

    def _broken(self, cells: Sequence[str], key: Key | None) -> Iterator[BrokenRule]:
        row = dict(zip(self.header, fill_up(cells, len(self.header)), strict=True))
        if len(cells) > len(self.header):
            yield BrokenRule("cells", "error", f"{self._describe_width(cells)}: pandas does not read the file")
        else:
            yield from self._check_cells(cells, row, key)
        if key is not None and self.build is not None:
            yield from self._check_in_build(row, key, self.build)

    def _describe_width(self, cells: Sequence[str]) -> str:
        return f"has {plural(len(cells), 'cell')}, the header {len(self.header)}"

    def _check_cells(self, cells: Sequence[str], row: Mapping[str, str], key: Key | None) -> Iterator[BrokenRule]:
        is_short = len(cells) < len(self.header)
        if is_short:
            has_time = self.header.index("us") < len(cells)
            text = f"{self._describe_width(cells)}: pandas fills it up at the end"
            yield BrokenRule("cells", "warning" if has_time else "error", text)
        yield from self._check_time(row)
        yield from self._check_kernel(row)
        yield from self._check_error(row)
        if not is_short:
            yield from self._check_tflops(row)
        if key is not None:
            yield from self._check_key(row, key)

    def _check_key(self, row: Mapping[str, str], key: Key) -> Iterator[BrokenRule]:
        if fault := missing_gfx(key):
            yield BrokenRule("gfx", "warning", f"{fault}: AITER never selects it")
        for column in self.family.columns:
            yield from _check_key_cell(column, row[column.name])

    def _check_in_build(self, row: Mapping[str, str], key: Key, build: Build) -> Iterator[BrokenRule]:
        answer = build.availability_of(self.family, key, row)
        if answer.standing == "rebuild":
            yield BrokenRule(REBUILD, "warning", f"{row.get('kernelName', '')} {answer.why}")
        elif answer.standing != "loads":
            yield BrokenRule(f"build: {answer.standing}", "error", answer.why)
        if backend_of(self.family.name, row) == "hipblaslt":
            text = "is a solution of hipBLASLt: numbers and names differ between its versions"
            yield BrokenRule("hipblaslt", "error", text)
        gfx = str(key[0])
        cu_num = int(key[1])
        cu_nums = {whole // parts for whole in CU_NUMS.get(gfx, ()) for parts in PARTITIONS}
        if gfx and build.chips and gfx not in build.chips:
            yield BrokenRule("chip", "error", f"gfx is {gfx[:20]}, which this AITER does not know")
        elif cu_num and cu_nums and cu_num not in cu_nums:
            text = f"cu_num is {cu_num}: no {gfx} has that many compute units, so no lookup finds the row"
            yield BrokenRule("chip", "error", text)

    def _check_time(self, row: Mapping[str, str]) -> Iterator[BrokenRule]:
        text = row["us"]
        us = number_of(text)
        if us is not None and us > 0:
            return
        if self.family.aiter.hand_written and (us == 0 or text.lower() == "inf"):
            what = f"us is {text[:MAX_SHOWN]}: AITER uses the row, but anything beats it, or nothing"
            yield BrokenRule("us", "warning", what)
        else:
            yield BrokenRule("us", "error", f"us is {text[:MAX_SHOWN] or 'empty'}: not a time")

    def _check_kernel(self, row: Mapping[str, str]) -> Iterator[BrokenRule]:
        columns = [column for column in KERNEL_NAMES if column in row]
        name = kernel_of(row)
        if columns and not name:
            yield BrokenRule("kernel", "error", f"{columns[0]} is empty: AITER has nothing to call")
            return
        libtype = row.get("libtype", "").lower()
        by_name = backend_of(self.family.name, {column: row[column] for column in columns})
        if name and not by_name and not backend_of(self.family.name, row):
            yield BrokenRule("kernel", "warning", f"{name[:MAX_NAME]}: is a name of no known pattern")
        elif libtype == "gluon":
            text = "AITER's dispatch knows no libtype gluon: write triton, with gluon as kernelName"
            yield BrokenRule("libtype", "error", text)
        elif libtype not in NULLS and by_name and not _agree(libtype, by_name):
            text = f"libtype is {libtype[:MAX_SHOWN]}, but {name[:MAX_NAME]} looks like {by_name}"
            yield BrokenRule("libtype", "warning", text)

    def _check_error(self, row: Mapping[str, str]) -> Iterator[BrokenRule]:
        columns = [self.family.err_column]
        limit = self.err_ratio
        if self.family.err_column == "err1":  # one a stage of fmoe
            columns = ["err1", "err2"]
            limit = max(self.err_ratio, PERCENT_LIMIT)
        for column in columns:
            text = row.get(column, "")
            if text in NULLS:
                continue
            share = number_of(text.rstrip("%"))
            if share is not None and text.endswith("%"):
                share /= 100
            if share is None or not 0 <= share <= limit:
                what = f"{column} is {text[:MAX_SHOWN]}, the limit of the tuner {limit:g}"
                yield BrokenRule("error ratio", "warning", what)

    def _check_tflops(self, row: Mapping[str, str]) -> Iterator[BrokenRule]:
        us = number_of(row["us"])
        written = number_of(row.get("tflops", ""))
        if written is None or not us or us <= 0:
            return
        try:
            expected = [self.family.flops(row) / us / 1e6]
            if self.family.two_stages and int(row["token"]) < SMALLEST_TOKENS:
                expected.append(expected[0] * SMALLEST_TOKENS / int(row["token"]))
        except (ValueError, KeyError, ZeroDivisionError):
            return
        if not any(_is_near(written, tflops, row["tflops"], us, row["us"]) for tflops in expected):
            text = f"tflops is {row['tflops'][:20]}, from its us follow {expected[0]:.4g}"
            yield BrokenRule("tflops", "warning", text)


def _check_key_cell(column: Column, text: str) -> Iterator[BrokenRule]:
    if column.kind == "int" and not column.legal:
        if (number_of(text) or 0) < 1:
            yield BrokenRule("key", "error", f"{column.name} is {text[:MAX_SHOWN]}: no shape has that")
        return
    if text in column.legal:
        return
    if column.kind == "int" and number_of(text) in [float(legal) for legal in column.legal]:
        return
    if text.lower() in [legal.lower() for legal in column.legal]:
        what = f"{column.name} is {text[:MAX_SHOWN]}: AITER writes it otherwise"
        yield BrokenRule("spelling", "warning", what)
        return
    what = f"{column.name} is {text[:MAX_SHOWN]!r}: AITER evaluates it as Python, and it is not one of its values"
    yield BrokenRule("eval", "error", what)


def _agree(libtype: str, by_name: str) -> bool:
    """CK-Tile is a part of CK, and some tables call its kernels ck."""
    return libtype == by_name or {libtype, by_name} <= {"ck", "cktile"}


def _is_near(written: float, expected: float, text: str, us: float, us_text: str) -> bool:
    """Within 5 %, or within half of the last digit that was printed, of the figure itself or of us."""
    if abs(written - expected) <= max(TOLERANCE * expected, half_digit(text)):
        return True
    us_error = half_digit(us_text)
    lowest = expected * us / (us + us_error)
    highest = expected * us / (us - us_error) if us > us_error else math.inf
    return lowest <= written <= highest


def half_digit(text: str) -> float:
    """Half a unit of the last printed digit: 0.005 of "1.25"."""
    mantissa, _, exponent = text.lower().partition("e")
    decimals = len(mantissa.partition(".")[2])
    try:
        return float(0.5 * 10.0 ** (int(exponent or 0) - decimals))
    except (ValueError, OverflowError):
        return 0.0
