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
def find_sources(sources: Sequence[str], *, runs: Path, family: Family | None = None) -> Iterator[InputTables]:
    """The tables in these sources, each a file, a folder, a run's folder or a run's id; the latest run without any.

    `family`: read only its files; those of unknown family are taken for it. Rows that are only in a ledger are written
    to a temporary folder that lasts as long as the context. Raises InputError, LedgerError.
    """
    with TemporaryDirectory(prefix="gemmfleet-analyze-") as aside:
        finder = _SourceFinder(Path(aside))
        for source in sources or (None,):
            kind, path = locate(source, runs)
            if kind == "run":
                finder.run(RunPaths(path))
            elif kind == "file":
                finder.file(path)
            else:
                finder.folder(path)
        yield finder.sources(family)


class _SourceFinder:
    """Collects the tables: `run`, `file` or `folder` for each source, then `sources`. `aside`: a folder for tables that
    are made here."""

    def __init__(self, aside: Path) -> None:
        self._aside = aside
        self._tables: list[InputTable] = []
        self._notes: list[str] = []
        self._titles: list[str] = []
        self._requested: list[Key] = []
        self._device_names: dict[str, None] = {}

    def file(self, path: Path, family: Family | None = None, name: str | None = None) -> None:
        """A file given by name. Raises InputError where it is not a table of measurements, or is damaged."""
        name = name or escaped(path.name)
        guide_rows = _guide_rows(path)
        if guide_rows:
            path = self._aside / f"{len(self._tables)}-guide.csv"
            family = family or FAMILIES[GUIDE_FAMILY]
            write_csv(path, ("M", "N", "K", "us", "backend"), ((*row, "aiter") for row in guide_rows))
        header = read_header(path)
        _check_columns(path, header)
        if family is None:
            with suppress(TunedDBError):
                family = family_of(path)
        self._tables.append(InputTable(path, name, header, family))

    def folder(self, folder: Path) -> None:
        """A plain folder. Raises InputError where it holds nothing to read, or a damaged table."""
        try:
            paths = sorted(p for p in folder.iterdir() if p.suffix.lower() == ".csv" and p.is_file())
        except OSError as e:
            raise InputError(f"{escaped(str(folder))}: cannot be read: {e.strerror or e}") from e
        document = provenance_of(folder)
        devices = document.get("devices")
        if isinstance(devices, list):
            self._note_devices(slot.get("device") for slot in devices if isinstance(slot, dict))
        family = FAMILIES.get(str(document.get("family")))
        count = len(self._tables)
        passed: list[str] = []
        for path in paths:
            try:
                self.file(path, family)
            except ForeignError as e:
                passed += e.faults
        if len(self._tables) == count:
            raise InputError([f"{escaped(str(folder))}: holds no CSV with measurements", *passed[:20]])
        self._notes += [f"passed over {fault}" for fault in passed]
        self._titles.append(escaped(folder.name or str(folder)))

    def run(self, paths: RunPaths) -> None:
        """A run's rows, the shapes requested, the names of its devices; of a bench the means of its runs."""
        with LedgerReader.open_readonly(paths.ledger) as ledger:
            is_running = bool(holder(paths.lock))
            if recorded_tuner(ledger.meta("tuner", "")).side_by_side:  # the mean of its runs, not the luckiest row
                if not paths.bench.is_file():
                    raise InputError(f"run {paths.run} is a bench that has not ended: it has no bench.csv yet")
                self.file(paths.bench, ledger.family)
            elif paths.profile.is_file() and not is_running and ledger.state in AT_REST:
                self.file(paths.profile, ledger.family)
            else:
                profile = self._aside / f"{len(self._tables)}-profile.csv"
                write_profile(ledger, profile)
                self.file(profile, ledger.family, f"ledger of {paths.run}")
                state = "has not ended: what its ledger holds"
                if is_running:
                    state = "is under way: what it has measured so far"
                self._notes.append(f"run {paths.run} {state}")
            self._note_devices(slot.device for slot in ledger.slots())
            self._requested += [shape.key for shape in ledger.shapes() if shape.state in ("failed", "tuned")]
        self._titles.append(f"run {escaped(paths.run)}")

    def _note_devices(self, devices: Iterable[object]) -> None:
        for device in devices:
            name = clean(device.get("device"), 80) if isinstance(device, dict) else ""
            if name:
                self._device_names[name] = None

    def sources(self, wanted: Family | None) -> InputTables:
        """All that was found, of one family. Raises InputError where there are several."""
        family = wanted or self._only_family()
        mine = [table for table in self._tables if table.family in (None, family)]
        others = [table for table in self._tables if table not in mine]
        required = [column.name for column in family.columns if column.required]
        notes = list(self._notes)
        files = []
        without_errors = []
        for table in mine:
            columns = measurement_columns(table.header, family)
            missing = [name for name in required if name not in columns.keys]
            if missing:
                lacks = f"it has no {', '.join(missing)}, which tables of {family.name} have"
                notes.append(f"passed over {table.name}: {lacks}")
                continue
            files.append(table)
            if "err" not in columns.roles:
                without_errors.append(table)
        if others:
            notes.append(f"passed over, of other families: {_named(others)}")
        if not files:
            raise InputError([f"no measurements of {family.name} are among the files", *notes])
        if without_errors and family.err_column != "err1":
            notes.append(f"no column of errors, so nothing there is left out for them: {_named(without_errors)}")
        if family is PLAIN:
            notes.append("the family of these tables is unknown: read by M, N and K alone (name it with --family)")
        title = ", ".join(self._titles) or _named(files, 3)
        return InputTables(tuple(files), family, title, tuple(self._requested), tuple(self._device_names), tuple(notes))

    def _only_family(self) -> Family:
        """The family of the tables, PLAIN if nothing shows it. Raises InputError where there are several."""
        families = list(dict.fromkeys(table.family for table in self._tables if table.family is not None))
        if len(families) > 1:
            tables = {f.name: [table for table in self._tables if table.family is f] for f in families}
            listed = "; ".join(f"{name}: {_named(some, 3)}" for name, some in tables.items())
            raise InputError(f"results of several families ({listed}): analyze one after the other with --family")
        return families[0] if families else PLAIN


