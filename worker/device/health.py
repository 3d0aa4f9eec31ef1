"""Conditions of a slot: temperature, power and clocks of its GPU or CPU, and the error counters of its GPU.

Read before and after an attempt, never while one is measured. A reading is a flat JSON object:

    source            sysfs (AMD GPUs), nvidia-smi, or cpu (a slot without a GPU)
    age_s             seconds since it was taken, where it is not fresh (see Gauge)
    pci, id           the GPU's PCI address and its serial or UUID
    temperature_c     {sensor: degrees Celsius}
    power_w, power_cap_w          watts
    clock_mhz, memory_clock_mhz   MHz
    errors            {uncorrectable: {total, block: count}}

Fields that a source does not have are left out. Formats: the kernel's Documentation/gpu/amdgpu (thermal, ras) and
Documentation/hwmon/sysfs-interface.rst.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from worker.device.probe import kfd_gpus, numbers, text_of, visible

ROOT = Path("/")
ROOT_ENV = "GEMMFLEET_HEALTH_ROOT"  # names a folder with a recorded sys and proc to read instead, for tests
TOOL_EVERY_S = 60.0  # nvidia-smi takes tens to hundreds of milliseconds: between calls its last reading is used
TOOL_TIMEOUT_S = 10.0
HOT_C = 100.0  # a GPU is said to be hot from here on
MAX_CORES = 8  # the clocks of more cores would cost milliseconds on a large host
_PCI_BITS = 0xFFFF  # the PCI address in a KFD location_id; partitions carry their number above it
_NVIDIA_FIELDS = (
    "pci.bus_id", "uuid", "temperature.gpu", "temperature.memory", "power.draw", "power.limit", "clocks.sm",
    "clocks.mem", "ecc.errors.uncorrected.volatile.total",
)  # fmt: skip
NVIDIA_SMI = ("nvidia-smi", f"--query-gpu={','.join(_NVIDIA_FIELDS)}", "--format=csv,noheader,nounits")


class Gauge:
    """Reads one slot's conditions. `env` is the slot's environment, which selects its GPU."""

    def __init__(self, env: Mapping[str, str], root: Path | None = None) -> None:
        self._env = {**os.environ, **env}
        self._root = root or Path(os.environ.get(ROOT_ENV, ROOT))
        self._source = ""
        self._device = ROOT
        self._asked = 0.0
        self._kept: dict[str, Any] = {}

    def read(self, *, fresh: bool = False) -> dict[str, Any]:
        """The conditions now; {} where nothing can be read. Never raises: no attempt fails for a sensor.

        `fresh`: call a tool too, however recent its last reading.
        """
        try:
            if not self._source:
                self._choose()
            if self._source == "sysfs":
                return {"source": "sysfs", **amd_gpu(self._device)}
            if self._source == "cpu":
                return {"source": "cpu", **cpu(self._root)}
            age = time.monotonic() - self._asked
            if not fresh and age < TOOL_EVERY_S:
                return {**self._kept, "age_s": round(age, 1)}
            self._ask()
            return self._kept
        except (OSError, ValueError, ArithmeticError, LookupError, TypeError):
            return {}

    def _choose(self) -> None:
        """Find the slot's source once; the folder of a GPU does not move."""
        if devices := amd_devices(self._root):
            mine = visible([{"vendor": "amd", "path": d} for d in devices], self._env)
            self._device = mine[0]["path"] if mine else ROOT
            self._source = "sysfs" if mine else "cpu"
            return
        if self._root == ROOT:  # the tool knows nothing of a recorded root
            self._ask()
        self._source = self._kept.get("source", "cpu")

    def _ask(self) -> None:
        gpus = parse_nvidia(_output(NVIDIA_SMI))
        mine = visible([{"vendor": "nvidia", "reading": gpu} for gpu in gpus], self._env)
        self._kept = {"source": "nvidia-smi", **mine[0]["reading"]} if mine else {}
        self._asked = time.monotonic()


# --- AMD GPUs -----------------------------------------------------------------------------------------------------


def amd_devices(root: Path) -> list[Path]:
    """The PCI device folders of the GPUs that we may open, in the order of their KFD nodes."""
    found = (_device(root, properties) for _, properties in kfd_gpus(root))
    return [device for device in found if device]


def _device(root: Path, properties: Mapping[str, int]) -> Path | None:
    """The PCI device of a KFD node. A partition's render node hangs on a platform device: then by its address."""
    by_render = root / f"sys/class/drm/renderD{properties.get('drm_render_minor', 0)}/device"
    place = properties.get("location_id", -1) & _PCI_BITS
    address = f"{properties.get('domain', 0):04x}:{place >> 8:02x}:{place >> 3 & 31:02x}.{place & 7}"
    return next((p for p in (by_render, root / "sys/bus/pci/devices" / address) if (p / "vendor").exists()), None)


