"""Processes that compile candidates ahead.

The pool takes jobs in an order that may change until a process takes them, and returns each result once. A process
that crashes, or takes longer than COMPILE_S, is replaced and its job becomes a failure.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from worker.tuners.common.helper_process import HelperDied, HelperProcess, HelperTimedOut
from worker.tuners.search.compiling import compile_candidate
from worker.tuners.search.forked_process import ForkedProcess
from worker.tuners.search.source import CompileFacts, KernelSource
from worker.tuners.search.target import Target

COMPILE_S = 90.0
"""Limit of one compile in seconds."""


@dataclass(frozen=True, slots=True)
class CompileResult:
    """A job's end: status ok, or unsupported, oom, error, timeout with a detail."""

    name: str
    status: str
    detail: str
    facts: CompileFacts | None = None


@dataclass(slots=True)
class _Compiler:
    """A process of the pool. `job`: the name of the one that it has."""

    process: HelperProcess
    job: str | None = None


class CompilePool:
    """`size` processes. Call `collect` often: it takes in results and hands out jobs."""

    def __init__(self, size: int, source: KernelSource, target: Target, env: dict[str, str]) -> None:
        def start_compiler() -> ForkedProcess:
            return ForkedProcess("the compiler's process", serve_jobs, env, source, target)

        self._queue: list[tuple[str, Any]] = []
        self._compilers = [_Compiler(HelperProcess(start_compiler, COMPILE_S)) for _ in range(max(1, size))]
        for compiler in self._compilers:
            compiler.process.start()

    @property
    def connections(self) -> list[Connection]:
        """Connections to wait on: something is to be collected when one of them is ready."""
        busy = [compiler for compiler in self._compilers if compiler.job is not None]
        return [connection for compiler in busy for connection in compiler.process.connections]

    def request(self, jobs: Sequence[tuple[str, Any]]) -> None:
        """The jobs that are wanted now, in order; takes the place of all that wait. Running ones go on."""
        running = {compiler.job for compiler in self._compilers}
        self._queue = [(name, job) for name, job in jobs if name not in running]
        self._hand_out()

    def collect(self) -> list[CompileResult]:
        """Results since the last call; free processes get the next jobs."""
        results: list[CompileResult] = []
        for compiler in self._compilers:
            if compiler.job is None:
                continue
            result = _result_of(compiler.process, compiler.job)
            if result is not None:
                compiler.job = None
                results.append(result)
        self._hand_out()
        return results

    def close(self) -> None:
        """End all processes."""
        for compiler in self._compilers:
            compiler.process.end()
        self._compilers.clear()

    def _hand_out(self) -> None:
        for compiler in self._compilers:
            if compiler.job is not None or not self._queue:
                continue
            compiler.job, job = self._queue.pop(0)
            if not compiler.process.is_alive:
                compiler.process.start()
            if not compiler.process.send(job):  # it died without work; once more on a new one
                compiler.process.start()
                compiler.process.send(job)


def _result_of(process: HelperProcess, job: str) -> CompileResult | None:
    """The end of a process's job, if it came."""
    try:
        message = process.receive()
    except HelperTimedOut:
        return CompileResult(job, "timeout", f"not compiled within {COMPILE_S:g} s")
    except HelperDied as e:
        return CompileResult(job, "error", str(e))
    return None if message is None else CompileResult(job, *message)


def serve_jobs(connection: Connection, source: KernelSource, target: Target) -> None:
    """A process of the pool: jobs come, results go."""
    os.nice(5)  # the process that launches kernels must not wait for a compiler
    while True:
        connection.send(compile_candidate(source, target, connection.recv()))
