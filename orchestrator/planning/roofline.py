"""The roofline of a shape, from a chip's data sheet, and the value of tuning it for a workload. Pure.

    roof = min(peak of the type, arithmetic intensity * memory bandwidth)
    arithmetic intensity = operations / bytes, with every operand read once and the result written once

Bytes are counted like AITER's `bw` column (without scales; checked against its shipped tables), except for outputs
wider than 2 bytes. Peaks are dense (no sparsity) and at the boost clock, so no kernel reaches them.

    value = calls * (time now - expected time)
    expected time = time at the roofline / efficiency of the nearest tuned row

"Nearest" is the row with the same key and the most similar other M. Without such a row we use the median efficiency.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from orchestrator.errors import InputError
from orchestrator.shapes.model import Key, Shape, element_type, operand_bytes
from worker.families import Family
from worker.text import did_you_mean

Device = tuple[str, int | None]
"""(gfx, cu_num); ("", None) where unknown."""


@dataclass(frozen=True, slots=True)
class Chip:
    """A GPU's data sheet. `peaks`: 1e12 operations per second by type. `bandwidth`: 1e12 bytes of memory per second.
    `devices`: the (gfx, cu_num) by which it is recognized; cu_num None: any."""

    name: str
    devices: tuple[Device, ...]
    peaks: dict[str, float]
    bandwidth: float
    source: str


def _cdna4(ghz: float) -> dict[str, float]:
    """256 CUs; operations a clock and CU by type: CDNA 4 white paper. MI355X 2.4 GHz, MI350X 2.2 GHz."""
    clocks = {"fp4": 16384, "fp8": 8192, "int8": 8192, "bf16": 4096, "fp16": 4096, "fp32": 256}
    return {kind: round(256 * operations * ghz / 1000, 1) for kind, operations in clocks.items()}


_CDNA3 = {"fp8": 2614.9, "int8": 2614.9, "bf16": 1307.4, "fp16": 1307.4, "fp32": 163.4}
_HOPPER = {"fp8": 1979.0, "int8": 1979.0, "bf16": 989.4, "fp16": 989.4, "fp32": 66.9}
_GFX950: tuple[Device, ...] = (("gfx950", 256),)
_GFX942: tuple[Device, ...] = (("gfx942", 304),)
_SM90: tuple[Device, ...] = (("sm_90", None),)

_DATA_SHEETS = (
    Chip("MI355X", _GFX950, _cdna4(2.4), 8.0, "AMD Instinct MI355X data sheet, 2025"),
    Chip("MI350X", _GFX950, _cdna4(2.2), 8.0, "AMD Instinct MI350X data sheet, 2025"),
    Chip("MI300X", _GFX942, _CDNA3, 5.3, "AMD Instinct MI300X data sheet, 2023"),
    Chip("MI325X", _GFX942, _CDNA3, 6.0, "AMD Instinct MI325X data sheet, 2024"),
    Chip("H200", _SM90, _HOPPER, 4.8, "NVIDIA H200 Tensor Core GPU data sheet (SXM), 2023"),
    Chip("H100", _SM90, _HOPPER, 3.35, "NVIDIA H100 Tensor Core GPU data sheet (SXM5), 2023"),
)
CHIPS: dict[str, Chip] = {chip.name.lower(): chip for chip in _DATA_SHEETS}
"""If no name identifies a device, its first chip is assumed."""


class Roof(NamedTuple):
    """The limit for one shape. `tflops`: the most that the chip allows. `bound`: compute or memory. `intensity`:
    operations per byte."""

    tflops: float
    bound: str
    intensity: float


def chip_of(device: Device, names: Sequence[str] = (), wanted: str | None = None) -> tuple[Chip | None, str]:
    """(the chip of a device, a note on it). `names`: the drivers' names of the devices; `wanted`: the user's choice.

    Raises InputError if `wanted` is not a known chip.
    """
    if wanted is not None:
        if wanted.lower() not in CHIPS:
            known = ", ".join(chip.name for chip in CHIPS.values())
            raise InputError(f"--chip {wanted[:40]!r} is not known{did_you_mean(wanted, CHIPS)} (there are {known})")
        return CHIPS[wanted.lower()], ""
    gfx, cu_num = device
    fitting = [chip for chip in CHIPS.values() if device in chip.devices or (gfx, None) in chip.devices]
    for chip in fitting:
        if any(chip.name.lower() in name.lower() for name in names):
            return chip, ""
    what = gfx or "a device that is not named"
    if cu_num:
        what += f" with {cu_num} CUs"
    if not fitting:
        return None, f"no roofline: no data sheet is known for {what} (--chip NAME if it is one of the known)"
    others = " or ".join(chip.name for chip in fitting)
    return fitting[0], f"{what} may be {others}: assumed to be {fitting[0].name} for the roofline (--chip corrects it)"


def roofline(family: Family, chip: Chip) -> Callable[[Key], Roof | None]:
    """A function from a shape's key to its roofline. It gives None for fmoe (its bytes depend on the routing) and for
    types that the chip lacks."""
    type_of = element_type(family)
    bytes_of = operand_bytes(family)

    def roof(key: Key) -> Roof | None:
        kind = type_of(key)
        moved = bytes_of(key)
        peak = chip.peaks.get(kind[0]) if kind else None
        if peak is None or not moved:
            return None
        intensity = family.flops(family.named_key(key)) / moved
        by_memory = intensity * chip.bandwidth
        if by_memory < peak:
            return Roof(by_memory, "memory", intensity)
        return Roof(peak, "compute", intensity)

    return roof


def roof_of(family: Family, key: Key, chip: Chip) -> Roof | None:
    """The roofline of one shape."""
    return roofline(family, chip)(key)


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
