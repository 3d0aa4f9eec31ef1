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

from worker.tuners.search.child_process import ChildProcess, now
from worker.tuners.search.compiling import compile_candidate
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
    """A process of the pool. `job`: the name of the one that it has; `since`: when it got it."""

    child: ChildProcess
    job: str | None = None
    since: float = 0.0


class CompilePool:
    """`size` processes. Call `collect` often: it takes in results and hands out jobs."""

    def __init__(self, size: int, source: KernelSource, target: Target, env: dict[str, str]) -> None:
        self._source = source
        self._target = target
        self._env = env
        self._queue: list[tuple[str, Any]] = []
        self._compilers = [_Compiler(self._start_process()) for _ in range(max(1, size))]

    @property
    def connections(self) -> list[Connection]:
        """Connections to wait on: something is to be collected when one of them is ready."""
        return [compiler.child.conn for compiler in self._compilers if compiler.job is not None]

    def request(self, jobs: Sequence[tuple[str, Any]]) -> None:
        """The jobs that are wanted now, in order; takes the place of all that wait. Running ones go on."""
        running = {compiler.job for compiler in self._compilers}
        self._queue = [(name, job) for name, job in jobs if name not in running]
        self._hand_out()

    def collect(self) -> list[CompileResult]:
        """Results since the last call; free processes get the next jobs."""
        results: list[CompileResult] = []
        for compiler in self._compilers:
            if compiler.job is not None:
                result = self._result_of(compiler, compiler.job)
                if result is not None:
                    results.append(result)
        self._hand_out()
        return results

    def close(self) -> None:
        """End all processes."""
        for compiler in self._compilers:
            compiler.child.end()
        self._compilers.clear()

    def _result_of(self, compiler: _Compiler, job: str) -> CompileResult | None:
        """The end of a process's job, if it came."""
        try:
            if compiler.child.conn.poll():
                compiler.job = None
                status, detail, facts = compiler.child.conn.recv()
                return CompileResult(job, status, detail, facts)
        except (EOFError, OSError):
            compiler.child.await_end()
            return CompileResult(job, "error", f"the compiler's process died: {self._replace(compiler)}")
        if now() - compiler.since > COMPILE_S:
            self._replace(compiler)
            return CompileResult(job, "timeout", f"not compiled within {COMPILE_S:g} s")
        return None

    def _hand_out(self) -> None:
        for compiler in self._compilers:
            if compiler.job is not None or not self._queue:
                continue
            name, job = self._queue.pop(0)
            try:
                compiler.child.conn.send(job)
            except OSError:  # it died without work; once more on a new one
                self._replace(compiler)
                compiler.child.conn.send(job)
            compiler.job = name
            compiler.since = now()

    def _replace(self, compiler: _Compiler) -> str:
        """Replace a process; a text of how it ended."""
        how = compiler.child.end()
        compiler.child = self._start_process()
        compiler.job = None
        return how

    def _start_process(self) -> ChildProcess:
        return ChildProcess(serve_jobs, self._env, self._source, self._target)


def serve_jobs(conn: Connection, source: KernelSource, target: Target) -> None:
    """A process of the pool: jobs come, results go."""
    os.nice(5)  # the process that launches kernels must not wait for a compiler
    while True:
        conn.send(compile_candidate(source, target, conn.recv()))
