"""The result files of a run, written from its ledger, each complete or absent (docs/reference/files.md).

The controller calls `provenance` and `export` at the end of a run; a merge takes `winners` and `candidates`. The files
of a bench are in `bench.py`, the record beside a row of a tuned table in `run_facts.py`.
"""

from __future__ import annotations

import json
import platform
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from orchestrator.configs.winners import write_winners
from orchestrator.files.cells import cell, no_formula, utc
from orchestrator.files.write import write_atomic, write_csv
from orchestrator.ledger.reader import LedgerReader, ProfileRow, ShapeState
from orchestrator.paths import RunConfig, RunPaths
from orchestrator.results import Document
from orchestrator.results.bench import BenchResults, redacted
from orchestrator.results.run_results import RunResults
from orchestrator.tables.table import FAILED_EXTRA, PROFILE_EXTRA, SHOWN
from worker.families import Cell, Family
from worker.tuners.catalog import recorded_tuner

FORMAT = 1
MOST_BLOCKED = 1000
"""Candidates that were not measured are listed up to here; the ledger has all."""


def export(results: RunResults, paths: RunPaths, provenance: Document) -> None:
    """Write tuned.csv and profile.csv (a bench: its own files), failed.csv and provenance.json.

    Raises OSError.
    """
    ledger = results.ledger
    tuner = recorded_tuner(ledger.meta("tuner", ""))
    if tuner.side_by_side:  # no winners of a search: backends side by side
        BenchResults.of_run(ledger, paths, provenance["options"]).write()
    else:
        write_tuned(results, paths)
        write_profile(results, paths.profile)
    if tuner.produces == "configs":
        provenance["configs"] = write_winners(ledger, paths.root)
    write_failed(results, paths)
    text = json.dumps(provenance, indent=1, ensure_ascii=False, default=str)
    write_atomic(paths.provenance, f"{text}\n")


def write_tuned(results: RunResults, paths: RunPaths) -> None:
    """Write tuned.csv: exactly the shapes tuned in this run, in the family's columns, in the order of the shapes."""
    rows = (tuned_columns(row, results.family).values() for row in results.winners)
    _write(paths.tuned, results.family.aiter_header, rows)


def write_profile(results: RunResults, path: Path) -> None:
    """Write every candidate, measured or not (us -1), in the order of arrival."""
    _write(path, (*results.family.aiter_header, *PROFILE_EXTRA), (row.values() for row in candidates(results)))


def write_failed(results: RunResults, paths: RunPaths) -> None:
    """Write failed.csv: the shapes without a winner, each with the reason and the place of its last attempt."""
    rows = ((*s.key, s.reason, no_formula(s.detail), s.node, s.attempts) for s in results.failed)
    _write(paths.failed, (*results.family.key_names, *FAILED_EXTRA), rows)


def _write(path: Path, header: Sequence[str], rows: Iterable[Iterable[Any]]) -> None:
    write_csv(path, header, (map(cell, row) for row in rows))


def tuned_columns(row: ProfileRow, family: Family) -> dict[str, Cell]:
    """A ledger's row by the columns of `family.tuned_header`, in order; "" for what the row lacks."""
    chip: dict[str, Cell] = {"gfx": row.gfx, "cu_num": "" if row.cu_num is None else row.cu_num}
    chip = {name: chip[name] for name in family.chip_columns}
    return chip | family.named_key(row.key) | family.row_to_columns(row.row)


def _place(row: ProfileRow | ShapeState) -> dict[str, str]:
    return {"attempt": row.attempt, "node": row.node, "slot": row.slot}


def winners(results: RunResults) -> Iterator[Document]:
    """The rows of the shapes tuned in a run as a merge takes them, each with its spread."""
    for row in results.winners:
        spread = results.noisy.get(row.shape) or row.row.get("spread", 0.0)
        yield {**tuned_columns(row, results.family), **_place(row), "spread": spread}


