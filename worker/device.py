"""The machine and its devices, without importing torch: cores, memory, GPUs, and the gfx and cu_num of tuned rows.

GPUs are read from the kernel's KFD topology (AMD) or from nvidia-smi. A machine without a GPU is named after its CPU:
gfx is `cpu-<machine>-<isa>` with the best instruction set of ISA_LEVELS, and cu_num is the number of usable cores.
conditions.py reads temperatures, clocks and error counters.
"""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
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
SLOTS_ON_CORES = "GEMMFLEET_SLOTS_ON_CORES"
"""Variable of a slot's tuner: how many slots of its node run on its cores, including itself."""
TOOL_TIMEOUT_S = 20.0
"""nvidia-smi takes tens to hundreds of milliseconds; a broken driver may block it."""
_MAX_CORE = 65_535
_IDENTITY = ("name", "compute_cap", "memory.total")


def identify(env: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """host, python, machine, kernel, cpu, cores, memory (bytes), gpus, and gfx, cu_num, device of this slot.

    gpus: the visible ones in this environment, each {vendor, gfx, cu_num, device, memory}.
    cu_num is None if only the tuner knows it (nvidia-smi does not give the number of multiprocessors).
    """
    cores = usable_cores()
    cpu = cpu_model()
    gpus = visible_gpus(find_gpus(), env)
    device = gpus[0] if gpus else {"gfx": cpu_gfx(), "cu_num": cores, "device": cpu}
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
        "gfx": device["gfx"],
        "cu_num": device["cu_num"],
        "device": device["device"],
    }


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def cores_of(text: str) -> set[int]:
    """Cores of a kernel list such as 0-63,128-191. Raises ValueError."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        begin = int(first)
        end = int(last or first)
        if not 0 <= begin <= end <= _MAX_CORE:
            raise ValueError(f"{part!r} is not a range of cores")
        cores.update(range(begin, end + 1))
    return cores


def pin(cpus: str) -> int:
    """Restrict this process to those of these cores that it may use. Return their number, 0 if nothing changed."""
    with suppress(OSError, ValueError):
        cores = cores_of(cpus) & os.sched_getaffinity(0)
        if cores:
            os.sched_setaffinity(0, cores)
            return len(cores)
    return 0


def slots_on_cores(slots: Mapping[str, Mapping[str, str]], slot: str) -> int:
    """Number of slots that run on the cores of `slot`. `slots`: the variables of each slot."""
    cpus = slots.get(slot, {}).get(CPUS, "")
    sharing = [env for env in slots.values() if env.get(CPUS, "") == cpus]
    return max(1, len(sharing))


def own_cores() -> int:
    """This process's part of the cores that it may run on, shared evenly with the slots that also run there; at
    least 1."""
    text = os.environ.get(SLOTS_ON_CORES, "")
    slots = int(text) if text.isdigit() else 1
    return max(1, usable_cores() // max(1, slots))


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
    levels = [name for name, flag in ISA_LEVELS.get(machine, ()) if flag in flags]
    return "-".join(filter(None, ("cpu", machine, *levels[:1])))


def find_gpus(root: Path = Path("/")) -> list[dict[str, Any]]:
    """All GPUs of this machine that we may open: AMD GPUs in the order of their KFD nodes, or else NVIDIA GPUs."""
    return _amd_gpus(root) or parse_nvidia_smi(nvidia_smi(_IDENTITY))


def visible_gpus(gpus: list[dict[str, Any]], env: Mapping[str, str]) -> list[dict[str, Any]]:
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
            indexes = [int(word) for word in value.split(",")] if value.strip() else []
        except ValueError:
            continue
        gpus = [gpus[index] for index in indexes if 0 <= index < len(gpus)]
    return gpus


def gfx_of_target(version: int) -> str:
    """The name of a KFD gfx_target_version: 90402 is gfx942, 90010 is gfx90a (steps are hexadecimal)."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def kfd_gpus(root: Path) -> Iterator[tuple[Path, dict[str, int]]]:
    """The KFD nodes of AMD GPUs below a root, in their order, each with its properties.

    The properties of a GPU that the container may not open cannot be read here.
    """
    folder = root / KFD_NODES
    nodes = [path for path in folder.iterdir() if path.name.isdigit()] if folder.is_dir() else []
    for node in sorted(nodes, key=lambda path: int(path.name)):
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
    gpus: list[dict[str, Any]] = []
    for node, properties in kfd_gpus(root):
        gfx = gfx_of_target(properties["gfx_target_version"])
        cu_num = properties["simd_count"] // (properties.get("simd_per_cu") or 4)
        banks = [numbers(text_of(bank)).get("size_in_bytes") for bank in node.glob("mem_banks/*/properties")]
        memory = sum(filter(None, banks)) or None
        name = text_of(node / "name") or gfx
        gpus.append({"vendor": "amd", "gfx": gfx, "cu_num": cu_num, "device": name, "memory": memory})
    return gpus


def parse_nvidia_smi(text: str) -> list[dict[str, Any]]:
    """GPUs from nvidia-smi's output for _IDENTITY: `NVIDIA H200, 9.0, 143771` is gfx sm_90."""
    gpus: list[dict[str, Any]] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(_IDENTITY) or not cells[1].replace(".", "").isdigit():
            continue  # a line about an error
        name, capability, mib = cells
        gfx = "sm_" + capability.replace(".", "")
        memory = int(mib) * 2**20 if mib.isdigit() else None
        gpus.append({"vendor": "nvidia", "gfx": gfx, "cu_num": None, "device": name, "memory": memory})
    return gpus


def _cpuinfo(path: Path) -> dict[str, str]:
    """The first processor of /proc/cpuinfo; empty if it cannot be read."""
    first_processor = text_of(path).split("\n\n", 1)[0]
    pairs = [line.partition(":") for line in first_processor.splitlines()]
    return {name.strip(): value.strip() for name, _, value in pairs}


def driver_version(root: Path = Path("/")) -> str:
    """The version of NVIDIA's driver, or of an amdgpu module that is not the kernel's own; "" if it is not known."""
    nvidia = nvidia_smi(("driver_version",)).splitlines()
    return nvidia[0].strip() if nvidia else text_of(root / "sys/module/amdgpu/version")


def nvidia_smi(fields: Sequence[str]) -> str:
    """Output of nvidia-smi on these fields, "" if it is missing, fails, or takes too long."""
    argv = ("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""
    return done.stdout if done.returncode == 0 else ""
