"""Facts about a node: the check script, the parser of its answer, and the facts that a run keeps.

The script (templates/check.sh.j2) prints key=value lines. It runs as `sh -s` with the script on standard input, so it
leaves nothing on the node. Its answer is data from a node: we cap and clean it and never trust it.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from orchestrator import clean
from orchestrator.engines import find_engine
from orchestrator.inventory.model import Node
from orchestrator.templating import render
from orchestrator.transport.base import Completed
from worker.aiter_tree.locate import PLACES
from worker.device import ISA_LEVELS, cpu_flags, cpu_name, gfx_of_target, identify, parse_nvidia_smi
from worker.protocol import LOCKS

# The command that takes `script` on its standard input.
ARGV = ("sh", "-s")
TIMEOUT_S = 30.0
# Time limits of a call of docker or nvidia-smi on the node, and of one that starts a container.
TOOL_TIMEOUT_S, CONTAINER_TIMEOUT_S = 5, 10
MAX_BYTES = 256 * 1024
MAX_LINES = 4000
DEFAULT_WORKDIR = "~/.gemmfleet"
FILE = "facts.json"


class Fact(NamedTuple):
    """A fact that one shell command prints. `now`: it changes while nodes work, so polls ask for it too. `kept`: a run
    keeps it for later plans. A kept fact must not hold the name of a user, host or folder, because these may be values
    of references (`${env:NAME}`), which stay out of files."""

    name: str
    command: str
    now: bool = False
    kept: bool = False


FACTS = (
    Fact("clock", "date +%s", now=True),
    Fact("host", "uname -n"),
    Fact("kernel", "uname -sr"),
    Fact("machine", "uname -m", kept=True),
    Fact("user", "id -un 2>/dev/null || id -u"),
    Fact("cores", "nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null", now=True, kept=True),
    Fact("memory_kb", r"sed -n 's/^MemTotal: *\([0-9]*\) kB/\1/p' /proc/meminfo 2>/dev/null"),
    # the folder for runs: $near is the nearest folder that exists, $mounted the mount point of its file system
    Fact("workdir", 'printf %s "$workdir"'),
    Fact("workdir_writable", '[ -w "$near" ] && echo yes || echo no'),
    Fact("workdir_mount", """printf '%s ' "$mounted"; awk -v at="$mounted" '$2 == at { split($4, options, ",") }"""
         " END { print options[1] }' /proc/mounts 2>/dev/null"),
    Fact("workdir_fs", 'stat -f -c %T -- "$near" 2>/dev/null'),
    Fact("workdir_free_kb", """df -Pk -- "$near" 2>/dev/null | awk 'NR == 2 { print $4 }'"""),
    Fact("workdir_free_inodes", """df -Pi -- "$near" 2>/dev/null | awk 'NR == 2 { print $4 }'"""),
)  # fmt: skip
"""Facts that need one command each. The script has separate parts for GPUs, devices, locks, containers, the image,
AITER and Python."""
# Keys that the script may print several times, once for each thing found.
_LISTS = ("container", "nvidia", "lacks", "cpu_flag", "lock.held", "lock.closed", "lock.stale", "lock.waiting")
_KEPT = frozenset(("end", *(f.name for f in FACTS if f.kept)))
_UNCORRECTABLE = re.compile(r"\bue: (\d{1,18})\b", re.ASCII)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of a node. Bytes, degrees Celsius, watts; unknown values are None or empty.

    `cpus`: the cores near it, as the kernel lists them (0-63,128-191). `uncorrectable`: errors since the driver was
    loaded, by block; blocks without errors are left out. `processes`: bytes of its memory by process id (KFD).
    """

    vendor: str
    gfx: str
    cu_num: int | None
    device: str = ""
    render: str = ""
    pci: str = ""
    numa: int | None = None
    cpus: str = ""
    id: str = ""
    partition: str = ""
    use_pct: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    temperature_c: dict[str, float] = field(default_factory=dict)
    power_w: float | None = None
    uncorrectable: dict[str, int] = field(default_factory=dict)
    processes: dict[str, int] = field(default_factory=dict)


class Container(NamedTuple):
    """A running container, with the labels that show which run it belongs to. A run's containers that are not workers
    (the one that streams their records) have no slot. `devices`: the host's devices that it was given; `gpu:DRIVER` for
    GPUs that Docker hands out itself."""

    id: str
    name: str
    image: str
    status: str
    run: str
    node: str
    slot: str
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Facts about a node from its check script. `values` has the plain keys; lists have their own fields.

    `devices`: path of a device -> `GID GROUP MODE open|closed`, or `missing`. `locks`: by state. held: RUN/NODE/DEVICE
    of living workers in any workdir; closed: `DEVICE PATH of OWNER, mode MODE` (DEVICE `all`: the folder) of locks that
    cannot be opened; stale, waiting: lock files of slots without a worker, below this workdir. `lacks`:
    tools that the node does not have.
    """

    values: dict[str, str]
    gpus: tuple[Gpu, ...] = ()
    devices: dict[str, str] = field(default_factory=dict)
    containers: tuple[Container, ...] = ()
    locks: dict[str, tuple[str, ...]] = field(default_factory=dict)
    lacks: tuple[str, ...] = ()
    cpu_flags: tuple[str, ...] = ()

    def number(self, key: str) -> int | None:
        """A value as a whole number, None if it is something else."""
        return _int(self.values.get(key, "").split(" ")[0])

    @property
    def complete(self) -> bool:
        """Return whether the script ran to its end."""
        return self.values.get("end") == "1"

    @property
    def gfx(self) -> str | None:
        """gfx of the first GPU as in tuned rows, or the CPU's name if there is no GPU."""
        machine = self.values.get("machine", "")
        return self.gpus[0].gfx if self.gpus else cpu_name(machine, self.cpu_flags) if machine else None

    @property
    def cu_num(self) -> int | None:
        """Compute units of the first GPU, or the CPU's usable cores."""
        return self.gpus[0].cu_num if self.gpus else self.number("cores")


