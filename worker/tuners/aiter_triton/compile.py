"""Compilation of a config of AITER's for a target, on any CPU: shared memory, registers, spills, machine code.

What is compiled and how it is specialised is decided by AITER's own wrapper (see wrapper.py). The result is in Triton's
disk cache, where the measuring process finds it. Facts are read from the compiled file itself (ELF): the kernel's
metadata of AMD's code objects (LLVM's AMDGPUUsage, "Code Object V5 Metadata") is MessagePack in a note, and numbers
follow their key there. Registers depend on Triton's version: numbers hold for the one that compiled.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from worker.bench.case import Case
from worker.triton_configs.kinds import BY_NAME
from worker.tuners.aiter_triton.config import Values
from worker.tuners.aiter_triton.problem import case_of, family_of
from worker.tuners.aiter_triton.wrapper import Wrapper, compiling, enter, hollow
from worker.tuners.common.problem import NotImportableError as NotImportableError  # what the check catches
from worker.tuners.common.problem import UnavailableError, UnsupportedError
from worker.tuners.common.rows import status_of
from worker.tuners.triton.launch import kind_of
from worker.tuners.triton.processes import STATUS
from worker.tuners.triton.target import Target, known


@dataclass(frozen=True, slots=True)
class CompileFacts:
    """Of all kernels of one call. lds: bytes of shared memory of a program; vgprs and spills: registers of a lane, None
    and 0 where the file does not say (NVIDIA); hash: of the machine code; grid: what starts it, with its split-K."""

    lds: int
    vgprs: int | None
    spills: int
    hash: str
    grid: tuple[int, ...] = ()

    @property
    def same_as(self) -> tuple[object, ...]:
        return self.hash, self.grid


@dataclass(frozen=True, slots=True)
class CompileJob:
    """A config on a case; plain data. `root`: the tree; `caller`: as of AiterConfig."""

    root: str
    kind: str
    case: Case
    values: tuple[tuple[str, Any], ...]
    caller: str = ""

    @property
    def compile_key(self) -> str:
        """By all of it: which M share a kernel only the compiler can tell, from its cache."""
        return hashlib.sha256(repr((self.root, self.kind, self.case, self.values, self.caller)).encode()).hexdigest()


def compile_config(
    kind: str, arch: int | str, values: Values, M: int, N: int, K: int, B: int | None = None, *, root: str | Path,
    caller: str = "",
) -> CompileFacts:  # fmt: skip
    """Compile a bucket's values for a shape (K the logical one) with this process's Triton; no GPU is needed.

    `root`: the tree; a process compiles for one tree and one arch. Raises UnavailableError where the kind cannot be
    imported, UnsupportedError for a case that it does not compute, and what the compiler raises.
    """
    found, target = BY_NAME[kind], known(arch)
    key: dict[str, int | str] = {"M": M, "N": N, "K": K, **({} if B is None else {"B": B})}
    case = case_of(found, family_of(found), key, target.gfx)
    return _compile(CompileJob(str(root), kind, case, tuple(values.items()), caller), target)


def compile_job(job: tuple[CompileJob, Target]) -> tuple[str, str] | tuple[str, str, CompileFacts]:
    """Compile in a process of the pool. (status, detail, facts)."""
    made, target = job
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "ok", ""  # nothing is compiled there
    try:
        facts = _compile(made, target)
    except (UnsupportedError, UnavailableError) as e:
        return "unsupported", str(e)
    except Exception as e:  # noqa: BLE001 - a compiler may raise anything
        while isinstance(e.__cause__, Exception):
            e = e.__cause__  # Triton quotes the source; the reason is at the bottom
        status = STATUS.get(kind_of(e), "error")
        return status if status != "error" else status_of(e), f"{type(e).__name__}: {e}"
    if facts.lds > target.shared_bytes:
        return "unsupported", f"needs {facts.lds} bytes of shared memory, {target.shared_bytes} are there"
    return "ok", "", facts


def _compile(job: CompileJob, target: Target) -> CompileFacts:
    wrapper = _wrapper(job.root, job.kind, target, job.caller)
    inputs, out = hollow(job.case)
    config = wrapper.completed(dict(job.values), job.case)
    call = wrapper.call(wrapper.operands(inputs, drawn=False), out, config)
    with compiling() as kernels:
        call()
    if not kernels:
        raise UnsupportedError(f"{job.kind} starts no kernel of Triton's")
    return facts_of(kernels, tuple(int(config.get(k) or 0) for k in ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "NUM_KSPLIT")))


@cache
def _wrapper(root: str, kind: str, target: Target, caller: str) -> Wrapper:
    enter(root, target)
    return Wrapper(BY_NAME[kind], caller)


def facts_of(kernels: list[Any], grid: tuple[int, ...] = ()) -> CompileFacts:
    """Facts of compiled kernels (Triton's CompiledKernel)."""
    digest, vgprs, spills, lds = hashlib.sha256(), [], 0, 0
    for kernel in kernels:
        data = next(kernel.asm[k] for k in ("hsaco", "cubin") if k in kernel.asm)
        lds = max(lds, int(kernel.metadata.shared))
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
    return CompileFacts(lds, max(vgprs, default=None), spills, digest.hexdigest()[:16], grid)


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
