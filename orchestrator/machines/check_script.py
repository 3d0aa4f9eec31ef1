"""The check script: asks a node for its facts (facts.py), and reads the answer.

The script (templates/check.sh.j2) runs as `sh -s` with the script on standard input, so it leaves nothing on the node.
Its answer is data from a node: we cap and clean it and never trust it. It prints lines such as

    cores=128
    gpu.0.gfx_target_version=90500              amdgpu's and amdkfd's files, by the number of the GPU
    gpu.0.sensor.junction=41000
    lock.held=20261129-101500-3f9a/n1/gpu-0     one line for each, as all keys of LISTS

A caller renders the script, has a transport run it as ARGV, and gives the answer to `read_facts`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from orchestrator import clean
from orchestrator.engines import find_engine
from orchestrator.files.faults import shown
from orchestrator.inventory.model import Node
from orchestrator.machines.facts import Container, Gpu, NodeFacts, whole_number
from orchestrator.templating import render
from orchestrator.transport.base import Completed
from worker.aiter_tree.locate import PLACES
from worker.device import ISA_LEVELS, gfx_of_target, parse_nvidia_smi
from worker.protocol import LOCKS

V = TypeVar("V")
ARGV = ("sh", "-s")
"""The command that takes the script on its standard input."""
TOOL_TIMEOUT_S = 5
"""Time limit of a call of docker or nvidia-smi on the node."""
CONTAINER_TIMEOUT_S = 10
"""Time limit of a call that starts a container."""
TIMEOUT_S = 60.0
"""Time limit of the script: longer than those of all calls together, so that a slow tool does not hide the facts."""
MAX_BYTES = 256 * 1024
MAX_LINES = 4000
DEFAULT_WORKDIR = "~/.gemmfleet"
_KEY = re.compile(rb"[a-z][\w.]*=")
"""The beginning of a line that the script prints."""


class Fact(NamedTuple):
    """A fact that one shell command prints. `changes`: it does while nodes work, so polls ask for it too."""

    name: str
    command: str
    changes: bool = False


FACTS = (
    Fact("clock", "date +%s", changes=True),
    Fact("host", "uname -n"),
    Fact("kernel", "uname -sr"),
    Fact("machine", "uname -m"),
    Fact("user", "id -un 2>/dev/null || id -u"),
    Fact("cores", "nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null", changes=True),
    Fact("memory_kb", r"sed -n 's/^MemTotal: *\([0-9]*\) kB/\1/p' /proc/meminfo 2>/dev/null"),
    # the folder for runs: $near is the nearest folder that exists, $mounted the mount point of its file system
    Fact("workdir", 'printf %s "$workdir"'),
    Fact("workdir_writable", '[ -w "$near" ] && echo yes || echo no'),
    Fact(
        "workdir_mount",
        """printf '%s ' "$mounted"; awk -v at="$mounted" '$2 == at { split($4, options, ",") }"""
        " END { print options[1] }' /proc/mounts 2>/dev/null",
    ),
    Fact("workdir_fs", 'stat -f -c %T -- "$near" 2>/dev/null'),
    Fact("workdir_free_kb", """df -Pk -- "$near" 2>/dev/null | awk 'NR == 2 { print $4 }'"""),
    Fact("workdir_free_inodes", """df -Pi -- "$near" 2>/dev/null | awk 'NR == 2 { print $4 }'"""),
)
"""Facts that need one command each. The script has separate parts for GPUs, devices, locks, containers, the image,
AITER and Python."""
LISTS = ("container", "nvidia", "lacks", "cpu_flag", "lock.held", "lock.closed", "lock.stale", "lock.waiting")
"""Keys that the script may print several times, once for each item."""
LOCK_STATES = ("held", "closed", "stale", "waiting")
_UNCORRECTABLE = re.compile(r"\bue: (\d{1,18})\b", re.ASCII)
"""The count of uncorrectable errors in a line of the driver's RAS files."""


def python_of(node: Node) -> str | None:
    """The Python of workers that run in no image, None for the first that is found on the node."""
    if node.python:
        return node.python
    engine = find_engine(node.engine)
    return sys.executable if node.is_here and not engine.runs_images and not engine.enter else None


