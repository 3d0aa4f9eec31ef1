"""Write the result files of a run from its ledger, each complete or absent (docs/reference/files.md)."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from orchestrator.ledger.reader import LedgerReader
from orchestrator.paths import RunPaths
from orchestrator.results.champions import cell
from orchestrator.results.provenance import render
from orchestrator.results.rows import tuned_columns
from orchestrator.userfiles import write_atomic
from worker.tuners.catalog import recorded_tuner

PROFILE_EXTRA = ("attempt", "node", "slot", "status", "spread", "samples", "winner", "detail", "unconfirmed")
"""Columns of profile.csv beyond the tuned table's. winner: 1 where this row settled its shape; unconfirmed: 1 where
candidates were left out then that faulted on one slot alone."""

FAILED_EXTRA = ("reason", "detail", "node", "attempts")


def export(ledger: LedgerReader, paths: RunPaths, provenance: dict[str, Any]) -> None:
    """Write tuned.csv and profile.csv (a bench: its own files), failed.csv and provenance.json as the ledger is now.

    Raises OSError.
    """
    if recorded_tuner(ledger.meta("tuner", "")).side_by_side:  # no winners of a search: backends side by side
        from orchestrator.bench.files import write

        write(ledger, paths)
    else:
        write_tuned(ledger, paths)
        write_profile(ledger, paths)
    write_failed(ledger, paths)
    write_atomic(paths.provenance, lambda f: print(render(provenance), file=f))


def write_tuned(ledger: LedgerReader, paths: RunPaths) -> None:
    """tuned.csv: exactly the shapes tuned in this run, in the family's columns, in the order of the shapes."""
    family = ledger.family
    rows = (tuned_columns(r, family).values() for r in ledger.winners())
    write_atomic(paths.tuned, lambda f: _write(f, family.tuned_header, rows))


def write_profile(ledger: LedgerReader, paths: RunPaths) -> None:
    """profile.csv: every candidate, measured or not (us -1), in the order of arrival."""
    write_profile_to(ledger, paths.profile)


def write_profile_to(ledger: LedgerReader, path: Path) -> None:
    """The same to another place."""
    family = ledger.family
    settled = {w.id for w in ledger.winners()}
    unsure = {s.id for s in ledger.shapes("tuned") if s.confirmed is False}
    rows = (
        (
            *tuned_columns(r, family).values(),
            *(
                r.attempt,
                r.node,
                r.slot,
                data(r.status),
                r.spread,
                r.samples,
                int(r.id in settled),
                data(r.detail),
                int(r.id in settled and r.shape in unsure),
            ),
        )
        for r in ledger.profile_rows()
    )
    write_atomic(path, lambda f: _write(f, (*family.tuned_header, *PROFILE_EXTRA), rows))


def write_failed(ledger: LedgerReader, paths: RunPaths) -> None:
    """failed.csv: the shapes that did not make it, with reason and where they were seen last."""
    rows = ((*s.key, s.reason, data(s.detail), s.node, s.attempts) for s in ledger.failed())
    header = (*ledger.family.key_names, *FAILED_EXTRA)
    write_atomic(paths.failed, lambda f: _write(f, header, rows))


def data(text: str) -> str:
    """Text from a node for a cell that no program reads: what a spreadsheet would take for a formula gets a `'`."""
    return "'" + text if text[:1] in ("=", "+", "-", "@", "\t", "\r") and text else text


def _write(f: TextIO, header: Sequence[str], rows: Iterable[Iterable[Any]]) -> None:
    out = csv.writer(f, lineterminator="\n")
    out.writerow(header)
    out.writerows([cell(v) for v in row] for row in rows)
