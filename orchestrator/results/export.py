"""Write the result files of a run from its ledger, each complete or absent (docs/reference/files.md)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from orchestrator.ledger.reader import LedgerReader
from orchestrator.paths import RunPaths
from orchestrator.results.bench import write as write_bench
from orchestrator.results.provenance import render
from orchestrator.tables.tuned import FAILED_EXTRA, PROFILE_EXTRA
from orchestrator.tables.write import cell, no_formula, write_csv
from orchestrator.tuned_db.run_facts import tuned_columns
from orchestrator.userfiles import write_atomic
from worker.tuners.catalog import recorded_tuner


def export(ledger: LedgerReader, paths: RunPaths, provenance: dict[str, Any]) -> None:
    """Write tuned.csv and profile.csv (a bench: its own files), failed.csv and provenance.json as the ledger is now.

    Raises OSError.
    """
    if recorded_tuner(ledger.meta("tuner", "")).side_by_side:  # no winners of a search: backends side by side
        write_bench(ledger, paths, provenance["options"])
    else:
        write_tuned(ledger, paths)
        write_profile(ledger, paths.profile)
    write_failed(ledger, paths)
    write_atomic(paths.provenance, lambda f: print(render(provenance), file=f))


def write_tuned(ledger: LedgerReader, paths: RunPaths) -> None:
    """Write tuned.csv: exactly the shapes tuned in this run, in the family's columns, in the order of the shapes."""
    family = ledger.family
    _write(paths.tuned, family.tuned_header, (tuned_columns(r, family).values() for r in ledger.winners()))


def write_profile(ledger: LedgerReader, path: Path) -> None:
    """Write every candidate, measured or not (us -1), in the order of arrival."""
    family = ledger.family
    settled = {w.id for w in ledger.winners()}
    unsure = {s.id for s in ledger.shapes("tuned") if s.confirmed is False}
    rows = (
        (
            *tuned_columns(r, family).values(), r.attempt, r.node, r.slot, no_formula(r.status), r.spread, r.samples,
            int(r.id in settled), no_formula(r.detail), int(r.id in settled and r.shape in unsure),
        )
        for r in ledger.profile_rows()
    )  # fmt: skip
    _write(path, (*family.tuned_header, *PROFILE_EXTRA), rows)


def write_failed(ledger: LedgerReader, paths: RunPaths) -> None:
    """Write failed.csv: the shapes without a winner, each with the reason and the place of its last attempt."""
    rows = ((*s.key, s.reason, no_formula(s.detail), s.node, s.attempts) for s in ledger.failed())
    _write(paths.failed, (*ledger.family.key_names, *FAILED_EXTRA), rows)


def _write(path: Path, header: Sequence[str], rows: Iterable[Iterable[Any]]) -> None:
    write_csv(path, header, ([cell(v) for v in row] for row in rows))
