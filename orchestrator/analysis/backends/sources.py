"""Finds the files that an analysis reads: those of a run, of a folder, or by name; by default those of the latest run.

- A run: its profile.csv. While it runs, or if its controller died, the ledger instead. The ledger also knows the
  shapes without a row.
- A folder: every CSV right in it that holds measurements: the runbook's names (`fp4_profile_*.csv`,
  `fp4_tuned_*.csv`, `fp4_triton_gluon_bench.csv`), or any other.
- A file: as it is. A file that cannot be read is an error, but in a folder it is passed over with a note.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from orchestrator.analysis.backends.read import ForeignError, layout, read_header
from orchestrator.dispatch.control import holder
from orchestrator.errors import InputError, TunedDBError
from orchestrator.ledger.clean import text as clean
from orchestrator.ledger.reader import LedgerReader
from orchestrator.paths import RunPaths
from orchestrator.results.export import write_profile
from orchestrator.shapes.model import Key
from orchestrator.tables.faults import escaped
from orchestrator.tables.locate import family_of, locate, provenance_of
from worker.families import FAMILIES, Column, Family
from worker.tuners.catalog import recorded_tuner

PLAIN = Family(
    "gemm", columns=(Column("M"), Column("N"), Column("K")), result_columns=(), tuned_csv="", untuned_csv="", env=""
)
"""The family of tables that have M, N and K and no sign of the format: no roofline, one kind of kernel."""
AT_REST = ("finished", "interrupted", "cancelled")
"""States in which a controller has written the result files."""
MOST_NAMES = 10


@dataclass(frozen=True, slots=True)
class InputTable:
    """A file to read. `name`: as it is shown; `size` in bytes; `family`: None where nothing shows it."""

    path: Path
    name: str
    header: tuple[str, ...]
    size: int
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
    finder = _Finder()
    with TemporaryDirectory(prefix="gemmfleet-analyze-") as aside:
        for name in given or (None,):
            found = locate(name, runs)
            if found.kind == "run":
                finder.run(found.paths, Path(aside))
            elif found.kind == "file":
                finder.file(found.path)
            else:
                finder.folder(found.path)
        yield finder.sources(family)


class _Finder:
    def __init__(self) -> None:
        self.found: list[InputTable] = []
        self.notes: list[str] = []
        self.titles: list[str] = []
        self.requested: list[Key] = []
        self.device_names: dict[str, None] = {}

    def file(self, path: Path, hint: Family | None = None, name: str | None = None) -> None:
        """A file given by name. Raises InputError where it is not a table of measurements, or is damaged."""
        header = read_header(path)
        lower = [n.lower() for n in header]
        at = layout(header, PLAIN)
        shown = clean(",".join(header), 120)
        if "us" not in at.at and not at.wide:
            raise ForeignError(f"{escaped(str(path))}: has no column of times (us); its header is {shown}")
        if not ({"m", "n", "k"} <= set(lower) or {"token", "model_dim", "inter_dim"} <= set(lower)):
            raise ForeignError(f"{escaped(str(path))}: has no M, N and K; its header is {shown}")
        twice = sorted({n for n in header if n and header.count(n) > 1})
        if twice:
            raise InputError(f"{escaped(str(path))}:1: column {clean(', '.join(twice), 80)} is there twice")
        if hint is None:
            try:
                hint = family_of(path)
            except TunedDBError:
                pass
        self.found.append(InputTable(path, name or escaped(path.name), header, path.stat().st_size, hint))

    def folder(self, folder: Path) -> None:
        """A plain folder. Raises InputError where it holds nothing to read, or a damaged table."""
        try:
            paths = sorted(p for p in folder.iterdir() if p.suffix.lower() == ".csv" and p.is_file())
        except OSError as e:
            raise InputError(f"{escaped(str(folder))}: cannot be read: {e.strerror or e}") from e
        document = provenance_of(folder)
        devices = document.get("devices")
        self._note_devices(
            d.get("device") for d in (devices if isinstance(devices, list) else ()) if isinstance(d, dict)
        )
        before, passed = len(self.found), list[str]()
        for path in paths:
            try:
                self.file(path, FAMILIES.get(str(document.get("family"))))
            except ForeignError as e:
                passed += e.faults
        self.notes += [f"passed over {p}" for p in passed]
        if len(self.found) == before:
            raise InputError([f"{escaped(str(folder))}: holds no CSV with measurements", *passed[:20]])
        self.titles.append(escaped(folder.name or str(folder)))

    def run(self, paths: RunPaths, aside: Path) -> None:
        """A run's rows, the shapes requested, the names of its devices; and its benchmark, where there is one."""
        with LedgerReader.open_readonly(paths.ledger) as ledger:
            family = ledger.family
            running = bool(holder(paths.lock))
            # its result is the mean of its runs, not the luckiest row
            benched = recorded_tuner(ledger.meta("tuner", "")).side_by_side
            if benched and not paths.bench.is_file():
                raise InputError(f"run {paths.run} is a bench that has not come to its end: it has no bench.csv yet")
            if not benched and paths.profile.is_file() and not running and ledger.state in AT_REST:
                self.file(paths.profile, family)
            elif not benched:
                live = aside / f"{len(self.found)}-profile.csv"
                write_profile(ledger, live)
                self.file(live, family, f"ledger of {paths.run}")
                state = (
                    "is under way: what it has measured so far"
                    if running
                    else "has not come to its end: what its ledger holds"
                )
                self.notes.append(f"run {paths.run} {state}")
            self._note_devices(slot.device for slot in ledger.slots())
            self.requested += [shape.key for shape in ledger.shapes() if shape.state in ("failed", "tuned")]
        if paths.bench.is_file():
            self.file(paths.bench, family)
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
        notes, files, bare = list(self.notes), [], []
        for table in self.found:
            at = layout(table.header, family)
            lacking = [c.name for c in family.columns if c.required and c.name not in at.keys]
            if table.family in (None, family) and not lacking:
                files.append(table)
                bare += [table] if "err" not in at.at and family.err_column != "err1" else []
            elif lacking and table.family in (None, family):
                what = f"it has no {', '.join(lacking)}, which tables of {family.name} have"
                notes.append(f"passed over {table.name}: {what}")
        if others := [t for t in self.found if t.family not in (None, family)]:
            notes.append(f"passed over, of other families: {_named(others)}")
        if not files:
            raise InputError([f"no measurements of {family.name} are among the files", *notes])
        if bare:
            notes.append(f"no column of errors, so nothing there is left out for them: {_named(bare)}")
        if family is PLAIN:
            notes.append("the family of these tables is unknown: read by M, N and K alone (name it with --family)")
        title = ", ".join(self.titles) or _named(files, 3)
        return InputTables(tuple(files), family, title, tuple(self.requested), tuple(self.device_names), tuple(notes))


def _named(tables: Sequence[InputTable], most: int = MOST_NAMES) -> str:
    return ", ".join(t.name for t in tables[:most]) + (", ..." if len(tables) > most else "")
