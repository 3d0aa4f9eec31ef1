"""One-time work of the fork server for all processes that it forks; nothing here touches a GPU.

Imports, and the hash of its own files that Triton makes once a process.
"""

from __future__ import annotations

import contextlib
import importlib

MODULES = ("torch", "triton", "triton.compiler")


def warm() -> None:
    """Import and hash."""
    for name in MODULES:
        importlib.import_module(name)
    for place in ("triton.runtime.cache", "triton.compiler.compiler"):  # it moved between versions
        key = getattr(importlib.import_module(place), "triton_key", None)
        if key is not None:
            key()


with contextlib.suppress(ImportError):  # a process that needs them reports the missing one
    warm()
