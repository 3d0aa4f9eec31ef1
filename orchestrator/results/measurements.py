"""Measurements as files: found, opened, and read with pandas, for `analyze`.

- A run: its profile.csv. While it runs, or if its controller died, the ledger instead. The ledger also knows the
  shapes without a row.
- A folder: every CSV right in it that holds measurements: the runbook's names (`fp4_profile_*.csv`,
  `fp4_tuned_*.csv`, `fp4_triton_gluon_bench.csv`), or any other.
- A file: as it is, or a log with the table that the FP4 guide's script prints. A file that cannot be read is an
  error, but in a folder it is passed over with a note.

Columns are found by name, whatever their date and order. Some names changed over AITER's history or differ between
families: solidx for kernelId, err_ratio for errRatio, total_us for us (fmoe, before 2025-11). A benchmark is long
(`backend,us`) or wide (`triton_us,triton_tflops,...`).
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn, TextIO

import pandas as pd

from orchestrator.clean import text as clean
from orchestrator.errors import InputError, TunedDBError
from orchestrator.families import GUIDE_FAMILY, legal_name, owned
from orchestrator.files.faults import Faults, escaped
from orchestrator.files.read import decode, open_file
from orchestrator.files.write import write_csv
from orchestrator.ledger.reader import LedgerReader
from orchestrator.paths import RunPaths, holder
from orchestrator.results.export import write_profile
from orchestrator.results.run_results import RunResults
from orchestrator.shapes.model import Key
from orchestrator.tables.locate import family_of, locate, provenance_of
from worker.families import FAMILIES, Column, Family
from worker.text import plural
from worker.tuners.catalog import recorded_tuner

PLAIN = Family(
    "gemm", columns=(Column("M"), Column("N"), Column("K")), result_columns=(), tuned_csv="", untuned_csv="", env=""
)
"""The family of tables that have M, N and K and no sign of the format: no roofline, one kind of kernel."""
AT_REST = ("finished", "interrupted", "cancelled")
"""States in which a controller has written the result files."""
MOST_NAMES = 10
_SIZES = {"m", "n", "k"}, {"token", "model_dim", "inter_dim"}


@dataclass(frozen=True, slots=True)
class InputTable:
    """A file to read. `name`: as it is shown; `family`: None where nothing shows it."""

    path: Path
    name: str
    header: tuple[str, ...]
    family: Family | None


@dataclass(frozen=True, slots=True)
class InputTables:
    """The files of one family. `requested`: keys that should have a row; `device_names`: what the workers called their
    devices, as far as they are known; `notes`: what was passed over, and why."""

    files: tuple[InputTable, ...]
    family: Family
    title: str
    requested: tuple[Key, ...]
    device_names: tuple[str, ...]
    notes: tuple[str, ...]


@contextmanager
def find_sources(given: Sequence[str], *, runs: Path, family: Family | None = None) -> Iterator[InputTables]:
    """The sources named by `given`, each a file, a folder, a run's folder or a run's id; the latest run without any.

    `family`: read only its files; those of unknown family are taken for it. Rows that are only in a ledger are written
    to a temporary folder that lasts as long as the context. Raises InputError, LedgerError.
    """
    with TemporaryDirectory(prefix="gemmfleet-analyze-") as aside:
        finder = _Finder(Path(aside))
        for name in given or (None,):
            kind, path = locate(name, runs)
            if kind == "run":
                finder.run(RunPaths(path))
            elif kind == "file":
                finder.file(path)
            else:
                finder.folder(path)
        yield finder.sources(family)


class _Finder:
    def __init__(self, aside: Path) -> None:
        self._aside = aside
        self.found: list[InputTable] = []
        self.notes: list[str] = []
        self.titles: list[str] = []
        self.requested: list[Key] = []
        self.device_names: dict[str, None] = {}

    def file(self, path: Path, hint: Family | None = None, name: str | None = None) -> None:
        """A file given by name. Raises InputError where it is not a table of measurements, or is damaged."""
        name = name or escaped(path.name)
        if printed := _guide_rows(path):
            path, hint = self._aside / f"{len(self.found)}-guide.csv", hint or FAMILIES[GUIDE_FAMILY]
            write_csv(path, ("M", "N", "K", "us", "backend"), ((*row, "aiter") for row in printed))
        header = read_header(path)
        lower, at, where = {n.lower() for n in header}, layout(header, PLAIN), escaped(str(path))
        lacks = "" if "us" in at.at or at.wide else "has no column of times (us)"
        if not lacks and not any(sizes <= lower for sizes in _SIZES):
            lacks = "has no M, N and K"
        if lacks:
            raise ForeignError(f"{where}: {lacks}; its header is {clean(','.join(header), 120)}")
        if twice := sorted({n for n in header if n and header.count(n) > 1}):
            raise InputError(f"{where}:1: column {clean(', '.join(twice), 80)} is there twice")
        if hint is None:
            with suppress(TunedDBError):
                hint = family_of(path)
        self.found.append(InputTable(path, name, header, hint))

    def folder(self, folder: Path) -> None:
        """A plain folder. Raises InputError where it holds nothing to read, or a damaged table."""
        try:
            paths = sorted(p for p in folder.iterdir() if p.suffix.lower() == ".csv" and p.is_file())
        except OSError as e:
            raise InputError(f"{escaped(str(folder))}: cannot be read: {e.strerror or e}") from e
        document = provenance_of(folder)
        devices = document.get("devices")
        known = devices if isinstance(devices, list) else ()
        self._note_devices(d.get("device") for d in known if isinstance(d, dict))
        before, passed = len(self.found), list[str]()
        for path in paths:
            try:
                self.file(path, FAMILIES.get(str(document.get("family"))))
            except ForeignError as e:
                passed += e.faults
        if len(self.found) == before:
            raise InputError([f"{escaped(str(folder))}: holds no CSV with measurements", *passed[:20]])
        self.notes += [f"passed over {p}" for p in passed]
        self.titles.append(escaped(folder.name or str(folder)))

    def run(self, paths: RunPaths) -> None:
        """A run's rows, the shapes requested, the names of its devices; of a bench the means of its runs."""
        with LedgerReader.open_readonly(paths.ledger) as ledger:
            family, running = ledger.family, bool(holder(paths.lock))
            if recorded_tuner(ledger.meta("tuner", "")).side_by_side:  # the mean of its runs, not the luckiest row
                if not paths.bench.is_file():
                    raise InputError(f"run {paths.run} is a bench that has not ended: it has no bench.csv yet")
                self.file(paths.bench, family)
            elif paths.profile.is_file() and not running and ledger.state in AT_REST:
                self.file(paths.profile, family)
            else:
                live = self._aside / f"{len(self.found)}-profile.csv"
                write_profile(RunResults.read(ledger), live)
                self.file(live, family, f"ledger of {paths.run}")
                ended = "has not ended: what its ledger holds"
                self.notes.append(
                    f"run {paths.run} {'is under way: what it has measured so far' if running else ended}"
                )
            self._note_devices(slot.device for slot in ledger.slots())
            self.requested += [shape.key for shape in ledger.shapes() if shape.state in ("failed", "tuned")]
        self.titles.append(f"run {escaped(paths.run)}")

    def _note_devices(self, devices: Iterable[object]) -> None:
        names = (clean(d.get("device"), 80) for d in devices if isinstance(d, dict))
        self.device_names |= dict.fromkeys(filter(None, names))

    def sources(self, wanted: Family | None) -> InputTables:
        """All that was found, of one family. Raises InputError where there are several."""
        families = list(dict.fromkeys(t.family for t in self.found if t.family is not None))
        family = wanted or (families[0] if families else PLAIN)
        if wanted is None and len(families) > 1:
            some = "; ".join(f"{f.name}: {_named([t for t in self.found if t.family is f], 3)}" for f in families)
            raise InputError(f"results of several families ({some}): analyze one after the other with --family")
        notes, mine = list(self.notes), [t for t in self.found if t.family in (None, family)]
        at = {t: layout(t.header, family) for t in mine}
        needed = [c.name for c in family.columns if c.required]
        files = [t for t in mine if {*needed} <= {*at[t].keys}]
        for table in (t for t in mine if t not in files):
            what = ", ".join(n for n in needed if n not in at[table].keys)
            notes.append(f"passed over {table.name}: it has no {what}, which tables of {family.name} have")
        if others := [t for t in self.found if t not in mine]:
            notes.append(f"passed over, of other families: {_named(others)}")
        if not files:
            raise InputError([f"no measurements of {family.name} are among the files", *notes])
        if bare := [t for t in files if "err" not in at[t].at and family.err_column != "err1"]:
            notes.append(f"no column of errors, so nothing there is left out for them: {_named(bare)}")
        if family is PLAIN:
            notes.append("the family of these tables is unknown: read by M, N and K alone (name it with --family)")
        title = ", ".join(self.titles) or _named(files, 3)
        return InputTables(tuple(files), family, title, tuple(self.requested), tuple(self.device_names), tuple(notes))