def render_script(node: Node, *, brief: bool = False, sysfs: str = "/sys", dev: str = "/dev") -> bytes:
    """The check script for a node whose references are resolved. `sysfs` and `dev`: other roots, for tests.

    `brief`: only what changes while nodes work (GPUs, containers, living workers). That is much faster.
    """
    engine = find_engine(node.engine)
    devices = node.docker.devices
    searches_aiter = not (node.aiter.root or engine.runs_images or engine.enter)
    return render(
        "check.sh.j2",
        {
            "brief": brief,
            "facts": [fact._asdict() for fact in FACTS if fact.changes or not brief],
            "sys": sysfs,
            "dev": dev,
            "locks": LOCKS,
            "workdir": from_home(node.workdir or DEFAULT_WORKDIR),
            "timeout_s": TOOL_TIMEOUT_S,
            "container_timeout_s": CONTAINER_TIMEOUT_S,
            "aiter_root": node.aiter.root or "",
            "aiter_places": PLACES if searches_aiter else (),
            "aiter_mount": _mount_of(node.aiter.root or "", node.docker.volumes),
            "cpu_flags": sorted({flag for levels in ISA_LEVELS.values() for _, flag in levels}),
            "devices": list(dict.fromkeys(d.partition(":")[0] for d in devices or ())) if engine.runs_images else [],
            "own_gpus": engine.runs_images and devices is None,  # each container gets its slot's GPU
            "engine": node.engine,
            "docker_command": list(node.docker.docker_command),
            "image": node.image or "",
            "python": python_of(node) or "",
        },
    ).encode()


def _mount_of(path: str, volumes: Sequence[str]) -> str:
    """The argument of `docker run --mount` that makes the path visible, "" if it is in the image. We do not use
    --volume, because that creates a missing folder on the node.
    """
    for volume in sorted(volumes, key=lambda v: -len(v.split(":")[1])):
        source, target = volume.split(":")[:2]
        if f"{path.rstrip('/')}/".startswith(f"{target.rstrip('/')}/"):
            quoted = source.replace('"', '""')
            kind = "bind" if source.startswith("/") else "volume"
            return f'type={kind},"source={quoted}",target={target},readonly'
    return ""


def from_home(path: str) -> str:
    """A path on a node. If it begins with `~`, make it relative to the home folder, where commands start."""
    if path != "~" and not path.startswith("~/"):
        return path
    return path[2:].lstrip("/") or "."


def read_facts(done: Completed) -> NodeFacts:
    """Parse the answer of the check script. Never raises, whatever a node sends."""
    printed = _printed_values(done.out)
    single = {key: values[0] for key, values in printed.items() if key not in LISTS}
    listed = {key: tuple(printed.get(key, ())) for key in LISTS}
    gpus = _amd_gpus(single) or [gpu for line in listed["nvidia"] for gpu in _nvidia_gpus(line)]
    return NodeFacts(
        values={key: value for key, value in single.items() if not key.startswith(("gpu.", "device."))},
        gpus=tuple(gpus),
        devices={key.removeprefix("device."): value for key, value in single.items() if key.startswith("device.")},
        containers=tuple(filter(None, map(_container, listed["container"]))),
        locks={state: listed[f"lock.{state}"] for state in LOCK_STATES if listed[f"lock.{state}"]},
        lacks=listed["lacks"],
        cpu_flags=listed["cpu_flag"],
        greeting=_greeting(done.out),
    )


def _greeting(output: bytes) -> str:
    """The first line, "" if the script printed it."""
    if not output or _KEY.match(output):
        return ""
    return shown(output[:400].lstrip().partition(b"\n")[0].decode("utf-8", "replace"))


def _printed_values(output: bytes) -> dict[str, list[str]]:
    """The values of each key in lines `KEY=VALUE`, capped and cleaned."""
    printed: dict[str, list[str]] = {}
    for line in output[:MAX_BYTES].decode("utf-8", "replace").splitlines()[:MAX_LINES]:
        raw_key, separator, value = line.partition("=")
        key = clean.text(raw_key, 100)
        if separator and key:
            printed.setdefault(key, []).append(clean.text(value, 600))
    return printed


