"""Target of a search: a device's limits and peaks, from torch, or from the datasheet without a device; and its clock.

A sample taken while the clock was slowed for heat, by the board, or by a power brake is no measure of a kernel.
The power cap is another matter: a large GEMM runs into it all the time, so that is its true speed; it is not counted.
Without NVML (through ctypes) and amdsmi (ROCm's Python module) the clock is unknown.

NVML: nvmlDeviceGetCurrentClocksThrottleReasons and the nvmlClocksThrottleReason* bits of nvml.h. amdsmi:
`throttle_status` of amdsmi_get_gpu_metrics_info, in the driver's common bits (SMU_THROTTLER_*, amdgpu_smu.h): 0 to 15
are power limits, 16 to 31 currents, 32 to 55 temperatures, 56 and up others such as PROCHOT.
"""

from __future__ import annotations

import ctypes
import importlib
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple


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


def _rates(half: float, fp8: float, int8: float, fp4: float) -> dict[str, float]:
    return {
        "bfloat16": half,
        "float16": half,
        "float8_e4m3fn": fp8,
        "float8_e4m3fnuz": fp8,
        "int8": int8,
        "float4_e2m1fn_x2": fp4,
    }


_HOPPER = _rates(989, 1979, 1979, 989)
# Dense peaks and bandwidths: NVIDIA's H100 and H200 and AMD's MI300X and MI355X datasheets. Hopper's shared memory:
# CUDA C Programming Guide, table of compute capability 9.0. LDS (64 and 160 KiB) and registers of a CU: AMD's CDNA3
# and CDNA4 instruction set guides. The L2 of an XCD is 4 MiB; `l2_bytes` is the shared 256 MiB cache behind it.
_KNOWN = (
    Target("cuda", 90, 32, 132, 232448, 233472, 65536, 60 << 20, 4800, _HOPPER, 1.83, "NVIDIA H200"),
    Target("cuda", 90, 32, 132, 232448, 233472, 65536, 50 << 20, 3350, _HOPPER, 1.83, "NVIDIA H100 80GB HBM3"),
    Target(
        "hip", "gfx950", 64, 256, 163840, 163840, 131072, 256 << 20, 8000,
        _rates(2517, 5033, 5033, 10066), 2.4, "AMD Instinct MI355X",
    ),
    Target(
        "hip", "gfx942", 64, 304, 65536, 65536, 131072, 256 << 20, 5300,
        _rates(1307, 2615, 2615, 1307), 2.1, "AMD Instinct MI300X",
    ),
)  # fmt: skip


def known(arch: int | str) -> Target:
    """The datasheet's device of an arch (90, `gfx950`, `gfx942`). Raises KeyError for one that is not listed."""
    for target in _KNOWN:
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
    enabled = getattr(compiler, "is_async_copy_enabled", lambda _: knobs.amd.use_async_copy)
    return bool(enabled(arch))


def of_device(index: int = 0) -> Target:
    """The GPU that torch sees. Limits are the device's own; peaks are the datasheet's where the name or arch is known.

    For an unknown device the peaks are those of the nearest known arch of its backend, by multiprocessors: the order
    of candidates needs ratios only. Raises RuntimeError where torch sees no GPU.
    """
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU")
    p: Any = torch.cuda.get_device_properties(index)
    hip = torch.version.hip is not None
    arch: int | str = p.gcnArchName.split(":")[0] if hip else 10 * p.major + p.minor
    like = _nearest("hip" if hip else "cuda", arch, p.name)
    share = 1.0 if like.name == p.name else p.multi_processor_count / like.sms
    return replace(
        like,
        arch=arch,
        warp_size=int(getattr(p, "warp_size", like.warp_size)),
        sms=p.multi_processor_count,
        shared_bytes=like.shared_bytes if hip else int(p.shared_memory_per_block_optin),
        shared_sm_bytes=like.shared_sm_bytes if hip else int(p.shared_memory_per_multiprocessor),
        registers=like.registers if hip else int(p.regs_per_multiprocessor),
        l2_bytes=like.l2_bytes if hip else int(p.L2_cache_size),
        async_copy=hip and copies_async(arch),
        memory_gbs=like.memory_gbs * share,
        tflops={d: v * share for d, v in like.tflops.items()},
        name=p.name,
    )


