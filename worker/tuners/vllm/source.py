"""vLLM's Triton kernels as a kernel source of the search (worker/tuners/search/source.py), and its linear layer.

The engine's own launcher decides which kernels a config starts and how they are specialised: it runs once with the
config imposed. Its launches are made on a GPU, or compiled for a target without a GPU. Each kind of layer is a source
of its own. Imports torch and triton.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch

from worker.bench.case import BLOCK8, Case
from worker.bench.measuring import Inputs, needed_bytes
from worker.families import ENGINE
from worker.triton_configs.engine import Device, Engine, EngineError, Launch, Layer, load, replaced
from worker.tuners.common.problem import SCALE_BLOCK, Problem, UnavailableError, UnsupportedError, fp8_of, size_of
from worker.tuners.search.compiling import compile_for, compiling, facts_of, hollow
from worker.tuners.search.model import accumulators, estimate_us
from worker.tuners.search.source import Call, CompileFacts, KernelSource, Target
from worker.tuners.search.tiles import Space, TileConfig, Values, fits, same_as

Operands = Mapping[str, torch.Tensor]


WARPS_OFF = {"cuda": 0.03, "hip": 0.15}  # share of the time that half or twice 4 warps cost, as with AITER's kernels
LEAST_SUMS = 2  # registers of a lane for the sums; with fewer most lanes of a program have nothing to do


def warps_factor(c: TileConfig, target: Target) -> float:
    """Factor on the model's time, which knows no cost of warps."""
    return 1 + WARPS_OFF[target.backend] * abs(math.log2(c.knobs.num_warps / 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProblem(Problem):
    """A layer at one M. `label`: as of a Point."""

    layer: Layer
    label: str = ""


@dataclass(frozen=True, slots=True)
class EngineSource(KernelSource):
    """Kernels of one kind of layer (`op`: as `Layer.op`) of the engine in a folder, on a device. An M is measured at
    each of `labels`, and searched at those of `searched`; rows are of the first. Where there are several, the winner of
    a range has the least worst regret."""

    root: str
    device: Device

    op: ClassVar[str]
    labels: ClassVar[tuple[str, ...]] = ("",)
    searched: ClassVar[tuple[str, ...]] = ("",)

    @abstractmethod
    def problem(self, family: str, key: Mapping[str, int | str], gfx: str) -> LayerProblem:
        """The problem of a shape's key columns. Raises UnsupportedError."""

    @abstractmethod
    def sibling(self, layer: Layer, sizes: Sequence[int]) -> Layer:
        """The layer whose file has other sizes in its name."""

    @abstractmethod
    def alike(self, p: Any) -> Any:
        """A problem whose calls compile to the same kernels: one for all M that are specialised alike."""

    @abstractmethod
    def launches(self, p: Any, values: Values, operands: Operands, out: torch.Tensor) -> list[Launch]:
        """The engine's launches with these values, which write `out`. Raises UnsupportedError."""

    def engine(self) -> Engine:
        """The engine in this process."""
        return _engine(self.root, self.device)

    def enter(self, target: Target | None) -> None:
        if target is not None:
            compile_for(target)
        try:
            self.engine()
        except EngineError as e:
            raise UnavailableError(str(e)) from e

    def default(self, p: LayerProblem) -> Values:
        """The config of a launch where there is no file."""
        engine, none = self.engine(), cache(lambda *_, **__: None)
        with replaced(engine.fp8, {LINEAR_LOOKUP: none}), replaced(engine.moe, {"get_moe_configs": none}):
            return engine.config(p.layer, p.m)

    def job(self, problem: LayerProblem, candidate: TileConfig) -> tuple[LayerProblem, TileConfig]:
        return self.alike(problem), candidate

    def compile(self, job: tuple[LayerProblem, TileConfig], target: Target) -> CompileFacts:
        p, values = job[0], job[1].values

        def forms() -> dict[str, Any]:
            inputs = self.inputs(p, torch.device("cpu"), 0, 0)
            return {**self.operands(inputs), "out": inputs.output()}

        operands = hollow(forms)
        out = operands.pop("out")
        with compiling() as kernels:
            _start(self.launches(p, values, operands, out))
        return facts_of(kernels, tuple(int(values[f"BLOCK_SIZE_{x}"]) for x in "MN"))

    def launch(
        self, problem: LayerProblem, candidate: TileConfig, operands: Sequence[Operands], out: torch.Tensor
    ) -> list[Call]:
        launches = self.launches(problem, candidate.values, operands[0], out)
        return [_replay(launches, operands[0], other) for other in operands]


def _replay(launches: Sequence[Launch], first: Operands, other: Operands) -> Call:
    """A call that makes the launches on another copy of the operands."""
    instead = {id(first[name]): other[name] for name in first}
    mine = [x._replace(args=tuple(instead.get(id(a), a) for a in x.args)) for x in launches]
    return lambda: _start(mine)


def _start(launches: Sequence[Launch]) -> None:
    for x in launches:
        x.kernel[x.grid](*x.args, **x.named)


@cache
def _engine(root: str, device: Device) -> Engine:
    return load(Path(root), device)


BLOCK = (SCALE_BLOCK, SCALE_BLOCK)
LINEAR_LOOKUP = "get_w8a8_block_fp8_configs"
FIRST_BYTES = 1 << 31  # AMD's compiler treats a tensor of this size or more in another way
KNOBS: dict[str, tuple[Any, ...]] = {
    "BLOCK_SIZE_M": (16, 32, 64, 128, 256),
    "BLOCK_SIZE_N": (16, 32, 64, 128, 256),
    "BLOCK_SIZE_K": (32, 64, 128),
    "GROUP_SIZE_M": (1, 8, 16, 32, 64),
}
OF_BACKEND: dict[str, dict[str, tuple[Any, ...]]] = {
    "cuda": {"num_warps": (2, 4, 8, 16), "num_stages": (1, 2, 3, 4, 5, 6)},
    "hip": {
        "num_warps": (1, 2, 4, 8), "num_stages": (1, 2, 3), "waves_per_eu": (0, 1, 2, 4),
        "matrix_instr_nonkdim": (16, 32),
    },
}  # fmt: skip
"""vLLM's own space (rows from 16, columns from 32, steps of 64 and 128, 4 and 8 warps, 2 to 5 stages), and what the
kernel takes beyond it."""
OF_CHIP: dict[int | str, dict[str, tuple[Any, ...]]] = {"gfx942": {"kpack": (1, 2)}}
DEFAULT_GROUP = 16


@dataclass(frozen=True, slots=True)
class Linear(EngineSource):
    """The block-FP8 linear layer: one kernel, one file for each (N, K)."""

    op = "linear"

    def problem(self, family: str, key: Mapping[str, int | str], gfx: str) -> LayerProblem:
        m, n, k = (size_of(key, c) for c in "MNK")
        return LayerProblem(family, 1, m, n, k, fp8_of(gfx), layer=Layer("linear", n, k, dtype="fp8_w8a8", block=BLOCK))

    def sibling(self, layer: Layer, sizes: Sequence[int]) -> Layer:
        return replace(layer, n=sizes[0], k=sizes[1])

    def space(self, p: LayerProblem, target: Target) -> Space:
        knobs = {**KNOBS, **OF_BACKEND[target.backend], **OF_CHIP.get(target.arch, {})}
        return Space(
            knobs, {"GROUP_SIZE_M": DEFAULT_GROUP}, lambda c: is_legal(p, c, target),
            lambda c: estimate_us(p, c.knobs, target) * warps_factor(c, target), lambda c: same_as(p, c.values), ENGINE,
        )  # fmt: skip

    def alike(self, p: LayerProblem) -> LayerProblem:
        if p.m == 1 or max(p.x_bytes, p.out_bytes) >= FIRST_BYTES:
            return p
        return replace(p, m=16 if p.m % 16 == 0 else 17)

    def needed_bytes(self, p: LayerProblem) -> int:
        return needed_bytes(_case(p))

    def inputs(self, p: LayerProblem, device: torch.device, seed: int, draw: int) -> Inputs:
        return Inputs.make(_case(p), device, seed, draw)

    def operands(self, inputs: Inputs) -> Operands:
        xs, ws = inputs.scales
        with replaced(torch.accelerator, {"empty_cache": lambda: None}):  # where it is compiled there may be none
            w = self.engine().fp8._maybe_pad_fp8_weight(inputs.w)
        return {"x": inputs.x, "w": w, "xs": xs, "ws": ws}

    def launches(self, p: LayerProblem, values: Values, operands: Operands, out: torch.Tensor) -> list[Launch]:
        engine, made = self.engine(), []
        multiply, given = engine.fp8.w8a8_triton_block_scaled_mm, [operands[name] for name in ("x", "w", "xs", "ws")]
        with replaced(engine.fp8, {LINEAR_LOOKUP: lambda *_: {1: dict(values)}}):
            found = engine.launches("linear", lambda: made.append(multiply(*given, list(BLOCK), out.dtype)))
        if len(found) != 1:
            raise UnsupportedError(f"{engine.project} {engine.version} starts {len(found)} kernels for a linear layer")
        return [found[0]._replace(args=tuple(out if a is made[0] else a for a in found[0].args))]


def _case(p: LayerProblem) -> Case:
    return Case(p.family, BLOCK8, p.m, p.n, p.k, dtype=p.dtype, outdtype=p.outdtype)


def is_legal(p: LayerProblem, c: TileConfig, target: Target) -> bool:
    """False for what gives wrong results or cannot be a good one; what it needs of shared memory the compiler says."""
    x = c.knobs
    one_scale = SCALE_BLOCK % x.block_k == 0 or p.k <= SCALE_BLOCK  # the kernel takes one scale a step
    least = (x.num_stages - 1) * (x.block_m + x.block_n) * x.block_k  # a pipeline may keep one stage in registers
    busy = accumulators(x, target) >= LEAST_SUMS
    return one_scale and busy and fits(p, c, target) and least <= target.shared_bytes
