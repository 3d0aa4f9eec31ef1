"""The result files of a run, written from its ledger, each complete or absent (docs/reference/files.md).

Also the measurement of each winner: the fields of its record beside a tuned table.
"""

from __future__ import annotations

import json
import platform
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from orchestrator.configs.winners import write_winners
from orchestrator.errors import OrchestratorError
from orchestrator.files.cells import cell, no_formula, utc
from orchestrator.files.write import write_atomic, write_csv
from orchestrator.ledger.reader import NO_REPORT, LedgerReader, ProfileRow, Report, SlotInfo
from orchestrator.paths import RunConfig, RunPaths
from orchestrator.results.bench import BenchResults, redacted
from orchestrator.tables.locate import provenance_of
from orchestrator.tables.policy import Newcomer
from orchestrator.tables.tuned import FAILED_EXTRA, PROFILE_EXTRA, SHOWN, Key, KeyFault, key_of, number_of
from worker.families import Cell, Family
from worker.tuners.catalog import recorded_tuner


def export(ledger: LedgerReader, paths: RunPaths, provenance: dict[str, Any]) -> None:
    """Write tuned.csv and profile.csv (a bench: its own files), failed.csv and provenance.json as the ledger is now.

    Raises OSError.
    """
    if recorded_tuner(ledger.meta("tuner", "")).side_by_side:  # no winners of a search: backends side by side
        BenchResults.of_run(ledger, paths, provenance["options"]).write()
    else:
        write_tuned(ledger, paths)
        write_profile(ledger, paths.profile)
    if recorded_tuner(ledger.meta("tuner", "")).produces == "configs":
        provenance["configs"] = write_winners(ledger, paths.root)
    write_failed(ledger, paths)
    write_atomic(paths.provenance, render(provenance) + "\n")


def write_tuned(ledger: LedgerReader, paths: RunPaths) -> None:
    """Write tuned.csv: exactly the shapes tuned in this run, in the family's columns, in the order of the shapes."""
    _write(
        paths.tuned, ledger.family.aiter_header, (tuned_columns(r, ledger.family).values() for r in ledger.winners())
    )


def write_profile(ledger: LedgerReader, path: Path) -> None:
    """Write every candidate, measured or not (us -1), in the order of arrival."""
    _write(path, (*ledger.family.aiter_header, *PROFILE_EXTRA), (row.values() for row in candidates(ledger)))


def winners(ledger: LedgerReader) -> Iterator[dict[str, Any]]:
    """The rows of the shapes tuned in a run as a merge takes them, each with its spread."""
    noisy = ledger.noisy()
    for row in ledger.winners():
        spread = noisy.get(row.shape) or row.row.get("spread", 0.0)
        place = {"attempt": row.attempt, "node": row.node, "slot": row.slot, "spread": spread}
        yield tuned_columns(row, ledger.family) | place


def candidates(ledger: LedgerReader) -> Iterator[dict[str, Any]]:
    """The rows of profile.csv: those of every candidate. The spread of a noisy winner covers its first time too."""
    settled, noisy = {w.id for w in ledger.winners()}, ledger.noisy()
    unsure = {s.id for s in ledger.shapes("tuned") if s.confirmed is False}
    for r in ledger.profile_rows():
        shown = {n: no_formula(v) if isinstance(v := r.row.get(n), str) else v for n in SHOWN}
        if r.id in settled and r.shape in noisy:
            shown["spread"] = noisy[r.shape]
        marks = {"winner": int(r.id in settled), "unconfirmed": int(r.id in settled and r.shape in unsure)}
        place = {"attempt": r.attempt, "node": r.node, "slot": r.slot}
        yield tuned_columns(r, ledger.family) | place | shown | marks


def write_failed(ledger: LedgerReader, paths: RunPaths) -> None:
    """Write failed.csv: the shapes without a winner, each with the reason and the place of its last attempt."""
    rows = ((*s.key, s.reason, no_formula(s.detail), s.node, s.attempts) for s in ledger.failed())
    _write(paths.failed, (*ledger.family.key_names, *FAILED_EXTRA), rows)


