"""The operands: seeded inputs, the layouts of W, the copies that timing rotates over, and the float32 reference.

Distribution (docs/explanation/measurement.md): X and W are uniform over 256 levels (a byte from the generator, or a
code), scaled by powers of two so that an output element has a standard deviation near 1 whatever K is. Every input is
exact in its format, in bfloat16 and in float32, so an honest bfloat16 result is off by its own rounding only (at most
2^-8 relative), well within atol 1e-2 + rtol 1e-2.

The X that is checked is used in no timed call: what a candidate leaves unwritten cannot hold an earlier right answer.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from worker.tuners.common.formats import unpack_codes
from worker.tuners.torch.candidate import Operand, op
from worker.tuners.torch.problem import A4W4, A8W8, A16W16, MX_GROUP, Problem

MAX_COPIES = 64
CHUNK_BYTES = 256 << 20
"""float32 W is made in blocks of about so much for the reference."""
UNIFORM = 0.577
"""Standard deviation of a uniform variable on -1..1."""
E2M1_RMS = math.sqrt((0.25 + 1 + 2.25 + 4 + 9 + 16 + 36) / 8)
MX_EXPONENTS = (-2, -1, 0, 1)
"""Exponents of the e8m0 scales, drawn evenly; `MX_RMS` is their root mean square as factors."""
MX_RMS = math.sqrt(sum(4.0**e for e in MX_EXPONENTS) / 4)


class TooLargeError(Exception):
    """Something does not fit in the memory that is available."""

    def __init__(self, what: str, needed: int, available: int) -> None:
        super().__init__(f"{what} needs {needed} bytes, {available} are available")


Available = Callable[[], int]


@dataclass(slots=True)
class Weights:
    """W of a group of shapes, in the layouts that were asked for, each as rotated copies; shared by the group."""

    problem: Problem
    device: torch.device
    master: Operand
    rotate_bytes: int
    available: Available
    _layouts: dict[str, list[Operand]]
    _wide: torch.Tensor | None = None

    @classmethod
    def make(cls, p: Problem, device: torch.device, seed: int, rotate_bytes: int, available: Available) -> Weights:
        """Draw W by (seed, weight_key): the same for every M."""
        return cls(
            p, device, _weights(p, device, generator(device, seed, "W", p.weight_key)), rotate_bytes, available, {}
        )

    def layout(self, name: str) -> list[Operand]:
        """The copies of a layout, made on first use. Raises TooLargeError."""
        if name not in self._layouts:
            p = self.problem
            size = layout_bytes(p, name)
            free = self.available()
            if size * 1.1 > free:
                self._layouts.clear()  # those of slower candidates may go; who still needs one holds it
                free = self.available()
                if size * 1.1 > free:
                    raise TooLargeError(f"layout {name} of W", size, free)
            count = max(1, min(copies(size, self.rotate_bytes), free // 4 // size))
            first = _LAYOUTS[p.family][name](self.master)
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
            yield n, widen(self.problem, tuple(t[n : n + step] for t in self.master))


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
    def make(cls, p: Problem, weights: Weights, seed: int) -> Operands:
        """Draw X (and the bias) by (seed, the whole problem)."""
        draw = generator(weights.device, seed, "X", p)
        size = max(1, p.x_bytes + p.scale_bytes)
        count = min(copies(size + p.w_bytes, weights.rotate_bytes), max(1, weights.available() // 8 // size))
        xs = [_activations(p, weights.device, draw) for _ in range(1 + count)]
        bias = _levels((p.n,), weights.device, draw).to(_float(p.dtype)).mul_(2.0**-7) if p.bias else None
        return cls(p, weights, xs[0], xs[1:], bias)

    def reference(self, tick: Callable[[], None]) -> torch.Tensor:
        """[M, N] in float32: both operands dequantised to float32, float32 product, scales, bias."""
        p = self.problem
        out = torch.empty(p.m, p.n, dtype=torch.float32, device=self.weights.device)
        x = widen(p, self.checked)
        for n, rows in self.weights.wide_rows():
            out[:, n : n + rows.shape[0]] = x @ rows.t()
            tick()
        return out if self.bias is None else out.add_(self.bias.float())


def needed_bytes(p: Problem) -> int:
    """What a shape takes at the very least: both operands, output, reference, and a float32 block of W."""
    block = min(4 * p.n * p.k, CHUNK_BYTES + 4 * p.k)
    return p.w_bytes + 2 * p.x_bytes + p.scale_bytes + 4 * p.m * p.k + p.out_bytes + 4 * p.m * p.n + block


def layout_bytes(p: Problem, name: str) -> int:
    """Memory of one copy of a layout of W."""
    wide = {"f32": 4, "bf16": 2, "packed": 4 if p.dtype == "float32" else 2}
    stored = p.n * p.k * wide[name] if name in wide else p.w_bytes
    return stored + (p.scale_bytes if p.family != A16W16 else 0)


def copies(size: int, span: int) -> int:
    """How many copies of `size` bytes span `span` bytes."""
    return max(1, min(MAX_COPIES, -(-span // max(1, size))))


def widen(p: Problem, operand: Operand) -> torch.Tensor:
    """Rows of an operand as float32 [R, K], scales applied: the meaning of the format, by the plain path."""
    if p.family == A16W16:
        return operand[0].float()
    if p.family == A8W8:
        return operand[0].float().mul_(operand[1][:, None])
    return unpack_codes(operand[0], operand[1], torch.float32)


def generator(device: torch.device, *words: object) -> torch.Generator:
    """A generator seeded by what the words say."""
    digest = hashlib.sha256(repr(words).encode()).digest()
    made = torch.Generator(device=device)
    made.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return made


def _levels(shape: tuple[int, ...], device: torch.device, draw: torch.Generator) -> torch.Tensor:
    """int8, uniform over all 256 values; eight at a time, since that is what a generator is fast at."""
    size = math.prod(shape)
    words = torch.empty(-(-size // 8), dtype=torch.int64, device=device)
    words.random_(-(2**63), None, generator=draw)
    return words.view(torch.int8)[:size].view(shape)


def _shrink(p: Problem) -> int:
    """The power of two by which W is scaled so that an output element has a standard deviation near 1."""
    rms = UNIFORM if p.family != A4W4 else E2M1_RMS * MX_RMS
    return -round(math.log2(math.sqrt(p.k) * rms * rms))


def _activations(p: Problem, device: torch.device, draw: torch.Generator) -> Operand:
    return _rows(p, p.m, 0, device, draw)


def _weights(p: Problem, device: torch.device, draw: torch.Generator) -> Operand:
    return _rows(p, p.n, _shrink(p), device, draw)


def _rows(p: Problem, rows: int, exponent: int, device: torch.device, draw: torch.Generator) -> Operand:
    """`rows` rows of K elements of the family's format, of size about 2^exponent."""
    if p.family == A4W4:
        codes = _levels((rows, p.k // 2), device, draw).view(torch.uint8)
        pick = _levels((rows, p.k // MX_GROUP), device, draw).view(torch.uint8) & 3
        return codes, pick + (127 + MX_EXPONENTS[0] + exponent)
    levels = _levels((rows, p.k), device, draw)
    if p.family == A16W16:
        return (levels.to(_float(p.dtype)).mul_(2.0 ** (exponent - 7)),)
    scale = torch.rand(rows, device=device, generator=draw).add_(0.5).mul_(2.0**exponent)
    if p.dtype == "int8":
        return levels, scale.mul_(2.0**-7)
    return levels.to(torch.bfloat16).mul_(2.0**-7).to(_float(p.dtype)), scale


def _float(name: str) -> torch.dtype:
    found: torch.dtype = op(name)
    return found


def _pack(w: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = op("ops.mkldnn._reorder_linear_weight")(w, None)
    return packed


def _mx(w: Operand, dtype: torch.dtype) -> torch.Tensor:
    """MXFP4 rows dequantised, in blocks so that the steps between stay small."""
    out = torch.empty(w[0].shape[0], 2 * w[0].shape[1], dtype=dtype, device=w[0].device)
    for n in range(0, out.shape[0], 512):
        out[n : n + 512] = unpack_codes(w[0][n : n + 512], w[1][n : n + 512], dtype)
    return out


_LAYOUTS: dict[str, dict[str, Callable[[Operand], Operand]]] = {
    A16W16: {
        "nk": lambda w: (w[0].clone(),),
        "kn": lambda w: (w[0].t().contiguous(),),
        "f32": lambda w: (w[0].float(),),
        "packed": lambda w: (_pack(w[0]),),
    },
    A8W8: {
        "nk": lambda w: (w[0].clone(), w[1]),
        "kn": lambda w: (w[0].t().contiguous(), w[1]),
        "bf16": lambda w: (w[0].to(torch.bfloat16), w[1]),
        "f32": lambda w: (w[0].float(), w[1]),
        "packed": lambda w: (_pack(w[0].to(torch.bfloat16)), w[1]),
    },
    A4W4: {
        "nk": lambda w: (w[0].clone(), w[1].clone()),
        "bf16": lambda w: (_mx(w, torch.bfloat16),),
        "f32": lambda w: (_mx(w, torch.float32),),
        "packed": lambda w: (_pack(_mx(w, torch.bfloat16)),),
    },
}
