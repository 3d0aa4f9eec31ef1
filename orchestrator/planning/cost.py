"""Estimated cost of a shape in seconds on one slot.

    cost(group) = setup + sum over its shapes of  a + b * flops + c * weights

with flops = the family's operation count (GEMM: 2*M*N*K*B) and weights = flops / (2*M), for a GEMM the
elements of the weight matrix, N*K*B. `a` is the fixed cost of a shape (candidates times overhead), `b` pays
for running candidates and the reference, `c` for making inputs and for the memory-bound part of decode
shapes.

The coefficients are fitted to earlier runs of the same family, tuner and gfx (`fit`). Without such runs they are a
first guess from shipped rates (`default`). On a chip that nobody measured they only order the work (`known` is False).
No result depends on them.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from orchestrator.planning.estimate import CERTAIN
from orchestrator.planning.rates import nearest_rate
from orchestrator.shapes.model import Shape, operand_bytes
from worker.families import Family
from worker.tuners.catalog import recorded_tuner

FIRST_SPREAD = 3.0
"""Factor by which a first guess from shipped rates may be wrong either way: versions, cores and shapes differ."""

UNKNOWN_SPREAD = 10.0
"""The same on a chip that nobody measured, once the run itself has shown a first result."""

DOES_NOT_FIT_S = 0.01
"""Seconds until a shape whose operands exceed the device's memory has failed: the tuner sees it before it starts, so
hundreds of them cost next to nothing."""

FEWEST_FOR_FIT = 8
"""With fewer samples than this, only the scale of the guess is corrected."""

RUN_OFF = 0.3
"""Prior for the error of a whole run: the standard deviation of the logarithm of measured over estimated."""

RUN_WEIGHT = 2.0
"""Number of measured runs that the prior counts for."""

FIT_ROUNDS = 10
"""Rounds of reweighting, after which the weights hardly change."""

MEDIAN_TO_DEVIATION = 1.4826
"""The standard deviation of normal errors, in medians of their size."""


@dataclass(frozen=True, slots=True)
class CostSample:
    """One finished attempt of an earlier run, as `fit` wants it (ledger/cost_samples.py gathers them)."""

    shapes: float
    """Number of shapes that it measured."""
    flops: float
    """Sum of their operations."""
    weights: float
    """Sum of their weight elements."""
    seconds: float
    """Seconds that it took, without imports."""
    run: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Coefficients of the formula in the module's docstring, and how far to trust them."""

    setup_s: float
    """Seconds of a group, without imports."""
    shape_s: float
    """`a`: seconds of a shape."""
    flop_s: float
    """`b`: seconds of an operation."""
    weight_s: float
    """`c`: seconds of a weight element."""
    source: str
    """A sentence that says where they are from."""
    start_s: float = 0.0
    """Seconds from the command to a slot's first group (worker, imports, canary)."""
    spread: float = FIRST_SPREAD
    """The factor by which the estimate of a whole run may be wrong either way; nine of ten runs are within it."""
    is_guess: bool = False
    """No run of the user was measured yet."""
    known: bool = True
    """Somebody measured this tuner on this chip."""
    memory: int = 0
    """Bytes of the largest device, 0 if unknown. Shapes that exceed it fail at once."""

    @classmethod
    def default(cls, tuner: str, family: Family, gfx: str = "") -> CostModel:
        """The first guess, if this user has measured nothing yet. The guess of a tuner from a package is its own."""
        spec = recorded_tuner(tuner)
        rate, known = nearest_rate(tuner, family.name, gfx)
        if spec.cost_guess is not None:
            known = True
            source = f"the guess of tuner {tuner} itself; the next run of {family.name} will know better"
        elif known:
            source = f"a first guess for tuner {tuner}, {rate.source}; the next run of {family.name} will know better"
        else:
            source = f"not known: nobody has measured tuner {tuner} on {gfx or 'this chip'}; the first run will show it"
        seconds = spec.cost_guess or rate
        model = cls(
            seconds.setup_s,
            seconds.shape_s,
            seconds.flop_s,
            seconds.weight_s,
            source,
            seconds.start_s,
            FIRST_SPREAD if known else UNKNOWN_SPREAD,
            is_guess=True,
            known=known,
        )
        return model.scaled(spec.slower_families.get(family.name, 1.0))

    def scaled(self, units: float) -> CostModel:
        """The model for a run whose options multiply the cost of every shape by `units`."""
        return replace(self, shape_s=units * self.shape_s, flop_s=units * self.flop_s, weight_s=units * self.weight_s)

    def fit(self, samples: Sequence[CostSample], starts: Sequence[float] = ()) -> CostModel:
        """The model corrected by measurements: robust least squares of the relative error, no coefficient below 0.

        With fewer than FEWEST_FOR_FIT samples the model is scaled by the median of measured over estimated; without
        samples it does not change. `starts`: seconds of earlier runs until their first group, and after their last.
        """
        from statistics import median

        good = [sample for sample in samples if sample.shapes > 0 and sample.seconds > 0]
        if not good:
            return self
        ratio = median([sample.seconds / max(self._attempt_s(sample), 1e-9) for sample in good])
        scaled = [ratio * seconds for seconds in (self.setup_s, self.shape_s, self.flop_s, self.weight_s)]
        if len(good) >= FEWEST_FOR_FIT:
            # in groups of one size the set-up cannot be told from what each shape costs, and shapes without a cost
            # would be dealt one by one
            set_up = float(len({sample.shapes for sample in good}) > 1)
            features = [(set_up, sample.shapes, sample.flops, sample.weights) for sample in good]
            scaled = _robust_fit(features, [sample.seconds for sample in good], scaled)
        setup_s, shape_s, flop_s, weight_s = scaled
        fitted = CostModel(setup_s, shape_s, flop_s, weight_s, "", median(starts) if starts else self.start_s)
        error = median([abs(fitted._attempt_s(sample) / sample.seconds - 1) for sample in good])
        attempts = "attempt" if len(good) == 1 else "attempts"
        source = f"fitted to {len(good)} {attempts} of earlier runs (median error {error:.0%})"
        return replace(fitted, source=source, spread=fitted._spread_over(good))

    def _spread_over(self, samples: Sequence[CostSample]) -> float:
        """The factor within which nine of ten runs are, computed from how far off whole runs of the samples are."""
        measured: dict[str, float] = defaultdict(float)
        estimated: dict[str, float] = defaultdict(float)
        for sample in samples:
            measured[sample.run] += sample.seconds
            estimated[sample.run] += self._attempt_s(sample)
        off = [math.log(measured[run] / max(1e-9, estimated[run])) for run in measured]
        variance = (RUN_WEIGHT * RUN_OFF**2 + sum(log * log for log in off)) / (RUN_WEIGHT + len(off))
        return min(FIRST_SPREAD, math.exp(CERTAIN * math.sqrt(variance)))

    def cost_s(self, shape: Shape | Mapping[str, int | str], family: Family) -> float:
        """Seconds of one shape on one slot, without the set-up of its group."""
        key = shape.key_dict(family) if isinstance(shape, Shape) else shape
        flops = family.flops(key)
        return self.shape_s + flops * (self.flop_s + self.weight_s / (2.0 * int(key[family.m_column])))

    def shape_costs(self, shapes: Sequence[Shape], family: Family) -> dict[int, float]:
        """Seconds by shape id, without set-up."""
        size = operand_bytes(family)
        costs: dict[int, float] = {}
        for shape in shapes:
            if self.memory and size(shape.key) > self.memory:
                costs[shape.id] = DOES_NOT_FIT_S
            else:
                costs[shape.id] = self.cost_s(shape, family)
        return costs

    def _attempt_s(self, sample: CostSample) -> float:
        shapes_s = self.shape_s * sample.shapes
        return self.setup_s + shapes_s + self.flop_s * sample.flops + self.weight_s * sample.weights


