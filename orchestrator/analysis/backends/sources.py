"""Where an analysis reads: a run, a plain folder of results, or single files.

- A run: its profile.csv; while it runs, or where its controller died, the ledger instead. Shapes that were asked for
  and have no row are known from the ledger.
- A folder: every CSV right in it that holds measurements: the runbook's names (`fp4_profile_*.csv`, `fp4_tuned_*.csv`,
  `fp4_triton_gluon_bench.csv`), a folder of `collect`, or any other.
- A file: as it is; one that cannot be read is an error, where a folder's is passed over with a note.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from orchestrator.analysis import columns
from orchestrator.analysis.backends.scan import ForeignError, Scanned, scan
from orchestrator.errors import InputError, TunedDBError
from orchestrator.ledger.clean import text as clean
from orchestrator.tables.backends import OLD_BENCH_NOTE, OWNER_COLUMN
from orchestrator.tables.family import family_of
from orchestrator.tables.faults import escaped
from orchestrator.tables.locate import provenance_of
from worker.families import FAMILIES, Column, Family

PLAIN = Family(
    "gemm", columns=(Column("M"), Column("N"), Column("K")), result_columns=(), tuned_csv="", untuned_csv="", env=""
)
"""What tables are taken for that have M, N and K and say nothing of the format: no roofline, no kernels told apart."""


@dataclass(frozen=True, slots=True)
class Source:
    """A file to read. `name`: as it is shown."""

    scanned: Scanned
    name: str


@dataclass(frozen=True, slots=True)
class Sources:
    """The files of one family. `asked`: keys that should have a row; `device_names`: what the workers called their
    devices, as far as they said; `notes`: what was passed over, and why."""

    files: tuple[Source, ...]
    family: Family
    title: str
    asked: tuple[tuple[int | str, ...], ...] = ()
    device_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class Finder:
    """Collects files and what is known beside them. `family`: only files of this one; those that do not tell are
    taken for it."""

    def __init__(self, family: Family | None = None) -> None:
        self.wanted = family
        self.found: list[tuple[Source, Family | None]] = []
        self.notes: list[str] = []
        self.titles: list[str] = []
        self.asked: list[tuple[int | str, ...]] = []
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
        twice = columns.doubled(scanned.header)
        if twice:
            raise InputError(f"{escaped(str(scanned.path))}:1: column {clean(', '.join(twice), 80)} is there twice")
        self.found.append((Source(scanned, name), hint or _family(scanned)))

    def sources(self) -> Sources:
        """All that was found, of one family. Raises InputError where there are several."""
        families = list(dict.fromkeys(f for _, f in self.found if f is not None))
        family = self.wanted or (families[0] if families else PLAIN)
        if self.wanted is None and len(families) > 1:
            some = "; ".join(f"{f.name}: {self._names_of(f)}" for f in families)
            raise InputError(f"results of several families ({some}): analyze one after the other with --family")
        notes = list(self.notes)
        files, left = [], []
        for source, of in self.found:
            lacking = columns.missing(columns.layout(source.scanned.header, family), family)
            if of not in (None, family):
                left.append(source.name)
            elif lacking:
                notes.append(
                    f"passed over {source.name}: it has no {', '.join(lacking)}, which {family.name} is told by"
                )
            else:
                files.append(source)
        if left:
            notes.append(f"passed over, of other families: {', '.join(left[:10])}{', ...' if len(left) > 10 else ''}")
        if not files:
            raise InputError([f"no measurements of {family.name} are among the files", *notes])
        if any("err" not in columns.layout(s.scanned.header, family).at for s in files) and family.err_column != "err1":
            bare = [s.name for s in files if "err" not in columns.layout(s.scanned.header, family).at]
            notes.append(f"no column of errors, so nothing there is left out for them: {', '.join(bare[:10])}")
        old = [s.name for s in files if OWNER_COLUMN in s.scanned.header]
        notes += [f"{', '.join(old[:10])}: {OLD_BENCH_NOTE}"] if old else []
        if family is PLAIN:
            notes.append("nothing tells the family of these tables: read by M, N and K alone (say it with --family)")
        title = ", ".join(self.titles) or ", ".join(s.name for s in files[:3]) + (", ..." if len(files) > 3 else "")
        return Sources(tuple(files), family, title, tuple(self.asked), tuple(self.device_names), tuple(notes))

    def _names_of(self, family: Family) -> str:
        names = [s.name for s, f in self.found if f is family]
        return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _why_not(scanned: Scanned) -> str | None:
    """Why a CSV is no table of measurements."""
    found = columns.layout(scanned.header, PLAIN)
    if not found.times:
        return f"has no column of times (us); its header is {clean(','.join(scanned.header), 120)}"
    lower = {n.lower() for n in scanned.header}
    if not ({"m", "n", "k"} <= lower or {"token", "model_dim", "inter_dim"} <= lower):
        return f"has no M, N and K; its header is {clean(','.join(scanned.header), 120)}"
    return None


def _family(scanned: Scanned) -> Family | None:
    """The family of a table by its name, the run it lies in, its columns or its kernels; None where nothing tells."""
    try:
        return family_of(scanned.path)
    except TunedDBError:
        return None
