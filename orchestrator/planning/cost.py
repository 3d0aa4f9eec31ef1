"""What a shape costs in seconds on one slot, estimated.

    cost(group) = setup + sum over its shapes of  a + b * flops + c * weights

with flops = the family's operation count (GEMM: 2*M*N*K*B) and weights = flops / (2*M), for a GEMM the
elements of the weight matrix, N*K*B. `a` is what every shape costs (candidates times overhead), `b` pays
for running candidates and the reference, `c` for making inputs and for the memory-bound part of decode
shapes.

The numbers come from what earlier runs of the same family, tuner and gfx measured (`fit`), else from a
table of rough first guesses (`default`). They order the work and date its end; no result depends on them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.families import Family
from orchestrator.shapes import Shape

# (setup, a, b, c): seconds, seconds, seconds per operation, seconds per weight element.
# torch: a CPU of some 100 GFLOP/s, about 30 executions a shape. aiter: 53 candidates, a pool start of 10 to
# 25 s a group and about 15 s a shape (AITER's own practice on MI300/MI355X). bench: a process a backend, then
# some seconds a shape. replay: recorded rows, next to nothing.
_GUESSES: dict[str, tuple[float, float, float, float]] = {
    "torch": (0.2, 2.0, 3e-10, 2e-8),
    "aiter": (25.0, 10.0, 3e-12, 3e-8),
    "triton": (5.0, 30.0, 1e-11, 1e-8),
    "bench": (15.0, 5.0, 1e-11, 2e-8),
    "replay": (0.001, 0.01, 0.0, 0.0),
}
# Dequantised on a CPU: the multiplication runs on unpacked copies.
_FACTORS = {("torch", "a4w4_blockscale"): 1.5}

FEWEST_FOR_FIT = 8
"""Below so many samples only the scale of the guess is corrected."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One finished attempt: how many shapes it measured, their sums of flops and weights, seconds without import."""

    shapes: int
    flops: float
    weights: float
    seconds: float


@dataclass(frozen=True, slots=True)
class CostModel:
    """The four numbers of the formula in the module's docstring; `source` says for people where they come from."""

    setup_s: float
    shape_s: float
    flop_s: float
    weight_s: float
    source: str

    @classmethod
    def default(cls, tuner: str, family: Family) -> CostModel:
        """The first guess, where nothing was measured yet."""
        factor = _FACTORS.get((tuner, family.name), 1.0)
        setup, a, b, c = (factor * v for v in _GUESSES.get(tuner, _GUESSES["torch"]))
        source = f"a first guess for tuner {tuner}; the next run of {family.name} will know better"
        return cls(setup, a, b, c, source)

    def fit(self, samples: Sequence[Sample]) -> CostModel:
        """This model corrected by measurements: robust least squares of the relative error, no number below 0.

        Fewer than FEWEST_FOR_FIT samples scale this model by the median of measured over estimated; none leave it
        as it is.
        """
        good = [s for s in samples if s.shapes > 0 and s.seconds > 0]
        if not good:
            return self
        four = [self.setup_s, self.shape_s, self.flop_s, self.weight_s]
        ratio = _median([s.seconds / max(self._attempt_s(s), 1e-9) for s in good])
        if len(good) < FEWEST_FOR_FIT:
            four = [v * ratio for v in four]
        else:
            features = [(1.0, s.shapes, s.flops, s.weights) for s in good]
            four = _robust_fit(features, [s.seconds for s in good], [v * ratio for v in four])
        setup, a, b, c = four
        fitted = CostModel(setup, a, b, c, "")
        off = _median([abs(fitted._attempt_s(s) / s.seconds - 1) for s in good])
        word = "attempt" if len(good) == 1 else "attempts"
        return replace(fitted, source=f"fitted to {len(good)} {word} of earlier runs (median error {off:.0%})")

    def cost_s(self, shape: Shape | Mapping[str, int | str], family: Family) -> float:
        """Seconds of one shape on one slot, without the set-up of its group."""
        key = shape.key_dict(family) if isinstance(shape, Shape) else shape
        flops = family.flops(key)
        return self.shape_s + flops * (self.flop_s + self.weight_s / (2.0 * int(key[family.m_column])))

    def shape_costs(self, shapes: Sequence[Shape], family: Family) -> dict[int, float]:
        """Seconds by shape id, without set-up."""
        return {s.id: self.cost_s(s, family) for s in shapes}

    def group_cost_s(self, shapes: Sequence[Shape], family: Family) -> float:
        """Seconds of one attempt at these shapes."""
        return self.setup_s + sum(self.cost_s(s, family) for s in shapes)

    def _attempt_s(self, s: Sample) -> float:
        return self.setup_s + self.shape_s * s.shapes + self.flop_s * s.flops + self.weight_s * s.weights


def weights(key: Mapping[str, int | str], family: Family) -> float:
    """flops / (2*M): the elements of a GEMM's weight matrix."""
    return family.flops(key) / (2.0 * int(key[family.m_column]))


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    n = len(ordered)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


def _robust_fit(features: Sequence[Sequence[float]], seconds: Sequence[float], start: Sequence[float]) -> list[float]:
    """Non-negative weights w of `features @ w` near `seconds`, beginning at `start`.

    The error of a sample is taken relative to the larger of measured and estimated, so that it is at most 1 either
    way, and samples far beyond the usual error count little (Cauchy weights, ten rounds).
    """
    import numpy as np

    x, y, best = (np.asarray(v, dtype=float) for v in (features, seconds, start))
    for _ in range(10):
        guess = x @ best
        size = np.maximum(y, guess)
        off = np.abs(guess - y) / size
        usual = 1.4826 * max(float(np.median(off)), 1e-6)
        trust = np.sqrt(1.0 / (1.0 + (off / usual) ** 2)) / size
        rows = x * trust[:, None]
        scale = np.sqrt((rows * rows).sum(axis=0))
        scale[scale == 0] = 1.0
        best = np.asarray(_non_negative(rows / scale, y * trust)) / scale
    return [float(v) for v in best]


def _non_negative(x: object, y: object) -> list[float]:
    """Least squares with no negative weight, exact: the best over every subset of the four columns."""
    import numpy as np

    a, b = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    columns = a.shape[1]
    best, least = np.zeros(columns), float(b @ b)
    for size in range(1, columns + 1):
        for chosen in itertools.combinations(range(columns), size):
            part = np.linalg.lstsq(a[:, chosen], b, rcond=None)[0]
            if (part < 0).any():
                continue
            left = a[:, chosen] @ part - b
            if float(left @ left) < least * (1 - 1e-12):
                least = float(left @ left)
                best = np.zeros(columns)
                best[list(chosen)] = part
    return [float(v) for v in best]
