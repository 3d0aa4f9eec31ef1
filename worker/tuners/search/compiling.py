"""Compiling Triton kernels without launching them, for a chip that need not be here, and facts of the compiled code.

A source's own launch code decides which kernels are compiled and how they are specialised: every launch of a thread
that is `compiling` ends with the compiled kernel. Facts are read from the compiled file itself (ELF): the kernel's
metadata of AMD's code objects (LLVM's AMDGPUUsage, "Code Object V5 Metadata") is MessagePack in a note, and numbers
follow their key there. Registers depend on Triton's version: numbers hold for the one that compiled.

The processes that compile and measure are forked by the standard library's fork server from one that has imported
torch and triton: that costs tens of milliseconds, and they share its memory; it never touched a GPU. Each talks over
one pipe, in pickled messages. All end with the tuner's process: its pipe closes, and the agent kills the session. The
pool takes jobs in an order that may change until a process takes them, and returns each result once. A process that
crashes, or takes longer than the timeout, is replaced and its job becomes a failure.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import hashlib
import multiprocessing
import os
import signal
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from worker.process import exit_words
from worker.tuners.common.problem import UnavailableError, UnsupportedError, status_of
from worker.tuners.search.source import CompileFacts, KernelSource, Target

_thread = threading.local()


def compile_candidate(source: KernelSource, target: Target, job: Any) -> tuple[str, str, CompileFacts | None]:
    """Compile one job in a process of the pool: (status of a row, detail, facts)."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "ok", "", None  # nothing is compiled there
    try:
        source.enter(target)
        facts = source.compile(job, target)
    except (UnsupportedError, UnavailableError) as e:
        return "unsupported", str(e), None
    except Exception as e:  # noqa: BLE001 - a compiler may raise anything
        while isinstance(e.__cause__, Exception):
            e = e.__cause__  # Triton quotes the source; the reason is at the bottom
        return status_of(e), f"{type(e).__name__}: {e}", None
    if facts.shared_bytes > target.shared_bytes:
        detail = f"needs {facts.shared_bytes} bytes of shared memory, {target.shared_bytes} are there"
        return "unsupported", detail, None
    return "ok", "", facts


def gpu_target(target: Target) -> Any:
    """Triton's GPUTarget of a target."""
    from triton.backends.compiler import GPUTarget

    return GPUTarget(target.backend, target.arch, target.warp_size)


def compile_for(target: Target) -> None:
    """Have Triton compile for the target in this process. From now on nothing can run in it."""
    import triton

    driver: Any = triton.runtime.driver
    named = gpu_target(target)
    driver.set_active(
        SimpleNamespace(  # a driver that names a target and has no device
            get_current_target=lambda: named,
            get_current_device=lambda: 0,
            get_current_stream=lambda device=0: 0,
            is_active=lambda: True,
        )
    )


