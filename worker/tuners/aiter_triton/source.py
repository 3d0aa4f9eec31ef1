"""AITER's Triton GEMMs of one kind as a kernel source of the search (worker/tuners/search/source.py).

AITER's own public wrapper, imported from a tree, decides which kernels a config compiles, and how they are specialised:
with a GPU, or for a target without one. AITER asks Triton's driver for the chip when it is imported, and keeps the
answer; where no kernel is to run, a driver that only names the target stands there. Imports torch and triton.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from worker.bench.backends import plain
from worker.bench.case import BLOCK8, MX4, PRE4, PRE8, Case
from worker.bench.measuring import Inputs, needed_bytes
from worker.triton_configs.engine import replaced
from worker.triton_configs.kinds import BY_NAME, ConfigKind
from worker.tuners.aiter_triton import space
from worker.tuners.aiter_triton.space import KindProblem, family_of, problem_of
from worker.tuners.common.calls import arguments_of, find_function
from worker.tuners.common.problem import MX_GROUP, UnavailableError, UnsupportedError
from worker.tuners.search.compiling import compile_for, compiling, facts_of, hollow
from worker.tuners.search.source import Call, CompileFacts, KernelSource, Target, known
from worker.tuners.search.tiles import Space, TileConfig, Values

# Only the Triton ops are imported, without ROCm and JIT builds; and wrappers log every call otherwise.
ENV = {"AITER_TRITON_ONLY": "1", "AITER_LOG_LEVEL": "ERROR"}
SHUFFLE = (("aiter.ops.triton.utils.shuffle", "shuffle_weight"), ("aiter.ops.shuffle", "shuffle_weight"))
SHUFFLE_SCALE = (("aiter.ops.triton.utils.shuffle", "shuffle_scale_gemm"),)
FIRST_SHUFFLED_M = 32  # with this many rows or more, the scales of X are shuffled as well (gemm_afp4wfp4_preshuffle)


def enter(root: str | Path, target: Target | None) -> None:
    """Have `import aiter` mean this tree. With a target nothing can run in this process from now on, only be compiled
    for it; None: the GPU's own driver answers."""
    os.environ.update(ENV)
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    if target is not None:
        compile_for(target)


