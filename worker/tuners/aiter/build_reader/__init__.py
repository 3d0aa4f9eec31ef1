"""Availability of tuned rows' kernels in a build of AITER, read from its tree: no GPU, no import of aiter.

The controller uses `open_build` with its result, and MODULES.
"""

from __future__ import annotations

from pathlib import Path

from worker.tuners.aiter.build_reader.lists import PLACES
from worker.tuners.aiter.build_reader.reader import KernelAvailability, KernelReader
from worker.tuners.aiter.tree.locate import NotATreeError, tree_at

MODULES = tuple(dict.fromkeys(p.module for p in PLACES.values()))
"""The modules that are compiled from tuned tables, as AITER calls them."""

__all__ = ["MODULES", "KernelAvailability", "KernelReader", "NotATreeError", "open_build"]


def open_build(root: Path) -> KernelReader:
    """The kernels of the AITER at `root`. Raises NotATreeError."""
    return KernelReader(tree_at(root))
