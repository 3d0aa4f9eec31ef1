"""The sections of a page on the origin of its data: the request, the software, the devices, the files."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Iterable, Sequence

from orchestrator import __version__
from orchestrator.ledger.reader import LedgerReader, SlotInfo
from orchestrator.pages import Document
from orchestrator.paths import RunConfig, RunPaths
from orchestrator.report.measured import Winner
from worker.text import and_more

MOST_DEVICE_LINES = 64
"""The page has at most this many lines of devices. Slots with the same device and software share a line."""
Pairs = list[list[str]]
"""Pairs of text, such as [["run", "20261129-1"], ["begun", "2026-11-29 10:00:00 UTC"]]."""


def describe_origin(
    ledger: LedgerReader, slots: Sequence[SlotInfo], winners: Iterable[Winner], config: RunConfig, paths: RunPaths
) -> list[Document]:
    """The sections on the origin of the data, each as `{"title": "Asked", "pairs": [["run", "20261129-1"], ...]}`."""
    code = sorted({str(slot.info.get("code", "")) for slot in slots} - {""})
    made_with: Pairs = [
        ["gemmfleet", f"{config.version} tuned, {__version__} wrote this page"],
        ["worker's code", ", ".join(code) or "not known yet"],
        ["controller", str(ledger.meta("controller", ""))],
    ]
    by_device = Counter((winner.gfx, winner.cu_num or 0, winner.node) for winner in winners)
    measured_on: Pairs = []
    for (gfx, cu_num, node), count in sorted(by_device.items()):
        measured_on.append([node, f"{count:,} winners on {gfx} with {cu_num} CUs"])
    seconds: Pairs = [[kind, f"{spent:,.1f} s"] for kind, spent in sorted(ledger.spent().items())]
    files: Pairs = [[path.name, f"{path.stat().st_size:,} bytes"] for path in paths.results() if path.is_file()]
    sections = {
        "Asked": _request(config),
        "Made with": made_with,
        "Measured on": measured_on,
        "Devices": _devices(slots),
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


def _devices(slots: Sequence[SlotInfo]) -> Pairs:
    """Lines of slots and their device with its software."""
    slots_by_device: dict[str, list[str]] = {}
    for slot in slots:
        slots_by_device.setdefault(_describe_device(slot), []).append(f"{slot.node}/{slot.slot}")
    lines = [[and_more(names, 4), device] for device, names in slots_by_device.items()]
    return lines[:MOST_DEVICE_LINES]


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