def _check_columns(path: Path, header: Sequence[str]) -> None:
    """Raise InputError for a header without times or sizes (ForeignError), or with a column that is there twice."""
    columns = measurement_columns(header, PLAIN)
    names = {name.lower() for name in header}
    fault = ""
    if "us" not in columns.roles and not columns.wide:
        fault = "has no column of times (us)"
    elif not any(sizes <= names for sizes in _SIZES):
        fault = "has no M, N and K"
    where = escaped(str(path))
    if fault:
        raise ForeignError(f"{where}: {fault}; its header is {clean(','.join(header), 120)}")
    doubled = sorted({name for name in header if name and header.count(name) > 1})
    if doubled:
        raise InputError(f"{where}:1: column {clean(', '.join(doubled), 80)} is there twice")


def _guide_rows(path: Path) -> list[tuple[str, ...]]:
    """M, N, K and us ("" for a shape that failed) of the table that the FP4 guide's script prints, from its log."""
    with open_file(path, InputError) as f:
        text = f.read(MAX_LINE)
        if not _GUIDE_HEADER.search(text):
            return []
        text += f.read(_MAX_LOG)
    return _GUIDE_ROW.findall(text.decode(errors="replace"))


def _named(tables: Sequence[InputTable], most: int = MOST_NAMES) -> str:
    more = ", ..." if len(tables) > most else ""
    return ", ".join(table.name for table in tables[:most]) + more


_MAX_LOG = 64 << 20
"""Bytes of a log that are searched for the guide's table."""
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
class MeasurementColumns:
    """The columns of a header by meaning, as column numbers. `roles` are the keys of _ALIASES, `keys` the family's key
    columns that are there, `wide` the columns of times of a wide benchmark by backend."""

    roles: dict[str, int]
    keys: dict[str, int]
    wide: dict[str, int]


def measurement_columns(header: Sequence[str], family: Family) -> MeasurementColumns:
    """Finds out what the columns of a header mean for a family."""
    numbers: dict[str, int] = {}
    for i, name in enumerate(header):
        if name:
            numbers.setdefault(name.lower(), i)
    roles = {}
    for role, aliases in _ALIASES.items():
        alias = next((name for name in aliases if name in numbers), None)
        if alias:
            roles[role] = numbers[alias]
    keys = {c.name: numbers[c.name.lower()] for c in family.columns if c.name.lower() in numbers}
    wide = {}
    if "us" not in roles:
        for name, i in numbers.items():
            backend = legal_name(name.removesuffix(US))
            if backend and name.endswith(US):
                wide[owned(backend)] = i
    return MeasurementColumns(roles, keys, wide)


