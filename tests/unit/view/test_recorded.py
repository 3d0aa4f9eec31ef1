"""The documents of thirty recorded runs with faults are those that people saw when the runs were recorded.

A recording holds facts alone: the journal, the rows, and what workers reported beside them. `replayed` makes a run
folder of it, `documents` draws what `status`, `explain`, the CSV files and the page show of that folder. To draw the
documents again, after a change that is meant to change them: python -m tests.unit.view.test_recorded [NAME...]
"""

from __future__ import annotations

import csv
import json
import lzma
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from orchestrator import events as ev
from orchestrator.command_hints import program
from orchestrator.controller.run_snapshot import RunSnapshot
from orchestrator.families import get_family
from orchestrator.ledger.database import COLUMNS
from orchestrator.ledger.reader import LedgerReader
from orchestrator.ledger.writer import Ledger
from orchestrator.paths import RunConfig, RunPaths, create_run_folder
from orchestrator.report.collector import Collector
from orchestrator.results.export import export, make_provenance
from orchestrator.results.run_results import RunResults
from orchestrator.shapes.model import Shape
from orchestrator.view.explain import explain
from tests.paths import ROOT

FOLDER = ROOT / "tests" / "data" / "recorded"
Recording = dict[str, Any]
ROW = (
    "attempt", "shape", "node", "slot", "t", "winner", *(f.column for f in COLUMNS), "gfx", "cu_num", "extra", "note",
)  # fmt: skip
REPORT = ("device", "exit", "spent", "conditions")
LEFT_OUT = (
    "attempt", "shape", "candidate", "node", "slot", "entry", "name", "outcome", "detail", "source", "confirmed",
)  # fmt: skip


def names() -> list[str]:
    """Names of the recordings."""
    return sorted(p.name.removesuffix(".json.xz") for p in FOLDER.glob("*.json.xz"))


def read(name: str) -> Recording:
    """A recording by its name."""
    found: Recording = json.loads(lzma.decompress((FOLDER / f"{name}.json.xz").read_bytes()))
    return found


def replayed(recording: Recording, runs: Path) -> RunPaths:
    """A run folder with the recording's facts."""
    config = RunConfig(**recording["config"])
    paths = create_run_folder(runs, config.run)
    config.write(paths.config)
    paths.inventory.write_text(recording["inventory"])
    family = get_family(config.family)
    with Ledger.create(paths.ledger) as ledger, ledger.transaction():
        ledger.add_shapes([Shape(i, tuple(key)) for i, key in recording["shapes"]], family)
        for key, value in recording["meta"].items():
            ledger.set_meta(key, value)
        for i, reason, detail, t in recording["skipped"]:
            ledger.skip_shapes([i], detail, t, reason=reason or "")
        by_name = (dict(zip(recording["columns"], row, strict=True)) for row in recording["rows"])
        ledger.put_rows([tuple(row.get(name) for name in ROW) for row in by_name])
        for node, slot, info, device in recording["slots"]:
            ledger.keep_slot_info(node, slot, info, device)
        for raw in recording["left_out"]:
            w = dict(zip(LEFT_OUT, raw, strict=True))
            entry = {
                **json.loads(w["entry"]), "candidate": json.loads(w["candidate"]),
                **{k: w[k] for k in ("name", "outcome", "detail", "source", "confirmed")},
            }  # fmt: skip
            ledger.keep_blocked(attempt=w["attempt"], shape=w["shape"], node=w["node"], slot=w["slot"], entries=[entry])
        for t, kind, data in recording["journal"]:
            ledger.journal(ev.from_json(kind, json.dumps(data)), t)
        for attempt, *values in recording["reports"]:
            ledger.keep_report(attempt, **dict(zip(REPORT, values, strict=True)))
    return paths


NOT_COMPARED = {"made", "program", "name", "files", "controller"}
"""Parts of the documents that name the place, the time or the version of this program."""


def documents(paths: RunPaths, whats: list[str | None]) -> dict[str, Any]:
    """`status`, `explain` of some, the CSV files and the page."""
    with _utc():
        with LedgerReader.open_readonly(paths.ledger) as ledger:
            export(RunResults.read(ledger), paths, {})
            proof = make_provenance(RunResults.read(ledger), RunConfig("", 0.0, [], "", "", "", "", "", ""))
        page = Collector(paths).document()
        page["origin"] = [s for s in page["origin"] if s["title"] not in ("Files of the run", "Made with")]
        found = {
            "status": RunSnapshot(paths).status().to_json(),
            "explain": {what or "": explain(paths, what).to_json() for what in whats},
            "csv": {p.name: _cells(p) for p in (paths.tuned, paths.failed, paths.profile)},
            "page": page,
            "provenance": {k: v for k, v in proof.items() if k not in ("written", "code", "controller")},
        }
    for part in ("status", "page"):
        found[part] = {k: v for k, v in found[part].items() if k not in NOT_COMPARED}
    text = json.dumps(found).replace(f"{program()} ", "gemmfleet ")
    out: dict[str, Any] = json.loads(text.replace(str(paths.root.parent), "RUNS"))
    return out


def _cells(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV file by column: their order says nothing."""
    with path.open(newline="") as f:
        return list(csv.DictReader(f))


@contextmanager
def _utc() -> Iterator[None]:
    """Times of day are those of Greenwich."""
    before = os.environ.get("TZ")
    os.environ["TZ"] = "UTC"
    time.tzset()
    try:
        yield
    finally:
        os.environ.pop("TZ")
        if before is not None:
            os.environ["TZ"] = before
        time.tzset()


@pytest.mark.parametrize("name", names())
def test_the_documents_are_as_recorded(name: str, tmp_path: Path) -> None:
    recording = read(name)
    paths = replayed(recording, tmp_path)
    found = documents(paths, recording["asked"])
    for part, was in recording["documents"].items():
        assert found[part] == was, part
    assert found.keys() == recording["documents"].keys()


def test_there_are_thirty() -> None:
    assert len(names()) == 30


def main(wanted: list[str]) -> None:
    """Draw the documents of recordings again, after a change that is meant to change them."""
    for name in wanted or names():
        with tempfile.TemporaryDirectory() as at:
            recording = read(name)
            recording["documents"] = documents(replayed(recording, Path(at)), recording["asked"])
            text = json.dumps(recording, separators=(",", ":"))
            (FOLDER / f"{name}.json.xz").write_bytes(lzma.compress(text.encode(), preset=9))


if __name__ == "__main__":
    main(sys.argv[1:])
