"""Triton kernels of a serving engine as a kernel source of the search (worker/tuners/search/source.py).

The engine's own launcher decides which kernels a config starts and how they are specialised: it runs once with the
config imposed. Its launches are made on a GPU, or compiled for a target without a GPU. Each kind of layer is a source
of its own: `linear.py`, `moe.py`, `sglang_moe.py`. Imports torch and triton.
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

from worker.families import ENGINE
from worker.triton_configs.engine_modules import replaced
from worker.triton_configs.engine_package import EngineDevice, Layer, ServingEngineError
from worker.triton_configs.serving_engine import (
    LINEAR_LOOKUP,
    MOE_LOOKUP,
    KernelLaunch,
    ServingEngine,
    load_engine,
)
from worker.tuners.common.problem import Problem, UnavailableError
from worker.tuners.search.compiling import compile_for, compiling, facts_of, untouched_tensors
from worker.tuners.search.source import Call, CompileFacts, KernelSource
from worker.tuners.search.target import Target
from worker.tuners.search.tile_config import TileConfig, Values

Operands = Mapping[str, torch.Tensor]
WARPS_OFF = {"cuda": 0.03, "hip": 0.15}
"""Share of the time that half or twice 4 warps cost, as with AITER's kernels."""
AMD_KNOBS: dict[str, tuple[int, ...]] = {"waves_per_eu": (0, 1, 2, 4), "matrix_instr_nonkdim": (16, 32)}
"""Values of the keys that AMD's compiler alone reads."""
LEAST_SUMS = 2
"""Registers of a lane for the sums; with fewer most lanes of a program have nothing to do."""


def warps_factor(config: TileConfig, target: Target) -> float:
    """Factor on the model's time, which knows no cost of warps."""
    return 1 + WARPS_OFF[target.backend] * abs(math.log2(config.knobs.num_warps / 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProblem(Problem):
    """A layer at one M."""

    layer: Layer
    label: str = ""
    """The routing of a mixture of experts, as of a Point."""
    captured: tuple[tuple[int, ...], ...] = ()
    """Tokens of each expert, in each of the routings that a server had."""


@dataclass(frozen=True, slots=True)
class EngineSource(KernelSource):
    """Kernels of one kind of layer of the engine in the folder `root`, on a device."""

    root: str
    device: EngineDevice

    op: ClassVar[str]
    """The kind of layer, as in `Layer.op`."""
    prefix: ClassVar[str] = ENGINE
    """The beginning of the configs' names."""
    labels: ClassVar[tuple[str, ...]] = ("",)
    """An M is measured at each of these, and its rows are of the first. If there are several, the config of a range has
    the least worst regret."""
    searched_labels: ClassVar[tuple[str, ...]] = ("",)
    """An M is searched at each of these."""

    @abstractmethod
    def problem(self, family: str, key: Mapping[str, int | str], gfx: str) -> LayerProblem:
        """The problem of a shape's key columns. Raises UnsupportedError."""

    def has_pairs(self, target: Target) -> bool:
        """True if each product of a layer may have a config of its own on a device."""
        return False

    @abstractmethod
    def compile_problem(self, problem: Any) -> Any:
        """A problem whose calls compile to the same kernels: one for all M that are specialised alike."""

    @abstractmethod
    def launches(self, problem: Any, values: Values, operands: Operands, out: torch.Tensor) -> list[KernelLaunch]:
        """The engine's launches with these values, which write `out`. Raises UnsupportedError."""

    def engine(self) -> ServingEngine:
        """The engine in this process."""
        return _loaded_engine(self.root, self.device)

    def enter(self, target: Target | None) -> None:
        if target is not None:
            compile_for(target)
        try:
            self.engine()
        except ServingEngineError as e:
            raise UnavailableError(str(e)) from e

    def default_config(self, problem: LayerProblem) -> Values:
        """The config of a launch where there is no file."""
        engine = self.engine()
        finds_nothing = cache(lambda *_, **__: None)  # the engine clears its look-ups' caches
        of_linear = replaced(engine.fp8, {LINEAR_LOOKUP: finds_nothing})
        with of_linear, replaced(engine.moe_lookup, {MOE_LOOKUP: finds_nothing}):
            return engine.config(problem.layer, problem.m)

    def job(self, problem: LayerProblem, candidate: TileConfig) -> tuple[LayerProblem, TileConfig]:
        return self.compile_problem(problem), candidate

    def compile(self, job: tuple[LayerProblem, TileConfig], target: Target) -> CompileFacts:
        problem, config = job
        values = config.values

        def operands_and_output() -> dict[str, Any]:
            inputs = self.inputs(problem, torch.device("cpu"), 0, 0)
            return {**self.operands(inputs), "out": inputs.output()}

        operands = untouched_tensors(operands_and_output)
        out = operands.pop("out")
        with compiling() as kernels:
            _start(self.launches(problem, values, operands, out))
        return facts_of(kernels, (int(values["BLOCK_SIZE_M"]), int(values["BLOCK_SIZE_N"])))

    def launch(
        self, problem: LayerProblem, candidate: TileConfig, operands: Sequence[Operands], out: torch.Tensor
    ) -> list[Call]:
        launches = self.launches(problem, candidate.values, operands[0], out)
        return [_call_on(launches, operands[0], copy) for copy in operands]


def _call_on(launches: Sequence[KernelLaunch], original: Operands, copy: Operands) -> Call:
    """A call that makes the launches on another copy of the operands."""
    replacement = {id(original[name]): copy[name] for name in original}
    on_copy = []
    for launch in launches:
        args = tuple(argument_on_copy(argument, replacement) for argument in launch.args)
        on_copy.append(launch._replace(args=args))
    return lambda: _start(on_copy)


def argument_on_copy(argument: Any, replacement: Mapping[int, torch.Tensor]) -> Any:
    """The argument on the other copy. A TMA descriptor holds the address of its tensor, so the copy gets its own."""
    base = getattr(argument, "base", None)
    if base is not None and id(base) in replacement:
        return replace(argument, base=replacement[id(base)])
    return replacement.get(id(argument), argument)


def _start(launches: Sequence[KernelLaunch]) -> None:
    for launch in launches:
        launch.kernel[launch.grid](*launch.args, **launch.named)


@cache
def _loaded_engine(root: str, device: EngineDevice) -> ServingEngine:
    return load_engine(Path(root), device)
