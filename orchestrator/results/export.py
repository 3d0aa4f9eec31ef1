"""The result files of a run, written from its ledger, each complete or absent (docs/reference/files.md)."""

from __future__ import annotations

import json
import platform
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from orchestrator.configs.winners import FOLDER
from orchestrator.configs.winners import write as write_configs
from orchestrator.ledger.reader import LedgerReader
from orchestrator.paths import RunPaths
from orchestrator.results.bench import BenchResults
from orchestrator.results.run_facts import tuned_columns
from orchestrator.tables.tuned import FAILED_EXTRA, PROFILE_EXTRA, SHOWN
from orchestrator.tables.write import cell, no_formula, utc, write_atomic, write_csv
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
        provenance["configs"] = write_configs(ledger, paths.root / FOLDER)
    write_failed(ledger, paths)
    write_atomic(paths.provenance, render(provenance) + "\n")


def write_tuned(ledger: LedgerReader, paths: RunPaths) -> None:
    """Write tuned.csv: exactly the shapes tuned in this run, in the family's columns, in the order of the shapes."""
    family = ledger.family
    _write(paths.tuned, family.aiter_header, (tuned_columns(r, family).values() for r in ledger.winners()))


def write_profile(ledger: LedgerReader, path: Path) -> None:
    """Write every candidate, measured or not (us -1), in the order of arrival."""
    family = ledger.family
    settled = {w.id for w in ledger.winners()}
    unsure = {s.id for s in ledger.shapes("tuned") if s.confirmed is False}
    rows = (
        (
            *tuned_columns(r, family).values(), r.attempt, r.node, r.slot, *(_shown(r.row.get(name)) for name in SHOWN),
            int(r.id in settled), int(r.id in settled and r.shape in unsure),
        )
        for r in ledger.profile_rows()
    )  # fmt: skip
    _write(path, (*family.aiter_header, *PROFILE_EXTRA), rows)


def _shown(value: Any) -> Any:
    return no_formula(value) if isinstance(value, str) else value


def write_failed(ledger: LedgerReader, paths: RunPaths) -> None:
    """Write failed.csv: the shapes without a winner, each with the reason and the place of its last attempt."""
    rows = ((*s.key, s.reason, no_formula(s.detail), s.node, s.attempts) for s in ledger.failed())
    _write(paths.failed, (*ledger.family.key_names, *FAILED_EXTRA), rows)


def _write(path: Path, header: Sequence[str], rows: Iterable[Iterable[Any]]) -> None:
    write_csv(path, header, ([cell(v) for v in row] for row in rows))


FORMAT = 1
MOST_WITHHELD = 1000
"""Candidates that were left out are listed up to here; the ledger has all."""


@dataclass(frozen=True, slots=True)
class Request:
    """Facts of a run beside its ledger. Hashes are sha256 in hex; `created` epoch
    seconds.

    `argv` and `options` are written as they are: references to the environment must still be references in
    them.
    """

    run: str
    created: float
    argv: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    shapes: str = ""
    shapes_sha256: str = ""
    inventory: str = ""
    inventory_sha256: str = ""
    code_sha: str = ""


def unpromised(ledger: LedgerReader) -> list[str]:
    """A sentence for each AITER that gemmfleet does not promise to drive, with its nodes."""
    nodes: dict[str, list[str]] = {}
    for slot in ledger.slots():
        facts = slot.device.get("aiter")
        text = facts.get("warning") if isinstance(facts, dict) else None
        if isinstance(text, str) and text and slot.node not in nodes.setdefault(text, []):
            nodes[text].append(slot.node)
    return [f"{', '.join(names)}: {text}" for text, names in nodes.items()]


def provenance(ledger: LedgerReader, request: Request) -> dict[str, Any]:
    """The document of provenance.json (docs/reference/files.md)."""
    return {
        "format": FORMAT,
        "run": request.run,
        "state": ledger.state,
        "created": utc(request.created),
        "written": utc(time.time()),
        "argv": list(request.argv),
        "options": dict(request.options),
        "family": ledger.meta("family"),
        "tuner": ledger.meta("tuner"),
        "shapes": {"file": request.shapes, "sha256": request.shapes_sha256},
        "inventory": {"file": request.inventory, "sha256": request.inventory_sha256},
        "code": {"worker_sha": request.code_sha, "gemmfleet": version()},
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
