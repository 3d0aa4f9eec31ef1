"""Compiling Triton kernels without launching them, for a chip that need not be here, and facts of the compiled code.

A source's own launch code decides which kernels are compiled and how they are specialised: every launch of a thread
that is `compiling` ends with the compiled kernel. Facts are read from the compiled file itself (ELF): the kernel's
metadata of AMD's code objects (LLVM's AMDGPUUsage, "Code Object V5 Metadata") is MessagePack in a note, and numbers
follow their key there. Registers depend on Triton's version: numbers hold for the one that compiled.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from worker.tuners.common.problem import UnavailableError, UnsupportedError
from worker.tuners.common.rows import status_of
from worker.tuners.search.source import Facts, KernelSource
from worker.tuners.search.target import Target

_thread = threading.local()


@dataclass(frozen=True, slots=True)
class CompileFacts:
    """Facts of all kernels of one call.

    shared_bytes: shared memory (LDS) of a program. vgprs and spills: registers of a lane, None and 0 where the file
    does not say (NVIDIA). hash: of the machine code. grid: what decides how the kernels are started.
    """

    shared_bytes: int
    vgprs: int | None
    spills: int
    hash: str
    grid: tuple[int, ...] = ()

    @property
    def same_as(self) -> tuple[object, ...]:
        return self.hash, self.grid


def compile_candidate(source: KernelSource, target: Target, job: Any) -> tuple[str, str] | tuple[str, str, Facts]:
    """Compile one job in a process of the pool: (status of a row, detail, facts)."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "ok", ""  # nothing is compiled there
    try:
        source.enter(target)
        facts = source.compile(job, target)
    except (UnsupportedError, UnavailableError) as e:
        return "unsupported", str(e)
    except Exception as e:  # noqa: BLE001 - a compiler may raise anything
        while isinstance(e.__cause__, Exception):
            e = e.__cause__  # Triton quotes the source; the reason is at the bottom
        return status_of(e), f"{type(e).__name__}: {e}"
    if facts.shared_bytes > target.shared_bytes:
        return "unsupported", f"needs {facts.shared_bytes} bytes of shared memory, {target.shared_bytes} are there"
    return "ok", "", facts


class _NamedTarget:
    """A driver of Triton's that names a target and has no device."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def is_active(self) -> bool:
        return True


def gpu_target(target: Target) -> Any:
    """Triton's GPUTarget of a target."""
    from triton.backends.compiler import GPUTarget

    return GPUTarget(target.backend, target.arch, target.warp_size)


def compile_for(target: Target) -> None:
    """Have Triton compile for the target in this process. From now on nothing can run in it."""
    import triton

    driver: Any = triton.runtime.driver
    driver.set_active(_NamedTarget(gpu_target(target)))


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
    """(name, content) of a 64-bit little-endian ELF file's sections. Raises ValueError for another file."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("no 64-bit ELF file")
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
