"""Hold tuned tables to a build of AITER: kernels, chips, the keys of all tables that it merges, order and line ends.

Each finding has a way out (FIXES). Nothing is imported or run, and no GPU is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

from orchestrator.tables.open import text_lines
from orchestrator.tables.tuned import TAG, TableRow, file_order, read_shipped
from orchestrator.tuned_db.aiter_build import Answer, Build, Standing, counted
from orchestrator.tuned_db.rules import Broken, Severity
from worker.families import Family, backend_of

Verdict = Literal["safe", "rebuild", "unsafe"]
VERDICTS: Mapping[Verdict, str] = {
    "safe": "safe in", "rebuild": "safe after a rebuild in (AITER_REBUILD=1, once)", "unsafe": "not safe in",
}  # fmt: skip
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
    "bw": "multiply it by 1000",
    "chip": "write the gfx and cu_num of the GPU that the row was tuned on",
    "duplicate": "keep the faster row, in the file that has it (`publish` does so)",
    "error ratio": "tune the shape again: a kernel with so many wrong elements must not win",
    "header": "use the columns of the build's own table, in their order",
    "hipblaslt": "tune the shape again without hipBLASLt, or delete the row",
    "line ends": "write LF: `git add --renormalize FILE`, or `sed -i 's/\\r$//' FILE`",
    "mixed": "delete the row: AITER has no such kernel",
    "order": "sort the rows by gfx, cu_num, N, M, K",
    "tflops": "compute it from us",
    "us": "measure the row again, or delete it",
}  # fmt: skip
"""The way out by rule; FIX for the others."""
Place = tuple[int | str, ...]


class BuildCheck:
    """The rules that a build adds. `given`: the tables that are checked; `alone`: AITER reads them and none of its own,
    as it does where a variable names them."""

    def __init__(self, build: Build, given: Sequence[Path], *, alone: bool = False) -> None:
        self.build = build
        self._alone = alone
        self._given = {p.resolve() for p in given}
        self._names = {p.name for p in given}
        self.places = cache(self._places)

    def place(self, row: TableRow, family: Family) -> Place:
        """The key of a row in the build's merge."""
        return self.build.start(family).place(row, family)

    def _places(self, family: Family) -> dict[Place, str]:
        """FILE:LINE of each key of the build's own tables, without those that are given or replaced by name.

        The caller adds those of the tables that it checks.
        """
        out: dict[Place, str] = {}
        for path in () if self._alone else self.build.tables(family):
            if path.resolve() not in self._given and path.name not in self._names:
                for row in read_shipped(path, family).rows:
                    out.setdefault(self.place(row, family), f"{path.relative_to(self.build.tree.root)}:{row.line}")
        return out

    def held(self, broken: Broken) -> Broken:
        """A row's finding at the level that it has here."""
        rule, level, text = broken
        return rule, "error" if rule in HELD else level, text

    def doubled(self, path: Path, first: str, family: Family) -> Broken:
        """The finding on a row whose key `first` has, too.

        An error where AITER merges both: a table that its rule for names does not find is read by a variable alone.
        """
        merged = Path(family.tuned_csv).stem in path.name or not first.startswith("aiter/configs/")
        level: Severity = "error" if merged else "warning"
        stops = self.build.start(family).stops
        does = "AITER stops at its start" if stops else "AITER leaves out one of the two, without a word"
        return "duplicate", level, f"has the key of {first}: {does if merged else f'in model_configs {does}'}"

    def table(
        self, path: Path, header: tuple[str, ...], rows: Sequence[TableRow], family: Family
    ) -> Iterator[tuple[int, Broken]]:
        """(line, finding) of a table's form: its header, line ends and order."""
        start = self.build.start(family)
        mine, own = ([n for n in h if n != TAG or not start.tag] for h in (header, self.build.header(family)))
        if start.one_header and own and mine != own and not self._alone:
            yield 1, ("header", "error", f"its columns are not those of {family.tuned_csv}: AITER stops at its start")
        for n, line in enumerate(text_lines(path), 1):
            if line.endswith("\r\n"):
                yield n, ("line ends", "warning", "ends with CRLF, as others may; .gitattributes of AITER wants LF")
                break
        keys = [file_order(row.key, family) for row in rows]
        for row, before, key in zip(rows[1:], keys, keys[1:], strict=False):
            if key < before and not family.two_stages:
                yield row.line, ("order", "warning", "comes before the row above it in the order of AITER's tuners")
                break

    def rows(
        self, header: Sequence[str], rows: Sequence[TableRow], family: Family
    ) -> tuple[dict[Standing, int], list[tuple[int, Broken]]]:
        """(rows by their standing in the build, line and finding of each row that does not load)."""
        answers: list[Answer] = []
        found: list[tuple[int, Broken]] = []
        for row in rows:
            cells = dict(zip(header, row.cells, strict=True))
            answers.append(answer := self.build.answer(family, row.key, cells))
            if answer.standing != "loads":
                level: Severity = "warning" if answer.standing == "rebuild" else "error"
                why = answer.why if answer.standing != "rebuild" else f"{cells.get('kernelName', '')} {answer.why}"
                found.append((row.line, (f"build: {answer.standing}", level, why)))
            if backend_of(family.name, cells) == "hipblaslt":
                what = "is a solution of hipBLASLt: numbers and names differ between its versions"
                found.append((row.line, ("hipblaslt", "error", what)))
            if why := self._chip(str(row.key[0]), int(row.key[1])):
                found.append((row.line, ("chip", "error", why)))
        return counted(answers), found

    def _chip(self, gfx: str, cu_num: int) -> str:
        """The reason for which no GPU has the chip of a row, "" where one may."""
        known = self.build.chips
        if gfx and known and gfx not in known:
            return f"gfx is {gfx[:20]}, which this AITER does not know"
        parts = {n // d for n in CU_NUMS.get(gfx, ()) for d in (1, 2, 4, 8)}
        if cu_num and parts and cu_num not in parts:
            return f"cu_num is {cu_num}: no {gfx} has so many compute units, so no lookup finds the row"
        return ""
