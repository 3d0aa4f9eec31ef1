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
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from worker.tuners.common.problem import UnavailableError, UnsupportedError, status_of
from worker.tuners.search.source import CompileFacts, KernelSource
from worker.tuners.search.target import Target

_thread = threading.local()
"""`kernels`: the list of a thread that is `compiling`."""
SHT_NOBITS = 8
"""Type of an ELF section that takes no bytes of the file."""


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

        def run_or_compile(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            kernels = getattr(_thread, "kernels", None)
            if kernels is None:
                return run(self, *args, grid=grid, warmup=warmup, **options)
            kernel = run(self, *args, grid=grid, warmup=True, **options)
            kernels.append(kernel)
            return kernel

        run_or_compile.gemmfleet = True  # type: ignore[attr-defined]
        JITFunction.run = run_or_compile
    _thread.kernels = []
    try:
        yield _thread.kernels
    finally:
        _thread.kernels = None


def untouched_tensors(make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """The tensors that `make` gives by name, in their forms on the CPU, of memory that is never touched: to compile
    with.

    `make` runs on torch's meta device, whose tensors have forms and no memory, whatever device it names. FakeTensorMode
    would do the same, but it imports torch's compiler, which costs each process that compiles two seconds.
    """
    import torch

    with torch.device("meta"), _meta_mode():
        tensors = {name: tensor for name, tensor in make().items() if tensor is not None}
    return {name: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu") for name, t in tensors.items()}


def _meta_mode() -> Any:
    """Mode in which torch's functions take the meta device for the one that they are given, and no generator."""
    from torch import device
    from torch.overrides import TorchFunctionMode

    class OnMeta(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            named = dict(kwargs or {})
            named.pop("generator", None)
            if "device" in named:
                named["device"] = "meta"
            return function(*("meta" if isinstance(value, device) else value for value in args), **named)

    return OnMeta()


def facts_of(kernels: list[Any], grid: tuple[int, ...] = ()) -> CompileFacts:
    """Facts of compiled kernels (Triton's CompiledKernel)."""
    digest = hashlib.sha256()
    vgprs: list[int] = []
    spills = 0
    shared_bytes = 0
    for kernel in kernels:
        is_amd = "hsaco" in kernel.asm
        data = kernel.asm["hsaco" if is_amd else "cubin"]
        shared_bytes = max(shared_bytes, int(kernel.metadata.shared))
        for name, code in sections(data):
            # beside the code AMD's descriptor (.rodata): waves_per_eu 0, 1 and 2 are the same instructions, with other
            # numbers of registers reserved, which decide how many waves run at once
            if name.startswith(".text") or (name == ".rodata" and is_amd):
                digest.update(code)
        digest.update(repr((kernel.metadata.shared, kernel.metadata.num_warps)).encode())
        registers = number_after(data, b".vgpr_count")
        if registers is not None:
            vgprs.append(registers)
        spills += number_after(data, b".vgpr_spill_count") or 0
    return CompileFacts(shared_bytes, max(vgprs, default=None), spills, digest.hexdigest()[:16], grid)


def sections(data: bytes) -> Iterator[tuple[str, bytes]]:
    """(name, content) of a 64-bit little-endian ELF file's sections."""
    (headers_offset,) = struct.unpack_from("<Q", data, 0x28)
    header_size, count, names_index = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, headers_offset + i * header_size) for i in range(count)]
    names_offset = headers[names_index][4]
    for name_offset, kind, _, _, offset, size in headers:
        start = names_offset + name_offset
        end = data.index(b"\0", start)
        has_content = kind != SHT_NOBITS
        yield data[start:end].decode("ascii", "replace"), data[offset : offset + size] if has_content else b""


def number_after(data: bytes, key: bytes) -> int | None:
    """The unsigned MessagePack number behind a key, None where the key is not there."""
    key_start = data.find(bytes([0xA0 + len(key)]) + key)  # a text of up to 31 bytes
    if key_start < 0:
        return None
    start = key_start + 1 + len(key)
    width = {0xCC: 1, 0xCD: 2, 0xCE: 4}.get(data[start])
    if width is None:
        return data[start]  # numbers below 128 are their own byte
    return int.from_bytes(data[start + 1 : start + 1 + width], "big")
