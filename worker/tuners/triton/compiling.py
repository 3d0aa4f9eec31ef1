"""What a compile process does with a job. Imports triton; touches no device."""

from __future__ import annotations

import contextlib
import importlib
from typing import TYPE_CHECKING, Any

from worker.tuners.triton.target import Target

if TYPE_CHECKING:
    from worker.tuners.triton.launch import Plan

STATUS = {"resource": "unsupported", "unsupported": "unsupported", "error": "error"}
"""A row's status for what CompileError tells."""


def work(job: tuple[Plan, Target]) -> tuple[str, str]:
    """Compile for the target; the result is in Triton's disk cache. (status, detail)."""
    from worker.tuners.triton.launch import CompileError, compile_plan

    made, target = job
    try:
        compiled = compile_plan(made, target)
    except CompileError as e:
        return STATUS.get(e.kind, "error"), str(e)
    except MemoryError:
        return "oom", "the compiler ran out of memory"
    with contextlib.suppress(Exception):  # it only saves time: who loads the kernel makes what is missing
        _make_launcher(compiled, target)
    return "ok", ""


def _make_launcher(compiled: Any, target: Target) -> None:
    """Up to 3.6 Triton has a C compiler make a launcher for each signature (0.1 s): here, not where the GPU waits.

    Later versions have one for all. It is linked against the driver's library, and opens no device.
    """
    vendor, name = ("nvidia", "CudaLauncher") if target.backend == "cuda" else ("amd", "HIPLauncher")
    driver = importlib.import_module(f"triton.backends.{vendor}.driver")
    if hasattr(driver, "make_launcher") and hasattr(compiled, "metadata"):
        getattr(driver, name)(compiled.src, compiled.metadata)
