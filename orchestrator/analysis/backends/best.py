"""The fastest valid row of each backend on each shape, gathered from all files.

sources = find_sources(["results/"], runs=Path("runs"))
table = backend_table(sources)
for shape in table.shapes:
    shape.best["asm"].tflops, shape.winner, shape.ratio("asm")
"""

from __future__ import annotations

import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from operator import attrgetter, itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from orchestrator.analysis.backends import query
from orchestrator.analysis.backends.query import REASONS, TFLOPS_OFF
from orchestrator.analysis.backends.scan import layout
from orchestrator.analysis.backends.sources import InputTable, InputTables
from orchestrator.analysis.backends.table import (
    COUNTED,
    BackendTable,
    Best,
    InputFile,
    ShapeBest,
    Wrong,
    counted,
    key_text,
)
from orchestrator.errors import InputError
from orchestrator.ledger.clean import text as clean
from orchestrator.planning.roofline import Device
from orchestrator.shapes.model import Key
from orchestrator.tables.backends import order
from orchestrator.tables.faults import escaped
from orchestrator.tables.tuned import GFX_OF_CU_NUM
from worker import without_gc
from worker.families import Family
from worker.text import plural

if TYPE_CHECKING:
    import duckdb

LARGE = 16 << 20
"""Bytes of a file that is worth a query of its own; smaller ones that are alike go together."""


def backend_table(sources: InputTables, err_ratio: float | None = None) -> BackendTable:
    """Read all sources and keep the best of each backend on each shape.

    `err_ratio`: the largest share of wrong elements that counts (default: the family's in AITER). fmoe is not judged:
    its columns hold text in percent, of measures that changed. Raises InputError.
    """
    family = sources.family
    limit = family.aiter.err_ratio if err_ratio is None else err_ratio
    book = ResultCollector(family)
    inputs: list[InputFile] = []
    notes = list(sources.notes)
    with without_gc(), TemporaryDirectory(prefix="gemmfleet-analyze-") as folder:
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
    book.add_requested(sources.requested)
    notes += book.tflops_notes()
    if not book.shapes and not sources.requested and not any(left_out.values()):
        raise InputError([f"there are no rows in {', '.join(s.name for s in sources.files[:5])}", *notes])
    shapes = sorted(book.shapes.values(), key=attrgetter("key"))
    if len({device for device, _ in book.shapes}) > 1:
        shapes.sort(key=lambda s: (s.device[0], s.device[1] or 0))
    backends = sorted(book.backends, key=order)
    return BackendTable(
        family, limit, tuple(shapes), tuple(backends), left_out, book.left_out_of(),
        tuple(inputs), tuple(notes), sources.title, sources.device_names,
    )  # fmt: skip


def _staged(source: InputTable, folder: Path, number: int) -> Path:
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
    db: duckdb.DuckDBPyConnection, names: dict[str, InputTable], family: Family, limit: float, book: ResultCollector
) -> dict[str, tuple[set[int], bool]]:
    """Read every file into the collector; return the bad lines by file, and whether there may be more."""
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


def _line_notes(source: InputTable, lines: set[int], more: bool) -> Iterable[str]:
    name = escaped(str(source.scanned.path))
    if source.scanned.cut:
        yield f"{name}: its last line has no line end and may be cut short: left out (add a line end if it is whole)"
    if lines:
        some = ", ".join(map(str, sorted(lines)[:5])) + (", ..." if len(lines) > 5 else "")
        word = "line is no row" if len(lines) == 1 else "lines are no rows"
        least = "at least " if more else ""
        yield f"{name}:{min(lines)}: {least}{len(lines)} {word} of its header: left out (line {some})"


UNNAMED: Device = ("", None)


