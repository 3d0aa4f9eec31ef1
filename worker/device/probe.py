"""Identity of this machine, without importing torch: cores, memory, GPUs, and the gfx and cu_num of tuned rows.

GPUs are read from the kernel's KFD topology (AMD) or from nvidia-smi. A machine without a GPU is named as the
CPU it is: gfx `cpu-<machine>-<isa>` with the best instruction set of ISA_LEVELS, cu_num its usable cores.
"""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
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
# variable of a slot's tuner: how many slots of its node, its own among them, run on its cores
SLOTS_ON_CORES = "GEMMFLEET_SLOTS_ON_CORES"
_MAX_CORE = 65_535
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,compute_cap,memory.total", "--format=csv,noheader,nounits")


def identify(env: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """host, python, machine, kernel, cpu, cores, memory (bytes), gpus, and gfx, cu_num, device of this slot.

    gpus: those that the environment leaves visible, each {vendor, gfx, cu_num, device, memory}.
    cu_num is None where only the tuner knows it (nvidia-smi does not name the count of multiprocessors).
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
        "memory": memory_bytes(),
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
            raise ValueError(f"{part!r} is no range of cores")
        out.update(range(begin, end + 1))
    return out


def pin(cpus: str) -> int:
    """Restrict this process to the cores that it may use of these; their number, 0 where nothing was changed."""
    try:
        wanted = cores_of(cpus) & os.sched_getaffinity(0)
        if not wanted:
            return 0
        os.sched_setaffinity(0, wanted)
    except (OSError, ValueError):
        return 0
    return len(wanted)


def slots_on_cores(slots: Mapping[str, Mapping[str, str]], slot: str) -> int:
    """Number of slots that run on the cores of `slot`; `slots` are their variables."""
    mine = slots.get(slot, {}).get(CPUS, "")
    return max(1, sum(env.get(CPUS, "") == mine for env in slots.values()))


def own_cores() -> int:
    """The cores that this process may run on, shared evenly with the slots that run there too; at least 1."""
    slots = os.environ.get(SLOTS_ON_CORES, "")
    return max(1, usable_cores() // (int(slots) if slots.isdigit() and int(slots) else 1))


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cpu_model(cpuinfo: Path = CPUINFO) -> str:
    """The CPU's name as the kernel has it, the machine type where it has none."""
    return _cpuinfo(cpuinfo).get("model name") or platform.machine()


def cpu_gfx(cpuinfo: Path = CPUINFO, machine: str = "") -> str:
    """`cpu-x86_64-avx512` and the like: short, and the same on every host of a kind."""
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
    """All GPUs of this machine that we may open, AMD's in the order of their KFD nodes, else NVIDIA's."""
    return _amd_gpus(root) or _nvidia_gpus()


def visible(gpus: list[dict[str, Any]], env: Mapping[str, str]) -> list[dict[str, Any]]:
    """`gpus` as the runtimes' variables leave them. A value that is no list of numbers (UUIDs) leaves all."""
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
    """The KFD nodes of AMD's GPUs below a root, in their order, each with its properties.

    A GPU that the container may not open has none that can be read here.
    """
    folder = root / KFD_NODES
    nodes = (p for p in folder.iterdir() if p.name.isdigit()) if folder.is_dir() else ()
    for node in sorted(nodes, key=lambda p: int(p.name)):
        properties = numbers(text_of(node / "properties"))
        if properties.get("simd_count") and properties.get("gfx_target_version"):
            yield node, properties


def numbers(text: str) -> dict[str, int]:
    """`name number` lines of a file of the kernel's; others are passed over."""
    pairs = (line.split() for line in text.splitlines())
    return {words[0]: int(words[1]) for words in pairs if len(words) > 1 and words[1].isdigit()}


def text_of(path: Path) -> str:
    """The text of a small file, "" where there is none that we may read."""
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


def _nvidia_gpus() -> list[dict[str, Any]]:
    if not Path("/proc/driver/nvidia/version").exists():
        return []
    try:
        done = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_nvidia_smi(done.stdout)


def parse_nvidia_smi(text: str) -> list[dict[str, Any]]:
    """GPUs from what NVIDIA_SMI prints: `NVIDIA H200, 9.0, 143771` is gfx sm_90."""
    out: list[dict[str, Any]] = []
    for line in text.splitlines():
        cells = [c.strip() for c in line.split(",")]
        if len(cells) == 3 and cells[1].replace(".", "").isdigit():
            gfx = "sm_" + cells[1].replace(".", "")
            memory = int(cells[2]) * 2**20 if cells[2].isdigit() else None
            out.append({"vendor": "nvidia", "gfx": gfx, "cu_num": None, "device": cells[0], "memory": memory})
    return out


def _cpuinfo(path: Path) -> dict[str, str]:
    """The first processor of /proc/cpuinfo; empty where it cannot be read."""
    pairs = (line.partition(":") for line in text_of(path).split("\n\n", 1)[0].splitlines())
    return {k.strip(): v.strip() for k, _, v in pairs}
