"""The files that an analysis reads, found: runs by id, folders, files; the latest run where nothing is named.

- A run: its profile.csv; while it runs, or where its controller died, the ledger instead. Shapes of the run without
  a row are known from the ledger.
- A folder: every CSV right in it that holds measurements: the runbook's names (`fp4_profile_*.csv`,
  `fp4_tuned_*.csv`, `fp4_triton_gluon_bench.csv`), a folder of `collect`, or any other.
- A file: as it is; one that cannot be read is an error, where a folder's is passed over with a note.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from orchestrator.analysis.backends.scan import ForeignError, Scanned, doubled, layout, missing, scan
from orchestrator.dispatch.control import holder
from orchestrator.errors import InputError, TunedDBError
from orchestrator.ledger.clean import text as clean
from orchestrator.ledger.reader import LedgerReader
from orchestrator.paths import RunPaths
from orchestrator.results.export import write_profile
from orchestrator.tables.faults import escaped
from orchestrator.tables.locate import family_of, locate, provenance_of
from worker.families import FAMILIES, Column, Family
from worker.tuners.catalog import recorded_tuner

PLAIN = Family(
    "gemm", columns=(Column("M"), Column("N"), Column("K")), result_columns=(), tuned_csv="", untuned_csv="", env=""
)
"""The family of tables that have M, N and K and no sign of the format: no roofline, one kind of kernel."""


@dataclass(frozen=True, slots=True)
class InputTable:
    """A file to read. `name`: as it is shown."""

    scanned: Scanned
    name: str


@dataclass(frozen=True, slots=True)
class InputTables:
    """The files of one family. `requested`: keys that should have a row; `device_names`: what the workers called their
    devices, as far as they are known; `notes`: what was passed over, and why."""

    files: tuple[InputTable, ...]
    family: Family
    title: str
    requested: tuple[tuple[int | str, ...], ...] = ()
    device_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class InputFinder:
    """The files found, with their families and devices. `family`: only files of this one; those of unknown family are
    taken for it."""

    def __init__(self, family: Family | None = None) -> None:
        self.wanted = family
        self.found: list[tuple[InputTable, Family | None]] = []
        self.notes: list[str] = []
        self.titles: list[str] = []
        self.requested: list[tuple[int | str, ...]] = []
        self.device_names: list[str] = []

    def file(self, path: Path, hint: Family | None = None, name: str | None = None) -> None:
        """A file given by name. Raises InputError where it is no table of measurements."""
        scanned = scan(path)
        why = _why_not(scanned)
        if why:
            raise InputError(f"{escaped(str(path))}:1: {why}")
        self._keep(scanned, hint, name or escaped(path.name))

    def folder(self, folder: Path) -> None:
        """A plain folder. Raises InputError where it holds nothing to read, or a damaged table."""
        try:
            paths = sorted(p for p in folder.iterdir() if p.suffix.lower() == ".csv" and p.is_file())
        except OSError as e:
            raise InputError(f"{escaped(str(folder))}: cannot be read: {e.strerror or e}") from e
        document = provenance_of(folder)
        hint = FAMILIES.get(str(document.get("family")))
        self.note_devices(document.get("devices"))
        before = len(self.found)
        passed: list[str] = []
        for path in paths:
            try:
                scanned = scan(path)
            except ForeignError as e:
                passed += e.faults
                continue
            why = _why_not(scanned)
            if why:
                passed.append(f"{escaped(str(path))}: {why}")
            else:
                self._keep(scanned, hint, escaped(path.name))
        self.notes += [f"passed over {p}" for p in passed]
        if len(self.found) == before:
            raise InputError([f"{escaped(str(folder))}: holds no CSV with measurements", *passed[:20]])
        self.titles.append(escaped(folder.name or str(folder)))

    def note_devices(self, devices: object) -> None:
        """The names in a provenance document's `devices`."""
        for entry in devices if isinstance(devices, list) else []:
            device = entry.get("device") if isinstance(entry, dict) else None
            name = clean(device.get("device"), 80) if isinstance(device, dict) else ""
            if name and name not in self.device_names:
                self.device_names.append(name)

    def _keep(self, scanned: Scanned, hint: Family | None, name: str) -> None:
        twice = doubled(scanned.header)
        if twice:
            raise InputError(f"{escaped(str(scanned.path))}:1: column {clean(', '.join(twice), 80)} is there twice")
        self.found.append((InputTable(scanned, name), hint or _family(scanned)))

    def sources(self) -> InputTables:
        """All that was found, of one family. Raises InputError where there are several."""
        families = list(dict.fromkeys(f for _, f in self.found if f is not None))
        family = self.wanted or (families[0] if families else PLAIN)
        if self.wanted is None and len(families) > 1:
            some = "; ".join(f"{f.name}: {self._names_of(f)}" for f in families)
            raise InputError(f"results of several families ({some}): analyze one after the other with --family")
        notes = list(self.notes)
        files, left = [], []
        for source, of in self.found:
            lacking = missing(layout(source.scanned.header, family), family)
            if of not in (None, family):
                left.append(source.name)
            elif lacking:
                notes.append(
                    f"passed over {source.name}: it has no {', '.join(lacking)}, which tables of {family.name} have"
                )
            else:
                files.append(source)
        if left:
            notes.append(f"passed over, of other families: {', '.join(left[:10])}{', ...' if len(left) > 10 else ''}")
        if not files:
            raise InputError([f"no measurements of {family.name} are among the files", *notes])
        if any("err" not in layout(s.scanned.header, family).at for s in files) and family.err_column != "err1":
            bare = [s.name for s in files if "err" not in layout(s.scanned.header, family).at]
            notes.append(f"no column of errors, so nothing there is left out for them: {', '.join(bare[:10])}")
        if family is PLAIN:
            notes.append("the family of these tables is unknown: read by M, N and K alone (name it with --family)")
        title = ", ".join(self.titles) or ", ".join(s.name for s in files[:3]) + (", ..." if len(files) > 3 else "")
        return InputTables(tuple(files), family, title, tuple(self.requested), tuple(self.device_names), tuple(notes))

    def _names_of(self, family: Family) -> str:
        names = [s.name for s, f in self.found if f is family]
        return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _why_not(scanned: Scanned) -> str | None:
    """The reason why a CSV is no table of measurements, None where it is one."""
    found = layout(scanned.header, PLAIN)
    if not found.times:
        return f"has no column of times (us); its header is {clean(','.join(scanned.header), 120)}"
    lower = {n.lower() for n in scanned.header}
    if not ({"m", "n", "k"} <= lower or {"token", "model_dim", "inter_dim"} <= lower):
        return f"has no M, N and K; its header is {clean(','.join(scanned.header), 120)}"
    return None