def gpus_in_words(facts: NodeFacts) -> str:
    """`8 x gfx950 (SPX/NPS1)`."""
    kinds = Counter(f"{g.gfx} ({g.partition})" if g.partition else g.gfx for g in facts.gpus)
    return ", ".join(f"{n} x {kind}" for kind, n in kinds.items()) or (facts.gfx or "")


def facts_here() -> NodeFacts:
    """The facts of this machine that a plan needs. Does not run the script."""
    seen = identify({})
    gpus = tuple(Gpu(g["vendor"], g["gfx"], g["cu_num"], g["device"], memory_total=g["memory"]) for g in seen["gpus"])
    values = {"machine": seen["machine"], "cores": str(seen["cores"]), "end": "1"}
    return NodeFacts({**values, "memory_kb": str(seen["memory"] // 1024)}, gpus, cpu_flags=tuple(cpu_flags()))


def save_facts(run_folder: Path, facts: Mapping[str, NodeFacts]) -> None:
    """Store the facts that `plan_nodes` needs in the run's folder, so that a later plan need not ask the nodes."""
    for name, found in facts.items():
        if found.complete:
            folder = run_folder / "nodes" / name
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            values = {k: v for k, v in found.values.items() if k in _KEPT}
            kept = {"values": values, "gpus": [asdict(g) for g in found.gpus], "cpu_flags": list(found.cpu_flags)}
            aside = folder / f".{FILE}.tmp"
            aside.write_text(json.dumps(kept, indent=1) + "\n")
            os.rename(aside, folder / FILE)


def load_facts(run_folder: Path, names: Iterable[str]) -> dict[str, NodeFacts]:
    """Facts that `save_facts` stored. Nodes whose facts are missing or unreadable are left out."""
    out = {}
    for name in names:
        try:
            data = json.loads((run_folder / "nodes" / name / FILE).read_text())
            gpus = tuple(Gpu(**g) for g in data["gpus"])
            out[name] = NodeFacts(dict(data["values"]), gpus, cpu_flags=tuple(data["cpu_flags"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return out


def python_of(node: Node) -> str | None:
    """The Python of workers that run in no image, None for the first that is found on the node."""
    spec = find_engine(node.engine)
    return node.python or (sys.executable if node.is_here and not (spec.runs_images or spec.enter) else None)


def script(node: Node, *, brief: bool = False, sysfs: str = "/sys", dev: str = "/dev") -> bytes:
    """The check script for a node whose references are resolved. `sysfs` and `dev`: other roots, for tests.

    `brief`: only facts that change while nodes work (GPUs, containers, living workers). That is much faster.
    """
    spec, devices = find_engine(node.engine), node.docker.devices
    in_image = spec.runs_images
    values = {
        "brief": brief,
        "facts": [f._asdict() for f in FACTS if f.now or not brief],
        "sys": sysfs,
        "dev": dev,
        "locks": LOCKS,
        "workdir": from_home(node.workdir or DEFAULT_WORKDIR),
        "timeout_s": TOOL_TIMEOUT_S,
        "container_timeout_s": CONTAINER_TIMEOUT_S,
        "aiter_root": node.aiter.root or "",
        "aiter_places": () if node.aiter.root or in_image or spec.enter else PLACES,
        "aiter_mount": _mount_of(node.aiter.root or "", node.docker.volumes),
        "cpu_flags": sorted({flag for levels in ISA_LEVELS.values() for _, flag in levels}),
        "devices": list(dict.fromkeys(d.partition(":")[0] for d in devices or ())) if in_image else [],
        "own_gpus": in_image and devices is None,  # each container gets its slot's GPU
        "engine": node.engine,
        "docker_command": list(node.docker.docker_command),
        "image": node.image or "",
        "python": python_of(node) or "",
    }
    return render("check.sh.j2", values).encode()


def _mount_of(path: str, volumes: Sequence[str]) -> str:
    """The argument of `docker run --mount` that makes the path visible, "" if it is in the image. We do not use
    --volume, because that creates a missing folder on the node.
    """
    for volume in sorted(volumes, key=lambda v: -len(v.split(":")[1])):
        source, target = volume.split(":")[:2]
        if f"{path.rstrip('/')}/".startswith(f"{target.rstrip('/')}/"):
            quoted = source.replace('"', '""')
            return f'type={"bind" if source.startswith("/") else "volume"},"source={quoted}",target={target},readonly'
    return ""


def from_home(path: str) -> str:
    """A path on a node. If it begins with `~`, make it relative to the home folder, where commands start."""
    return path[2:].lstrip("/") or "." if path == "~" or path.startswith("~/") else path


def read_facts(done: Completed) -> NodeFacts:
    """Parse the answer of the check script. Never raises, whatever a node sends."""
    said: dict[str, list[str]] = {}
    for line in done.out[:MAX_BYTES].decode("utf-8", "replace").splitlines()[:MAX_LINES]:
        key, sep, raw = line.partition("=")
        if sep and (key := clean.text(key, 100)):
            said.setdefault(key, []).append(clean.text(raw, 600))
    first = {key: values[0] for key, values in said.items() if key not in _LISTS}
    gpus: dict[int, dict[str, str]] = {}
    for key, value in first.items():
        if (gpu := key.split(".", 2))[0] == "gpu" and len(gpu) == 3 and (number := _int(gpu[1])) is not None:
            gpus.setdefault(number, {})[gpu[2]] = value
    many: dict[str, tuple[str, ...]] = {key: tuple(said.get(key, ())) for key in _LISTS}
    return NodeFacts(
        {key: value for key, value in first.items() if not key.startswith(("gpu.", "device."))},
        tuple(_amd(gpus[n]) for n in sorted(gpus)) or tuple(g for line in many["nvidia"] for g in _nvidia(line)),
        {key.removeprefix("device."): value for key, value in first.items() if key.startswith("device.")},
        tuple(c for line in many["container"] for c in _containers(line)),
        {s: many[f"lock.{s}"] for s in ("held", "closed", "stale", "waiting") if many[f"lock.{s}"]},
        many["lacks"],
        many["cpu_flag"],
    )


def _amd(raw: dict[str, str]) -> Gpu:
    numbers = {key: n for key, text in raw.items() if (n := _int(text)) is not None}
    sensors, processes = (
        {k.removeprefix(kind): n for k, n in numbers.items() if k.startswith(kind)} for kind in ("sensor.", "process.")
    )
    errors = ((k.removeprefix("ras."), _UNCORRECTABLE.search(v)) for k, v in raw.items() if k.startswith("ras."))
    power, per_cu = sensors.pop("power", None), numbers.get("simd_per_cu")
    modes = (raw.get("current_compute_partition"), raw.get("current_memory_partition"))
    return Gpu(
        vendor="amd",
        gfx=gfx_of_target(numbers.get("gfx_target_version", 0)),
        cu_num=numbers.get("simd_count", 0) // per_cu if per_cu else None,
        render=raw.get("render", ""),
        pci=raw.get("pci", ""),
        numa=numbers.get("numa_node"),
        cpus=raw.get("local_cpulist", ""),
        id=raw.get("unique_id", ""),
        partition="/".join(m for m in modes if m),
        use_pct=numbers.get("gpu_busy_percent"),
        memory_used=numbers.get("mem_info_vram_used"),
        memory_total=numbers.get("mem_info_vram_total"),
        temperature_c={label: value / 1000 for label, value in sensors.items()},
        power_w=None if power is None else power / 1e6,
        uncorrectable={block: int(count[1]) for block, count in errors if count and int(count[1])},
        processes=processes,
    )


def _nvidia(line: str) -> list[Gpu]:
    """A line of the script's nvidia-smi query: index, name, capability, MiB total, MiB used, %, C, uuid."""
    cells = [c.strip() for c in line.split(",")]
    known = parse_nvidia_smi(",".join(cells[1:4])) if len(cells) == 8 else []
    used, use, degrees = (_int(c) for c in cells[4:7]) if known else (None, None, None)
    return [
        Gpu(
            vendor="nvidia",
            gfx=str(gpu["gfx"]),
            cu_num=None,
            device=str(gpu["device"]),
            id=cells[7],
            use_pct=use,
            memory_used=None if used is None else used * 2**20,
            memory_total=gpu["memory"],
            temperature_c={} if degrees is None else {"gpu": float(degrees)},
        )
        for gpu in known
    ]


def _containers(line: str) -> list[Container]:
    cells = line.split("|")
    if len(cells) != 8:
        return []
    id_, name, image, status, run, node, slot, devices = cells
    given = tuple(d for d in devices.split(",") if d)
    return [Container(id_[:12], name.lstrip("/"), image, status, run, node, slot, given)]


def _int(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None
