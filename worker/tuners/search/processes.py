"""Processes of the tuner's own, forked from one that has imported torch and triton; and the pool that compiles.

The standard library's fork server does the forking, so a process costs tens of milliseconds and shares the imported
libraries' memory; that one never touched a GPU. Each talks over one pipe, in pickled messages. All end with the tuner's
process: its pipe closes, and the agent kills the session.

The pool takes jobs in an order that may change until a process takes them, and returns each result once. A job is a
name and plain data. A process that crashes, or takes longer than the timeout, is replaced
and its job becomes a failure; the others go on. The pool does not look into a job: `work` does.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from worker.process import exit_words
from worker.tuners.search.source import Facts

PRELOAD = ["worker.tuners.search.processes"]
GRACE_S = 2.0

Serve = Callable[..., None]


class ChildProcess:
    """One such process. `conn` is our end of its pipe."""

    def __init__(self, serve: Serve, env: Mapping[str, str], *args: Any) -> None:
        """Starts `serve(conn, *args)` with `env` set in it. Raises OSError."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.conn, theirs = context.Pipe()
        self._process = context.Process(target=_begin, args=(serve, dict(env), theirs, args), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def ended_by_itself(self, seconds: float = 1.0) -> bool:
        """Wait a moment for a process whose pipe has closed, so that its exit code is known."""
        self._process.join(seconds)
        return self._process.exitcode is not None

    def end(self) -> str:
        """End it, by force if it has not ended by itself; a text of how it ended."""
        try:
            self.conn.close()
        except OSError:
            pass
        forced = self._process.exitcode is None
        if forced:
            self._process.kill()
            self._process.join(GRACE_S)
        code = self._process.exitcode
        if code is None:
            return "it cannot be killed"
        self._process.close()
        return "we ended it" if forced else f"it {exit_words(code)}"


def _begin(serve: Serve, env: Mapping[str, str], conn: Connection, args: tuple[Any, ...]) -> None:
    """Main function of the new process: environment, no Ctrl-C (its parent handles it), then `serve`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(env)
    tempfile.tempdir = None  # the server may have looked already
    faulthandler.enable()
    try:
        serve(conn, *args)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the tuner is gone
    os._exit(0)  # exit handlers of libraries may hang


def now() -> float:
    """CLOCK_MONOTONIC: the same in all processes of a machine."""
    return time.monotonic()


@dataclass(frozen=True, slots=True)
class CompileResult:
    """A job's end: status ok, or unsupported, oom, error, timeout with a detail; its span in CLOCK_MONOTONIC."""

    name: str
    status: str
    detail: str
    start: float
    end: float
    facts: Facts | None = None


Work = Callable[[Any], "tuple[str, str] | tuple[str, str, Facts]"]
"""Compiles one job in a process of the pool: (status, detail), and facts where it has some. An exception of it is an
`error`."""


@dataclass(slots=True)
class _Process:
    helper: ChildProcess
    job: str | None = None
    since: float = 0.0


class CompilePool:
    """`size` processes. Call `collect` often: it takes in results and hands out jobs."""

    def __init__(self, size: int, work: Work, env: dict[str, str], timeout_s: float) -> None:
        self._work, self._env, self._timeout_s = work, env, timeout_s
        self._queue: list[tuple[str, Any]] = []
        self._processes = [_Process(self._start()) for _ in range(max(1, size))]

    @property
    def size(self) -> int:
        return len(self._processes)

    @property
    def running(self) -> set[str]:
        """Names of the jobs that a process has."""
        return {p.job for p in self._processes if p.job is not None}

    @property
    def connections(self) -> list[Connection]:
        """Connections to wait on: something is to be collected when one of them is ready."""
        return [p.helper.conn for p in self._processes if p.job is not None]

    def want(self, jobs: Sequence[tuple[str, Any]]) -> None:
        """The jobs that are wanted now, in order; takes the place of all that wait. Running ones go on."""
        running = self.running
        self._queue = [(name, job) for name, job in jobs if name not in running]
        self._hand_out()

    def collect(self) -> list[CompileResult]:
        """Results since the last call; free processes get the next jobs."""
        done = []
        for p in self._processes:
            if p.job is None:
                continue
            found = self._look(p, p.job)
            if found is not None:
                done.append(found)
        self._hand_out()
        return done

    def close(self) -> None:
        """End all processes."""
        for p in self._processes:
            p.helper.end()
        self._processes.clear()

    def _look(self, p: _Process, job: str) -> CompileResult | None:
        """The end of a process's job, if it came."""
        try:
            if p.helper.conn.poll():
                p.job, found = None, p.helper.conn.recv()
                return CompileResult(job, *found)
        except (EOFError, OSError):
            p.helper.ended_by_itself()
            return CompileResult(job, "error", f"the compiler's process died: {self._replace(p)}", p.since, now())
        if now() - p.since > self._timeout_s:
            self._replace(p)
            return CompileResult(job, "timeout", f"not compiled within {self._timeout_s:g} s", p.since, now())
        return None

    def _hand_out(self) -> None:
        for p in self._processes:
            if p.job is None and self._queue:
                name, job = self._queue.pop(0)
                try:
                    p.helper.conn.send(job)
                except OSError:  # it died without work; once more on a new one
                    self._replace(p)
                    p.helper.conn.send(job)
                p.job, p.since = name, now()

    def _replace(self, p: _Process) -> str:
        how = p.helper.end()
        p.helper, p.job = self._start(), None
        return how

    def _start(self) -> ChildProcess:
        return ChildProcess(serve_jobs, self._env, self._work)


def serve_jobs(conn: Connection, work: Work) -> None:
    """A process of the pool: jobs come, results go."""
    os.nice(5)  # the process that launches kernels must not wait for a compiler
    while True:
        job = conn.recv()
        start = now()
        try:
            status, detail, *facts = work(job)
        except Exception as e:  # noqa: BLE001 - a compiler may raise anything
            status, detail, facts = "error", f"{type(e).__name__}: {e}", []
        conn.send((status, detail, start, now(), *facts))


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
