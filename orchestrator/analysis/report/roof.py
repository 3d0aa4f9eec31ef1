"""The roofline of the device that the winners were measured on: peak rate and memory bandwidth by datasheet.

Dense rates without sparsity. A device that is not listed has no roof, and the page says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_FP4, _EIGHT, _HALF = "FP4", "FP8/INT8", "BF16/FP16"


@dataclass(frozen=True, slots=True)
class Device:
    """`tflops`: peak by format, 1e12 operations a second; `tbs`: memory bandwidth, TB/s."""

    name: str
    names: tuple[str, ...]
    tflops: Mapping[str, float]
    tbs: float
    source: str


_AMD = "AMD's datasheet"
_NV = "NVIDIA's datasheet"
DEVICES = (
    Device("MI355X", ("mi355x",), {_FP4: 10066.0, _EIGHT: 5033.2, _HALF: 2516.6}, 8.0, _AMD),
    Device("MI350X", ("mi350x",), {_FP4: 9227.5, _EIGHT: 4613.7, _HALF: 2306.9}, 8.0, _AMD),
    Device("MI325X", ("mi325x",), {_EIGHT: 2614.9, _HALF: 1307.4}, 6.0, _AMD),
    Device("MI300X", ("mi300x",), {_EIGHT: 2614.9, _HALF: 1307.4}, 5.3, _AMD),
    Device("H200", ("h200",), {_EIGHT: 1978.9, _HALF: 989.4}, 4.8, _NV),
    Device("H100", ("h100 80gb hbm3", "h100 sxm"), {_EIGHT: 1978.9, _HALF: 989.4}, 3.35, _NV),
)
_BY_CHIP = {("gfx950", 256): "MI355X", ("gfx942", 304): "MI300X"}
"""Where the name says nothing: the chip, and how many of its compute units there are."""


def roof(family: str, devices: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The roof of a family on the devices (their gfx, cu_num, device); None for none, unknown or more than one."""
    found = [_find(d) for d in devices]
    device = found[0] if found else None
    kind = _format(family)
    if device is None or any(d is not device for d in found) or kind not in device.tflops:
        return None
    return {
        "device": device.name,
        "format": kind,
        "tflops": device.tflops[kind],
        "tbs": device.tbs,
        "source": device.source,
    }


def _find(device: Mapping[str, Any]) -> Device | None:
    text = str(device.get("device", "")).lower()
    for known in DEVICES:
        if any(name in text for name in known.names):
            return known
    chip = _BY_CHIP.get((str(device.get("gfx", "")), device.get("cu_num") or 0))
    return next((d for d in DEVICES if d.name == chip), None)


def _format(family: str) -> str:
    if "a4w4" in family:
        return _FP4
    if "a8w8" in family:
        return _EIGHT
    return _HALF if family in ("a16w16", "batched_bf16") else ""