def _family(scanned: Scanned) -> Family | None:
    """The family of a table by its name, the run it lies in, its columns or its kernels; None where it is unknown."""
    try:
        return family_of(scanned.path)
    except TunedDBError:
        return None


AT_REST = ("finished", "interrupted", "cancelled")
"""States in which a controller has written the result files."""


@contextmanager
def find_sources(given: Sequence[str], *, runs: Path, family: Family | None = None) -> Iterator[InputTables]:
    """The sources named by `given`, each a file, a folder, a run's folder or a run's id; the latest run without any.

    Rows that are only in a ledger are written to a temporary folder that lasts as long as the context. Raises
    InputError, LedgerError.
    """
    finder = InputFinder(family)
    with TemporaryDirectory(prefix="gemmfleet-analyze-") as aside:
        for name in given or (None,):
            found = locate(name, runs)
            if found.kind == "run":
                _run(finder, found.paths, Path(aside))
            elif found.kind == "file":
                finder.file(found.path)
            else:
                finder.folder(found.path)
        yield finder.sources()


def _run(finder: InputFinder, paths: RunPaths, aside: Path) -> None:
    """A run's rows, the shapes requested, the names of its devices; and its benchmark, where there is one."""
    with LedgerReader.open_readonly(paths.ledger) as ledger:
        family = ledger.family
        running = bool(holder(paths.lock))
        # its result is the mean of its runs, not the luckiest row
        benched = recorded_tuner(ledger.meta("tuner", "")).side_by_side
        if benched and not paths.bench.is_file():
            raise InputError(f"run {paths.run} is a bench that has not come to its end: it has no bench.csv yet")
        if benched:
            pass
        elif paths.profile.is_file() and not running and ledger.state in AT_REST:
            finder.file(paths.profile, family)
        else:
            live = aside / f"{len(finder.found)}-profile.csv"
            write_profile(ledger, live)
            finder.file(live, family, f"ledger of {paths.run}")
            finder.notes.append(
                f"run {paths.run} is under way: what it has measured so far"
                if running
                else f"run {paths.run} has not come to its end: what its ledger holds"
            )
        finder.note_devices([{"device": slot.device} for slot in ledger.slots()])
        finder.requested += [shape.key for shape in ledger.shapes() if shape.state in ("failed", "tuned")]
    if paths.bench.is_file():
        finder.file(paths.bench, family)
    finder.titles.append(f"run {escaped(paths.run)}")
