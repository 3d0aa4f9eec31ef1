"""GPUs as the vendors' tools show them: `amd-smi` (JSON) and `nvidia-smi` (CSV). For hosts without the sysfs files.

A tool costs tens to hundreds of milliseconds a call: worker/device/health.py calls it rarely.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from typing import Any

AMD_SMI = ("amd-smi", "metric", "--json")
_NVIDIA_FIELDS = (
    "index", "pci.bus_id", "uuid", "utilization.gpu", "utilization.memory", "memory.used", "memory.total",
    "temperature.gpu", "temperature.memory", "power.draw", "power.limit", "clocks.sm", "clocks.mem",
    "ecc.errors.uncorrected.volatile.total", "ecc.errors.corrected.volatile.total", "mig.mode.current",
)  # fmt: skip
NVIDIA_SMI = ("nvidia-smi", f"--query-gpu={','.join(_NVIDIA_FIELDS)}", "--format=csv,noheader,nounits")
TIMEOUT_S = 10.0
_MIB = 2**20


def ask(argv: Sequence[str]) -> str:
    """Output of a tool, "" if it is missing, fails, or takes too long."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def parse_nvidia(text: str) -> list[dict[str, Any]]:
    """GPUs from what NVIDIA_SMI prints, one a line; what it calls N/A is left out."""
    out = []
    for line in text.splitlines():
        cells = [c.strip() for c in line.split(",")]
        if len(cells) != len(_NVIDIA_FIELDS) or not cells[0].isdigit():
            continue
        cell = dict(zip(_NVIDIA_FIELDS, cells, strict=True))
        number = {name: _float(value) for name, value in cell.items()}
        used, total = number["memory.used"], number["memory.total"]
        found = {
            "pci": _short_address(cell["pci.bus_id"]),
            "id": cell["uuid"],
            "use_pct": number["utilization.gpu"],
            "memory_use_pct": number["utilization.memory"],
            "memory_used": None if used is None else int(used * _MIB),
            "memory_total": None if total is None else int(total * _MIB),
            "temperature_c": _without_none({"gpu": number["temperature.gpu"], "memory": number["temperature.memory"]}),
            "power_w": number["power.draw"],
            "power_cap_w": number["power.limit"],
            "clock_mhz": number["clocks.sm"],
            "memory_clock_mhz": number["clocks.mem"],
            "partition": "MIG" if cell["mig.mode.current"] == "Enabled" else None,
            "errors": _totals(
                uncorrectable=number["ecc.errors.uncorrected.volatile.total"],
                correctable=number["ecc.errors.corrected.volatile.total"],
            ),
        }
        out.append(_without_none(found))
    return out


def parse_amd(text: str) -> list[dict[str, Any]]:
    """GPUs from what AMD_SMI prints: a list, in newer versions under `gpu_data`; [] for what is no such thing."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return []
    listed = data.get("gpu_data") if isinstance(data, dict) else data
    return [_amd(gpu) for gpu in listed if isinstance(gpu, dict)] if isinstance(listed, list) else []


def _amd(gpu: dict[str, Any]) -> dict[str, Any]:
    used, total = (_megabytes(gpu, "mem_usage", name) for name in ("used_vram", "total_vram"))
    temperatures = {
        name: _value(gpu, "temperature", key)
        for name, key in (("edge", "edge"), ("junction", "hotspot"), ("mem", "mem"))
    }
    found = {
        "use_pct": _value(gpu, "usage", "gfx_activity"),
        "memory_use_pct": _value(gpu, "usage", "umc_activity"),
        "memory_used": used,
        "memory_total": total,
        "temperature_c": _without_none(temperatures),
        "power_w": _value(gpu, "power", "socket_power"),
        "clock_mhz": _value(gpu, "clock", "gfx_0", "clk"),
        "memory_clock_mhz": _value(gpu, "clock", "mem_0", "clk"),
        "errors": _totals(
            uncorrectable=_value(gpu, "ecc", "total_uncorrectable_count"),
            correctable=_value(gpu, "ecc", "total_correctable_count"),
        ),
    }
    return _without_none(found)


def _value(data: Any, *path: str) -> float | None:
    """A number of amd-smi: plain, or {"value": number, "unit": ...}; None for N/A."""
    for name in path:
        data = data.get(name) if isinstance(data, dict) else None
    if isinstance(data, dict):
        data = data.get("value")
    return _float(str(data)) if isinstance(data, (int, float, str)) and not isinstance(data, bool) else None


def _megabytes(data: Any, *path: str) -> int | None:
    value = _value(data, *path)
    return None if value is None else int(value * _MIB)


def _totals(**counts: float | None) -> dict[str, dict[str, int]]:
    return {kind: {"total": int(count)} for kind, count in counts.items() if count is not None}


def _float(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    if value != value or value in (float("inf"), float("-inf")):
        return None
    return int(value) if value.is_integer() else value


def _short_address(text: str) -> str:
    """`00000000:1B:00.0` as the kernel writes it, 0000:1b:00.0."""
    return text[4:].lower() if len(text) == 16 else text.lower()


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in values.items() if v not in (None, "", {})}
