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
    return {kind: round(256 * n * ghz / 1000, 1) for kind, n in clocks.items()}


_CDNA3 = {"fp8": 2614.9, "int8": 2614.9, "bf16": 1307.4, "fp16": 1307.4, "fp32": 163.4}
_HOPPER = {"fp8": 1979.0, "int8": 1979.0, "bf16": 989.4, "fp16": 989.4, "fp32": 66.9}
_GFX950: tuple[Device, ...] = (("gfx950", 256),)
_GFX942: tuple[Device, ...] = (("gfx942", 304),)
_SM90: tuple[Device, ...] = (("sm_90", None),)

CHIPS: dict[str, Chip] = {
    c.name.lower(): c
    for c in (
        Chip("MI355X", _GFX950, _cdna4(2.4), 8.0, "AMD Instinct MI355X data sheet, 2025"),
        Chip("MI350X", _GFX950, _cdna4(2.2), 8.0, "AMD Instinct MI350X data sheet, 2025"),
        Chip("MI300X", _GFX942, _CDNA3, 5.3, "AMD Instinct MI300X data sheet, 2023"),
        Chip("MI325X", _GFX942, _CDNA3, 6.0, "AMD Instinct MI325X data sheet, 2024"),
        Chip("H200", _SM90, _HOPPER, 4.8, "NVIDIA H200 Tensor Core GPU data sheet (SXM), 2023"),
        Chip("H100", _SM90, _HOPPER, 3.35, "NVIDIA H100 Tensor Core GPU data sheet (SXM5), 2023"),
    )
}
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
        chip = CHIPS.get(wanted.lower())
        if chip is None:
            near, known = did_you_mean(wanted, CHIPS), ", ".join(c.name for c in CHIPS.values())
            raise InputError(f"--chip {wanted[:40]!r} is not known{near} (there are {known})")
        return chip, ""
    fitting = [c for c in CHIPS.values() if device in c.devices or (device[0], None) in c.devices]
    named = [c for c in fitting if any(c.name.lower() in n.lower() for n in names)]
    gfx, cu_num = device
    what = f"{gfx or 'a device that is not named'}{f' with {cu_num} CUs' if cu_num else ''}"
    if named:
        return named[0], ""
    if not fitting:
        return None, f"no roofline: no data sheet is known for {what} (--chip NAME if it is one of the known)"
    others = " or ".join(c.name for c in fitting)
    return fitting[0], f"{what} may be {others}: assumed to be {fitting[0].name} for the roofline (--chip corrects it)"


def roofline(family: Family, chip: Chip) -> Callable[[Key], Roof | None]:
    """A function from a shape's key to its roofline. It gives None for fmoe (its bytes depend on the routing) and for
    types that the chip lacks."""
    typed, size, names = element_type(family), operand_bytes(family), family.key_names

    def roof(key: Key) -> Roof | None:
        kind, moved = typed(key), size(key)
        peak = chip.peaks.get(kind[0]) if kind else None
        if peak is None or not moved:
            return None
        intensity = family.flops(dict(zip(names, key, strict=True))) / moved
        by_memory = intensity * chip.bandwidth
        return Roof(by_memory, "memory", intensity) if by_memory < peak else Roof(peak, "compute", intensity)

    return roof


def roof_of(family: Family, key: Key, chip: Chip) -> Roof | None:
    """The roofline of one shape."""
    return roofline(family, chip)(key)


EFFICIENCY = 0.6
"""A guess: the share of the roofline that a tuned kernel reaches, if no row of the chip shows it."""
ANY_OPS, ANY_BYTES = 1e6, 1e5
"""Operations and bytes per microsecond of an unknown chip. If there are tuned rows, only their ratio matters."""
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
    """The class of each shape by its value: a class spans a factor of 4, and class 0 is the most valuable."""
    top = max(values.values(), default=0.0)
    return {i: int(math.log2(top / v) / 2) if v > 0 else 99 for i, v in values.items()}


@dataclass(frozen=True, slots=True)
class Won:
    """The gain of a workload in microseconds. `total_us`: its time in these GEMMs before tuning; `guessed_us` of it was
    not measured. `won_us`: saved so far. `rest_us`: still expected from unsettled shapes."""

    total_us: float
    guessed_us: float
    won_us: float
    rest_us: float

    @property
    def share(self) -> float:
        """The share of the whole expected gain that is won; 1 if no gain is expected."""
        return self.won_us / whole if (whole := self.won_us + self.rest_us) > 0 else 1.0


def won(of: Mapping[int, Worth], tuned: Mapping[int, float], failed: Collection[int] = ()) -> Won:
    """The gain so far. `tuned`: microseconds of each tuned shape; it never replaces a shorter time."""
    saved = sum(w.calls * max(0.0, w.now_us - tuned[i]) for i, w in of.items() if i in tuned)
    settled = {*tuned, *failed}
    expected = sum(w.value for i, w in of.items() if i in settled)
    factor = saved / expected if len(settled) >= FEW and expected > 0 else 1.0
    rest = factor * sum(w.value for i, w in of.items() if i not in settled)
    total = sum(w.calls * w.now_us for w in of.values())
    return Won(total, sum(w.calls * w.now_us for w in of.values() if not w.measured), saved, rest)
