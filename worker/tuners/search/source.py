"""The contract between the search and a family of kernels: `KernelSource`, the plain data that it hands over,
the device that it is searched for, and the options that all tuners of the engine have.

Importing this module imports neither torch nor triton.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from worker.registry import Rule, option, seconds, text, whole

if TYPE_CHECKING:
    import torch

    from worker.tuners.search.tiles import Space

Call = Callable[[], None]


class Candidate(Protocol):
    """One way to run a kernel. Plain data: it is sent to the measuring process."""

    @property
    def name(self) -> str:
        """A text that spells every knob. Two candidates of a problem have different names."""

    @property
    def split_k(self) -> int:
        """The number of programs that share one tile's K."""

    @property
    def simplicity(self) -> tuple[int, ...]:
        """Value that decides between two candidates of the same speed: the lower one wins."""

    @property
    def features(self) -> tuple[float, ...]:
        """The candidate as a point: a step of one knob is a distance of about 1."""


@dataclass(frozen=True, slots=True)
class CompileFacts:
    """Facts of all kernels of one call, from `worker.tuners.search.compiling.facts_of`.

    shared_bytes: shared memory (LDS) of a program. vgprs: registers of a lane, None where the file does not say
    (NVIDIA). spills: registers that did not fit; a candidate that spills is measured last. hash: of the machine code.
    grid: what decides how the kernels are started.
    """

    shared_bytes: int
    vgprs: int | None
    spills: int
    hash: str
    grid: tuple[int, ...] = ()

    @property
    def same_as(self) -> tuple[object, ...]:
        """Equal for candidates that start the same machine code alike. One of them is measured."""
        return self.hash, self.grid


class KernelSource(Protocol):
    """A family of kernels that can be searched.

    A source is small, plain data: each process of the search has a copy and calls `enter` first. The tuner's process
    asks for the space and jobs; compile processes compile; the measuring process, which alone uses the
    GPU, makes operands and launches.
    """

    def enter(self, target: Target | None) -> None:
        """Import the kernels into this process; calling it again does nothing.

        With a target, kernels are only compiled for it here, and no GPU is touched. None: the GPU's driver answers.
        Raises UnavailableError.
        """

    def space(self, problem: Any, target: Target) -> Space:
        """The configs of a problem, with their estimated times."""

    def job(self, problem: Any, candidate: Any) -> Any:
        """The candidate's compile job: plain data. Jobs of the same `repr` compile the same kernel."""

    def compile(self, job: Any, target: Target) -> CompileFacts:
        """Compile into Triton's disk cache. Raises UnsupportedError, and what the compiler raises."""

    def needed_bytes(self, problem: Any) -> int:
        """The least memory that the problem takes: operands, output and reference."""

    def inputs(self, problem: Any, device: torch.device, seed: int, draw: int) -> Any:
        """Draw the operands by (seed, problem, draw), before a kernel wants them in its own order. Raises
        UnsupportedError.

        They have what `worker.bench.measuring.Inputs` has: `bytes`, the memory that they take; `copy`, the same values
        in other memory; `output`, a tensor of the problem's form, filled with NaN; `reference`, the right answer in
        float32, whose last dimension is the output's. If a call makes several products, `reference` gives a tuple of
        those, which lie in the output one behind the other: each has to be right.
        """

    def operands(self, inputs: Any) -> Any:
        """The operands as the kernels want them (shuffled, padded). This is not timed. Raises UnsupportedError."""

    def launch(self, problem: Any, candidate: Any, operands: Sequence[Any], out: torch.Tensor) -> Sequence[Call]:
        """One call on each of the operands. A call writes `out` and can be captured in a graph."""


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
    return {t.arch: t for t in reversed(_KNOWN)}[arch]


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

    For an unknown device the peaks are those of another one of its backend, by multiprocessors: the order of candidates
    needs ratios only. Raises RuntimeError where torch sees no GPU.
    """
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU")
    p: Any = torch.cuda.get_device_properties(index)
    hip = torch.version.hip is not None
    arch: int | str = p.gcnArchName.split(":")[0] if hip else 10 * p.major + p.minor
    same = [t for t in _KNOWN if t.backend == ("hip" if hip else "cuda")]
    like = min(same, key=lambda t: (t.name != p.name, t.arch != arch))
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


FAST, EXHAUSTIVE = "fast", "exhaustive"


def _search(value: Any) -> str:
    if value not in (FAST, EXHAUSTIVE):
        raise ValueError(f"neither {FAST} nor {EXHAUSTIVE}")
    return str(value)


def mapping_of(fits: Callable[[str, Any], bool], what: str) -> Rule:
    """Rule: a mapping from texts whose entries fit."""

    def rule(value: Any) -> tuple[tuple[str, Any], ...]:
        if not isinstance(value, Mapping) or not all(isinstance(k, str) and fits(k, v) for k, v in value.items()):
            raise ValueError(f"not {what}")
        return tuple(value.items())

    return rule


_COUNTS = mapping_of(lambda _, v: isinstance(v, (int, float)) and v > 0, "numbers of calls above 0 by shape")


def cost_factor(options: Mapping[str, Any]) -> float:
    """Factor on a shape's time with these options."""
    return 4.0 if options.get("search") == EXHAUSTIVE else 1.0


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Each option with its default; docs/reference/tuners.md explains them."""

    search: str = option(FAST, _search)
    # Seconds from a shape's start until no further candidate is begun; 0 means as long as the search takes.
    budget_s_per_shape: float = option(0.0, seconds(0, 86400))
    # Most candidates of a shape, the best by the model; 0 means all legal ones.
    max_candidates: int = option(0, whole(0, 1_000_000))
    # Compile processes; 0 means the slot's share of the usable cores less one, at least one.
    compilers: int = option(0, whole(0, 1024))
    min_samples: int = option(5, whole(1, 100_000))
    max_samples: int = option(31, whole(1, 100_000))
    seed: int = option(0, whole(0, 2**63))
    # Memory that the copies of the operands span: more than the last-level cache of MI300 and MI355X (256 MB).
    rotate_mb: int = option(512, whole(0, 65536))
    # We end the measuring process if it has work and sends nothing for this time.
    hang_s: float = option(30.0, seconds(0.5, 3600))
    again: int = option(0, whole(0, 100))  # times that a ranking is repeated whose winner has a small margin
    family: str = option("", text)  # the run's family, set by gemmfleet
    root: str = option("", text)  # the folder with the kernels, where it is not found by itself
    # Calls of the workload by shape (`16x1280x8192`), set by gemmfleet from the column `count`.
    counts: tuple[tuple[str, float], ...] = option((), _COUNTS)
