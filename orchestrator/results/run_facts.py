"""The record of a newcomer, which a merge keeps beside its row in a tuned table: where and how it was measured.

A merge calls `RunFacts` with each row that it takes from a run, and keeps the record that it returns, such as

    {"run": "20261129-1", "flags": {}, "image": "sha256:ab12...", "tuner": "aiter e4048607a5", "attempt": "g0001-1",
     "node": "n1", "slot": "0", "device": "AMD Instinct MI355X", "spread": 0.004, "tried": 31, "failed": 2, ...}
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.errors import OrchestratorError
from orchestrator.files.cells import cell, utc
from orchestrator.ledger.reader import NO_REPORT, LedgerReader, ProfileRow, Report, SlotInfo
from orchestrator.pages import Document
from orchestrator.paths import RunPaths
from orchestrator.results.export import tuned_columns
from orchestrator.results.run_results import RunResults
from orchestrator.tables.keys import Key, KeyFault, key_of, number_of
from orchestrator.tables.newcomers import Newcomer
from orchestrator.tables.run_folders import provenance_of
from worker.tuners.catalog import recorded_tuner

CLOCKS = ("clock_mhz", "memory_clock_mhz", "temperature_c", "power_w")
_COUNTS = "SELECT attempt, shape, count(*), sum(status <> 'ok') FROM rows WHERE winner=0 GROUP BY attempt, shape"


class RunFacts:
    """Makes the records of a run's winners; called with a newcomer, it returns that newcomer's.

    They come from the run's results (without `results`: from its ledger) and its provenance.json. A run without a
    ledger, collected from elsewhere, gives only what its provenance.json says.
    """

    def __init__(self, folder: Path, results: RunResults | None = None) -> None:
        paths = RunPaths(folder)
        self._run_fields: Document = {"source": str(folder)}
        self._by_key: dict[Key, tuple[float, Document]] = {}
        document = provenance_of(folder)
        if document:
            self._run_fields = {"run": str(document.get("run") or paths.run), "flags": document.get("options")}
        if results is not None:
            self._read(results)
        elif paths.ledger.is_file():
            try:
                with LedgerReader.open_readonly(paths.ledger) as ledger:
                    self._read(RunResults.read(ledger))
            except OrchestratorError as e:
                self._run_fields["note"] = f"the ledger could not be read: {e}"[:200]

    def __call__(self, new: Newcomer) -> Document:
        """The fields of its record. If its time is not that of the ledger's winner, only its place is known."""
        us, fields = self._by_key.get(new.key, (None, {}))
        if us is None or abs(us - new.us) > 1e-3 * new.us:
            fields = {name: new.cells[name] for name in ("attempt", "node", "slot") if new.cells.get(name)}
        return self._run_fields | fields

    def _read(self, results: RunResults) -> None:
        """Keep the fields of all winners by their keys in a table."""
        ledger = results.ledger
        tuner = str(ledger.meta("tuner") or "")
        slots = {(slot.node, slot.slot): slot for slot in results.slots}
        reports = ledger.reports()
        counts = {(attempt, shape): numbers for attempt, shape, *numbers in ledger.query(_COUNTS)}
        for row in results.winners:
            cells = {name: cell(value) for name, value in tuned_columns(row, results.family).items()}
            try:
                key = key_of(cells, results.family)
            except KeyFault:
                continue
            us = number_of(cells["us"])
            if us is None:
                continue
            slot = slots.get((row.node, row.slot)) or SlotInfo(row.node, row.slot, {}, {})
            report = reports.get(row.attempt, NO_REPORT)
            fields = _fields(row, slot, report, tuner, results.spread_of(row))
            fields["tried"], fields["failed"] = counts.get((row.attempt, row.shape), (None, None))
            self._by_key[key] = (us, fields)


def _fields(row: ProfileRow, slot: SlotInfo, report: Report, tuner: str, spread: float | None) -> Document:
    """The fields of a winner. What its attempt reports of the device counts before what its slot reported last."""
    device = {**slot.device, **report.device}
    aiter = _object(device.get("aiter"))
    versions = {**slot.info, **device, **_object(device.get("versions"))}
    before = report.conditions.get("before", {})
    spec = recorded_tuner(tuner)
    version = spec.version(tuner, {**versions, "aiter": aiter})
    clocks = {}
    for moment, readings in report.conditions.items():
        clocks[moment] = {name: readings[name] for name in CLOCKS if name in readings}
    return {
        "image": slot.info.get("image") or aiter.get("image") or "",
        # `aiter e4048607a5`, `torch 2.9.1`: what must be the same for two rows to be of one make
        "tuner": f"{tuner} {version}" if tuner and version else "",
        "kind": spec.produces or None,
        "attempt": row.attempt,
        "node": row.node,
        "slot": row.slot,
        "device": device.get("device"),
        "gpu": before.get("id") or before.get("pci"),
        "aiter_commit": aiter.get("commit"),
        "rocm": versions.get("rocm") or versions.get("hip"),
        "spread": spread,
        "samples": row.row.get("samples"),
        "margin": row.row.get("margin"),
        "clocks": clocks,
        "time": utc(row.t),
    }


def _object(value: Any) -> Document:
    return value if isinstance(value, dict) else {}