class ResultCollector:
    """The rows of the queries, collected by device and key."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.shapes: dict[tuple[Device, Key], ShapeBest] = {}
        self.no_shape = 0
        self._counts: defaultdict[str, list[int]] = defaultdict(lambda: [0] * len(COUNTED))
        self.rows: Counter[str] = Counter()
        self._width = len(family.columns)
        self._texts = [(i, {v.lower(): v for v in c.legal}) for i, c in enumerate(family.columns) if c.kind == "text"]
        self._odd: list[tuple[str, float, float]] = []
        self._odd_count = 0
        self._flops = flops_of(family)

    def add(self, rows: Iterable[tuple[Any, ...]]) -> None:
        """Rows of query.best_rows. One long loop: there are tens of thousands of them, and a call costs as much."""
        w, shapes, texts, flops = 3 + self._width, self.shapes, self._texts, self._flops
        chip: tuple[Any, ...] = ()
        device = UNNAMED
        for row in rows:
            backend, n, no_time, infinite, wrong, worst, wrong_us, listed, us, turn, kernel, tflops, err = row[w:]
            self.rows[row[0]] += n
            if row[3] is None:
                self.no_shape += n
                continue
            key: Key = self._spelled(row[3:w]) if texts else row[3:w]
            if chip != row[1:3]:
                chip = row[1:3]
                device = self._device(*chip)
            at = (device, key)
            shape = shapes.get(at)
            if shape is None:
                shape = shapes[at] = ShapeBest(device, key)
            if no_time or infinite or wrong:
                counts, total = shape.counts, self._counts[backend]
                counts[0] += no_time
                counts[1] += infinite
                counts[2] += wrong
                total[0] += no_time
                total[1] += infinite
                total[2] += wrong
                if wrong:
                    shape.beyond(worst, wrong_us, [_wrong(r) for r in listed or ()])
            if us is None:
                continue
            old = shape.best.get(backend)
            if old is None or turn < old.turn:
                name = kernel or ""
                name = name if name.isprintable() else clean(name)
                shape.best[backend] = best = Best(backend, us, flops(key) / us / 1e6, name, err, turn)
                if tflops is not None:
                    self._compare(shape, best, tflops)

    def _spelled(self, key: Key) -> Key:
        """The key with its texts as the family spells them."""
        cells = list(key)
        for i, legal in self._texts:
            cell = str(cells[i])
            cells[i] = legal.get(cell.lower()) or clean(cell, 60)
        return tuple(cells)

    def _device(self, gfx: str | None, cu_num: int | None) -> Device:
        return (clean(gfx, 40) if gfx else GFX_OF_CU_NUM.get(cu_num or 0, ""), cu_num)

    @property
    def backends(self) -> set[str]:
        """Those that have a valid row somewhere."""
        return set().union(*(s.best for s in self.shapes.values()))

    def left_out_of(self) -> dict[str, dict[str, int]]:
        """Rows left out by backend and reason."""
        return {b: counted(self._counts[b]) for b in sorted(self._counts, key=order)}

    def left_out(self) -> dict[str, int]:
        """Rows left out by reason, lines that were no rows besides."""
        sums = [sum(column) for column in zip(*self._counts.values(), strict=True)] or [0] * len(COUNTED)
        total = Counter(dict(zip(COUNTED, sums, strict=True))) + Counter({"no_shape": self.no_shape})
        return {reason: total[reason] for reason in REASONS}

    def _compare(self, shape: ShapeBest, best: Best, tflops: str) -> None:
        """Note a best row whose tflops column is not what its shape and time give."""
        if _differs(best.tflops, tflops):
            self._odd_count += 1
            if len(self._odd) < 3:
                self._odd.append((key_text(self.family, shape.key), float(tflops), best.tflops))

    def add_requested(self, keys: Iterable[Key]) -> None:
        """Shapes that should be there, on whatever device; what nothing was measured of gets an empty row."""
        there = {key for _, key in self.shapes}
        devices = {device for device, _ in self.shapes}
        device = devices.pop() if len(devices) == 1 else UNNAMED
        for key in keys:
            if key not in there:
                self.shapes[device, key] = ShapeBest(device, key)

    def adopt_unknown_device(self, notes: list[str]) -> None:
        """Rows without gfx and cu_num belong to the one device that there is."""
        known = {d for d, _ in self.shapes} - {UNNAMED}
        homeless = [at for at in self.shapes if at[0] == UNNAMED]
        if not known or not homeless:
            return
        if len(known) > 1:
            names = ", ".join(device_text(d) for d in sorted(known, key=str))
            notes.append(f"{plural(len(homeless), 'shape')} without a named device: kept apart from {names}")
            return
        (device,) = known
        for at in homeless:
            stray = self.shapes.pop(at)
            self.shapes.setdefault((device, at[1]), ShapeBest(device, at[1])).take(stray)
        notes.append(f"{plural(len(homeless), 'shape')} came without gfx and cu_num: taken as {device_text(device)}")

    def tflops_notes(self) -> Iterable[str]:
        """Notes on tflops columns that are not 2*M*N*K / us."""
        if self._odd_count:
            shape, column, made = self._odd[0]
            yield (
                f"{self._odd_count} best rows have a tflops column more than {TFLOPS_OFF:.0%} off what their shape and"
                f" us give (as {shape}: {column:g} there, {made:.4g} computed): the computed one counts"
            )


def _wrong(row: dict[str, Any]) -> Wrong:
    return Wrong(row["b"], clean(row["k"] or "", 300), row["e"], row["u"])


def flops_of(family: Family) -> Callable[[Key], float]:
    """`Family.flops` of a key as a tuple; without a dictionary a shape where the family is a plain product."""
    names = family.key_names
    if family.m_column != "M":
        return lambda key: family.flops(dict(zip(names, key, strict=True)))
    sizes: Callable[[Key], tuple[Any, ...]] = itemgetter(*(names.index(c) for c in ("M", "N", "K")))
    b = names.index("B") if "B" in names else None

    def flops(key: Key) -> float:
        m, n, k = sizes(key)
        return float(2 * m * n * k)

    return flops if b is None else lambda key: flops(key) * int(key[b])


def device_text(device: Device) -> str:
    """`gfx950 with 256 CUs`."""
    gfx, cu_num = device
    return f"{gfx or 'unknown chip'}{f' with {cu_num} CUs' if cu_num else ''}"


def _differs(made: float, column: str) -> bool:
    """Beyond TFLOPS_OFF and beyond the rounding of the last printed digit."""
    try:
        value = float(column)
    except ValueError:
        return False
    last = 0.5 * 10.0 ** -len(column.partition(".")[2])
    return abs(value - made) > max(TFLOPS_OFF * made, last)