def amd_gpu(device: Path) -> dict[str, Any]:
    """One GPU's reading from its device folder."""
    hwmon = next(iter(_listing(device / "hwmon")), device / "hwmon")
    clocks = {_label(hwmon, f"freq{i}"): _number(hwmon / f"freq{i}_input", 1e-6) for i in (1, 2)}
    errors = _uncorrectable(device / "ras")
    return _known(
        pci=device.resolve().name,
        id=text_of(device / "unique_id"),
        temperature_c=_temperatures(hwmon),
        power_w=_number(hwmon / "power1_average", 1e-6) or _number(hwmon / "power1_input", 1e-6),
        power_cap_w=_number(hwmon / "power1_cap", 1e-6),
        clock_mhz=clocks.get("sclk"),
        memory_clock_mhz=clocks.get("mclk"),
        errors={"uncorrectable": errors} if errors else None,
    )


def _uncorrectable(folder: Path) -> dict[str, int]:
    """{"total": count, block: count} of the blocks that count uncorrectable errors; blocks with none are left out."""
    files = [p for p in _listing(folder) if p.name.endswith("_err_count")]
    counts = {p.name[: -len("_err_count")]: numbers(text_of(p).replace(":", " ")).get("ue") for p in files}
    counted = {block: count for block, count in counts.items() if count is not None}
    return {"total": sum(counted.values()), **{b: n for b, n in counted.items() if n}} if counted else {}


# --- CPU ----------------------------------------------------------------------------------------------------------


def cpu(root: Path) -> dict[str, Any]:
    """The mean clock of a few cores, and the hottest sensor of each of the CPU's drivers."""
    policies = _listing(root / "sys/devices/system/cpu/cpufreq")[:MAX_CORES]
    clocks = [mhz for p in policies if (mhz := _number(p / "scaling_cur_freq", 1e-3)) is not None]
    warm: dict[str, float] = {}
    for hwmon in _listing(root / "sys/class/hwmon"):
        name, found = text_of(hwmon / "name"), _temperatures(hwmon)
        if found and name in ("coretemp", "k10temp", "zenpower", "cpu_thermal"):
            warm[name] = max(warm.get(name, -273.0), *found.values())
    return _known(clock_mhz=round(sum(clocks) / len(clocks), 1) if clocks else None, temperature_c=warm)


def _temperatures(hwmon: Path) -> dict[str, float]:
    names = [p.name[: -len("_input")] for p in _listing(hwmon) if p.name[:4] == "temp" and p.name[-6:] == "_input"]
    found = {_label(hwmon, name): _number(hwmon / f"{name}_input", 1e-3) for name in names}
    return {label: degrees for label, degrees in found.items() if degrees is not None}


def _label(hwmon: Path, sensor: str) -> str:
    return text_of(hwmon / f"{sensor}_label") or sensor


def _number(path: Path, scale: float) -> float | None:
    try:
        return round(int(text_of(path)) * scale, 3)
    except ValueError:
        return None


def _listing(folder: Path) -> list[Path]:
    try:
        return sorted(Path(e.path) for e in os.scandir(folder))
    except OSError:
        return []


# --- NVIDIA GPUs --------------------------------------------------------------------------------------------------


def _output(argv: Sequence[str]) -> str:
    """Output of a tool, "" if it is missing, fails, or takes too long."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def parse_nvidia(text: str) -> list[dict[str, Any]]:
    """GPUs from what NVIDIA_SMI prints, one a line; what it calls N/A is left out."""
    rows = [[c.strip() for c in line.split(",")] for line in text.splitlines()]
    return [_nvidia_gpu(*cells) for cells in rows if len(cells) == len(_NVIDIA_FIELDS) and ":" in cells[0]]


def _nvidia_gpu(bus: str, uuid: str, *cells: str) -> dict[str, Any]:
    gpu, memory, power, cap, clock, memory_clock, errors = map(_float, cells)
    return _known(
        pci=bus.lower()[4 if len(bus) == 16 else 0 :],  # as the kernel writes it
        id=uuid,
        temperature_c=_known(gpu=gpu, memory=memory),
        power_w=power,
        power_cap_w=cap,
        clock_mhz=clock,
        memory_clock_mhz=memory_clock,
        errors=None if errors is None else {"uncorrectable": {"total": int(errors)}},
    )


def _float(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) < 1e12 else None  # neither nan nor inf


def _known(**values: Any) -> dict[str, Any]:
    return {k: v for k, v in values.items() if v not in (None, "", {})}


# --- evidence -----------------------------------------------------------------------------------------------------


def new_errors(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, int]:
    """{block: rise} of the uncorrectable errors that a GPU counted between two readings; {} for none or unknown.

    A counter that fell was reset and is no evidence.
    """
    then, now = (dict(reading.get("errors", {}).get("uncorrectable", {})) for reading in (before, after))
    if not then or any(before.get(name) != after.get(name) for name in ("id", "pci")):
        return {}
    rises = {block: n - then.get(block, 0) for block, n in now.items() if n > then.get(block, 0)}
    total = rises.pop("total", 0)
    return rises or ({"": total} if total else {})


def evidence(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Evidence of a hardware fault in two readings around an attempt, "" for none:
    `uncorrectable hardware errors rose during the attempt: umc +2`."""
    rises = new_errors(before, after)
    if not rises:
        return ""
    listed = ", ".join(f"{block} +{n}" if block else f"+{n}" for block, n in sorted(rises.items()))
    age = float(before.get("age_s", 0.0))
    when = f" or the {age:.0f} s before it" if age >= 1.0 else ""
    return f"uncorrectable hardware errors rose during the attempt{when}: {listed}"