def _write(path: Path, header: Sequence[str], rows: Iterable[Iterable[Any]]) -> None:
    write_csv(path, header, ([cell(v) for v in row] for row in rows))


FORMAT = 1
MOST_WITHHELD = 1000
"""Candidates that were left out are listed up to here; the ledger has all."""


def unpromised(ledger: LedgerReader) -> list[str]:
    """A sentence for each AITER that gemmfleet does not promise to drive, with its nodes."""
    nodes: dict[str, list[str]] = {}
    for slot in ledger.slots():
        facts = slot.device.get("aiter")
        text = facts.get("warning") if isinstance(facts, dict) else None
        if isinstance(text, str) and text and slot.node not in nodes.setdefault(text, []):
            nodes[text].append(slot.node)
    return [f"{', '.join(names)}: {text}" for text, names in nodes.items()]


def provenance(
    ledger: LedgerReader, config: RunConfig, *, inventory_sha256: str = "", code_sha: str = ""
) -> dict[str, Any]:
    """The document of provenance.json (docs/reference/files.md). References to the environment stay references."""
    bench = recorded_tuner(ledger.meta("tuner", "")).side_by_side
    return {
        "format": FORMAT,
        "run": config.run,
        "state": ledger.state,
        "created": utc(config.created),
        "written": utc(time.time()),
        "argv": list(config.argv),
        "options": redacted(config.options) if bench else dict(config.options),
        "family": ledger.meta("family"),
        "tuner": ledger.meta("tuner"),
        "shapes": {"file": config.shapes, "sha256": config.shapes_sha256},
        "inventory": {"file": config.inventory, "sha256": inventory_sha256},
        "code": {"worker_sha": code_sha, "gemmfleet": version()},
        "controller": {
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "devices": [{"node": s.node, "slot": s.slot, "device": s.device, "worker": s.info} for s in ledger.slots()],
        "images": {s.node: s.info["image"] for s in ledger.slots() if s.info.get("image")},
        "measured_on": [
            {"gfx": gfx, "cu_num": cu_num, "node": node, "tuned": n} for gfx, cu_num, node, n in measured_on(ledger)
        ],
        "shared": [
            {"node": node.name, "since": utc(t), "with": why}
            for node in ledger.replayed.nodes.values()
            for t, to, why in node.history
            if to == "shared"
        ],
        "unpromised": unpromised(ledger),
        "counts": ledger.counts().to_json(),
        "failures": ledger.failures(),
        "unconfirmed": [
            {
                "shape": dict(zip(ledger.family.key_names, u.key, strict=True)),
                "attempt": u.attempt,
                "node": u.node,
                "slot": u.slot,
                "why": u.detail,
                "withheld": [w.to_json() for w in left_out[:MOST_WITHHELD]],
            }
            for u, left_out in ledger.unconfirmed()
        ],
        "withheld": _withheld(ledger),
        "spent_s": {k: round(v, 3) for k, v in sorted(ledger.spent().items())},
    }


def measured_on(ledger: LedgerReader) -> list[tuple[str, int, str, int]]:
    """(gfx, cu_num, node, number of winners) of the devices that have some."""
    found = Counter((w.gfx, w.cu_num or 0, w.node) for w in ledger.winners())
    return [(*device, n) for device, n in sorted(found.items())]


def _withheld(ledger: LedgerReader) -> list[dict[str, Any]]:
    """Candidates that no slot should measure, or that a slot lost though they run elsewhere."""
    names = ledger.family.key_names
    return [
        {"shape": dict(zip(names, ledger.keys[w.shape], strict=True)), **w.to_json()}
        for w in ledger.left_out()[:MOST_WITHHELD]
    ]


def render(document: Mapping[str, Any]) -> str:
    """The document as JSON for people and programs."""
    return json.dumps(document, indent=1, ensure_ascii=False, default=str)


def version() -> str:
    """This program's version."""
    try:
        return metadata.version("gemmfleet")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"


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
        noisy = ledger.noisy()
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
                spread = noisy.get(row.shape) or facts["spread"]
                self._by_key[key] = (us, {**facts, "spread": spread, "tried": tried, "failed": failed})


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