def chunks(lines: CleanLines, columns: MeasurementColumns, family: Family) -> Iterator[pd.DataFrame]:
    """The rows of a file, some 100,000 at a time, in columns named by their meaning (a key column by its own name).

    Numbers are float or int, NaN where a cell does not hold one; texts are categories. Raises InputError where a line
    makes the rest of the file unreadable.
    """
    names = {i: name for name, i in (columns.roles | columns.keys).items()}
    names |= {i: backend + US for backend, i in columns.wide.items()}
    texts = {column.name for column in family.columns if column.kind == "text"} | set(_TEXTS)
    numeric = [name for name in names.values() if name not in texts]
    with lines:
        try:
            reader = pd.read_csv(
                lines,
                header=None,
                names=[names.get(i, f" {i}") for i in range(lines.columns)],
                chunksize=_CHUNK,
                usecols=list(names.values()),
                # a kernel's name is repeated in thousands of rows: as a category it is held once
                dtype={name: "category" for name in names.values() if name in texts},
                na_values=NULLS,
                low_memory=False,
                index_col=False,
                engine="c",
            )
        except pd.errors.EmptyDataError:
            return
        with reader:
            for chunk in reader:
                yield chunk.assign(**{name: pd.to_numeric(chunk[name], errors="coerce") for name in numeric})


class CleanLines(io.TextIOBase):
    """The lines of a CSV below its header, for pandas, without those that are not rows of it.

    pandas itself would fill up a line that is too short, and cut one that is too long. `malformed`: the number of lines
    left out, of which `named` has the first few numbers; `cut`: the last line has no end, so that its last cell may be
    the beginning of another number. Reading raises InputError, with the line, if nothing after it can be trusted.
    """

    def __init__(self, path: Path, columns: int) -> None:
        open_file(path, InputError).close()
        self.path = path
        self.columns = columns
        self.malformed = 0
        self.named: list[int] = []
        self.cut = False
        self._file: TextIO = path.open(encoding="utf-8-sig", errors="surrogateescape")  # all line ends become \n
        self._file.readline()
        self._line = 2
        self._rest = ""
        self._row = b"," * (columns - 1) + b"\n"

    def __iter__(self) -> Iterator[str]:  # type: ignore[override]
        """pandas asks for it and does not call it."""
        return iter(self.read, "")

    def notes(self) -> Iterator[str]:
        """Sentences on the lines that were left out."""
        name = escaped(str(self.path))
        if self.cut:
            how = "left out (add a line end if it is whole)"
            yield f"{name}: its last line has no line end and may be cut short: {how}"
        bad = self.malformed - self.cut
        if bad:
            more = ", ..." if bad > MOST_NAMED else ""
            what = plural(bad, "line is not a row", "lines are not rows")
            numbers = ", ".join(map(str, self.named))
            yield f"{name}:{self.named[0]}: {what} of its header: left out (line {numbers}{more})"

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
        super().close()

    def read(self, size: int | None = -1) -> str:
        """Returns the next lines, whatever `size`, "" at the end."""
        try:
            while True:
                block = self._file.read(_BLOCK)
                if not block:
                    break
                whole, end, self._rest = (self._rest + block).rpartition("\n")
                clean = self._clean(whole + end)
                if len(self._rest) > _BLOCK:
                    self._raise(self._line, f"is longer than {_BLOCK // 1024} KiB")
                if clean:
                    return clean
        except OSError as e:
            raise InputError(f"{escaped(str(self.path))}: cannot be read: {e.strerror or e}") from e
        if self._rest:  # without a line end
            self.cut = bool(self._clean(f"{self._rest}\n"))
            self._rest = ""
            self.malformed += self.cut
        return ""

    def _clean(self, text: str) -> str:
        """The lines of `text` that are rows. A block of plain rows is recognised as a whole, by its commas alone."""
        raw = text.encode("utf-8", "surrogateescape")
        marks = raw.translate(None, _UNMARKED)
        count = marks.count(b"\n")
        first = self._line
        self._line += count
        if marks == self._row * count and raw.isascii():
            return text
        lines = enumerate(text.split("\n")[:-1], first)
        return "".join(f"{line}\n" for number, line in lines if self._is_row(number, line))

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