class Wrapper:
    """The wrapper of a kind, or another operator that reads the same files, in the tree that was entered."""

    def __init__(self, kind: ConfigKind, caller: str = "") -> None:
        """Import it; `caller`: the operator's name. Raises UnavailableError."""
        at = next((c for c in kind.callers if c.function == caller), kind)
        old = re.sub(r"\.gemm\.\w+\.", ".", at.module)  # before 2026-01-07
        self.kind = kind
        self._given = dict(getattr(at, "given", None) or ())
        self._function, _ = find_function([(at.module, at.function), (old, at.function)])
        there = vars(sys.modules[self._function.__module__])
        self._completed: Callable[..., Any] | None = there.get("_get_triton_config") or there.get("_get_config")

    def completed(self, values: Values, case: Case) -> dict[str, Any]:
        """A bucket's values as the wrapper's callers hand them on: with SPLITK_BLOCK_SIZE and split-K made to fit, by
        AITER's own code (compute_splitk_params and its like)."""
        get = self._completed
        module = sys.modules.get(get.__module__) if get else None
        if get is None or module is None or not hasattr(module, "get_gemm_config"):
            return dict(values)
        k = case.k // 2 if self.kind.packed_k else case.k  # two values a byte where both operands are packed, or W is
        sizes = {"M": case.m, "N": case.n, "K": k, "B": case.b, "shuffle": self.kind.shuffled_w}
        there = inspect.signature(get).parameters
        with replaced(module, {"get_gemm_config": lambda *_, **__: (dict(values), True)}):
            found: dict[str, Any] = get(**{k: v for k, v in sizes.items() if k in there})[0]
        return found

    def operands(self, inputs: Inputs, *, drawn: bool = True) -> dict[str, Any]:
        """Operands in the order that the wrapper wants; shuffled ones by the tree's own functions. `drawn` False: they
        hold nothing, so that only their form is made. Raises UnsupportedError, UnavailableError."""
        made = plain(inputs)
        if inputs.case.format in (PRE8, PRE4):
            made["xs"] = None
        if not self.kind.shuffled_w:
            return made
        n, width = inputs.w.shape
        if n % 16:
            raise UnsupportedError(f"N is {n}; AITER shuffles W in tiles of 16 rows")
        w = find_function(SHUFFLE)[0](inputs.w, layout=(16, 16)) if drawn else inputs.w
        made["w"] = w.reshape(n // 16, width * 16)
        if inputs.case.format == BLOCK8 and inputs.xs is not None:
            made["xs"] = inputs.xs.t().contiguous().view(*inputs.xs.shape)
        if inputs.case.format == MX4:
            if inputs.case.m >= FIRST_SHUFFLED_M:
                made["xs"] = _mx_shuffled(inputs.xs, drawn=drawn)
            made["ws"] = _mx_shuffled(inputs.ws, drawn=drawn)
        return made

    def call(self, operands: Mapping[str, Any], out: torch.Tensor, config: dict[str, Any]) -> Callable[[], None]:
        """One call with a completed config, which writes `out`. Raises UnsupportedError."""
        given = {**operands, "dtype": out.dtype, "out": out, "config": config, "backend": "triton"}
        arguments = arguments_of(self._function, given) | self._given
        name = next((n for n, value in arguments.items() if value is config), "")
        if not name:
            raise UnsupportedError(f"{self._function.__name__} takes no config in this tree")
        function = self._function

        def run() -> None:
            function(**{**arguments, name: dict(config)})  # some wrappers change it

        return run


def _mx_shuffled(scales: torch.Tensor | None, *, drawn: bool) -> torch.Tensor:
    """e8m0 scales [R, K/32] in the order of the preshuffled kernel, rows padded to 32. Raises UnsupportedError."""
    assert scales is not None
    rows, columns = scales.shape
    if columns % 8:
        raise UnsupportedError(f"K is {columns * MX_GROUP}; shuffled scales need a multiple of 256")
    if not drawn:
        return scales.new_empty(-(-rows // 32), 32 * columns)
    padded = torch.nn.functional.pad(scales, (0, 0, 0, -rows % 32))
    shuffle = find_function(SHUFFLE_SCALE)[0]
    made: torch.Tensor = shuffle(padded, arch="gfx950", preshuffle_factor=32, scale_kwidth=8)
    return made


def _forms_of(case: Case) -> tuple[Inputs, torch.Tensor]:
    """(operands, output) in a case's forms: to compile with."""

    def make() -> dict[str, Any]:
        made = Inputs.make(case, torch.device("cpu"), 0, 0)
        return {**{n: getattr(made, n) for n in ("x", "w", "xs", "ws", "bias")}, "out": made.output()}

    real = hollow(make)
    out = real.pop("out")
    return Inputs(case, **real), out


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
        enter(self.root, target)
        try:
            self._wrapper()
        except UnavailableError as e:
            raise type(e)(f"AITER's Triton wrapper of {self.name} cannot be imported from {self.root}: {e}") from e

    def space(self, problem: KindProblem, target: Target) -> Space:
        """The configs of a problem."""
        return space.space_of(self.kind, problem, target, partial(self.completed, problem))

    def job(self, problem: KindProblem, candidate: TileConfig) -> CompileJob:
        return problem.case, candidate

    def compile(self, job: CompileJob, target: Target) -> CompileFacts:
        case, candidate = job
        wrapper = self._wrapper(candidate.caller)
        inputs, out = _forms_of(case)
        config = wrapper.completed(candidate.values, case)
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
        self, problem: KindProblem, candidate: TileConfig, operands: Sequence[dict[str, Any]], out: torch.Tensor
    ) -> list[Call]:
        wrapper = self._wrapper(candidate.caller)
        config = wrapper.completed(candidate.values, problem.case)
        return [wrapper.call(o, out, config) for o in operands]

    def completed(self, problem: KindProblem, values: dict[str, Any]) -> dict[str, Any]:
        """Values as AITER rewrites them for a problem."""
        wrapper = self._wrapper()
        try:
            return wrapper.completed(values, problem.case)
        except Exception:  # noqa: BLE001 - AITER's code on a bucket that lacks something: it fails when it is run
            return dict(values)

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
    problem = problem_of(kind, family_of(source.kind), key, target.gfx)
    enter(source.root, target)
    return source.compile(source.job(problem, TileConfig(tuple(values.items()), caller)), target)
