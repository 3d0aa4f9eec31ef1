"""What a compile process does with a job. Imports triton; touches no device."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
        compile_plan(made, target)
    except CompileError as e:
        return STATUS.get(e.kind, "error"), str(e)
    except MemoryError:
        return "oom", "the compiler ran out of memory"
    return "ok", ""
