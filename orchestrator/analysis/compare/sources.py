"""From what was typed (a file, a folder, a run's id) to CSVs and their environment records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.analysis.compare import environment
from orchestrator.analysis.compare.columns import is_timing
from orchestrator.analysis.compare.reading import Side, header_of, read_side
from orchestrator.errors import InputError
from orchestrator.paths import RunPaths
from orchestrator.tables.faults import escaped
from orchestrator.tables.locate import locate


@dataclass(slots=True)
class Source:
    """One side: its CSVs, what they hold and what they were measured with (a record a CSV that has one)."""

    name: str
    files: list[Path]
    side: Side
    records: list[dict[str, str]] = field(default_factory=list)

    @property
    def fields(self) -> dict[str, str]:
        """The records as one, with the chip that the rows name."""
        of_rows = {n: environment.joined(v) for n, v in self.side.chip.items() if v}
        return of_rows | environment.united(self.records)

    @property
    def interleaved(self) -> bool:
        """Whether the order columns say so."""
        return self.side.in_turn


def read_source(name: str, given: Sequence[str], runs: Path, dropped: Sequence[str] = ()) -> Source:
    """Read one side. Raises InputError."""
    files = [f for g in given for f in _files(g, runs)]
    source = Source(name, files, read_side(files, dropped))
    for path in dict.fromkeys(p for f in files if (p := environment.beside(f))):
        source.records.append(environment.read_record(path))
    if not source.records:
        for root in dict.fromkeys(f.parent for f in files):
            provenance = RunPaths(root).provenance
            if provenance.is_file():
                source.records.append(environment.of_provenance(provenance))
    return source


def _files(given: str, runs: Path) -> list[Path]:
    found = locate(given, runs)
    if found.kind == "file":
        return [found.path]
    if found.kind == "folder":
        files = [p for p in sorted(found.path.glob("*.csv")) if p.is_file() and is_timing(header_of(p))]
        if not files:
            raise InputError(f"{escaped(given)}: holds no CSV of timings (columns kernel, the shape's, us)")
        return files
    run = found.paths
    there = [p for p in (run.bench_runs, run.bench, run.profile, run.tuned) if p.is_file()]
    if not there:
        raise InputError(f"{escaped(given)}: has no bench.csv, profile.csv or tuned.csv; did the run end?")
    return there[:1]
