"""The worth of tuning each shape for a workload, before a run with --by-value and while it goes on. Pure.

    worth = calls * (time now - expected time)
    expected time = time at the roofline / efficiency of the nearest tuned row

"Nearest" is the row with the same key and the most similar other M. Without such a row we use the median efficiency.

`controller/prepare.py` calls `estimate_worths` with a `Forecast` once, and the run keeps the result. `plan.py` orders
the work by `value_tiers`; the run's limits and the page of its end call `measure_gain`.
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
"""A guess: the share of the roofline that a tuned kernel reaches, if no row of the chip shows it."""
ANY_OPS = 1e6
"""Operations per microsecond of an unknown chip. If there are tuned rows, only the ratio to ANY_BYTES matters."""
ANY_BYTES = 1e5
UNTUNED = 1.5
"""A guess: how much slower than expected a shape without a tuned row is, if it was not measured."""
FEW = 5
"""Once this many shapes are settled, their gains correct the gains expected from the others."""


@dataclass(frozen=True, slots=True)
class Worth:
    """The value of tuning a shape: its `calls` in a workload, and microseconds per call now and as expected.
    `measured`: the time now was measured."""

    calls: float
    now_us: float
    expected_us: float
    measured: bool = True

    @property
    def value(self) -> float:
        """Microseconds that the workload is expected to save."""
        return self.calls * max(0.0, self.now_us - self.expected_us)


class Forecast:
    """Predicts times of shapes in microseconds from the `known` times of the chip's tuned rows."""

    def __init__(self, family: Family, known: Mapping[Key, float], chip: Chip | None) -> None:
        self._family = family
        self._m_index = family.key_names.index(family.m_column)
        self._bytes_of = operand_bytes(family)
        self._roof = roofline(family, chip) if chip is not None else lambda key: None
        self._efficiencies: dict[Key, list[tuple[Key, float]]] = {}
        """(key, share of the bound that its tuned kernel reaches) of the rows that differ in M alone."""
        for key, us in known.items():
            rows = self._efficiencies.setdefault(self._without_m(key), [])
            rows.append((key, self._bound_us(key) / us))
        every = [efficiency for rows in self._efficiencies.values() for _, efficiency in rows]
        self._usual = median(every or [EFFICIENCY])

    def us(self, key: Key) -> float:
        """Expected time of a tuned kernel."""
        m = float(key[self._m_index])
        nearest = math.inf, self._usual
        for other, efficiency in self._efficiencies.get(self._without_m(key), ()):
            if other != key:
                distance = abs(math.log(float(other[self._m_index]) / m))
                nearest = min(nearest, (distance, efficiency))
        return self._bound_us(key) / nearest[1]

    def _without_m(self, key: Key) -> Key:
        return (*key[: self._m_index], *key[self._m_index + 1 :])

    def _bound_us(self, key: Key) -> float:
        """The least time by the data sheet, or by the rates of an unknown chip."""
        operations = float(self._family.flops(self._family.named_key(key)))
        roof = self._roof(key)
        if roof is not None:
            return operations / roof.tflops / 1e6
        return max(operations / ANY_OPS, self._bytes_of(key) / ANY_BYTES)


def estimate_worths(
    shapes: Sequence[Shape],
    calls: Mapping[Key, float],
    now: Mapping[Key, float],
    forecast: Forecast,
    fixed: Collection[int] = (),
) -> dict[int, Worth]:
    """The worth of each shape by its id. `now`: measured times; `fixed`: shapes that are not to be tuned."""
    worths = {}
    for shape in shapes:
        expected = forecast.us(shape.key)
        today = now.get(shape.key, UNTUNED * expected)
        if shape.id in fixed:
            expected = today
        worths[shape.id] = Worth(calls[shape.key], today, min(today, expected), shape.key in now)
    return worths


LAST_TIER = 99
"""The class of shapes that are worth nothing."""


def value_tiers(values: Mapping[int, float]) -> dict[int, int]:
    """The class of each shape by its value: a class spans a factor of 4, and class 0 is the most valuable."""
    top = max(values.values(), default=0.0)
    return {id_: int(math.log2(top / value) / 2) if value > 0 else LAST_TIER for id_, value in values.items()}


@dataclass(frozen=True, slots=True)
class Gain:
    """The gain of a workload in microseconds. `total_us`: its time in these GEMMs before tuning; `guessed_us` of it was
    not measured. `won_us`: saved so far. `rest_us`: still expected from unsettled shapes."""

    total_us: float
    guessed_us: float
    won_us: float
    rest_us: float

    @property
    def share(self) -> float:
        """The share of the whole expected gain that is won; 1 if no gain is expected."""
        whole = self.won_us + self.rest_us
        return self.won_us / whole if whole > 0 else 1.0


def measure_gain(worths: Mapping[int, Worth], tuned: Mapping[int, float], failed: Collection[int] = ()) -> Gain:
    """The gain so far. `tuned`: microseconds of each tuned shape; it never replaces a shorter time."""
    settled = {*tuned, *failed}
    total = guessed = saved = expected = rest = 0.0
    for shape, worth in worths.items():
        total += worth.calls * worth.now_us
        if not worth.measured:
            guessed += worth.calls * worth.now_us
        if shape in tuned:
            saved += worth.calls * max(0.0, worth.now_us - tuned[shape])
        if shape in settled:
            expected += worth.value
        else:
            rest += worth.value
    if len(settled) >= FEW and expected > 0:
        rest *= saved / expected
    return Gain(total, guessed, saved, rest)
