"""AITER's Triton GEMMs of one kind as a kernel source of the search (worker/tuners/search/source.py).

AITER's own public wrapper (`wrapper.py`) decides which kernels a config compiles, and how they are specialised: with a
GPU, or for a target without one. Imports torch and triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from worker.triton_configs.kinds import BY_NAME, ConfigKind
from worker.tuners.aiter_triton import space
from worker.tuners.aiter_triton.problem import KindProblem, family_of, problem_of
from worker.tuners.aiter_triton.wrapper import Wrapper, enter_tree
from worker.tuners.common.case import Case
from worker.tuners.common.inputs import Inputs, needed_bytes, stored_operands
from worker.tuners.common.problem import UnavailableError, UnsupportedError
from worker.tuners.search.compiling import compiling, facts_of, untouched_tensors
from worker.tuners.search.source import Call, CompileFacts, KernelSource
from worker.tuners.search.space import Space
from worker.tuners.search.target import Target, datasheet_target
from worker.tuners.search.tile_config import TileConfig, Values

CompileJob = tuple[Case, TileConfig]


@dataclass(frozen=True, slots=True)
class AiterSource(KernelSource):
    """The wrapper of a kind in a tree, and the other operators that read the same files. `root`: the tree."""

    root: str
    name: str

    @property
    def kind(self) -> ConfigKind:
        return BY_NAME[self.name]

    def enter(self, target: Target | None) -> None:
        enter_tree(self.root, target)
        try:
            self._wrapper()
        except UnavailableError as e:
            raise type(e)(f"AITER's Triton wrapper of {self.name} cannot be imported from {self.root}: {e}") from e

    def space(self, problem: KindProblem, target: Target) -> Space:
        """The configs of a problem."""
        return space.space_of(self.kind, problem, target, partial(self.complete_config, problem))

    def job(self, problem: KindProblem, candidate: TileConfig) -> CompileJob:
        return problem.case, candidate

    def compile(self, job: CompileJob, target: Target) -> CompileFacts:
        case, candidate = job
        wrapper = self._wrapper(candidate.caller)
        inputs, out = _hollow_inputs(case)
        config = wrapper.complete_config(candidate.values, case)
        call = wrapper.make_call(wrapper.operands(inputs, drawn=False), out, config)
        with compiling() as kernels:
            call()
        if not kernels:
            raise UnsupportedError(f"{self.name} starts no kernel of Triton's")
        grid_keys = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "NUM_KSPLIT")
        return facts_of(kernels, tuple(int(config.get(key) or 0) for key in grid_keys))

    def needed_bytes(self, problem: KindProblem) -> int:
        return needed_bytes(problem.case)

    def inputs(self, problem: KindProblem, device: torch.device, seed: int, draw: int) -> Inputs:
        return Inputs.make(problem.case, device, seed, draw)

    def operands(self, inputs: Inputs) -> dict[str, Any]:
        return self._wrapper().operands(inputs)

    def launch(
        self, problem: KindProblem, candidate: TileConfig, operands: Sequence[dict[str, Any]], out: torch.Tensor
    ) -> list[Call]:
        wrapper = self._wrapper(candidate.caller)
        config = wrapper.complete_config(candidate.values, problem.case)
        return [wrapper.make_call(copy, out, config) for copy in operands]

    def complete_config(self, problem: KindProblem, values: dict[str, Any]) -> dict[str, Any]:
        """Values as AITER rewrites them for a problem."""
        wrapper = self._wrapper()
        try:
            return wrapper.complete_config(values, problem.case)
        except Exception:  # noqa: BLE001 - AITER's code on a bucket that lacks something: it fails when it is run
            return dict(values)

    def _wrapper(self, caller: str = "") -> Wrapper:
        return _imported_wrapper(self.root, self.name, caller)


@cache
def _imported_wrapper(root: str, kind: str, caller: str) -> Wrapper:
    return Wrapper(BY_NAME[kind], caller)


def _hollow_inputs(case: Case) -> tuple[Inputs, torch.Tensor]:
    """(operands, output) in a case's forms: to compile with."""

    def inputs_and_output() -> dict[str, Any]:
        inputs = Inputs.make(case, torch.device("cpu"), 0, 0)
        return {**stored_operands(inputs), "out": inputs.output()}

    tensors = untouched_tensors(inputs_and_output)
    out = tensors.pop("out")
    return Inputs(case, **tensors), out


def compile_config(
    kind: str,
    arch: int | str,
    values: Values,
    shape: tuple[int | None, int, int, int],
    *,
    root: str | Path,
    caller: str = "",
) -> CompileFacts:
    """Compile a bucket's values for a shape (B, M, N, K; K the logical one) with this process's Triton; no GPU is
    needed.

    `root`: the tree; a process compiles for one tree and one arch. Raises UnavailableError where the kind cannot be
    imported, UnsupportedError for a case that it does not compute, and what the compiler raises.
    """
    source = AiterSource(str(root), kind)
    target = datasheet_target(arch)
    b, m, n, k = shape
    key: dict[str, int | str] = {"M": m, "N": n, "K": k}
    if b is not None:
        key["B"] = b
    problem = problem_of(kind, family_of(source.kind), key, target.gfx)
    enter_tree(source.root, target)
    return source.compile(source.job(problem, TileConfig(tuple(values.items()), caller)), target)
