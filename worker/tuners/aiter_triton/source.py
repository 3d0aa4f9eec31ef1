"""AITER's Triton GEMMs of one kind as a kernel source of the search (worker/tuners/search/source.py).

Which kernels a config compiles, and how they are specialised, is decided by AITER's own wrapper (see wrapper.py).
Imports torch and triton.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from worker.bench.backends.inputs import Inputs, needed_bytes
from worker.bench.case import Case
from worker.triton_configs.kinds import BY_NAME, ConfigKind
from worker.tuners.aiter_triton import space
from worker.tuners.aiter_triton.problem import KindProblem, case_of, family_of
from worker.tuners.aiter_triton.space import AiterConfig, Values
from worker.tuners.aiter_triton.wrapper import Wrapper, enter, hollow
from worker.tuners.common.problem import NotImportableError as NotImportableError  # what the check catches
from worker.tuners.common.problem import UnavailableError, UnsupportedError
from worker.tuners.search.compiling import CompileFacts, compiling, facts_of
from worker.tuners.search.source import Call
from worker.tuners.search.target import Target, known


@dataclass(frozen=True, slots=True)
class CompileJob:
    """A config on a case; plain data. `caller`: as of AiterConfig."""

    case: Case
    values: tuple[tuple[str, Any], ...]
    caller: str = ""

    @property
    def compile_key(self) -> str:
        """By all of it: which M share a kernel only the compiler can tell, from its cache."""
        return hashlib.sha256(repr((self.case, self.values, self.caller)).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class AiterSource:
    """The wrapper of a kind in a tree, and the other operators that read the same files. `root`: the tree."""

    root: str
    name: str

    @property
    def kind(self) -> ConfigKind:
        return BY_NAME[self.name]

    def enter(self, target: Target | None) -> None:
        enter(self.root, target)
        try:
            self._wrapper()
        except UnavailableError as e:
            raise type(e)(f"AITER's Triton wrapper of {self.name} cannot be imported from {self.root}: {e}") from e

    def candidates(
        self, problem: KindProblem, target: Target, first: Sequence[AiterConfig] = (), most: int = 0
    ) -> list[AiterConfig]:
        return space.candidates(self.kind, problem, target, self.completed(problem), first, most)

    def estimate_us(self, problem: KindProblem, candidate: AiterConfig, target: Target) -> float:
        return space.estimate(problem, candidate, target)

    def job(self, problem: KindProblem, candidate: AiterConfig) -> CompileJob:
        return CompileJob(problem.case, candidate.items, candidate.caller)

    def compile(self, job: CompileJob, target: Target) -> CompileFacts:
        wrapper = self._wrapper(job.caller)
        inputs, out = hollow(job.case)
        config = wrapper.completed(dict(job.values), job.case)
        call = wrapper.call(wrapper.operands(inputs, drawn=False), out, config)
        with compiling() as kernels:
            call()
        if not kernels:
            raise UnsupportedError(f"{self.name} starts no kernel of Triton's")
        started = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "NUM_KSPLIT")
        return facts_of(kernels, tuple(int(config.get(k) or 0) for k in started))

    def needed_bytes(self, problem: KindProblem) -> int:
        return needed_bytes(problem.case)

    def inputs(self, problem: KindProblem, device: torch.device, seed: int, draw: int) -> Inputs:
        return Inputs.make(problem.case, device, seed, draw)

    def operands(self, inputs: Inputs) -> dict[str, Any]:
        return self._wrapper().operands(inputs)

    def launch(
        self, problem: KindProblem, candidate: AiterConfig, operands: Sequence[dict[str, Any]], out: torch.Tensor
    ) -> list[Call]:
        wrapper = self._wrapper(candidate.caller)
        config = wrapper.completed(candidate.values, problem.case)
        return [wrapper.call(o, out, config) for o in operands]

    def completed(self, problem: KindProblem) -> space.Completed:
        """The rule by which AITER rewrites values for a problem."""
        wrapper = self._wrapper()

        def completed(values: dict[str, Any]) -> dict[str, Any]:
            try:
                return wrapper.completed(values, problem.case)
            except Exception:  # noqa: BLE001 - AITER's code on a bucket that lacks something: it fails when it is run
                return dict(values)

        return completed

    def _wrapper(self, caller: str = "") -> Wrapper:
        return _wrapper(self.root, self.name, caller)


@cache
def _wrapper(root: str, kind: str, caller: str) -> Wrapper:
    return Wrapper(BY_NAME[kind], caller)


def compile_config(
    kind: str, arch: int | str, values: Values, M: int, N: int, K: int, B: int | None = None, *, root: str | Path,
    caller: str = "",
) -> CompileFacts:  # fmt: skip
    """Compile a bucket's values for a shape (K the logical one) with this process's Triton; no GPU is needed.

    `root`: the tree; a process compiles for one tree and one arch. Raises UnavailableError where the kind cannot be
    imported, UnsupportedError for a case that it does not compute, and what the compiler raises.
    """
    source, target = AiterSource(str(root), kind), known(arch)
    key: dict[str, int | str] = {"M": M, "N": N, "K": K, **({} if B is None else {"B": B})}
    case = case_of(source.kind, family_of(source.kind), key, target.gfx)
    enter(source.root, target)
    return source.compile(CompileJob(case, tuple(values.items()), caller), target)