def candidates(results: RunResults) -> Iterator[Document]:
    """The rows of profile.csv: those of every candidate. The spread of a noisy winner covers its first time too."""
    winner_ids = {winner.id for winner in results.winners}
    unconfirmed = {shape.id for shape, _ in results.unconfirmed}
    for row in results.ledger.profile_rows():
        shown = {name: row.row.get(name) for name in SHOWN}
        for name, value in shown.items():
            if isinstance(value, str):
                shown[name] = no_formula(value)
        is_winner = row.id in winner_ids
        if is_winner and row.shape in results.noisy:
            shown["spread"] = results.noisy[row.shape]
        marks = {"winner": int(is_winner), "unconfirmed": int(is_winner and row.shape in unconfirmed)}
        yield {**tuned_columns(row, results.family), **_place(row), **shown, **marks}


def provenance(results: RunResults, config: RunConfig, *, inventory_sha256: str = "", code_sha: str = "") -> Document:
    """The document of provenance.json (docs/reference/files.md). References to the environment stay references."""
    ledger = results.ledger
    options = dict(config.options)
    if recorded_tuner(ledger.meta("tuner", "")).side_by_side:
        options = redacted(options)
    slots = ledger.slots()
    return {
        "format": FORMAT,
        "run": config.run,
        "state": ledger.state,
        "created": utc(config.created),
        "written": utc(time.time()),
        "argv": list(config.argv),
        "options": options,
        "family": ledger.meta("family"),
        "tuner": ledger.meta("tuner"),
        "shapes": {"file": config.shapes, "sha256": config.shapes_sha256},
        "inventory": {"file": config.inventory, "sha256": inventory_sha256},
        "code": {"worker_sha": code_sha, "gemmfleet": _version()},
        "controller": {
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "devices": [{"node": s.node, "slot": s.slot, "device": s.device, "worker": s.info} for s in slots],
        "images": {slot.node: slot.info["image"] for slot in slots if slot.info.get("image")},
        "measured_on": [
            {"gfx": gfx, "cu_num": cu_num, "node": node, "tuned": n}
            for gfx, cu_num, node, n in measured_on(results.winners)
        ],
        "shared": _shared_nodes(ledger),
        "unpromised": unpromised(ledger),
        "counts": results.counts.to_json(),
        "failures": ledger.failures(),
        "unconfirmed": _unconfirmed_shapes(results),
        "withheld": _blocked_candidates(ledger),
        "spent_s": {part: round(seconds, 3) for part, seconds in sorted(ledger.spent().items())},
    }


def _version() -> str:
    """This program's version."""
    try:
        return metadata.version("gemmfleet")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"


def measured_on(winners: Iterable[ProfileRow]) -> list[tuple[str, int, str, int]]:
    """(gfx, cu_num, node, number of winners) of the devices that have some."""
    counts = Counter((winner.gfx, winner.cu_num or 0, winner.node) for winner in winners)
    return [(*device, count) for device, count in sorted(counts.items())]


def _shared_nodes(ledger: LedgerReader) -> list[Document]:
    """The times from which a node ran beside other jobs."""
    documents = []
    for node in ledger.replayed.nodes.values():
        for since, state, why in node.history:
            if state == "shared":
                documents.append({"node": node.name, "since": utc(since), "with": why})
    return documents


def unpromised(ledger: LedgerReader) -> list[str]:
    """A sentence for each AITER that gemmfleet does not promise to drive, with its nodes."""
    nodes: dict[str, dict[str, None]] = {}
    for slot in ledger.slots():
        aiter = slot.device.get("aiter")
        warning = aiter.get("warning") if isinstance(aiter, dict) else None
        if warning and isinstance(warning, str):
            nodes.setdefault(warning, {})[slot.node] = None
    return [f"{', '.join(names)}: {warning}" for warning, names in nodes.items()]


def _unconfirmed_shapes(results: RunResults) -> list[Document]:
    """Winners that were chosen without some of the candidates."""
    documents = []
    for shape, blocked in results.unconfirmed:
        documents.append(
            {
                "shape": results.family.named_key(shape.key),
                **_place(shape),
                "why": shape.detail,
                "withheld": [candidate.to_json() for candidate in blocked[:MOST_BLOCKED]],
            }
        )
    return documents


def _blocked_candidates(ledger: LedgerReader) -> list[Document]:
    """Candidates that no slot should measure, or that a slot lost though they run elsewhere."""
    documents = []
    for candidate in ledger.blocked_candidates()[:MOST_BLOCKED]:
        shape = ledger.family.named_key(ledger.keys[candidate.shape])
        documents.append({"shape": shape, **candidate.to_json()})
    return documents