def _guide_rows(path: Path) -> list[tuple[str, ...]]:
    """M, N, K and us ("" for a shape that failed) of the table that the FP4 guide's script prints, from its log."""
    with open_file(path, InputError) as f:
        if not _GUIDE_HEADER.search(text := f.read(MAX_LINE)):
            return []
        text += f.read(64 << 20)
    return _GUIDE_ROW.findall(text.decode(errors="replace"))


def _named(tables: Sequence[InputTable], most: int = MOST_NAMES) -> str:
    return ", ".join(t.name for t in tables[:most]) + (", ..." if len(tables) > most else "")


MAX_LINE = 1 << 16
"""Characters of a line. AITER's longest lines have some 400."""
MAX_COLUMNS = 200
MOST_NAMED = 5
"""Bad lines that a note names by number."""
_BLOCK = 1 << 17
"""Characters that are looked at together. A line of more is refused."""
_CHUNK = 100_000
"""Rows in a frame; 200,000 take pandas a fifth longer."""
_UNMARKED = bytes(set(range(256)) - set(b',\n"\0'))
NULLS = ["Null", "null", "NULL", "None", ""]
"""Cells without a value. AITER writes `Null`, which pandas does not know."""
_ALIASES = {
    "us": ("us", "time_us", "total_us"),
    "err": ("errratio", "err_ratio", "err"),
    "kernel": ("kernelname", "kernel_name", "kernelname1", "kernel"),
    "kernel_id": ("kernelid", "kernel_id", "solidx"),
    "libtype": ("libtype", "backend"),
    "gfx": ("gfx",),
    "cu_num": ("cu_num",),
}
_GUIDE_HEADER = re.compile(rb"\bM +N +K +us +TFLOPS +status\b")
_GUIDE_ROW = re.compile(r"^ *(\d+) +(\d+) +(\d+) +(?:([\d.]+) +[\d.]+ +ok|ERR)\b", re.MULTILINE)
_TEXTS = ("kernel", "kernel_id", "libtype", "gfx")
US = "_us"
"""The end of the name of a backend's column of times in a wide benchmark."""