def _amd_gpus(values: Mapping[str, str]) -> list[Gpu]:
    """The GPUs in keys `gpu.NUMBER.NAME`, by number."""
    by_number: dict[int, dict[str, str]] = {}
    for key, value in values.items():
        parts = key.split(".", 2)
        number = whole_number(parts[1]) if len(parts) == 3 and parts[0] == "gpu" else None
        if number is not None:
            by_number.setdefault(number, {})[parts[2]] = value
    return [_amd_gpu(by_number[number]) for number in sorted(by_number)]


def _amd_gpu(raw: dict[str, str]) -> Gpu:
    """A GPU from the files of the amdgpu and amdkfd drivers in sysfs, by their names; `sensor.`, `process.` and `ras.`
    begin the names of several."""
    numbers = {name: number for name, text in raw.items() if (number := whole_number(text)) is not None}
    sensors = _with_prefix(numbers, "sensor.")
    power_uw = sensors.pop("power", None)
    simds_per_cu = numbers.get("simd_per_cu")
    modes = (raw.get("current_compute_partition"), raw.get("current_memory_partition"))
    return Gpu(
        vendor="amd",
        gfx=gfx_of_target(numbers.get("gfx_target_version", 0)),
        cu_num=numbers.get("simd_count", 0) // simds_per_cu if simds_per_cu else None,
        render=raw.get("render", ""),
        pci=raw.get("pci", ""),
        numa=numbers.get("numa_node"),
        cpus=raw.get("local_cpulist", ""),
        id=raw.get("unique_id", ""),
        partition="/".join(mode for mode in modes if mode),
        use_pct=numbers.get("gpu_busy_percent"),
        memory_used=numbers.get("mem_info_vram_used"),
        memory_total=numbers.get("mem_info_vram_total"),
        temperature_c={label: value / 1000 for label, value in sensors.items()},  # the kernel counts in 0.001 C
        power_w=None if power_uw is None else power_uw / 1e6,
        uncorrectable=_uncorrectable_errors(_with_prefix(raw, "ras.")),
        processes=_with_prefix(numbers, "process."),
    )


def _with_prefix(values: Mapping[str, V], prefix: str) -> dict[str, V]:
    """The values whose key begins with the prefix, without it."""
    return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}


def _uncorrectable_errors(ras_files: Mapping[str, str]) -> dict[str, int]:
    """Uncorrectable errors by block, without blocks that have none."""
    errors = {}
    for block, text in ras_files.items():
        count = _UNCORRECTABLE.search(text)
        if count is not None and int(count[1]):
            errors[block] = int(count[1])
    return errors


def _nvidia_gpus(line: str) -> list[Gpu]:
    """The GPU in a line of the script's nvidia-smi query (index, name, capability, MiB total, MiB used, %, C, uuid);
    none for any other line."""
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != 8:
        return []
    used_mib, use_pct, degrees = (whole_number(cell) for cell in cells[4:7])
    return [
        Gpu(
            vendor="nvidia",
            gfx=str(gpu["gfx"]),
            cu_num=None,
            device=str(gpu["device"]),
            id=cells[7],
            use_pct=use_pct,
            memory_used=None if used_mib is None else used_mib * 2**20,
            memory_total=gpu["memory"],
            temperature_c={} if degrees is None else {"gpu": float(degrees)},
        )
        for gpu in parse_nvidia_smi(",".join(cells[1:4]))
    ]


def _container(line: str) -> Container | None:
    """A line ID|NAME|IMAGE|STATUS|RUN|NODE|SLOT|DEVICES, the last a list with commas; None for any other line."""
    cells = line.split("|")
    if len(cells) != 8:
        return None
    id_, name, image, status, run, node, slot, devices = cells
    device_paths = tuple(device for device in devices.split(",") if device)
    return Container(id_[:12], name.lstrip("/"), image, status, run, node, slot, device_paths)
