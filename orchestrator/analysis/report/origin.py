"""The provenance of a page's numbers, as headed lists of names and values."""

from __future__ import annotations

import shlex
import time
from typing import Any

from orchestrator import __version__
from orchestrator.ledger import LedgerReader
from orchestrator.paths import RunPaths
from orchestrator.run.config import RunConfig

MOST_SLOTS = 64
Pairs = list[list[str]]


def origin(ledger: LedgerReader, config: RunConfig, paths: RunPaths) -> list[dict[str, Any]]:
    """Sections: title and pairs of text."""
    asked: Pairs = [
        ["run", config.run],
        ["begun", stamp(config.created)],
        ["command", shlex.join(["gemmfleet", *map(str, config.argv)])],
        ["shapes", f"{config.shapes} (sha256 {config.shapes_sha256[:16]})"],
        ["inventory", config.inventory],
        ["family, tuner", f"{config.family}, {config.tuner}"],
        ["error limit", f"{config.err_ratio:g} of the elements"],
        ["tuned table", config.db or "none named"],
    ]
    asked += [[f"option {name}", str(value)] for name, value in config.options.items()]
    code = sorted({str(s.info.get("code", "")) for s in ledger.slots()} - {""})
    made: Pairs = [
        ["gemmfleet", f"{config.version} tuned, {__version__} wrote this page"],
        ["worker's code", ", ".join(code) or "not known yet"],
        ["controller", str(ledger.meta("controller", ""))],
    ]
    measured = ledger.query(
        """SELECT r.gfx, r.cu_num, r.node, count(*) FROM shapes s JOIN rows r ON r.id=s.row
           WHERE s.state='tuned' GROUP BY 1, 2, 3 ORDER BY 1, 2, 3"""
    )
    on: Pairs = [[node, f"{n:,} winners on {gfx} with {cu_num} CUs"] for gfx, cu_num, node, n in measured]
    spent: Pairs = [[kind, f"{seconds:,.1f} s"] for kind, seconds in sorted(ledger.spent().items())]
    files: Pairs = [[p.name, f"{p.stat().st_size:,} bytes"] for p in paths.results() if p.is_file()]
    sections = [
        ("Asked", asked), ("Made with", made), ("Measured on", on), ("Devices", _devices(ledger)),
        ("Seconds of the workers", spent), ("Files of the run", files),
    ]  # fmt: skip
    return [{"title": title, "pairs": pairs} for title, pairs in sections if pairs]


def stamp(t: float) -> str:
    """A time of the controller's clock, with its zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(t))


def _devices(ledger: LedgerReader) -> Pairs:
    """Slots that say the same are one line."""
    places: dict[str, list[str]] = {}
    for slot in ledger.slots():
        said = {**slot.info, **slot.device}
        words = [str(said[k]) for k in ("device", "gfx") if said.get(k)]
        words += [f"{k} {said[k]}" for k in ("cu_num", "torch", "triton", "rocm", "hip", "aiter") if said.get(k)]
        if slot.info.get("image"):
            words.append(f"image {slot.info['image']}")
        places.setdefault(", ".join(words) or "said nothing", []).append(f"{slot.node}/{slot.slot}")
    return [[_some(where), what] for what, where in list(places.items())[:MOST_SLOTS]]


def _some(places: list[str]) -> str:
    return ", ".join(places[:4]) + (f" and {len(places) - 4} more" if len(places) > 4 else "")
