"""Provenance of a run's numbers: request, code, devices."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from orchestrator.events import NodeBusy
from orchestrator.ledger.reader import LedgerReader
from orchestrator.results.untried_kinds import untried_kinds

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


def provenance(ledger: LedgerReader, request: Request) -> dict[str, Any]:
    """The document of provenance.json (docs/reference/files.md)."""
    return {
        "format": FORMAT,
        "run": request.run,
        "state": ledger.state,
        "created": _utc(request.created),
        "written": _utc(time.time()),
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
            {"gfx": gfx, "cu_num": cu_num, "node": node, "tuned": n}
            for gfx, cu_num, node, n in ledger.query(
                """SELECT r.gfx, r.cu_num, r.node, count(*) FROM shapes s JOIN rows r ON r.id=s.row
                   WHERE s.state='tuned' GROUP BY 1, 2, 3 ORDER BY 1, 2, 3"""
            )
        ],
        "shared": [
            {"node": r.node, "since": _utc(t), "with": r.detail}
            for t, r in ledger.journal_records()
            if isinstance(r, NodeBusy) and r.doing == "share"
        ],
        "missing_kinds": untried_kinds(ledger),
        "counts": ledger.counts().to_json(),
        "failures": ledger.failures(),
        "unconfirmed": [
            {
                "shape": dict(zip(ledger.family.key_names, u.key, strict=True)),
                "attempt": u.attempt,
                "node": u.node,
                "slot": u.slot,
                "why": u.detail,
                "withheld": [w.to_json() for w in u.withheld[:MOST_WITHHELD]],
            }
            for u in ledger.unconfirmed()
        ],
        "withheld": _withheld(ledger),
        "spent_s": {k: round(v, 3) for k, v in sorted(ledger.spent().items())},
    }


def _withheld(ledger: LedgerReader) -> list[dict[str, Any]]:
    """Candidates that no slot should measure, or that a slot lost though they run elsewhere."""
    names = ledger.family.key_names
    return [
        {"shape": dict(zip(names, ledger.key(w.shape), strict=True)), **w.to_json()}
        for w in ledger.left_out()[:MOST_WITHHELD]
    ]


def render(document: Mapping[str, Any]) -> str:
    """As JSON for people and programs."""
    return json.dumps(document, indent=1, ensure_ascii=False, default=str)


def version() -> str:
    """This program's version."""
    try:
        return metadata.version("gemmfleet")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"


def _utc(t: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(t))