def weights(key: Mapping[str, int | str], family: Family) -> float:
    """flops / (2*M): the elements of a GEMM's weight matrix."""
    return family.flops(key) / (2.0 * int(key[family.m_column]))


def _robust_fit(features: Sequence[Sequence[float]], seconds: Sequence[float], start: Sequence[float]) -> list[float]:
    """Non-negative weights w with `features @ w` near `seconds`, starting from `start`.

    The error of a sample is relative to the larger of measured and estimated, so it is at most 1 either way. Samples
    with an unusually large error count little (Cauchy weights, ten rounds).
    """
    import numpy as np

    samples = np.asarray(features, dtype=float)
    measured = np.asarray(seconds, dtype=float)
    best = np.asarray(start, dtype=float)
    for _ in range(FIT_ROUNDS):
        estimated = samples @ best
        size = np.maximum(measured, estimated)
        error = np.abs(estimated - measured) / size
        usual_error = MEDIAN_TO_DEVIATION * max(float(np.median(error)), 1e-6)
        trust = np.sqrt(1.0 / (1.0 + (error / usual_error) ** 2)) / size
        rows = samples * trust[:, None]
        # columns differ by many powers of ten: each is scaled to length 1 for the solver
        scale = np.sqrt((rows * rows).sum(axis=0))
        scale[scale == 0] = 1.0
        best = _non_negative(rows / scale, measured * trust) / scale
    return [float(weight) for weight in best]


def _non_negative(a: Any, b: Any) -> Any:
    """Exact least squares without negative weights: the best over all subsets of the four columns."""
    import numpy as np

    columns = range(a.shape[1])
    best = np.zeros(len(columns))
    for size in columns:
        for chosen in itertools.combinations(columns, size + 1):
            weights = np.zeros(len(columns))
            weights[list(chosen)] = np.linalg.lstsq(a[:, chosen], b, rcond=None)[0]
            is_closer = np.linalg.norm(a @ weights - b) < np.linalg.norm(a @ best - b) * (1 - 1e-12)
            if is_closer and (weights >= 0).all():
                best = weights
    return best
