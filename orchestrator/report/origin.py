"""The sections of a page on the origin of its data: the request, the software, the devices, the files."""

from __future__ import annotations

import shlex
import time
from typing import Any

from orchestrator import __version__
from orchestrator.ledger.reader import LedgerReader, SlotInfo
from orchestrator.paths import RunConfig, RunPaths
from orchestrator.results.export import measured_on
from worker.text import and_more

MOST_SLOTS = 64
Pairs = list[list[str]]
"""Pairs of text, such as [["run", "20261129-1"], ["begun", "2026-11-29 10:00:00 UTC"]]."""


def describe_origin(ledger: LedgerReader, config: RunConfig, paths: RunPaths) -> list[dict[str, Any]]:
    """The sections on the origin of the data, each a title and pairs of text."""
    code = sorted({str(slot.info.get("code", "")) for slot in ledger.slots()} - {""})
    made_with: Pairs = [
        ["gemmfleet", f"{config.version} tuned, {__version__} wrote this page"],
        ["worker's code", ", ".join(code) or "not known yet"],
        ["controller", str(ledger.meta("controller", ""))],
    ]
    devices = measured_on(ledger.winners())
    winners: Pairs = [[node, f"{n:,} winners on {gfx} with {cu_num} CUs"] for gfx, cu_num, node, n in devices]
    seconds: Pairs = [[kind, f"{spent:,.1f} s"] for kind, spent in sorted(ledger.spent().items())]
    files: Pairs = [[path.name, f"{path.stat().st_size:,} bytes"] for path in paths.results() if path.is_file()]
    sections = {
        "Asked": _request(config),
        "Made with": made_with,
        "Measured on": winners,
        "Devices": _devices(ledger),
        "Seconds of the workers": seconds,
        "Files of the run": files,
    }
    return [{"title": title, "pairs": pairs} for title, pairs in sections.items() if pairs]


def _request(config: RunConfig) -> Pairs:
    return [
        ["run", config.run],
        ["begun", stamp(config.created)],
        ["command", shlex.join(["gemmfleet", *map(str, config.argv)])],
        ["shapes", f"{config.shapes} (sha256 {config.shapes_sha256[:16]})"],
        ["inventory", config.inventory],
        ["family, tuner", f"{config.family}, {config.tuner}"],
        ["error limit", f"{config.err_ratio:g} of the elements"],
        ["tuned table", config.db or "none named"],
        *([f"option {name}", str(value)] for name, value in config.options.items()),
    ]


def stamp(t: float) -> str:
    """A time of the controller's clock, with its zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(t))


def _devices(ledger: LedgerReader) -> Pairs:
    """Devices and software with their slots. Slots with the same facts share a line."""
    places: dict[str, list[str]] = {}
    for slot in ledger.slots():
        places.setdefault(_describe_device(slot), []).append(f"{slot.node}/{slot.slot}")
    return [[and_more(slots, 4), device] for device, slots in list(places.items())[:MOST_SLOTS]]


def _describe_device(slot: SlotInfo) -> str:
    """`AMD Instinct MI355X, gfx950, cu_num 256, torch 2.9.1, image rocm/vllm:1`."""
    facts = {**slot.info, **slot.device}
    words = [str(facts[name]) for name in ("device", "gfx") if facts.get(name)]
    for name in ("cu_num", "torch", "triton", "rocm", "hip", "aiter"):
        if facts.get(name):
            words.append(f"{name} {facts[name]}")
    if slot.info.get("image"):
        words.append(f"image {slot.info['image']}")
    return ", ".join(words) or "unknown"
