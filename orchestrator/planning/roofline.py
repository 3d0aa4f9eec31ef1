"""The roofline of a shape, from a chip's data sheet. `worth.py` estimates by it what tuning a shape is worth. Pure.

    roof = min(peak of the type, arithmetic intensity * memory bandwidth)
    arithmetic intensity = operations / bytes, with every operand read once and the result written once

Bytes are counted like AITER's `bw` column (without scales; checked against its shipped tables), except for outputs
wider than 2 bytes. Peaks are dense (no sparsity) and at the boost clock, so no kernel reaches them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from orchestrator.errors import InputError
from orchestrator.shapes.model import Key, element_type, operand_bytes
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
