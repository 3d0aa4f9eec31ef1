"""The best of each backend on each shape: what `analyze` and the report are made of.

sources = find_sources(["results/"], runs=Path("runs"))
table = backend_table(sources)
for shape in table.shapes:
    shape.best["asm"].tflops, shape.winner, shape.ratio("asm")
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from orchestrator.analysis.backends import query
from orchestrator.analysis.backends.gather import Book
from orchestrator.analysis.backends.sources import Source, Sources
from orchestrator.analysis.backends.table import BackendTable, InputFile
from orchestrator.analysis.columns import layout
from orchestrator.errors import InputError
from orchestrator.tables.backends import order
from orchestrator.tables.faults import escaped
from worker.families import Family
from worker.tuners.common.measure import quiet

if TYPE_CHECKING:
    import duckdb


LARGE = 16 << 20
"""Bytes of a file that is worth a query of its own; smaller ones that are alike go together."""


def default_err_ratio(family: Family) -> float:
    """AITER's own limit for the family."""
    return family.aiter.err_ratio


def backend_table(sources: Sources, err_ratio: float | None = None) -> BackendTable:
    """Read all sources and keep the best of each backend on each shape.

    `err_ratio`: the largest share of wrong elements that counts (default: the family's in AITER). fmoe is not judged:
    its columns hold text in percent, of measures that changed. Raises InputError.
    """
    family = sources.family
    limit = default_err_ratio(family) if err_ratio is None else err_ratio
    book = Book(family)
    inputs: list[InputFile] = []
    notes = list(sources.notes)
    with quiet(), TemporaryDirectory(prefix="gemmfleet-analyze-") as folder:
        names = {str(_staged(s, Path(folder), i)): s for i, s in enumerate(sources.files)}
        with query.connect(Path(folder)) as db:
            bad = _read(db, names, family, limit, book)
        for staged, source in names.items():
            cut = 1 if source.scanned.cut else 0
            lines, more = bad.get(staged, (set(), False))
            inputs.append(InputFile(source.name, source.scanned.size, book.rows[staged], len(lines) + cut, more))
            notes += _line_notes(source, lines, more)
    left_out = book.left_out() | {"malformed": sum(f.malformed for f in inputs)}
    book.adopt_unknown_device(notes)
    book.ask(sources.asked)
    notes += book.tflops_notes()
    if not book.shapes and not sources.asked and not any(left_out.values()):
        raise InputError([f"there are no rows in {', '.join(s.name for s in sources.files[:5])}", *notes])
    shapes = sorted(book.shapes.values(), key=attrgetter("key"))
    if len({device for device, _ in book.shapes}) > 1:
        shapes.sort(key=lambda s: (s.device[0], s.device[1] or 0))
    backends = sorted(book.backends, key=order)
    return BackendTable(
        family, limit, tuple(shapes), tuple(backends), left_out, book.left_out_of(),
        tuple(inputs), tuple(notes), sources.title, sources.device_names,
    )  # fmt: skip


def _staged(source: Source, folder: Path, number: int) -> Path:
    """The file under a name without wildcards; a copy without its last line where that is cut."""
    at = folder / f"{number}.csv"
    path = source.scanned.path.absolute()
    if not source.scanned.cut:
        os.symlink(path, at)
        return at
    with path.open("rb") as full, at.open("wb") as copy:
        left = source.scanned.whole
        while left and (data := full.read(min(left, 1 << 20))):
            copy.write(data)
            left -= len(data)
    shutil.copystat(path, at)
    return at


def _read(
    db: duckdb.DuckDBPyConnection, names: dict[str, Source], family: Family, limit: float, book: Book
) -> dict[str, tuple[set[int], bool]]:
    """Every file into the book; by file the bad lines, and whether there may be more."""
    bad: dict[str, tuple[set[int], bool]] = {}
    alike: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for staged, source in names.items():
        large = source.scanned.size >= LARGE
        alike[source.scanned.header, staged if large else None].append(staged)

    reader = db.cursor()

    def ask(number: int, files: list[str]) -> tuple[str, list[Path], dict[str, tuple[set[int], bool]]]:
        header = names[files[0]].scanned.header
        paths = [Path(f) for f in files]
        given = (reader, f"best{number}", paths, len(header), layout(header, family), family, limit)
        query.make_best(*given)
        lines, no_numbers = query.rejected(reader)
        if no_numbers:
            query.make_best(*given, typed=False)
            lines, _ = query.rejected(reader)
        return f"best{number}", paths, lines

    try:
        # the next query runs while the rows of the last are fetched and gathered
        with ThreadPoolExecutor(1) as aside:
            for table, paths, lines in aside.map(ask, count(), alike.values()):
                bad |= lines
                for rows in query.best_rows(db, table, paths, family):
                    book.add(rows)
    except InputError as e:
        faults = e.faults
        for staged, source in names.items():
            faults = [f.replace(staged, escaped(str(source.scanned.path))) for f in faults]
        raise InputError(faults) from e
    return bad


def _line_notes(source: Source, lines: set[int], more: bool) -> Iterable[str]:
    name = escaped(str(source.scanned.path))
    if source.scanned.cut:
        yield f"{name}: its last line has no line end and may be cut short: left out (add a line end if it is whole)"
    if lines:
        some = ", ".join(map(str, sorted(lines)[:5])) + (", ..." if len(lines) > 5 else "")
        word = "line is no row" if len(lines) == 1 else "lines are no rows"
        least = "at least " if more else ""
        yield f"{name}:{min(lines)}: {least}{len(lines)} {word} of its header: left out (line {some})"
