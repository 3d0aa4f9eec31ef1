"""Health and conditions of a slot: use, memory, temperature, power, clocks, error counters, partition mode.

Read before and after an attempt, never while one is measured. Sources, the first that answers: sysfs (AMD GPUs),
`amd-smi`, `nvidia-smi`, and for a slot without a GPU the CPU. A reading is a flat JSON object:

    source            sysfs, amd-smi, nvidia-smi or cpu
    age_s             seconds since it was taken, where it is not fresh (see Gauge)
    pci, id           the GPU's PCI address and its serial or UUID
    use_pct, memory_use_pct                 percent
    memory_used, memory_total               bytes
    temperature_c                           {sensor: degrees Celsius}
    power_w, power_cap_w                    watts
    clock_mhz, memory_clock_mhz             MHz
    partition, memory_partition             SPX, NPS1, ...
    errors                                  {uncorrectable|correctable|deferred: {total, block: count}}
    load, throttled                         of a CPU: load averages; {core, package, quota: count}

Fields that a source does not have are left out.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worker.device import sensors
from worker.device.probe import visible

ROOT = Path("/")
ROOT_ENV = "GEMMFLEET_HEALTH_ROOT"
"""Variable that names a folder with a recorded sys and proc to read instead, for tests of an agent's readings."""
TOOL_EVERY_S = 60.0
"""A vendor's tool is called at most so often; between calls its last reading is used, with its age."""
HOT_C = 100.0
"""Temperature from which on a GPU is said to be hot."""


def survey(root: Path = ROOT) -> list[dict[str, Any]]:
    """A fresh reading of every GPU, or of the CPU where there is none."""
    source, gpus = _all(root)
    return [{"source": source, **gpu} for gpu in gpus] or [{"source": "cpu", **sensors.cpu(root)}]


class Gauge:
    """Reads one slot's conditions. `env` is the slot's environment, which selects its GPU."""

    def __init__(self, env: Mapping[str, str], root: Path | None = None) -> None:
        self._env = {**os.environ, **env}
        self._root = root or Path(os.environ.get(ROOT_ENV, ROOT))
        self._source = ""
        self._device: Path | None = None
        self._kept: tuple[float, dict[str, Any]] | None = None

    def read(self, *, fresh: bool = False) -> dict[str, Any]:
        """The conditions now; {} where nothing can be read. Never raises: no attempt fails for a sensor.

        `fresh`: call a tool too, however recent its last reading.
        """
        if fresh:
            self._kept = None
        try:
            return self._read()
        except (OSError, ValueError, ArithmeticError, LookupError, TypeError):
            return {}

    def _read(self) -> dict[str, Any]:
        if not self._source:
            self._choose()
        if self._source == "sysfs" and self._device is not None:
            return {"source": "sysfs", **sensors.amd_gpu(self._device)}
        if self._source == "cpu":
            return {"source": "cpu", **sensors.cpu(self._root)}
        if self._kept is None or time.monotonic() - self._kept[0] > TOOL_EVERY_S:
            self._kept = (time.monotonic(), self._select())
            return self._kept[1]
        age = time.monotonic() - self._kept[0]
        return {**self._kept[1], "age_s": round(age, 1)}

    def _choose(self) -> None:
        """Find the slot's source once; the folder of a GPU does not move."""
        devices = sensors.amd_devices(self._root)
        if devices:
            mine = visible([{"vendor": "amd", "path": d} for d in devices], self._env)
            self._device = mine[0]["path"] if mine else None
            self._source = "sysfs" if mine else "cpu"
            return
        found = self._select()
        self._source = str(found.get("source", "cpu"))
        self._kept = (time.monotonic(), found)

    def _select(self) -> dict[str, Any]:
        source, gpus = _all(self._root)
        vendor = "nvidia" if source == "nvidia-smi" else "amd"
        mine = visible([{"vendor": vendor, "reading": gpu} for gpu in gpus], self._env)
        return {"source": source, **mine[0]["reading"]} if mine else {}


def _all(root: Path) -> tuple[str, list[dict[str, Any]]]:
    """(source, readings of all GPUs). Tools know nothing of a recorded root, and are run only on the real one."""
    gpus = [sensors.amd_gpu(device) for device in sensors.amd_devices(root)]  # in the order of HIP's numbers
    if gpus or root != ROOT:
        return "sysfs", gpus
    for tool, argv, parse in (
        ("amd-smi", sensors.AMD_SMI, sensors.parse_amd),
        ("nvidia-smi", sensors.NVIDIA_SMI, sensors.parse_nvidia),
    ):
        if shutil.which(tool) and (found := parse(sensors.ask(argv))):
            return tool, found
    return "cpu", []


def new_errors(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, int]:
    """{block: rise} of the uncorrectable errors that a GPU counted between two readings; {} for none or unknown.

    A counter that fell was reset and is no evidence.
    """
    if before.get("id") != after.get("id") or before.get("pci") != after.get("pci"):
        return {}
    then, now = (_uncorrectable(reading) for reading in (before, after))
    rises = {b: n - then.get(b, 0) for b, n in now.items() if n > then.get(b, 0) and b != "total"}
    total = now.get("total", 0) - then.get("total", 0) if then else 0
    return rises if rises and then else {"": total} if total > 0 else {}


def _uncorrectable(reading: Mapping[str, Any]) -> dict[str, int]:
    errors = reading.get("errors", {})
    return dict(errors.get("uncorrectable", {}))


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
