"""Value of tuning a shape for a workload: calls x (time now - expected time), and what a run has won of it. Pure.

    expected time = time at the roofline / efficiency of the nearest tuned row

nearest: the same key with the most similar other M; without such a row the median efficiency of all counts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from orchestrator.planning.roofline import Chip, roofline
from orchestrator.shapes.model import Key, Shape, operand_bytes
from worker.families import Family

EFFICIENCY = 0.6
"""Share of the roofline that a tuned kernel reaches, where no row of the chip shows one: a guess."""
ANY_OPS, ANY_BYTES = 1e6, 1e5
"""Operations and bytes in a microsecond of a chip that is not known: only their ratio counts where rows are known."""
UNTUNED = 1.5
"""Time of a shape without a tuned row over its expected time, where it was not measured: a guess."""
FEW = 5
"""Shapes that must be settled before what they won corrects what the others are expected to win."""


@dataclass(frozen=True, slots=True)
class Worth:
    """`calls` of a shape in a workload, the time of one now and as expected, in microseconds. `measured`: now is."""

    calls: float
    now_us: float
    expected_us: float
    measured: bool = True

    @property
    def value(self) -> float:
        """Microseconds that the workload is expected to win."""
        return self.calls * max(0.0, self.now_us - self.expected_us)


class Forecast:
    """Expected times of shapes in microseconds, from `known` times of the chip's tuned rows."""

    def __init__(self, family: Family, known: Mapping[Key, float], chip: Chip | None) -> None:
        self._names, self._at = family.key_names, family.key_names.index(family.m_column)
        self._flops, self._bytes = family.flops, operand_bytes(family)
        self._roof = roofline(family, chip) if chip is not None else lambda key: None
        self._kinds: dict[Key, list[tuple[Key, float]]] = {}
        for key, us in known.items():
            self._kinds.setdefault(self._kind(key), []).append((key, self._bound_us(key) / us))
        self._usual = median([e for kind in self._kinds.values() for _, e in kind] or [EFFICIENCY])

    def us(self, key: Key) -> float:
        """Expected time of a tuned kernel."""
        m = float(key[self._at])
        near = [(abs(math.log(float(k[self._at]) / m)), e) for k, e in self._kinds.get(self._kind(key), ()) if k != key]
        return self._bound_us(key) / (min(near)[1] if near else self._usual)

    def _kind(self, key: Key) -> Key:
        return (*key[: self._at], *key[self._at + 1 :])

    def _bound_us(self, key: Key) -> float:
        ops, roof = float(self._flops(dict(zip(self._names, key, strict=True)))), self._roof(key)
        return ops / roof.tflops / 1e6 if roof is not None else max(ops / ANY_OPS, self._bytes(key) / ANY_BYTES)


def worths(
    shapes: Sequence[Shape],
    calls: Mapping[Key, float],
    now: Mapping[Key, float],
    forecast: Forecast,
    fixed: Collection[int] = (),
) -> dict[int, Worth]:
    """The worth of each shape by its id. `now`: measured times; `fixed`: shapes that are not to be tuned."""
    out = {}
    for s in shapes:
        expected = forecast.us(s.key)
        today = now.get(s.key, UNTUNED * expected)
        out[s.id] = Worth(calls[s.key], today, today if s.id in fixed else min(today, expected), s.key in now)
    return out


def tiers(values: Mapping[int, float]) -> dict[int, int]:
    """Shapes by id in classes of about the same value: each spans a factor of 4, 0 is the most valuable."""
    top = max(values.values(), default=0.0)
    return {i: int(math.log2(top / v) / 2) if v > 0 else 99 for i, v in values.items()}


@dataclass(frozen=True, slots=True)
class Won:
    """Gain of a workload in microseconds: `total_us` it took in these GEMMs, of which `guessed_us` was not
    measured; `won_us` of it is saved, and `rest_us` is expected of what is not settled."""

    total_us: float
    guessed_us: float
    won_us: float
    rest_us: float

    @property
    def share(self) -> float:
        """Part of all that is expected to be won that is won; 1 where nothing is expected."""
        return self.won_us / whole if (whole := self.won_us + self.rest_us) > 0 else 1.0


def won(of: Mapping[int, Worth], tuned: Mapping[int, float], failed: Collection[int] = ()) -> Won:
    """Gain so far. `tuned`: time of each tuned shape in microseconds, which replaces a shorter one nowhere."""
    saved = sum(w.calls * max(0.0, w.now_us - tuned[i]) for i, w in of.items() if i in tuned)
    settled = {*tuned, *failed}
    expected = sum(w.value for i, w in of.items() if i in settled)
    factor = saved / expected if len(settled) >= FEW and expected > 0 else 1.0
    rest = factor * sum(w.value for i, w in of.items() if i not in settled)
    total = sum(w.calls * w.now_us for w in of.values())
    return Won(total, sum(w.calls * w.now_us for w in of.values() if not w.measured), saved, rest)
