"""Finds the tables of measurements that `analyze` is asked for; `measurement_csv.py` reads them.

- A run: its profile.csv. While it runs, or if its controller died, the ledger instead. The ledger also knows the
  shapes without a row.
- A folder: every CSV right in it that holds measurements: the runbook's names (`fp4_profile_*.csv`,
  `fp4_tuned_*.csv`, `fp4_triton_gluon_bench.csv`), or any other.
- A file: as it is, or a log with the table that the FP4 guide's script prints. A file that cannot be read is an
  error, but in a folder it is passed over with a note.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from orchestrator.clean import text as clean
from orchestrator.errors import InputError, TunedDBError
from orchestrator.families import GUIDE_FAMILY
from orchestrator.files.faults import escaped
from orchestrator.files.read import open_file
from orchestrator.files.scratch import scratch_folder
from orchestrator.files.write import write_csv
from orchestrator.ledger.reader import LedgerReader
from orchestrator.paths import RunPaths, holder
from orchestrator.results.export import write_profile
from orchestrator.results.measurement_csv import MAX_LINE, ForeignError, measurement_columns, read_header
from orchestrator.results.run_results import RunResults
from orchestrator.shapes.model import Key
from orchestrator.tables.run_folders import locate_input, provenance_of
from orchestrator.tables.table_names import family_of
from worker.families import FAMILIES, Column, Family
from worker.tuners.catalog import recorded_tuner

PLAIN = Family(
    "gemm", columns=(Column("M"), Column("N"), Column("K")), result_columns=(), tuned_csv="", untuned_csv="", env=""
)
"""The family of tables that have M, N and K and no sign of the format: no roofline, one kind of kernel."""
AT_REST = ("finished", "interrupted", "cancelled")
"""States in which a controller has written the result files."""
MOST_NAMES = 10
"""Tables that a note names."""
_SIZES = ({"m", "n", "k"}, {"token", "model_dim", "inter_dim"})
"""A table of measurements has the columns of one of these sets."""
_MAX_LOG = 64 << 20
"""Bytes of a log that are searched for the guide's table."""
_GUIDE_HEADER = re.compile(rb"\bM +N +K +us +TFLOPS +status\b")
_GUIDE_ROW = re.compile(r"^ *(\d+) +(\d+) +(\d+) +(?:([\d.]+) +[\d.]+ +ok|ERR)\b", re.MULTILINE)


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
    with scratch_folder("gemmfleet-analyze-") as aside:
        finder = _SourceFinder(aside)
        for source in sources or (None,):
            kind, path = locate_input(source, runs)
            if kind == "run":
                finder.add_run(RunPaths(path))
            elif kind == "file":
                finder.add_file(path)
            else:
                finder.add_folder(path)
        yield finder.tables_of(family)


class _SourceFinder:
    """Collects the tables. Call `add_run`, `add_file` or `add_folder` for each source, then `tables_of`.

    `aside`: a folder for tables that are made here.
    """

    def __init__(self, aside: Path) -> None:
        self._aside = aside
        self._tables: list[InputTable] = []
        self._notes: list[str] = []
        self._titles: list[str] = []
        self._requested: list[Key] = []
        self._device_names: dict[str, None] = {}

    def add_file(self, path: Path, family: Family | None = None, name: str | None = None) -> None:
        """Add a file. Raises InputError if it is not a table of measurements (ForeignError), or is damaged. `name`: how
        it is shown, if not by its own name."""
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

    def add_folder(self, folder: Path) -> None:
        """Add the tables in a folder that is no run. Raises InputError if none is there, or one is damaged."""
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
        passed_over: list[str] = []
        for path in paths:
            try:
                self.add_file(path, family)
            except ForeignError as e:
                passed_over += e.faults
        if len(self._tables) == count:
            raise InputError([f"{escaped(str(folder))}: holds no CSV with measurements", *passed_over[:20]])
        self._notes += [f"passed over {fault}" for fault in passed_over]
        self._titles.append(escaped(folder.name or str(folder)))

    def add_run(self, paths: RunPaths) -> None:
        """Add a run: its rows (of a bench their means), the shapes that it settled, the names of its devices."""
        with LedgerReader.open_readonly(paths.ledger) as ledger:
            is_running = bool(holder(paths.lock))
            if recorded_tuner(ledger.meta("tuner", "")).side_by_side:  # the mean of its runs, not the luckiest row
                if not paths.bench.is_file():
                    raise InputError(f"run {paths.run} is a bench that has not ended: it has no bench.csv yet")
                self.add_file(paths.bench, ledger.family)
            elif paths.profile.is_file() and not is_running and ledger.state in AT_REST:
                self.add_file(paths.profile, ledger.family)
            else:
                profile = self._aside / f"{len(self._tables)}-profile.csv"
                write_profile(RunResults.read(ledger), profile)
                self.add_file(profile, ledger.family, f"ledger of {paths.run}")
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

    def tables_of(self, wanted: Family | None) -> InputTables:
        """All that was added, of one family. Raises InputError if there are several and none is `wanted`."""
        family = wanted or self._only_family()
        of_family = [table for table in self._tables if table.family in (None, family)]
        others = [table for table in self._tables if table not in of_family]
        notes = list(self._notes)
        files = []
        for table in of_family:
            missing = _missing_columns(table, family)
            if missing:
                lacks = f"it has no {', '.join(missing)}, which tables of {family.name} have"
                notes.append(f"passed over {table.name}: {lacks}")
            else:
                files.append(table)
        if others:
            notes.append(f"passed over, of other families: {_named(others)}")
        if not files:
            raise InputError([f"no measurements of {family.name} are among the files", *notes])
        without_errors = [table for table in files if "err" not in measurement_columns(table.header, family).roles]
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


def _missing_columns(table: InputTable, family: Family) -> list[str]:
    """The key columns that a table of the family must have and this one lacks."""
    columns = measurement_columns(table.header, family)
    required = [column.name for column in family.columns if column.required]
    return [name for name in required if name not in columns.keys]


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