class ForeignError(InputError):
    """The file is not a table at all (empty, binary, compressed). In a folder such a file is passed over."""


def read_header(path: Path) -> tuple[str, ...]:
    """The stripped names in a CSV's first line. Raises ForeignError or InputError."""
    faults = Faults(path)
    with open_file(path, InputError) as f:
        text = decode(first := f.read(MAX_LINE), faults)
    line = text.lines[0] if text else ""
    if text and len(text.lines) == 1 and len(first) == MAX_LINE:
        raise InputError(f"{escaped(str(path))}:1: is longer than {MAX_LINE} bytes, which no header of a table is")
    names = tuple(c.strip() for c in next(csv.reader([line]), ()))
    if text and not any(names):
        faults.add("holds no header", line=1)
    faults.raise_as(ForeignError)
    if len(names) > MAX_COLUMNS:
        raise InputError(f"{escaped(str(path))}:1: has {len(names)} columns, which no table of this kind has")
    return names


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns of a header by meaning, as column numbers. `keys` holds the family's key columns that are there,
    `wide` the columns of times of a wide benchmark by backend."""

    at: dict[str, int]
    keys: dict[str, int]
    wide: dict[str, int]


def layout(header: tuple[str, ...], family: Family) -> Layout:
    """Finds out what the columns of a header mean for a family."""
    lower = {name.lower(): i for i, name in reversed(list(enumerate(header))) if name}
    at = {role: lower[found[0]] for role, names in _ALIASES.items() if (found := [n for n in names if n in lower])}
    keys = {c.name: lower[c.name.lower()] for c in family.columns if c.name.lower() in lower}
    wide = {
        owned(backend): i
        for name, i in (() if "us" in at else sorted(lower.items(), key=lambda item: item[1]))
        if name.endswith(US) and (backend := legal_name(name.removesuffix(US)))
    }
    return Layout(at, keys, wide)


def chunks(lines: CleanLines, found: Layout, family: Family) -> Iterator[pd.DataFrame]:
    """The rows of a file, some 100,000 at a time, in columns named by their meaning (a key column by its own name).

    Numbers are float or int, NaN where a cell does not hold one; texts are categories. Raises InputError where a line
    makes the rest of the file unreadable.
    """
    texts = {c.name for c in family.columns if c.kind == "text"} | set(_TEXTS)
    names = {i: name for name, i in (found.at | found.keys).items()}
    names |= {i: backend + US for backend, i in found.wide.items()}
    with lines:
        try:
            reader = pd.read_csv(
                lines, header=None, names=[names.get(i, f" {i}") for i in range(lines.columns)], chunksize=_CHUNK,
                usecols=list(names.values()), dtype={name: "category" for name in names.values() if name in texts},
                na_values=NULLS, low_memory=False, index_col=False, engine="c",
            )  # fmt: skip
        except pd.errors.EmptyDataError:
            return
        with reader:
            for chunk in reader:
                numbers = (name for name in names.values() if name not in texts)
                yield chunk.assign(**{name: pd.to_numeric(chunk[name], errors="coerce") for name in numbers})


class CleanLines(io.TextIOBase):
    """The lines of a CSV below its header, for pandas, without those that are not rows of it.

    pandas itself would fill up a line that is too short, and cut one that is too long. `malformed`: the number of lines
    left out, of which `named` has the first few numbers; `cut`: the last line has no end, so that its last cell may be
    the beginning of another number. Reading raises InputError, with the line, if nothing after it can be trusted.
    """

    def __init__(self, path: Path, columns: int) -> None:
        open_file(path, InputError).close()
        self.path, self.columns = path, columns
        self.malformed, self.named, self.cut = 0, list[int](), False
        self._file: TextIO = path.open(encoding="utf-8-sig", errors="surrogateescape")  # all line ends become \n
        self._file.readline()
        self._line, self._rest, self._row = 2, "", b"," * (columns - 1) + b"\n"

    def __iter__(self) -> Iterator[str]:  # type: ignore[override]
        """pandas asks for it and does not call it."""
        return iter(self.read, "")

    def notes(self) -> Iterator[str]:
        """Sentences on the lines that were left out."""
        name = escaped(str(self.path))
        if self.cut:
            how = "left out (add a line end if it is whole)"
            yield f"{name}: its last line has no line end and may be cut short: {how}"
        if bad := self.malformed - self.cut:
            some = ", ".join(map(str, self.named)) + (", ..." if bad > MOST_NAMED else "")
            what = plural(bad, "line is not a row", "lines are not rows")
            yield f"{name}:{self.named[0]}: {what} of its header: left out (line {some})"

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
        super().close()

    def read(self, size: int | None = -1) -> str:
        """Returns the next lines, whatever `size`, "" at the end."""
        try:
            while block := self._file.read(_BLOCK):
                whole, end, self._rest = (self._rest + block).rpartition("\n")
                clean = self._clean(whole + end)
                if len(self._rest) > _BLOCK:
                    self._raise(self._line, f"is longer than {_BLOCK // 1024} KiB")
                if clean:
                    return clean
        except OSError as e:
            raise InputError(f"{escaped(str(self.path))}: cannot be read: {e.strerror or e}") from e
        if self._rest:  # without a line end
            self.cut, self._rest = bool(self._clean(self._rest + "\n")), ""
            self.malformed += self.cut
        return ""

    def _clean(self, text: str) -> str:
        raw = text.encode("utf-8", "surrogateescape")
        marks = raw.translate(None, _UNMARKED)
        lines = marks.count(b"\n")
        first, self._line = self._line, self._line + lines
        if marks == self._row * lines and raw.isascii():
            return text
        return "".join(f"{line}\n" for n, line in enumerate(text.split("\n")[:-1], first) if self._is_row(n, line))

    def _is_row(self, number: int, line: str) -> bool:
        if "\0" in line:
            self._raise(number, "holds a NUL byte")
        try:
            cells = len(next(csv.reader([line], strict=True))) if '"' in line else line.count(",") + 1
            line.encode()
        except UnicodeEncodeError:
            cells = 0
        except csv.Error:
            self._raise(number, "opens a quote that is not closed")
        if cells != self.columns and line.strip():
            self.malformed += 1
            if len(self.named) < MOST_NAMED:
                self.named.append(number)
        return cells == self.columns

    def _raise(self, number: int, what: str) -> NoReturn:
        raise InputError(f"{escaped(str(self.path))}:{number}: {what}: the file is damaged; mend or remove the line")
