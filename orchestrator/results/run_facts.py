"""The measurement of each winner of a run, from its ledger: the fields of its record beside a tuned table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.errors import OrchestratorError
from orchestrator.ledger.reader import NO_REPORT, LedgerReader, ProfileRow, Report, SlotInfo
from orchestrator.paths import RunPaths
from orchestrator.tables.locate import provenance_of
from orchestrator.tables.policy import Newcomer
from orchestrator.tables.tuned import Key, KeyFault, key_of, number_of
from orchestrator.tables.write import cell, utc
from worker.families import Cell, Family
from worker.tuners.catalog import recorded_tuner

CLOCKS = ("clock_mhz", "memory_clock_mhz", "temperature_c", "power_w")
_COUNTS = "SELECT attempt, shape, count(*), sum(status <> 'ok') FROM rows WHERE winner=0 GROUP BY attempt, shape"


class RunFacts:
    """The fields of a newcomer's record, from the run's ledger and its provenance.json; callable.

    A run without a ledger (collected from elsewhere) gives what its provenance.json says.
    """

    def __init__(self, folder: Path) -> None:
        self._run = RunPaths(folder)
        self._of_run = _of_run(self._run)
        self._by_key: dict[Key, tuple[float, dict[str, Any]]] = {}
        if self._run.ledger.is_file():
            try:
                with LedgerReader.open_readonly(self._run.ledger) as ledger:
                    self._read(ledger)
            except OrchestratorError as e:
                self._of_run["note"] = f"the ledger could not be read: {e}"[:200]

    def __call__(self, new: Newcomer) -> Mapping[str, Any]:
        """The fields of its record."""
        us, facts = self._by_key.get(new.key, (None, {}))
        same = us is not None and abs(us - new.us) <= 1e-3 * new.us
        beside = {n: new.cells[n] for n in ("attempt", "node", "slot") if new.cells.get(n)}
        return {**self._of_run, **(facts if same else beside)}

    def _read(self, ledger: LedgerReader) -> None:
        family, tuner = ledger.family, str(ledger.meta("tuner") or "")
        slots = {(s.node, s.slot): s for s in ledger.slots()}
        reports = ledger.reports()
        counts = {(a, s): (n, bad) for a, s, n, bad in ledger.query(_COUNTS)}
        for row in ledger.winners():
            cells = {name: cell(value) for name, value in tuned_columns(row, family).items()}
            try:
                key = key_of(cells, family)
            except KeyFault:
                continue
            us = number_of(cells["us"])
            if us is not None:
                facts = _facts(row, slots.get((row.node, row.slot)), reports.get(row.attempt, NO_REPORT), tuner)
                tried, failed = counts.get((row.attempt, row.shape), (None, None))
                self._by_key[key] = (us, {**facts, "tried": tried, "failed": failed})


def tuned_columns(row: ProfileRow, family: Family) -> dict[str, Cell]:
    """A ledger's row by the columns of `family.tuned_header`, in order; "" for what the row lacks."""
    key = dict(zip(family.key_names, row.key, strict=True))
    chip: dict[str, Cell] = {"gfx": row.gfx, "cu_num": "" if row.cu_num is None else row.cu_num}
    return {**{n: chip[n] for n in family.chip_columns}, **key, **family.row_to_columns(row.row)}


def _of_run(paths: RunPaths) -> dict[str, Any]:
    known = provenance_of(paths.root)
    if not known:
        return {"source": str(paths.root)}
    return {"run": str(known.get("run") or paths.run), "flags": known.get("options")}


def _facts(row: ProfileRow, slot: SlotInfo | None, report: Report, tuner: str) -> dict[str, Any]:
    info = slot.info if slot else {}
    device = {**(slot.device if slot else {}), **report.device}
    aiter = _dict(device.get("aiter"))
    versions = {**info, **device, **_dict(device.get("versions"))}
    before = report.conditions.get("before", {})
    return {
        "image": info.get("image") or aiter.get("image") or "",
        "tuner": tuner_version(tuner, {**versions, "aiter": aiter}),
        "kind": recorded_tuner(tuner).produces or None,
        "attempt": row.attempt,
        "node": row.node,
        "slot": row.slot,
        "device": device.get("device"),
        "gpu": before.get("id") or before.get("pci"),
        "aiter_commit": aiter.get("commit"),
        "rocm": versions.get("rocm") or versions.get("hip"),
        "spread": row.row.get("spread"),
        "samples": row.row.get("samples"),
        "margin": row.row.get("margin"),
        "clocks": {when: {k: c[k] for k in CLOCKS if k in c} for when, c in report.conditions.items()},
        "time": utc(row.t),
    }


def tuner_version(tuner: str, device: Mapping[str, Any]) -> str:
    """`aiter e4048607a5`, `torch 2.9.1`: what must be the same for two rows to be of one make; "" where not known."""
    version = recorded_tuner(tuner).version(tuner, device)
    return f"{tuner} {version}" if tuner and version else ""


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