def _nearest(backend: str, arch: int | str, name: str) -> Target:
    same = [t for t in _KNOWN if t.backend == backend]
    for t in same:
        if t.name == name:
            return t
    number = _number(arch)
    return min(same, key=lambda t: abs(_number(t.arch) - number))


def _number(arch: int | str) -> int:
    digits = re.sub(r"[^0-9a-f]", "", str(arch).removeprefix("gfx"))
    return int(digits or "0", 16)


THROTTLE_BITS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}  # nvmlClocksThrottleReasonHwSlowdown, SwThermalSlowdown, HwThermalSlowdown, HwPowerBrakeSlowdown
AMD_THROTTLE_BITS = ~0xFFFF  # all of SMU_THROTTLER_* but the power limits
TRIES, PAUSE_S = 5, 0.05


class Clock(NamedTuple):
    """A GPU's clock. `source`: who says whether it is throttled, or why that is unknown. `throttled`: the reason for
    which it is throttled now, "" if it is not."""

    source: str
    throttled: Callable[[], str] = lambda: ""


def clock_of(backend: str, pci: str) -> Clock:
    """The clock of the GPU at a PCI address (`0000:1b:00.0`), `backend` being cuda or hip."""
    try:
        if backend == "cuda":
            return Clock("nvml", _nvml(pci))
        if backend == "hip":
            return Clock("amdsmi", _amdsmi(pci, importlib.import_module("amdsmi")))
    except (OSError, ImportError, AttributeError) as e:
        return Clock(f"unknown: {e}")
    return Clock(f"unknown: no GPU ({backend})")


def _nvml(pci: str) -> Callable[[], str]:
    """Throttling of an NVIDIA GPU. Raises OSError if NVML or the device is not there."""
    try:
        lib = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        lib = ctypes.CDLL("libnvidia-ml.so")
    if lib.nvmlInit_v2() != 0:
        raise OSError("nvmlInit failed")
    device, reasons = ctypes.c_void_p(), ctypes.c_ulonglong()
    if lib.nvmlDeviceGetHandleByPciBusId_v2(pci.encode(), ctypes.byref(device)) != 0:
        raise OSError(f"NVML knows no device {pci}")

    def status() -> int:
        return int(lib.nvmlDeviceGetCurrentClocksThrottleReasons(device, ctypes.byref(reasons)))

    if status() != 0:
        raise OSError("NVML reports no throttle reasons")

    def throttled() -> str:
        bits = reasons.value if status() == 0 else 0
        return ", ".join(words for bit, words in THROTTLE_BITS.items() if bits & bit)

    return throttled


def _amdsmi(pci: str, smi: Any) -> Callable[[], str]:
    """Throttling of an AMD GPU through ROCm's `amdsmi`. Raises OSError if it reports no throttle status."""
    try:
        smi.amdsmi_init()
        found = {str(smi.amdsmi_get_gpu_device_bdf(h)).lower(): h for h in smi.amdsmi_get_processor_handles()}
    except Exception as e:  # the module has exceptions of its own
        raise OSError(f"amdsmi: {e}") from e
    if pci.lower() not in found:
        raise OSError(f"amdsmi knows no device {pci}")

    def status() -> int | None:
        try:
            status = smi.amdsmi_get_gpu_metrics_info(found[pci.lower()]).get("throttle_status")
        except Exception:  # noqa: BLE001 - as above
            return None
        return status if isinstance(status, int) else None

    if status() is None:
        raise OSError("amdsmi reports no throttle status")
    return lambda: f"throttle status {bits:#x}" if (bits := (status() or 0) & AMD_THROTTLE_BITS) else ""


class Unthrottled:
    """A timer that drops a sample taken while the clock was throttled and takes another, up to TRIES times in a row.

    After that the sample counts as it is; `kept` counts those, `why` has the last reason.
    """

    def __init__(self, clock: Clock, pause: Callable[[float], None] = time.sleep) -> None:
        self._clock, self._pause = clock, pause
        self.kept, self.why = 0, ""

    def around(self, timer: Callable[[int], float]) -> Callable[[int], float]:
        """`timer` with throttled samples taken again."""

        def timed(calls: int) -> float:
            for _ in range(TRIES):
                before = self._clock.throttled()
                seconds = timer(calls)
                why = before or self._clock.throttled()
                if not why:
                    return seconds
                self.why = why
                self._pause(PAUSE_S)
            self.kept += 1
            return seconds

        return timed
