"""One-time work of the fork server for all processes that it forks; nothing here touches a GPU.

Imports, and the hashes that Triton makes once a process: of its own files, and of each kernel with all it calls.
"""

from __future__ import annotations

import contextlib
import importlib

MODULES = ("torch", "triton", "triton.compiler", "worker.tuners.triton.launch", "worker.tuners.triton.operands")


def warm() -> None:
    """Import and hash."""
    for name in MODULES:
        importlib.import_module(name)
    from worker.tuners.triton.kernels import KERNELS

    for kernel in KERNELS.values():
        getattr(kernel, "cache_key", None)  # the interpreter's have none
    for place in ("triton.runtime.cache", "triton.compiler.compiler"):  # it moved between versions
        key = getattr(importlib.import_module(place), "triton_key", None)
        if key is not None:
            key()


with contextlib.suppress(ImportError):  # a process that needs them reports the missing one
    warm()
