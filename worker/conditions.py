"""Conditions of a slot: temperatures, power, clocks and counts of hardware errors, read from the kernel or nvidia-smi.

The agent reads them before and after an attempt, never during a measurement (`Gauge.read`). A reading is a flat JSON
object; it becomes the field `conditions` of a record:

    source            sysfs (AMD GPUs), nvidia-smi, or cpu (a slot without a GPU)
    age_s             seconds since it was taken, if it is not fresh (see Gauge)
    pci, id           the GPU's PCI address and its serial or UUID
    temperature_c     {sensor: degrees Celsius}
    power_w, power_cap_w          watts
    clock_mhz, memory_clock_mhz   MHz
    errors            {uncorrectable: {total, block: count}}

Fields that a source lacks are left out. Formats: the kernel's Documentation/gpu/amdgpu (thermal, ras) and
Documentation/hwmon/sysfs-interface.rst.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worker.device import kfd_gpus, numbers, nvidia_smi, text_of, visible_gpus

ROOT = Path("/")
ROOT_ENV = "GEMMFLEET_HEALTH_ROOT"
"""Names a folder with a recorded sys and proc to read instead, for tests."""
TOOL_EVERY_S = 60.0
"""nvidia-smi takes tens to hundreds of milliseconds: between calls its last reading is used."""
MAX_CORES = 8
"""The clocks of more cores would cost milliseconds on a large host."""
_PCI_BITS = 0xFFFF
"""The PCI address in a KFD location_id; partitions carry their number above it."""
CPU_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")
"""Drivers of the CPU's own sensors."""
_CONDITIONS = (
    "pci.bus_id",
    "uuid",
    "temperature.gpu",
    "temperature.memory",
    "power.draw",
    "power.limit",
    "clocks.sm",
    "clocks.mem",
    "ecc.errors.uncorrected.volatile.total",
)


class Gauge:
    """Reads one slot's conditions. `env` is the slot's environment, which selects its GPU."""

    def __init__(self, env: Mapping[str, str], root: Path | None = None) -> None:
        self._env = {**os.environ, **env}
        self._root = root or Path(os.environ.get(ROOT_ENV, ROOT))
        self._source = ""
        """sysfs, nvidia-smi or cpu, once it is known."""
        self._device = ROOT
        """The folder of an AMD GPU."""
        self._asked = 0.0
        """The time of the last call of nvidia-smi."""
        self._kept: dict[str, Any] = {}
        """Its reading."""

    def read(self, *, fresh: bool = False) -> dict[str, Any]:
        """The conditions now; {} if nothing can be read. Never raises, because no attempt must fail for a sensor.

        `fresh`: call a tool even if its last reading is recent.
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
        """Find the slot's source once, because the folder of a GPU does not change."""
        devices = amd_devices(self._root)
        if devices:
            gpus = visible_gpus([{"vendor": "amd", "path": path} for path in devices], self._env)
            self._source = "cpu"
            if gpus:
                self._source = "sysfs"
                self._device = gpus[0]["path"]
            return
        if self._root == ROOT:  # the tool knows nothing of a recorded root
            self._ask()
        self._source = self._kept.get("source", "cpu")

    def _ask(self) -> None:
        readings = parse_nvidia(nvidia_smi(_CONDITIONS))
        gpus = visible_gpus([{"vendor": "nvidia", "reading": reading} for reading in readings], self._env)
        self._kept = {"source": "nvidia-smi", **gpus[0]["reading"]} if gpus else {}
        self._asked = time.monotonic()


def amd_devices(root: Path) -> list[Path]:
    """The PCI device folders of the GPUs that we may open, in the order of their KFD nodes."""
    devices = [_device(root, properties) for _, properties in kfd_gpus(root)]
    return [device for device in devices if device is not None]


