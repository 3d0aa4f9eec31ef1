"""GPUs and the CPU as sysfs and procfs show them, and as the vendors' tools do on hosts without the sysfs files.

Files: a few dozen plain reads a device. `root` is `/`, or a folder that holds a recorded `sys` and `proc`. What cannot
be read is left out. Formats: the kernel's Documentation/gpu/amdgpu (driver-misc, thermal, ras) and
Documentation/hwmon/sysfs-interface.rst.

Tools: `amd-smi` (JSON) and `nvidia-smi` (CSV). One costs tens to hundreds of milliseconds a call:
worker/device/health.py calls it rarely.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

MAX_CORES = 8
"""Cores whose clock is looked at; more would cost milliseconds on a large host."""
MAX_PROCFS_CORES = 16
"""/proc/cpuinfo is read for clocks only up to so many cores: the kernel interrupts every core for it."""
_PCI_BITS = 0xFFFF
"""PCI address within a KFD location_id; partitions carry their number above it."""


def amd_devices(root: Path) -> list[Path]:
    """The PCI device folders of the GPUs that we may open, in the order of their KFD nodes."""
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    out = []
    for node in sorted((p for p in _listing(nodes) if p.name.isdigit()), key=lambda p: int(p.name)):
        properties = numbers(_text(node / "properties"))
        if properties.get("simd_count", 0) > 0 and (device := _device(root, properties)):
            out.append(device)
    return out


def _device(root: Path, properties: dict[str, int]) -> Path | None:
    """The PCI device of a KFD node. A partition's render node hangs on a platform device: then by its address."""
    by_render = root / f"sys/class/drm/renderD{properties.get('drm_render_minor', 0)}/device"
    place = properties.get("location_id", -1) & _PCI_BITS
    address = f"{properties.get('domain', 0):04x}:{place >> 8:02x}:{place >> 3 & 31:02x}.{place & 7}"
    by_address = root / "sys/bus/pci/devices" / address
    for path in (by_render, by_address):
        if (path / "vendor").exists():
            return path
    return None


def amd_gpu(device: Path) -> dict[str, Any]:
    """One GPU's reading from its device folder; units as in worker/device/health.py."""
    hwmon = next(iter(_listing(device / "hwmon")), device / "hwmon")
    clocks = {_label(hwmon, f"freq{i}"): _number(hwmon / f"freq{i}_input", 1e-6) for i in (1, 2)}
    power = _number(hwmon / "power1_average", 1e-6)
    found: dict[str, Any] = {
        "pci": device.resolve().name,
        "id": _text(device / "unique_id"),
        "use_pct": _number(device / "gpu_busy_percent"),
        "memory_use_pct": _number(device / "mem_busy_percent"),
        "memory_used": _number(device / "mem_info_vram_used"),
        "memory_total": _number(device / "mem_info_vram_total"),
        "temperature_c": _temperatures(hwmon),
        "power_w": _number(hwmon / "power1_input", 1e-6) if power is None else power,
        "power_cap_w": _number(hwmon / "power1_cap", 1e-6),
        "clock_mhz": clocks.get("sclk"),
        "memory_clock_mhz": clocks.get("mclk"),
        "partition": _text(device / "current_compute_partition"),
        "memory_partition": _text(device / "current_memory_partition"),
        "errors": _ras(device / "ras"),
    }
    return _without_none(found)


def _ras(folder: Path) -> dict[str, dict[str, int]]:
    """{"uncorrectable": {block: count}, "correctable": ...} of the blocks that count; zeros are kept as one total."""
    kinds = {"ue": "uncorrectable", "ce": "correctable", "de": "deferred"}
    out: dict[str, dict[str, int]] = {}
    for path in _listing(folder):
        if not path.name.endswith("_err_count"):
            continue
        block = path.name[: -len("_err_count")]
        for kind, count in numbers(_text(path).replace(":", " ")).items():
            if kind in kinds:
                counts = out.setdefault(kinds[kind], {"total": 0})
                counts["total"] += count
                if count:
                    counts[block] = count
    return out


def _temperatures(hwmon: Path) -> dict[str, float]:
    out: dict[str, float] = {}
    for path in _listing(hwmon):
        if path.name.startswith("temp") and path.name.endswith("_input"):
            degrees = _number(path, 1e-3)
            if degrees is not None:
                out[_label(hwmon, path.name[: -len("_input")])] = degrees
    return out


