"""The roofline: the most TFLOPS that a chip allows for a shape, from its data sheet.

    roof = min(peak of the type, arithmetic intensity * memory bandwidth)
    arithmetic intensity = operations / bytes, every operand read once and the result written once

Bytes are counted as AITER's `bw` column counts them (scales left out; checked against its shipped tables), but for an
output that is wider than 2 bytes. Peaks are dense (no sparsity), at the boost clock: no kernel reaches them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from orchestrator.errors import InputError
from orchestrator.families import ELEMENT_TYPES, family_type
from orchestrator.shapes.model import Key, element_type
from worker.families import Family

Device = tuple[str, int | None]
"""(gfx, cu_num); ("", None) where unknown."""


@dataclass(frozen=True, slots=True)
class Chip:
    """`peaks`: 1e12 operations a second by type, `bandwidth`: bytes of memory a second / 1e12. `devices`: (gfx, cu_num)
    that it shows up as; cu_num None: any."""

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
"""The first chip of a device is the one assumed where no name identifies it."""


class Roof(NamedTuple):
    """`tflops`: the most that the chip allows; `bound`: compute or memory; `intensity`: operations a byte."""

    tflops: float
    bound: str
    intensity: float


def chip_of(device: Device, names: Sequence[str] = (), wanted: str | None = None) -> tuple[Chip | None, str]:
    """(the chip of a device, a note on it). `names`: the drivers' names of the devices; `wanted`: the user's choice.

    Raises InputError where `wanted` is no chip that is known.
    """
    if wanted is not None:
        chip = CHIPS.get(wanted.lower())
        if chip is None:
            raise InputError(
                f"--chip {wanted[:40]!r} is not known; there are {', '.join(c.name for c in CHIPS.values())}"
            )
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
    """The roofline of shapes by key; None for fmoe (its bytes depend on the routing) and types that the chip lacks."""
    typed, names = element_type(family), family.key_names
    if not {"M", "N", "K"} <= set(names):
        return lambda key: None
    at_m, at_n, at_k = (names.index(c) for c in ("M", "N", "K"))
    at_out = names.index("outdtype") if "outdtype" in names else None
    fixed = family_type(family)
    if fixed is not None and at_out is None and fixed[0] in chip.peaks:
        return _roof_of_one_type(fixed[1], chip.peaks[fixed[0]], chip.bandwidth, (at_m, at_n, at_k))

    def roof(key: Key) -> Roof | None:
        kind = typed(key)
        peak = chip.peaks.get(kind[0]) if kind else None
        if kind is None or peak is None:
            return None
        m, n, k = int(key[at_m]), int(key[at_n]), int(key[at_k])
        out = ELEMENT_TYPES.get(str(key[at_out]), ("", 2.0))[1] if at_out is not None else 2.0
        intensity = 2.0 * m * n * k / (kind[1] * (m * k + n * k) + out * m * n)  # a batch multiplies both
        by_memory = intensity * chip.bandwidth
        return Roof(by_memory, "memory", intensity) if by_memory < peak else Roof(peak, "compute", intensity)

    return roof


def roof_of(family: Family, key: Key, chip: Chip) -> Roof | None:
    """The roofline of one shape."""
    return roofline(family, chip)(key)


def _roof_of_one_type(
    size: float, peak: float, bandwidth: float, at: tuple[int, int, int]
) -> Callable[[Key], Roof | None]:
    """The same for a family whose shapes are all of one type, in a third of the time."""
    sizes = itemgetter(*at)

    def roof(key: Key) -> Roof:
        m, n, k = sizes(key)
        intensity = 2.0 * m * n * k / (size * k * (m + n) + 2.0 * m * n)
        by_memory = intensity * bandwidth
        return Roof(by_memory, "memory", intensity) if by_memory < peak else Roof(peak, "compute", intensity)

    return roof
