"""The result files of a run, written from its ledger, each complete or absent (docs/reference/files.md).

At the end of a run the controller calls `make_provenance`, then `export`, which writes the files; a `resume` with
nothing left to do calls `write_results`, because a file may have been damaged meanwhile. A merge takes
`winner_rows` and `candidate_rows`. The files of a bench are in `bench.py`; the record beside a row of a tuned table is
in `run_facts.py`.
"""

from __future__ import annotations

import json
import platform
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from orchestrator import __version__
from orchestrator.configs.winners import write_winners
from orchestrator.files.cells import cell, no_formula, utc
from orchestrator.files.write import write_atomic, write_csv
from orchestrator.ledger.reader import ProfileRow, ShapeState, SlotInfo
from orchestrator.pages import Document
from orchestrator.paths import RunConfig, RunPaths
from orchestrator.results.bench import BenchResults, hide_texts
from orchestrator.results.run_results import RunResults
from orchestrator.tables.table import FAILED_EXTRA, PROFILE_EXTRA, SHOWN
from worker.families import Cell, Family
from worker.tuners.catalog import recorded_tuner

FORMAT = 1
MOST_BLOCKED = 1000
"""Candidates that were not measured are listed up to here; the ledger has all."""


def export(results: RunResults, paths: RunPaths, provenance: Document) -> None:
    """Write the result files and provenance.json. Raises OSError."""
    provenance |= write_results(results, paths, provenance.get("options", {}))
    text = json.dumps(provenance, indent=1, ensure_ascii=False, default=str)
    write_atomic(paths.provenance, f"{text}\n")


def write_results(results: RunResults, paths: RunPaths, options: Document) -> Document:
    """Write tuned.csv and profile.csv (a bench: its own files), failed.csv and config files, and return what
    provenance.json says of the last. `options`: of the run. Raises OSError."""
    ledger = results.ledger
    tuner = recorded_tuner(ledger.meta("tuner", ""))
    if tuner.side_by_side:  # no winners of a search: backends side by side
        BenchResults.of_run(ledger, paths, options).write()
    else:
        write_tuned(results, paths)
        write_profile(results, paths.profile)
    write_failed(results, paths)
    return {"configs": write_winners(ledger, paths.root)} if tuner.produces == "configs" else {}


def write_tuned(results: RunResults, paths: RunPaths) -> None:
    """Write tuned.csv: exactly the shapes tuned in this run, in the family's columns, in the order of the shapes."""
    rows = (tuned_columns(row, results.family).values() for row in results.winners)
    _write(paths.tuned, results.family.aiter_header, rows)


def write_profile(results: RunResults, path: Path) -> None:
    """Write every candidate, measured or not (us -1), in the order of arrival."""
    _write(path, (*results.family.aiter_header, *PROFILE_EXTRA), (row.values() for row in candidate_rows(results)))


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


def winner_rows(results: RunResults) -> Iterator[Document]:
    """The winners as a merge takes them: the columns of tuned.csv, `attempt`, `node`, `slot` and `spread`."""
    for row in results.winners:
        yield {**tuned_columns(row, results.family), **_place(row), "spread": results.spread_of(row) or 0.0}


def candidate_rows(results: RunResults) -> Iterator[Document]:
    """Every candidate as a row of profile.csv: the columns of tuned.csv and those of PROFILE_EXTRA."""
    winner_ids = {winner.id for winner in results.winners}
    unconfirmed = {shape.id for shape, _ in results.unconfirmed}
    for row in results.ledger.profile_rows():
        shown = {name: row.row.get(name) for name in SHOWN}
        for name, value in shown.items():
            if isinstance(value, str):
                shown[name] = no_formula(value)
        is_winner = row.id in winner_ids
        if is_winner:
            shown["spread"] = results.spread_of(row)
        marks = {"winner": int(is_winner), "unconfirmed": int(is_winner and row.shape in unconfirmed)}
        yield {**tuned_columns(row, results.family), **_place(row), **shown, **marks}


def make_provenance(
    results: RunResults, config: RunConfig, *, inventory_sha256: str = "", code_sha: str = ""
) -> Document:
    """The document of provenance.json (docs/reference/files.md). References to the environment stay references."""
    return {
        "format": FORMAT,
        **_describe_request(results, config, inventory_sha256),
        "code": {"worker_sha": code_sha, "gemmfleet": __version__},
        "controller": {
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
        },
        **_describe_machines(results),
        **_describe_outcome(results),
    }


def _describe_request(results: RunResults, config: RunConfig, inventory_sha256: str) -> Document:
    """The request of the run: its options, its times and its files."""
    tuner = results.ledger.meta("tuner")
    options = dict(config.options)
    if recorded_tuner(tuner or "").side_by_side:
        options = hide_texts(options)
    return {
        "run": config.run,
        "state": results.ledger.state,
        "created": utc(config.created),
        "written": utc(time.time()),
        "argv": list(config.argv),
        "options": options,
        "family": results.family.name,
        "tuner": tuner,
        "shapes": {"file": config.shapes, "sha256": config.shapes_sha256},
        "inventory": {"file": config.inventory, "sha256": inventory_sha256},
    }


def _describe_machines(results: RunResults) -> Document:
    """The devices, images and AITERs of the slots, and what was measured where."""
    slots = results.slots
    shared = []
    for node in results.ledger.replayed.nodes.values():
        for since, state, why in node.history:
            if state == "shared":  # from then on it ran beside other jobs
                shared.append({"node": node.name, "since": utc(since), "with": why})
    winners_by_device = Counter((winner.gfx, winner.cu_num or 0, winner.node) for winner in results.winners)
    return {
        "devices": [{"node": s.node, "slot": s.slot, "device": s.device, "worker": s.info} for s in slots],
        "images": {slot.node: slot.info["image"] for slot in slots if slot.info.get("image")},
        "measured_on": [
            {"gfx": gfx, "cu_num": cu_num, "node": node, "tuned": tuned}
            for (gfx, cu_num, node), tuned in sorted(winners_by_device.items())
        ],
        "shared": shared,
        "unpromised": describe_unpromised(slots),
    }


def _describe_outcome(results: RunResults) -> Document:
    """The results of the shapes by number, and the candidates that were blocked."""
    ledger = results.ledger
    name_key = results.family.named_key
    unconfirmed = []
    for shape, blocked in results.unconfirmed:  # their winners were chosen without these candidates
        candidates = [candidate.to_json() for candidate in blocked[:MOST_BLOCKED]]
        unconfirmed.append({"shape": name_key(shape.key), **_place(shape), "why": shape.detail, "withheld": candidates})
    withheld = []
    for candidate in ledger.blocked_candidates()[:MOST_BLOCKED]:
        withheld.append({"shape": name_key(ledger.keys[candidate.shape]), **candidate.to_json()})
    return {
        "counts": results.counts.to_json(),
        "failures": ledger.failures(),
        "unconfirmed": unconfirmed,
        "withheld": withheld,
        "spent_s": {part: round(seconds, 3) for part, seconds in sorted(ledger.spent().items())},
    }


def describe_unpromised(slots: Iterable[SlotInfo]) -> list[str]:
    """A sentence for each AITER that gemmfleet does not promise to drive, with its nodes."""
    nodes: dict[str, dict[str, None]] = {}
    for slot in slots:
        aiter = slot.device.get("aiter")
        warning = aiter.get("warning") if isinstance(aiter, dict) else None
        if warning and isinstance(warning, str):
            nodes.setdefault(warning, {})[slot.node] = None
    return [f"{', '.join(names)}: {warning}" for warning, names in nodes.items()]
