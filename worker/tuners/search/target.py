"""A device as the compiler and the time model see it: its limits, read from the GPU or from datasheets.

`target_of_gpu` reads the GPU of this process; `datasheet_target` gives a chip that need not be here.
Importing this module imports neither torch nor triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Target:
    """A device as the compiler and the model see it.

    `arch` is the compute capability as a number (90) on CUDA, the gfx name on ROCm. `shared_bytes` is the limit of one
    program, `shared_sm_bytes` that of a multiprocessor (CU); `registers` 32-bit registers of a multiprocessor;
    `memory_gbs` 1e9 bytes a second; `tflops` dense peaks by operand format,
    `clock_ghz` the clock that they are stated for.
    """

    backend: str
    arch: int | str
    warp_size: int
    sms: int
    shared_bytes: int
    shared_sm_bytes: int
    registers: int
    l2_bytes: int
    memory_gbs: float
    tflops: Mapping[str, float] = field(hash=False)
    clock_ghz: float
    name: str = ""
    # The compiler pipelines loads straight into LDS (AMD), so that every stage takes its bytes there.
    async_copy: bool = False

    @property
    def gfx(self) -> str:
        """The chip's name in rows: `sm_90`, `gfx950`."""
        return f"sm_{self.arch}" if self.backend == "cuda" else str(self.arch)

    @property
    def native_mx(self) -> bool:
        """True where `tl.dot_scaled` is one instruction; elsewhere it is multiplied in bfloat16."""
        return self.arch == "gfx950" or (self.backend == "cuda" and int(self.arch) >= 100)

    def peak(self, dtype: str) -> float:
        """TFLOP/s for operands of that format; of bfloat16 where the device has none for it."""
        return self.tflops.get(dtype, self.tflops["bfloat16"])


def _peaks(half: float, fp8: float, int8: float, fp4: float) -> dict[str, float]:
    return {
        "bfloat16": half,
        "float16": half,
        "float8_e4m3fn": fp8,
        "float8_e4m3fnuz": fp8,
        "int8": int8,
        "float4_e2m1fn_x2": fp4,
    }


_HOPPER_PEAKS = _peaks(989, 1979, 1979, 989)
# Dense peaks and bandwidths: NVIDIA's H100 and H200 and AMD's MI300X and MI355X datasheets. Hopper's shared memory:
# CUDA C Programming Guide, table of compute capability 9.0. LDS (64 and 160 KiB) and registers of a CU: AMD's CDNA3
# and CDNA4 instruction set guides. The L2 of an XCD is 4 MiB; `l2_bytes` is the shared 256 MiB cache behind it.
DATASHEETS = (
    Target("cuda", 90, 32, 132, 232448, 233472, 65536, 60 << 20, 4800, _HOPPER_PEAKS, 1.83, "NVIDIA H200"),
    Target("cuda", 90, 32, 132, 232448, 233472, 65536, 50 << 20, 3350, _HOPPER_PEAKS, 1.83, "NVIDIA H100 80GB HBM3"),
    Target(
        "hip", "gfx950", 64, 256, 163840, 163840, 131072, 256 << 20, 8000,
        _peaks(2517, 5033, 5033, 10066), 2.4, "AMD Instinct MI355X",
    ),
    Target(
        "hip", "gfx942", 64, 304, 65536, 65536, 131072, 256 << 20, 5300,
        _peaks(1307, 2615, 2615, 1307), 2.1, "AMD Instinct MI300X",
    ),
)  # fmt: skip


def datasheet_target(arch: int | str) -> Target:
    """The first device of an arch (90, `gfx950`, `gfx942`) in DATASHEETS. Raises KeyError for another arch."""
    for target in DATASHEETS:
        if target.arch == arch:
            return target
    raise KeyError(arch)


def copies_async(arch: int | str) -> bool:
    """True where this process's Triton pipelines loads straight into the LDS of a chip of AMD's: from 3.8 on (gfx950),
    or as TRITON_HIP_USE_ASYNC_COPY says."""
    from triton.backends.amd import compiler

    try:
        from triton import knobs
    except ImportError:  # before 3.4
        return False
    is_enabled = getattr(compiler, "is_async_copy_enabled", lambda _: knobs.amd.use_async_copy)
    return bool(is_enabled(arch))


def target_of_gpu(index: int = 0) -> Target:
    """The GPU that torch sees. Limits are the device's own; peaks are the datasheet's where the name or arch is known.

    For an unknown device the peaks are those of another one of its backend, by multiprocessors: the order of candidates
    needs ratios only. Raises RuntimeError where torch sees no GPU.
    """
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU")
    properties: Any = torch.cuda.get_device_properties(index)
    is_amd = torch.version.hip is not None
    backend = "hip" if is_amd else "cuda"
    arch: int | str = 10 * properties.major + properties.minor
    if is_amd:
        arch = properties.gcnArchName.split(":")[0]
    same_backend = [target for target in DATASHEETS if target.backend == backend]
    like = min(same_backend, key=lambda target: (target.name != properties.name, target.arch != arch))
    share = 1.0
    if like.name != properties.name:
        share = properties.multi_processor_count / like.sms
    target = replace(
        like,
        arch=arch,
        warp_size=int(getattr(properties, "warp_size", like.warp_size)),
        sms=properties.multi_processor_count,
        memory_gbs=like.memory_gbs * share,
        tflops={dtype: peak * share for dtype, peak in like.tflops.items()},
        name=properties.name,
    )
    if is_amd:  # torch does not report the other limits of AMD's chips
        return replace(target, async_copy=copies_async(arch))
    return replace(
        target,
        shared_bytes=int(properties.shared_memory_per_block_optin),
        shared_sm_bytes=int(properties.shared_memory_per_multiprocessor),
        registers=int(properties.regs_per_multiprocessor),
        l2_bytes=int(properties.L2_cache_size),
    )
