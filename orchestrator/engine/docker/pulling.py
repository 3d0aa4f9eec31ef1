"""The progress of a pull, in words."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

EVERY_S = 1.0
_DONE = ("Download complete", "Pull complete", "Already exists")


def follow_pull(image: str, lines: Iterable[Mapping[str, Any]], progress: Callable[[str], None]) -> str:
    """Read a pull to its end, telling `progress` once a second; the fault that Docker named, or an empty text."""
    layers: dict[str, tuple[int, int]] = {}
    done: set[str] = set()
    told = 0.0
    for line in lines:
        if "error" in line:
            return str(line["error"])
        layer, status = str(line.get("id", "")), str(line.get("status", ""))
        if status in _DONE:
            done.add(layer)
            if layer in layers:
                layers[layer] = (layers[layer][1], layers[layer][1])
        elif status == "Downloading":
            detail = line.get("progressDetail") or {}
            layers[layer] = (int(detail.get("current") or 0), int(detail.get("total") or 0))
        elif status in ("Pulling fs layer", "Waiting"):
            layers.setdefault(layer, (0, 0))
        if layers and time.monotonic() - told >= EVERY_S:
            told = time.monotonic()
            got, size = (sum(pair[i] for pair in layers.values()) / 1e6 for i in (0, 1))
            have = len(done & layers.keys())
            progress(f"pulling {image}: {got:.0f} of {size:.0f} MB, {have} of {len(layers)} layers")
    progress(f"pulled {image}")
    return ""
