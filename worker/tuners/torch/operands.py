"""Operands of a shape for torch's candidates: layouts of W, the copies that timing rotates over, float32 reference.

The X that is checked is used in no timed call: what a candidate leaves unwritten cannot hold an earlier right answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from worker.tuners.common.device import Operand
from worker.tuners.common.operands import CHUNK_BYTES, copies, draw_bias, draw_w, draw_x, generator, unpack_codes, widen
from worker.tuners.common.problem import Problem
from worker.tuners.torch.variants import TooLargeError, op


@dataclass(slots=True)
class Weights:
    """W of a group of shapes, in the layouts in use, each as rotated copies; shared by the group."""

    problem: Problem
    device: torch.device
    master: Operand
    rotate_bytes: int
    available: Callable[[], int]
    _layouts: dict[str, list[Operand]]
    _wide: torch.Tensor | None = None

    @classmethod
    def make(cls, p: Problem, device: torch.device, rotate_bytes: int, available: Callable[[], int]) -> Weights:
        """Draw W by its weight_key: the same for every M."""
        master = _operand(draw_w(p, generator(device, "W", weight_key(p))))
        return cls(p, device, master, rotate_bytes, available, {})

    def layout(self, name: str) -> list[Operand]:
        """The copies of a layout, made on first use. Raises TooLargeError."""
        if name not in self._layouts:
            size = layout_bytes(self.problem, name)
            free = self.available()
            if size * 1.1 > free:
                self._layouts.clear()  # those of slower candidates may go; a contender holds its own
                free = self.available()
                if size * 1.1 > free:
                    raise TooLargeError(f"layout {name} of W", size, free)
            count = max(1, min(copies(size, self.rotate_bytes), free // 4 // size))
            first = _stored(self.problem, self.master, name)
            self._layouts[name] = [first] + [tuple(t.clone() for t in first) for _ in range(count - 1)]
        return self._layouts[name]

    def wide_rows(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(first row, float32 rows [r, K]) of the dequantised W, for the reference; kept whole where there is room."""
        p = self.problem
        if self._wide is None and 4 * p.n * p.k <= min(1 << 30, self.available() // 8):
            self._wide = torch.cat([rows for _, rows in self._widen()])
        if self._wide is not None:
            yield 0, self._wide
        else:
            yield from self._widen()

    def _widen(self) -> Iterator[tuple[int, torch.Tensor]]:
        step = max(1, CHUNK_BYTES // (4 * self.problem.k))
        for n in range(0, self.problem.n, step):
            yield n, widen(self.problem, *(t[n : n + step] for t in self.master))


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
    def make(cls, p: Problem, weights: Weights) -> Operands:
        """Draw X (and the bias) by the whole problem."""
        draw = generator(weights.device, "X", p)
        size = max(1, p.x_bytes + p.scale_bytes)
        count = min(copies(size + p.w_bytes, weights.rotate_bytes), max(1, weights.available() // 8 // size))
        xs = [_operand(draw_x(p, draw)) for _ in range(1 + count)]
        return cls(p, weights, xs[0], xs[1:], draw_bias(p, draw))

    def reference(self, tick: Callable[[], None]) -> torch.Tensor:
        """[M, N] in float32: both operands dequantised to float32, float32 product, scales, bias."""
        p = self.problem
        out = torch.empty(p.m, p.n, dtype=torch.float32, device=self.weights.device)
        x = widen(p, *self.checked)
        for n, rows in self.weights.wide_rows():
            out[:, n : n + rows.shape[0]] = x @ rows.t()
            tick()
        return out if self.bias is None else out.add_(self.bias.float())


def weight_key(p: Problem) -> tuple[object, ...]:
    """Problems of one weight_key can share W."""
    return (p.family, p.n, p.k, p.dtype)


def needed_bytes(p: Problem) -> int:
    """Least memory of a shape: both operands, output, reference, and a float32 block of W."""
    block = min(4 * p.n * p.k, CHUNK_BYTES + 4 * p.k)
    return p.w_bytes + 2 * p.x_bytes + p.scale_bytes + 4 * p.m * p.k + p.out_bytes + 4 * p.m * p.n + block


def layout_bytes(p: Problem, name: str) -> int:
    """Memory of one copy of a layout of W."""
    dequantised = p.scale != "none" and name in ("bf16", "packed")
    return (2 * p.n * p.k if dequantised else p.w_bytes) + p.scale_bytes


def _operand(drawn: tuple[torch.Tensor, torch.Tensor | None]) -> Operand:
    return tuple(t for t in drawn if t is not None)


def _stored(p: Problem, master: Operand, name: str) -> Operand:
    """W in a layout: `nk` as given (N rows of K), `kn` transposed, `bf16` dequantised, `packed` in oneDNN's own
    blocked order (dequantised too)."""
    if name == "nk":
        return tuple(t.clone() for t in master)
    w, *scale = master
    if p.scale == "row" and name != "kn":
        w = w.to(torch.bfloat16)
    elif p.scale == "mx":  # in blocks, so that the steps between stay small
        pairs = zip(torch.split(w, 512), torch.split(scale[0], 512), strict=True)
        w = torch.cat([unpack_codes(c, s, torch.bfloat16) for c, s in pairs])
    if name == "packed":
        return (op("ops.mkldnn._reorder_linear_weight")(w, None), *scale)
    return (w.t().contiguous() if name == "kn" else w, *scale)
