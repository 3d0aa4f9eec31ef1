"""Candidates of the tuner torch: a way to compute a problem, in a mode of the device, with an id that never changes.

A `Variant` is written down once in the family's table (a16w16.py, a8w8.py, a4w4.py); `expand` makes the
candidates of a machine from it: each variant in the device's first mode (all cores; torch's default BLAS), then
the variants marked `every_mode` in the other modes too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from worker.families.backends import TORCH
from worker.tuners.common.device import Mode, Run
from worker.tuners.common.formats import dtype_of
from worker.tuners.common.operands import float_of
from worker.tuners.common.problem import Problem, UnsupportedError

MODES = 10_000
"""kernelId = number of the variant * MODES + number of the mode."""


@dataclass(slots=True)
class Workspace:
    """A candidate's problem, device and buffers, which the checker can poison; a variant builds its run from it."""

    problem: Problem
    device: torch.device
    bias: torch.Tensor | None
    buffers: list[torch.Tensor] = field(default_factory=list)

    @property
    def gpu(self) -> bool:
        return self.device.type != "cpu"

    @property
    def dtype(self) -> torch.dtype:
        return float_of(self.problem.dtype)

    @property
    def outdtype(self) -> torch.dtype:
        return float_of(self.problem.outdtype)

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer of the candidate's own; poisoned before the check."""
        self.buffers.append(torch.empty(*shape, dtype=dtype, device=self.device))
        return self.buffers[-1]

    def output(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A buffer for the output [M, N]."""
        return self.empty(self.problem.m, self.problem.n, dtype=dtype or self.outdtype)

    def own(self, *tensors: torch.Tensor) -> None:
        """Have buffers made elsewhere poisoned too."""
        self.buffers.extend(tensors)


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to compute. `layout` names the form in which W is stored for it (operands.py)."""

    number: int
    stem: str
    layout: str
    make: Callable[[Workspace], Run]
    every_mode: bool = False
    split_k: int = 0
    """Into how many parts K is cut; 0 where it is not."""
    buffer_bytes: int = 0
    """Memory of its buffers, beside output and operands; known before they are made."""


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


def epilogue(workspace: Workspace, low: torch.Tensor, bias: bool = True) -> Callable[[], torch.Tensor]:
    """The step from the product `low` to the output: bias, and the cast where types differ."""
    added = workspace.bias if bias else None
    out = low if low.dtype is workspace.outdtype else workspace.output()

    def last() -> torch.Tensor:
        if added is not None:
            low.add_(added)
        return low if out is low else out.copy_(low)

    return last


def parts(k: int, count: int) -> list[tuple[int, int]]:
    """K cut into `count` ranges, all but the last of one length, a multiple of 8. Needs k >= 64 * count."""
    step = -(-k // count)
    step += -step % 8
    return [(start, min(k, start + step)) for start in range(0, k, step)]