def _device(root: Path, properties: Mapping[str, int]) -> Path | None:
    """The PCI device of a KFD node. A partition's render node belongs to a platform device, so find it by address."""
    by_render = root / f"sys/class/drm/renderD{properties.get('drm_render_minor', 0)}/device"
    place = properties.get("location_id", -1) & _PCI_BITS
    address = f"{properties.get('domain', 0):04x}:{place >> 8:02x}:{place >> 3 & 31:02x}.{place & 7}"
    for path in (by_render, root / "sys/bus/pci/devices" / address):
        if (path / "vendor").exists():
            return path
    return None


def amd_gpu(device: Path) -> dict[str, Any]:
    """One GPU's reading from its device folder."""
    hwmon_folders = _listing(device / "hwmon")
    hwmon = hwmon_folders[0] if hwmon_folders else device / "hwmon"
    clocks = {}
    for sensor in ("freq1", "freq2"):
        clocks[_label(hwmon, sensor)] = _number(hwmon / f"{sensor}_input", 1e-6)
    errors = _uncorrectable(device / "ras")
    power = _number(hwmon / "power1_average", 1e-6) or _number(hwmon / "power1_input", 1e-6)
    return _known(
        pci=device.resolve().name,
        id=text_of(device / "unique_id"),
        temperature_c=_temperatures(hwmon),
        power_w=power,
        power_cap_w=_number(hwmon / "power1_cap", 1e-6),
        clock_mhz=clocks.get("sclk"),
        memory_clock_mhz=clocks.get("mclk"),
        errors={"uncorrectable": errors} if errors else None,
    )


def _uncorrectable(folder: Path) -> dict[str, int]:
    """{"total": count, block: count} of uncorrectable errors, {} if nothing is counted. Blocks without errors are left
    out."""
    counts: dict[str, int] = {}
    for path in _listing(folder):
        block = path.name.removesuffix("_err_count")
        count = numbers(text_of(path).replace(":", " ")).get("ue")
        if block != path.name and count is not None:
            counts[block] = count
    if not counts:
        return {}
    return {"total": sum(counts.values()), **{block: count for block, count in counts.items() if count}}


def cpu(root: Path) -> dict[str, Any]:
    """The mean clock of a few cores, and the hottest sensor of each of the CPU's drivers."""
    policies = _listing(root / "sys/devices/system/cpu/cpufreq")[:MAX_CORES]
    clocks = [_number(policy / "scaling_cur_freq", 1e-3) for policy in policies]
    known_clocks = [clock for clock in clocks if clock is not None]
    hottest: dict[str, float] = {}
    for hwmon in _listing(root / "sys/class/hwmon"):
        driver = text_of(hwmon / "name")
        temperatures = _temperatures(hwmon)
        if temperatures and driver in CPU_SENSORS:
            hottest[driver] = max(hottest.get(driver, -273.0), *temperatures.values())
    clock = round(sum(known_clocks) / len(known_clocks), 1) if known_clocks else None
    return _known(clock_mhz=clock, temperature_c=hottest)


def _temperatures(hwmon: Path) -> dict[str, float]:
    """Degrees Celsius by the sensors' labels, of the files temp1_input and so on."""
    temperatures = {}
    for path in _listing(hwmon):
        sensor = path.name.removesuffix("_input")
        if path.name.startswith("temp") and sensor != path.name:
            degrees = _number(path, 1e-3)
            if degrees is not None:
                temperatures[_label(hwmon, sensor)] = degrees
    return temperatures


def _label(hwmon: Path, sensor: str) -> str:
    return text_of(hwmon / f"{sensor}_label") or sensor


def _number(path: Path, scale: float) -> float | None:
    try:
        return round(int(text_of(path)) * scale, 3)
    except ValueError:
        return None


def _listing(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def parse_nvidia(text: str) -> list[dict[str, Any]]:
    """GPUs from nvidia-smi's output for _CONDITIONS, one per line. Values that it gives as N/A are left out."""
    gpus = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == len(_CONDITIONS) and ":" in cells[0]:
            gpus.append(_nvidia_gpu(*cells))
    return gpus


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
    return {name: value for name, value in values.items() if value not in (None, "", {})}
