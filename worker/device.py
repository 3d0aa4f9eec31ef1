"""The machine and its devices, without importing torch: identity and conditions.

Identity: cores, memory, GPUs, and the gfx and cu_num of tuned rows. GPUs are read from the kernel's KFD topology (AMD)
or from nvidia-smi. A machine without a GPU is named after its CPU: gfx is `cpu-<machine>-<isa>` with the best
instruction set of ISA_LEVELS, and cu_num is the number of usable cores.

Conditions of a slot are read before and after an attempt, never during a measurement. A reading is a flat JSON object:

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
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from worker.protocol import CPUS

KFD_NODES = "sys/class/kfd/kfd/topology/nodes"
CPUINFO = Path("/proc/cpuinfo")

ISA_LEVELS: Mapping[str, tuple[tuple[str, str], ...]] = {
    # name in gfx, flag in /proc/cpuinfo; best first
    "x86_64": (
        ("amx", "amx_tile"),
        ("avx512", "avx512f"),
        ("avx2", "avx2"),
        ("avx", "avx"),
        ("sse2", "sse2"),
    ),
    "aarch64": (("sve2", "sve2"), ("sve", "sve"), ("neon", "asimd")),
}
# variable of a slot's tuner: how many slots of its node run on its cores, including itself
SLOTS_ON_CORES = "GEMMFLEET_SLOTS_ON_CORES"
_MAX_CORE = 65_535
_IDENTITY = ("name", "compute_cap", "memory.total")


def identify(env: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """host, python, machine, kernel, cpu, cores, memory (bytes), gpus, and gfx, cu_num, device of this slot.

    gpus: the visible ones in this environment, each {vendor, gfx, cu_num, device, memory}.
    cu_num is None if only the tuner knows it (nvidia-smi does not give the number of multiprocessors).
    """
    cores = usable_cores()
    cpu = cpu_model()
    gpus = visible(find_gpus(), env)
    first = gpus[0] if gpus else {"gfx": cpu_gfx(), "cu_num": cores, "device": cpu}
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "machine": platform.machine(),
        "kernel": platform.release(),
        "cpu": cpu,
        "cores": cores,
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": gpus,
        **{k: first[k] for k in ("gfx", "cu_num", "device")},
    }


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def cores_of(text: str) -> set[int]:
    """Cores of a kernel list such as 0-63,128-191. Raises ValueError."""
    out: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        begin, end = int(first), int(last or first)
        if not 0 <= begin <= end <= _MAX_CORE:
            raise ValueError(f"{part!r} is not a range of cores")
        out.update(range(begin, end + 1))
    return out


def pin(cpus: str) -> int:
    """Restrict this process to those of these cores that it may use. Return their number, 0 if nothing changed."""
    with suppress(OSError, ValueError):
        if wanted := cores_of(cpus) & os.sched_getaffinity(0):
            os.sched_setaffinity(0, wanted)
            return len(wanted)
    return 0


def slots_on_cores(slots: Mapping[str, Mapping[str, str]], slot: str) -> int:
    """Number of slots that run on the cores of `slot`. `slots`: the variables of each slot."""
    mine = slots.get(slot, {}).get(CPUS, "")
    return max(1, sum(env.get(CPUS, "") == mine for env in slots.values()))


def own_cores() -> int:
    """This process's part of the cores that it may run on, shared evenly with the slots that also run there; at
    least 1."""
    slots = os.environ.get(SLOTS_ON_CORES, "")
    return max(1, usable_cores() // (int(slots) if slots.isdigit() and int(slots) else 1))


def cpu_model(cpuinfo: Path = CPUINFO) -> str:
    """The CPU's name from the kernel, or the machine type if it gives no name."""
    return _cpuinfo(cpuinfo).get("model name") or platform.machine()


def cpu_gfx(cpuinfo: Path = CPUINFO, machine: str = "") -> str:
    """A name such as `cpu-x86_64-avx512`: short, and the same on every host of a kind."""
    return cpu_name(machine or platform.machine(), cpu_flags(cpuinfo))


def cpu_flags(cpuinfo: Path = CPUINFO) -> list[str]:
    """Instruction sets of the CPU as the kernel names them."""
    info = _cpuinfo(cpuinfo)
    return info.get("flags", info.get("Features", "")).split()


def cpu_name(machine: str, flags: Collection[str]) -> str:
    """The gfx of a CPU by its machine type and its flags."""
    best = next((name for name, flag in ISA_LEVELS.get(machine, ()) if flag in flags), "")
    return "-".join(p for p in ("cpu", machine, best) if p)


def find_gpus(root: Path = Path("/")) -> list[dict[str, Any]]:
    """All GPUs of this machine that we may open: AMD GPUs in the order of their KFD nodes, or else NVIDIA GPUs."""
    return _amd_gpus(root) or parse_nvidia_smi(_nvidia_smi(_IDENTITY))


def visible(gpus: list[dict[str, Any]], env: Mapping[str, str]) -> list[dict[str, Any]]:
    """The GPUs that the runtimes' variables leave visible. A value that is not a list of numbers (UUIDs) hides none."""
    for vendor, name in (
        ("amd", "ROCR_VISIBLE_DEVICES"),
        ("amd", "HIP_VISIBLE_DEVICES"),
        ("nvidia", "CUDA_VISIBLE_DEVICES"),
    ):
        value = env.get(name)
        if value is None or not gpus or gpus[0]["vendor"] != vendor:
            continue
        try:
            numbers = [int(n) for n in value.split(",")] if value.strip() else []
        except ValueError:
            continue
        gpus = [gpus[n] for n in numbers if 0 <= n < len(gpus)]
    return gpus


