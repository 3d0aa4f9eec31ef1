"""vLLM's Triton kernels as a kernel source of the search (worker/tuners/search/source.py).

The engine's own launcher decides which kernels a config starts and how they are specialised: it runs once with the
config imposed. Its launches are made on a GPU, or compiled for a target without a GPU. An `Op` holds the differences
between kinds of layers. Imports torch and triton.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch

from worker.triton_configs.engine import Device, Engine, EngineError, Launch, Layer, load
from worker.tuners.common.problem import Problem, UnavailableError
from worker.tuners.search.bucket import Point
from worker.tuners.search.compiling import compile_for, compiling, facts_of, hollow
from worker.tuners.search.source import Call, CompileFacts, Inputs, Target
from worker.tuners.search.tiles import Space, TileConfig, Values

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


P = TypeVar("P", bound=LayerProblem)


class Op(ABC, Generic[P]):
    """A kind of layer that has config files. Plain data; `engine` is the one that this process has loaded."""

    name: ClassVar[str]
    """The name in `Layer.op`."""
    labels: ClassVar[tuple[str, ...]]
    """Labels at each of which an M is measured."""
    searched: ClassVar[tuple[str, ...]]
    """Labels at which an M is searched too. Rows are of the first."""

    @abstractmethod
    def cost(self, points: Sequence[Point], us: Sequence[float], least: Sequence[float]) -> float:
        """The cost that the winner of a range has the least of."""

    @abstractmethod
    def problem(self, family: str, key: Mapping[str, int | str], gfx: str, label: str) -> P:
        """The problem of a shape's key columns. Raises UnsupportedError."""

    @abstractmethod
    def at(self, p: P, m: int, label: str) -> P:
        """The problem of the same layer at another M and label."""

    @abstractmethod
    def sibling(self, layer: Layer, sizes: Sequence[int]) -> Layer:
        """The layer whose file has other sizes in its name."""

    @abstractmethod
    def default(self, engine: Engine, p: P) -> Values:
        """The config of a launch where there is no file."""

    @abstractmethod
    def space(self, p: P, target: Target) -> Space:
        """Legal configs."""

    @abstractmethod
    def alike(self, p: P) -> P:
        """A problem whose calls compile to the same kernels: one for all M that are specialised alike."""

    @abstractmethod
    def needed_bytes(self, p: P) -> int:
        """Bytes of GPU memory that the problem needs."""

    @abstractmethod
    def inputs(self, p: P, device: torch.device, seed: int, draw: int) -> Inputs:
        """Random operands of the problem; `seed` and `draw` choose their values."""

    @abstractmethod
    def operands(self, engine: Engine, inputs: Any) -> Operands:
        """Tensors by name, as the engine stores them; in other copies they differ in their memory alone."""

    @abstractmethod
    def launches(self, engine: Engine, p: P, values: Values, operands: Operands, out: torch.Tensor) -> list[Launch]:
        """The engine's launches with these values, which write `out`. Raises UnsupportedError."""


@dataclass(frozen=True, slots=True)
class EngineJob:
    """A config on a layer; plain data."""

    problem: LayerProblem
    items: tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class EngineSource:
    """Kernels of one op of the engine in a folder, on a device."""

    root: str
    device: Device
    op: Op[Any]

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

    def candidates(
        self, problem: LayerProblem, target: Target, first: Sequence[TileConfig] = (), most: int = 0
    ) -> list[TileConfig]:
        return self.op.space(problem, target).candidates(first, most)

    def estimate_us(self, problem: LayerProblem, candidate: TileConfig, target: Target) -> float:
        return self.op.space(problem, target).estimate(candidate)

    def job(self, problem: LayerProblem, candidate: TileConfig) -> EngineJob:
        return EngineJob(self.op.alike(problem), candidate.items)

    def compile(self, job: EngineJob, target: Target) -> CompileFacts:
        engine, p, values = self.engine(), job.problem, dict(job.items)

        def forms() -> dict[str, Any]:
            inputs = self.op.inputs(p, torch.device("cpu"), 0, 0)
            return {**self.op.operands(engine, inputs), "out": inputs.output()}

        operands = hollow(forms)
        out = operands.pop("out")
        with compiling() as kernels:
            _start(self.op.launches(engine, p, values, operands, out))
        return facts_of(kernels, tuple(int(values[f"BLOCK_SIZE_{x}"]) for x in "MN"))

    def needed_bytes(self, problem: LayerProblem) -> int:
        return self.op.needed_bytes(problem)

    def inputs(self, problem: LayerProblem, device: torch.device, seed: int, draw: int) -> Inputs:
        return self.op.inputs(problem, device, seed, draw)

    def operands(self, inputs: Any) -> Operands:
        return self.op.operands(self.engine(), inputs)

    def launch(
        self, problem: LayerProblem, candidate: TileConfig, operands: Sequence[Operands], out: torch.Tensor
    ) -> list[Call]:
        first = operands[0]
        launches = self.op.launches(self.engine(), problem, candidate.values, first, out)
        return [_replay(launches, first, other) for other in operands]


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
