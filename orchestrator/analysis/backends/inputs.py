"""What `analyze` and the report are given, found: runs by id, folders, files; the latest run where nothing is given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from orchestrator.analysis.backends.sources import Finder, Sources
from orchestrator.dispatch.control import holder
from orchestrator.errors import InputError
from orchestrator.ledger.reader import LedgerReader
from orchestrator.paths import RunPaths
from orchestrator.results.export import write_profile
from orchestrator.tables.faults import escaped
from orchestrator.tables.locate import locate
from worker.families import Family
from worker.tuners.catalog import recorded_tuner

AT_REST = ("finished", "interrupted", "cancelled")
"""States in which a controller has written the result files."""


@contextmanager
def find_sources(asked: Sequence[str], *, runs: Path, family: Family | None = None) -> Iterator[Sources]:
    """The sources named by `asked`, each a file, a folder, a run's folder or a run's id; the latest run without any.

    Rows that are only in a ledger are written to a temporary folder that lasts as long as the context. Raises
    InputError, LedgerError.
    """
    finder = Finder(family)
    with TemporaryDirectory(prefix="gemmfleet-analyze-") as aside:
        for name in asked or (None,):
            found = locate(name, runs)
            if found.kind == "run":
                _run(finder, found.paths, Path(aside))
            elif found.kind == "file":
                finder.file(found.path)
            else:
                finder.folder(found.path)
        yield finder.sources()


def _run(finder: Finder, paths: RunPaths, aside: Path) -> None:
    """A run's rows, the shapes asked for, the names of its devices; and its benchmark, where there is one."""
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
        finder.asked += [shape.key for shape in ledger.shapes() if shape.state in ("failed", "tuned")]
    if paths.bench.is_file():
        finder.file(paths.bench, family)
    finder.titles.append(f"run {escaped(paths.run)}")
