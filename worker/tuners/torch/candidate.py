"""Candidates of the tuner torch: a way to compute a problem, in a mode of the device, with an id that never changes.

variants.py lists the ways of each family once. `expand` makes the candidates of a machine from them: each variant in
the device's first mode (all cores; torch's default BLAS), then the variants marked `every_mode` in the other modes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from worker.families.backends import TORCH
from worker.tuners.common.device import Mode, Run
from worker.tuners.common.operands import dtype_of, float_of
from worker.tuners.common.problem import Problem, UnsupportedError

MODES = 10_000
"""kernelId = number of the variant * MODES + number of the mode."""
ROOM = 0.9
"""Share of the free memory that a candidate's buffers may take."""


class TooLargeError(Exception):
    """Something does not fit in the memory that is available."""

    def __init__(self, what: str, needed: int, available: int) -> None:
        super().__init__(f"{what} needs {needed} bytes, {available} are available")


@dataclass(slots=True)
class Workspace:
    """A candidate's problem, device and buffers. The checker can poison the buffers."""

    problem: Problem
    device: torch.device
    bias: torch.Tensor | None
    free: int
    """Bytes that could be allocated when the candidate began."""
    buffers: list[torch.Tensor] = field(default_factory=list)

    @property
    def gpu(self) -> bool:
        return self.device.type != "cpu"

    @property
    def wide(self) -> torch.dtype:
        """The type in which the library multiplies: the operands' own, or bfloat16 where they have 8 or 4 bits."""
        return float_of(self.problem.dtype) if self.problem.scale == "none" else torch.bfloat16

    @property
    def outdtype(self) -> torch.dtype:
        return float_of(self.problem.outdtype)

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer of the candidate's own; it is poisoned before the check. Raises TooLargeError."""
        made = torch.empty(*shape, dtype=dtype, device="meta")
        needed = self.problem.out_bytes + sum(b.nbytes for b in (*self.buffers, made))
        if needed > ROOM * self.free:
            raise TooLargeError("the candidate's buffers", needed, self.free)
        self.buffers.append(torch.empty_like(made, device=self.device))
        return self.buffers[-1]

    def output(self, dtype: torch.dtype) -> torch.Tensor:
        """A buffer for the output [M, N]."""
        return self.empty(self.problem.m, self.problem.n, dtype=dtype)


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to compute. `layout` names the form in which W is stored for it (operands.py)."""

    number: int
    stem: str
    layout: str
    make: Callable[[Workspace], Run]
    every_mode: bool = False
    split_k: int = 0
    """The number of parts of K; 0 if K is not split."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A variant in a mode."""

    variant: Variant
    mode: Mode

    @property
    def kernel_id(self) -> int:
        return self.variant.number * MODES + self.mode.number

    @property
    def name(self) -> str:
        return f"{TORCH}{self.variant.stem}{self.mode.suffix}"

    @property
    def simplicity(self) -> tuple[int, ...]:
        """Order of candidates that are equally fast; the lowest wins: fewer threads, then lower id."""
        return (self.mode.threads or 0, self.kernel_id)


def expand(variants: Sequence[Variant], modes: Sequence[Mode]) -> list[Candidate]:
    """All candidates, the first mode's before the others' (the budget may end before the list does)."""
    first = [Candidate(v, modes[0]) for v in variants]
    return first + [Candidate(v, mode) for mode in modes[1:] for v in variants if v.every_mode]


def op(path: str) -> Any:
    """`torch.<path>` or UnsupportedError: private operators come and go between versions of torch."""
    found: Any = torch
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError as e:
            raise UnsupportedError(f"torch {torch.__version__} has no torch.{path}") from e
    return found


def mx_types(*, gpu: bool) -> tuple[torch.dtype, torch.dtype]:
    """torch's types of MXFP4 elements and scales. Raises UnsupportedError where its own product does not take them."""
    if not torch.version.hip or not gpu:
        raise UnsupportedError("torch multiplies MXFP4 itself only on an AMD GPU of gfx950 or later")
    fp4, e8 = dtype_of("float4_e2m1fn_x2"), dtype_of("float8_e8m0fnu")
    if fp4 is None or e8 is None:
        raise UnsupportedError(f"torch {torch.__version__} has no MXFP4 types")
    return fp4, e8
