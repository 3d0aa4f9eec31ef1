"""The operands of a shape for torch's candidates: W in the layouts in use, X, the bias, and the float32 reference.

search.py makes `Weights` once for shapes with the same W, and `Operands` for each shape. Each operand is held in copies
that timing rotates over, so that it is in no cache. The X that is checked is used in no timed call: what a candidate
leaves unwritten cannot hold an earlier right answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from worker.text import byte_words
from worker.tuners.common.device import Operand
from worker.tuners.common.operands import (
    CHUNK_BYTES,
    count_copies,
    draw_bias,
    draw_rows,
    generator,
    unpack_codes,
    w_exponent,
    widen_rows,
)
from worker.tuners.common.problem import Problem
from worker.tuners.torch.variants import op

ROOM = 1.1
"""A layout is made if this many times its size is free."""


@dataclass(slots=True)
class Weights:
    """W of a group of shapes, in the layouts in use; shared by the group."""

    problem: Problem
    device: torch.device
    master: Operand
    """W as drawn: [N, K] with its scales."""
    rotate_bytes: int
    """Memory that the copies of a layout span."""
    available: Callable[[], int]
    """Bytes that can be allocated now."""
    _layouts: dict[str, list[Operand]]

    @classmethod
    def make(cls, problem: Problem, device: torch.device, rotate_bytes: int, available: Callable[[], int]) -> Weights:
        """Draw W, the same for every M."""
        numbers = generator(device, "W", problem.group_key)
        exponent = w_exponent(problem.k, mx=problem.scale == "mx")
        master = _operand(draw_rows(problem.scale, problem.dtype, (problem.n,), problem.k, exponent, numbers))
        return cls(problem, device, master, rotate_bytes, available, {})

    def layout(self, name: str) -> list[Operand]:
        """The copies of a layout, made on first use. Raises MemoryError."""
        if name in self._layouts:
            return self._layouts[name]
        size = layout_bytes(self.problem, name)
        if size * ROOM > self.available():
            self._layouts.clear()  # those of slower candidates may go; a contender holds its own
        free = self.available()
        if size * ROOM > free:
            raise MemoryError(f"layout {name} of W needs {byte_words(size)}, {byte_words(free)} are available")
        count = count_copies(size, self.rotate_bytes, room=free // 4 // size)
        first = _in_layout(self.problem, self.master, name)
        others = [tuple(tensor.clone() for tensor in first) for _ in range(count - 1)]
        self._layouts[name] = [first, *others]
        return self._layouts[name]


@dataclass(slots=True)
class Operands:
    """All that the candidates of one shape are run on."""

    problem: Problem
    weights: Weights
    checked: Operand
    """X for the check, never timed."""
    timed: list[Operand]
    """X for timing, rotated."""
    bias: torch.Tensor | None

    @classmethod
    def make(cls, problem: Problem, weights: Weights) -> Operands:
        """Draw X (and the bias) by the whole problem."""
        numbers = generator(weights.device, "X", problem)
        size = max(1, problem.x_bytes + problem.scale_bytes)
        room = weights.available() // 8 // size
        count = count_copies(size + problem.w_bytes, weights.rotate_bytes, room)
        checked, *timed = (
            _operand(draw_rows(problem.scale, problem.dtype, (problem.m,), problem.k, 0, numbers))
            for _ in range(1 + count)
        )
        bias = None
        if problem.bias:
            bias = draw_bias(problem.n, problem.dtype, numbers)
        return cls(problem, weights, checked, timed, bias)

    def reference(self, tick: Callable[[], None]) -> torch.Tensor:
        """[M, N] in float32: both operands dequantised to float32, float32 product, scales, bias."""
        problem = self.problem
        out = torch.empty(problem.m, problem.n, dtype=torch.float32, device=self.weights.device)
        x = widen_rows(problem.scale, problem.k, *self.checked)
        step = max(1, CHUNK_BYTES // (4 * problem.k))
        for n in range(0, problem.n, step):
            rows = (tensor[n : n + step] for tensor in self.weights.master)
            out[:, n : n + step] = x @ widen_rows(problem.scale, problem.k, *rows).t()
            tick()
        return out if self.bias is None else out.add_(self.bias.float())


def needed_bytes(problem: Problem) -> int:
    """Least memory of a shape: both operands, output, reference, and a float32 block of W."""
    block = min(4 * problem.n * problem.k, CHUNK_BYTES + 4 * problem.k)
    operands = problem.w_bytes + 2 * problem.x_bytes + problem.scale_bytes + 4 * problem.m * problem.k
    return operands + problem.out_bytes + 4 * problem.m * problem.n + block


def layout_bytes(problem: Problem, name: str) -> int:
    """Memory of one copy of a layout of W."""
    is_dequantised = problem.scale != "none" and name in ("bf16", "packed")
    return (2 * problem.n * problem.k if is_dequantised else problem.w_bytes) + problem.scale_bytes


def _operand(drawn: tuple[torch.Tensor, torch.Tensor | None]) -> Operand:
    return tuple(tensor for tensor in drawn if tensor is not None)


def _in_layout(problem: Problem, master: Operand, name: str) -> Operand:
    """W in a layout: `nk` as drawn (N rows of K), `kn` transposed, `bf16` dequantised, `packed` in oneDNN's own
    blocked order (dequantised too)."""
    if name == "nk":
        return tuple(tensor.clone() for tensor in master)
    w, *scale = master
    if problem.scale == "row" and name != "kn":
        w = w.to(torch.bfloat16)
    elif problem.scale == "mx":  # in blocks, so that the steps between stay small
        blocks = zip(torch.split(w, 512), torch.split(scale[0], 512), strict=True)
        w = torch.cat([unpack_codes(codes, scales, torch.bfloat16) for codes, scales in blocks])
    if name == "kn":
        return (w.t().contiguous(), *scale)
    if name == "packed":
        w = op("ops.mkldnn._reorder_linear_weight")(w, None)
    return (w, *scale)