def _label(hwmon: Path, sensor: str) -> str:
    return _text(hwmon / f"{sensor}_label") or sensor


# --- CPU ----------------------------------------------------------------------------------------------------------


def cpu(root: Path) -> dict[str, Any]:
    """Load (1, 5, 15 min), clock, temperature, throttle counts and memory of the host, as far as they can be read."""
    load = _text(root / "proc/loadavg").split()[:3]
    memory = numbers(_text(root / "proc/meminfo").replace(":", " "))
    clocks = list(_clocks(root))
    found: dict[str, Any] = {
        "load": [float(x) for x in load] if len(load) == 3 else None,
        "clock_mhz": round(sum(clocks) / len(clocks), 1) if clocks else None,
        "temperature_c": _cpu_temperatures(root),
        "throttled": _throttled(root),
        "memory_used": (memory["MemTotal"] - memory["MemAvailable"]) * 1024
        if {"MemTotal", "MemAvailable"} <= set(memory)
        else None,
        "memory_total": memory["MemTotal"] * 1024 if "MemTotal" in memory else None,
    }
    return _without_none(found)


def _clocks(root: Path) -> Iterator[float]:
    """MHz of a few cores."""
    policies = _listing(root / "sys/devices/system/cpu/cpufreq")[:MAX_CORES]
    found = [_number(p / "scaling_cur_freq", 1e-3) for p in policies]
    if any(x is not None for x in found):
        yield from (x for x in found if x is not None)
    elif len(_cores(root)) <= MAX_PROCFS_CORES:
        for line in _text(root / "proc/cpuinfo").splitlines():
            if line.startswith("cpu MHz"):
                yield float(line.partition(":")[2])


def _cores(root: Path) -> list[Path]:
    return [p for p in _listing(root / "sys/devices/system/cpu") if p.name[:3] == "cpu" and p.name[3:].isdigit()]


def _cpu_temperatures(root: Path) -> dict[str, float]:
    """The hottest sensor of each CPU driver's hwmon, else of each thermal zone."""
    out: dict[str, float] = {}
    for hwmon in _listing(root / "sys/class/hwmon"):
        name = _text(hwmon / "name")
        if name in ("coretemp", "k10temp", "zenpower", "cpu_thermal") and (found := _temperatures(hwmon)):
            out[name] = max(out.get(name, -273.0), *found.values())
    if not out:
        for zone in _listing(root / "sys/class/thermal"):
            degrees = _number(zone / "temp", 1e-3)
            if zone.name.startswith("thermal_zone") and degrees is not None:
                kind = _text(zone / "type") or zone.name
                out[kind] = max(out.get(kind, -273.0), degrees)
    return out


def _throttled(root: Path) -> dict[str, int]:
    """Times that cores and packages were throttled for heat since boot, and our cgroup for its quota."""
    out: dict[str, int] = {}
    for kind in ("core", "package"):
        counts = [_number(c / f"thermal_throttle/{kind}_throttle_count") for c in _cores(root)[:MAX_CORES]]
        if any(c is not None for c in counts):
            out[kind] = int(sum(c or 0 for c in counts))
    for stat in ("sys/fs/cgroup/cpu.stat", "sys/fs/cgroup/cpu/cpu.stat"):
        counted = numbers(_text(root / stat))
        if "nr_throttled" in counted:
            out["quota"] = counted["nr_throttled"]
            break
    return out


# --- files --------------------------------------------------------------------------------------------------------


def numbers(text: str) -> dict[str, int]:
    """`name number` lines."""
    out = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[1].isdigit():
            out[words[0]] = int(words[1])
    return out


def _number(path: Path, scale: float = 1.0) -> float | None:
    """The number in a file; whole where it is and the scale is 1."""
    text = _text(path)
    try:
        value = int(text)
    except ValueError:
        return None
    return value if scale == 1.0 else round(value * scale, 3)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:  # no such sensor, or it sleeps, or it is not ours to read
        return ""


def _listing(folder: Path) -> list[Path]:
    try:
        return sorted(Path(e.path) for e in os.scandir(folder))
    except OSError:
        return []


# --- tools --------------------------------------------------------------------------------------------------------


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
            "pci": cell["pci.bus_id"].lower()[4 if len(cell["pci.bus_id"]) == 16 else 0 :],  # as the kernel writes it
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


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in values.items() if v not in (None, "", {})}