def gfx_of_target(version: int) -> str:
    """The name of a KFD gfx_target_version: 90402 is gfx942, 90010 is gfx90a (steps are hexadecimal)."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def kfd_gpus(root: Path) -> Iterator[tuple[Path, dict[str, int]]]:
    """The KFD nodes of AMD GPUs below a root, in their order, each with its properties.

    The properties of a GPU that the container may not open cannot be read here.
    """
    folder = root / KFD_NODES
    nodes = (p for p in folder.iterdir() if p.name.isdigit()) if folder.is_dir() else ()
    for node in sorted(nodes, key=lambda p: int(p.name)):
        properties = numbers(text_of(node / "properties"))
        if properties.get("simd_count") and properties.get("gfx_target_version"):
            yield node, properties


def numbers(text: str) -> dict[str, int]:
    """The `name number` lines of a kernel file. Other lines are skipped."""
    pairs = (line.split() for line in text.splitlines())
    return {words[0]: int(words[1]) for words in pairs if len(words) > 1 and words[1].isdigit()}


def text_of(path: Path) -> str:
    """The text of a small file, "" if it does not exist or we may not read it."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _amd_gpus(root: Path) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for node, properties in kfd_gpus(root):
        gfx = gfx_of_target(properties["gfx_target_version"])
        cu_num = properties["simd_count"] // (properties.get("simd_per_cu") or 4)
        banks = [numbers(text_of(bank)).get("size_in_bytes") for bank in node.glob("mem_banks/*/properties")]
        memory = sum(b for b in banks if b) or None
        name = text_of(node / "name") or gfx
        out.append({"vendor": "amd", "gfx": gfx, "cu_num": cu_num, "device": name, "memory": memory})
    return out


def parse_nvidia_smi(text: str) -> list[dict[str, Any]]:
    """GPUs from nvidia-smi's output for _IDENTITY: `NVIDIA H200, 9.0, 143771` is gfx sm_90."""
    out: list[dict[str, Any]] = []
    for line in text.splitlines():
        cells = [c.strip() for c in line.split(",")]
        if len(cells) == 3 and cells[1].replace(".", "").isdigit():
            gfx = "sm_" + cells[1].replace(".", "")
            memory = int(cells[2]) * 2**20 if cells[2].isdigit() else None
            out.append({"vendor": "nvidia", "gfx": gfx, "cu_num": None, "device": cells[0], "memory": memory})
    return out


def _cpuinfo(path: Path) -> dict[str, str]:
    """The first processor of /proc/cpuinfo; empty if it cannot be read."""
    pairs = (line.partition(":") for line in text_of(path).split("\n\n", 1)[0].splitlines())
    return {k.strip(): v.strip() for k, _, v in pairs}


ROOT = Path("/")
ROOT_ENV = "GEMMFLEET_HEALTH_ROOT"  # names a folder with a recorded sys and proc to read instead, for tests
TOOL_EVERY_S = 60.0  # nvidia-smi takes tens to hundreds of milliseconds: between calls its last reading is used
TOOL_TIMEOUT_S = 20.0
MAX_CORES = 8  # the clocks of more cores would cost milliseconds on a large host
_PCI_BITS = 0xFFFF  # the PCI address in a KFD location_id; partitions carry their number above it
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
        self._device = ROOT
        self._asked = 0.0
        self._kept: dict[str, Any] = {}

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
        if devices := amd_devices(self._root):
            mine = visible([{"vendor": "amd", "path": d} for d in devices], self._env)
            self._device = mine[0]["path"] if mine else ROOT
            self._source = "sysfs" if mine else "cpu"
            return
        if self._root == ROOT:  # the tool knows nothing of a recorded root
            self._ask()
        self._source = self._kept.get("source", "cpu")

    def _ask(self) -> None:
        gpus = parse_nvidia(_nvidia_smi(_CONDITIONS))
        mine = visible([{"vendor": "nvidia", "reading": gpu} for gpu in gpus], self._env)
        self._kept = {"source": "nvidia-smi", **mine[0]["reading"]} if mine else {}
        self._asked = time.monotonic()


def amd_devices(root: Path) -> list[Path]:
    """The PCI device folders of the GPUs that we may open, in the order of their KFD nodes."""
    found = (_device(root, properties) for _, properties in kfd_gpus(root))
    return [device for device in found if device]


def _device(root: Path, properties: Mapping[str, int]) -> Path | None:
    """The PCI device of a KFD node. A partition's render node belongs to a platform device, so find it by address."""
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
    """{"total": count, block: count} of uncorrectable errors. Blocks without errors are left out."""
    files = [p for p in _listing(folder) if p.name.endswith("_err_count")]
    counts = {p.name[: -len("_err_count")]: numbers(text_of(p).replace(":", " ")).get("ue") for p in files}
    counted = {block: count for block, count in counts.items() if count is not None}
    return {"total": sum(counted.values()), **{b: n for b, n in counted.items() if n}} if counted else {}


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


def _nvidia_smi(fields: Sequence[str]) -> str:
    """Output of nvidia-smi on these fields, "" if it is missing, fails, or takes too long."""
    argv = ("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def parse_nvidia(text: str) -> list[dict[str, Any]]:
    """GPUs from nvidia-smi's output for _CONDITIONS, one per line. Values that it gives as N/A are left out."""
    rows = [[c.strip() for c in line.split(",")] for line in text.splitlines()]
    return [_nvidia_gpu(*cells) for cells in rows if len(cells) == len(_CONDITIONS) and ":" in cells[0]]


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