@contextlib.contextmanager
def compiling() -> Iterator[list[Any]]:
    """Launches of this thread compile and load nothing else. The compiled kernels are added to the list."""
    from triton.runtime.jit import JITFunction

    run = JITFunction.run
    if not hasattr(run, "gemmfleet"):

        def only_compiled(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            found = getattr(_thread, "found", None)
            kernel = run(self, *args, grid=grid, warmup=warmup or found is not None, **options)
            if found is not None:
                found.append(kernel)
            return kernel

        only_compiled.gemmfleet = True  # type: ignore[attr-defined]
        JITFunction.run = only_compiled
    _thread.found = []
    try:
        yield _thread.found
    finally:
        _thread.found = None


def hollow(make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """The tensors that `make` gives by name, in their forms on the CPU, of memory that is never touched: to compile
    with."""
    import torch

    with _forms():
        made = make()
    tensors = {n: t for n, t in made.items() if t is not None}
    return {n: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for n, t in tensors.items()}


@functools.cache
def _forms() -> Any:
    """Mode in which tensors have forms and no memory; one, as tables that are kept between calls belong to it."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def facts_of(kernels: list[Any], grid: tuple[int, ...] = ()) -> CompileFacts:
    """Facts of compiled kernels (Triton's CompiledKernel)."""
    digest, vgprs, spills, shared = hashlib.sha256(), [], 0, 0
    for kernel in kernels:
        data = next(kernel.asm[k] for k in ("hsaco", "cubin") if k in kernel.asm)
        shared = max(shared, int(kernel.metadata.shared))
        for name, code in sections(data):
            # beside the code AMD's descriptor (.rodata): waves_per_eu 0, 1 and 2 are the same instructions, with other
            # numbers of registers reserved, which decide how many waves run at once
            if name.startswith(".text") or (name == ".rodata" and "hsaco" in kernel.asm):
                digest.update(code)
        digest.update(repr((kernel.metadata.shared, kernel.metadata.num_warps)).encode())
        registers = number_after(data, b".vgpr_count")
        if registers is not None:
            vgprs.append(registers)
        spills += number_after(data, b".vgpr_spill_count") or 0
    return CompileFacts(shared, max(vgprs, default=None), spills, digest.hexdigest()[:16], grid)


def sections(data: bytes) -> Iterator[tuple[str, bytes]]:
    """(name, content) of a 64-bit little-endian ELF file's sections."""
    (offset,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    heads = [struct.unpack_from("<IIQQQQ", data, offset + i * size) for i in range(count)]
    table = heads[names][4]
    for name, kind, _, _, begin, length in heads:
        start = table + name
        end = data.index(b"\0", start)
        yield data[start:end].decode("ascii", "replace"), b"" if kind == 8 else data[begin : begin + length]


def number_after(data: bytes, key: bytes) -> int | None:
    """The unsigned MessagePack number behind a key, None where the key is not there."""
    at = data.find(bytes([0xA0 + len(key)]) + key)
    if at < 0:
        return None
    at += 1 + len(key)
    first = data[at]
    width = {0xCC: 1, 0xCD: 2, 0xCE: 4}.get(first, 0)
    return int.from_bytes(data[at + 1 : at + 1 + width], "big") if width else first


PRELOAD = ["worker.tuners.search.device_bench"]  # imported once, by the fork server: it imports torch and triton
GRACE_S = 2.0
COMPILE_S = 90.0  # limit of one compile

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

    def await_end(self) -> None:
        """Wait a moment for a process whose pipe has closed, so that its exit code is known."""
        self._process.join(1.0)

    def end(self) -> str:
        """End it, by force if it has not ended by itself; a text of how it ended."""
        with contextlib.suppress(OSError):
            self.conn.close()
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
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the tuner is gone
        serve(conn, *args)
    os._exit(0)  # exit handlers of libraries may hang


now = time.monotonic  # the same clock in all processes of a machine


@dataclass(frozen=True, slots=True)
class CompileResult:
    """A job's end: status ok, or unsupported, oom, error, timeout with a detail."""

    name: str
    status: str
    detail: str
    facts: CompileFacts | None = None


@dataclass(slots=True)
class _Process:
    helper: ChildProcess
    job: str | None = None
    since: float = 0.0


class CompilePool:
    """`size` processes. Call `collect` often: it takes in results and hands out jobs."""

    def __init__(self, size: int, source: KernelSource, target: Target, env: dict[str, str]) -> None:
        self._source, self._target, self._env = source, target, env
        self._queue: list[tuple[str, Any]] = []
        self._processes = [_Process(self._start()) for _ in range(max(1, size))]

    @property
    def connections(self) -> list[Connection]:
        """Connections to wait on: something is to be collected when one of them is ready."""
        return [p.helper.conn for p in self._processes if p.job is not None]

    def want(self, jobs: Sequence[tuple[str, Any]]) -> None:
        """The jobs that are wanted now, in order; takes the place of all that wait. Running ones go on."""
        running = {p.job for p in self._processes}
        self._queue = [(name, job) for name, job in jobs if name not in running]
        self._hand_out()

    def collect(self) -> list[CompileResult]:
        """Results since the last call; free processes get the next jobs."""
        done = [self._look(p, p.job) for p in self._processes if p.job is not None]
        self._hand_out()
        return [result for result in done if result is not None]

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
            p.helper.await_end()
            return CompileResult(job, "error", f"the compiler's process died: {self._replace(p)}")
        if now() - p.since > COMPILE_S:
            self._replace(p)
            return CompileResult(job, "timeout", f"not compiled within {COMPILE_S:g} s")
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
        return ChildProcess(serve_jobs, self._env, self._source, self._target)


def serve_jobs(conn: Connection, source: KernelSource, target: Target) -> None:
    """A process of the pool: jobs come, results go."""
    os.nice(5)  # the process that launches kernels must not wait for a compiler
    while True:
        conn.send(compile_candidate(source, target, conn.recv()))
