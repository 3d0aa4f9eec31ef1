"""Facts of a node: the check script, and its answer parsed.

The script (templates/check.sh.j2) prints key=value lines; it runs as `sh -s` with the script on standard input, so
that it leaves nothing on the node. The answer is data from a node: capped, cleaned, never trusted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from orchestrator.engines import find_engine
from orchestrator.ledger import clean
from orchestrator.templating import render
from worker.device.probe import ISA_LEVELS, gfx_of_target, parse_nvidia_smi
from worker.protocol import LOCKS

if TYPE_CHECKING:
    from orchestrator.inventory import Node
    from orchestrator.transport import Completed

ARGV = ("sh", "-s")
"""The command that takes `script` on its standard input."""
TIMEOUT_S = 30.0
TOOL_TIMEOUT_S, CONTAINER_TIMEOUT_S = 5, 10
"""Time limits of a call of docker or nvidia-smi on the node, and of one that starts a container."""
MAX_BYTES = 256 * 1024
MAX_LINES = 4000
DEFAULT_WORKDIR = "~/.gemmfleet"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of a node. Bytes, degrees Celsius, watts; None or empty for what is not known."""

    vendor: str
    gfx: str
    cu_num: int | None
    device: str = ""
    render: str = ""
    pci: str = ""
    numa: int | None = None
    cpus: str = ""
    """The cores near it, as the kernel lists them (0-63,128-191)."""
    id: str = ""
    partition: str = ""
    use_pct: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    temperature_c: dict[str, float] = field(default_factory=dict)
    power_w: float | None = None
    uncorrectable: dict[str, int] = field(default_factory=dict)
    """Uncorrectable errors since the driver was loaded, of the blocks that counted any."""
    processes: dict[str, int] = field(default_factory=dict)
    """Bytes of its memory by process id on the host, where the kernel reports them (KFD)."""


@dataclass(frozen=True, slots=True)
class Container:
    """A running container, with the labels that show whose it is."""

    id: str
    name: str
    image: str
    status: str
    run: str
    node: str
    slot: str
    """Slot of a worker; a run's other containers (the stream's reader) have none."""
    devices: tuple[str, ...] = ()
    """The host's devices that it was given; `gpu:DRIVER` for GPUs that Docker hands out itself (--gpus)."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Facts of a node from its check script. `values` has the plain keys; lists are apart."""

    values: dict[str, str]
    gpus: tuple[Gpu, ...] = ()
    devices: dict[str, str] = field(default_factory=dict)
    """A device's path to `GID GROUP MODE open|closed`, or `missing`."""
    containers: tuple[Container, ...] = ()
    locks: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Locks by state. held: RUN/NODE/DEVICE of living workers, whatever their workdir. stale, waiting: lock files of
    slots without a worker, relative to the workdir."""
    lacks: tuple[str, ...] = ()
    cpu_flags: tuple[str, ...] = ()

    def number(self, key: str) -> int | None:
        """A value as a whole number, None where it is none."""
        return _int(self.values.get(key, "").split(" ")[0])

    @property
    def complete(self) -> bool:
        """Return whether the script came to its end."""
        return self.values.get("end") == "1"

    @property
    def gfx(self) -> str | None:
        """gfx as in tuned rows: of the first GPU, or of the CPU where there is none."""
        if self.gpus:
            return self.gpus[0].gfx
        machine = self.values.get("machine", "")
        best = next((name for name, flag in ISA_LEVELS.get(machine, ()) if flag in self.cpu_flags), "")
        return "-".join(p for p in ("cpu", machine, best) if p) if machine else None

    @property
    def cu_num(self) -> int | None:
        """Compute units of the first GPU, or the CPU's usable cores."""
        return self.gpus[0].cu_num if self.gpus else self.number("cores")

    @property
    def image_id(self) -> str:
        """Hash of the image's content, `sha256:...`; "" where it is missing or was not checked."""
        return self.values.get("image", "").split(" ")[0].replace("missing", "")

    def for_plan(self) -> dict[str, Any]:
        """JSON of the facts a plan needs. No names of users, hosts or folders: they may be values of references."""
        keep = ("machine", "cores", "end")
        return {
            "values": {k: self.values[k] for k in keep if k in self.values},
            "gpus": [asdict(g) for g in self.gpus],
            "cpu_flags": list(self.cpu_flags),
        }

    @classmethod
    def from_plan(cls, data: Mapping[str, Any]) -> NodeFacts:
        """Facts from the JSON of `for_plan`. Raise KeyError, TypeError."""
        return cls(dict(data["values"]), tuple(Gpu(**g) for g in data["gpus"]), cpu_flags=tuple(data["cpu_flags"]))


def script(node: Node, *, brief: bool = False, sys: str = "/sys", dev: str = "/dev") -> bytes:
    """The check script for a node whose references are resolved. `sys` and `dev`: other roots, for tests.

    `brief`: only what changes while nodes work (GPUs, containers, living workers), a fraction of the time.
    """
    values = {
        "brief": brief,
        "sys": sys,
        "dev": dev,
        "locks": LOCKS,
        "workdir": from_home(node.workdir or DEFAULT_WORKDIR),
        "timeout_s": TOOL_TIMEOUT_S,
        "container_timeout_s": CONTAINER_TIMEOUT_S,
        "aiter_root": node.aiter.root or "",
        "aiter_mount": _mount_of(node.aiter.root or "", node.docker.volumes),
        "cpu_flags": sorted({flag for levels in ISA_LEVELS.values() for _, flag in levels}),
        "devices": list(dict.fromkeys(d.partition(":")[0] for d in node.docker.devices or ()))
        if find_engine(node.engine).runs_images
        else [],
        "own_gpus": find_engine(node.engine).runs_images and node.docker.devices is None,
        "engine": node.engine,
        "docker_command": list(node.docker.docker_command),
        "image": node.image or "",
        "python": node.python or "",
    }
    return render("check.sh.j2", values).encode()


def _mount_of(path: str, volumes: Sequence[str]) -> str:
    """Argument of `docker run --mount` that makes the path visible, "" where it is in the image. Not --volume, which
    creates a missing folder on the node.
    """
    for volume in sorted(volumes, key=lambda v: -len(v.split(":")[1])):
        source, target = volume.split(":")[:2]
        if f"{path.rstrip('/')}/".startswith(f"{target.rstrip('/')}/"):
            quoted = source.replace('"', '""')
            return f'type={"bind" if source.startswith("/") else "volume"},"source={quoted}",target={target},readonly'
    return ""


def from_home(path: str) -> str:
    """A path of a node as it is, or relative to the home folder where it begins with `~`: where commands begin."""
    return path[2:].lstrip("/") or "." if path == "~" or path.startswith("~/") else path


def read_facts(done: Completed) -> NodeFacts:
    """Parse the answer of the check script; raises nothing, whatever a node sends."""
    values: dict[str, str] = {}
    many: dict[str, list[str]] = {}
    gpus: dict[str, dict[str, str]] = {}
    devices: dict[str, str] = {}
    for line in done.out[:MAX_BYTES].decode("utf-8", "replace").splitlines()[:MAX_LINES]:
        key, sep, raw = line.partition("=")
        key, value = clean.text(key, 100), clean.text(raw, 600)
        if not sep or not key:
            continue
        if key in ("container", "nvidia", "lacks", "cpu_flag", "lock.held", "lock.stale", "lock.waiting"):
            many.setdefault(key, []).append(value)
        elif key.startswith("device."):
            devices[key.removeprefix("device.")] = value
        elif key.startswith("gpu."):
            _, number, name = [*key.split(".", 2), "", ""][:3]
            gpus.setdefault(number, {})[name] = value
        else:
            values.setdefault(key, value)
    found = tuple(_amd(g) for n, g in sorted(gpus.items(), key=lambda g: (len(g[0]), g[0])) if n.isdigit())
    return NodeFacts(
        values,
        found or tuple(g for line in many.get("nvidia", ()) for g in _nvidia(line)),
        devices,
        tuple(c for line in many.get("container", ()) if (c := _container(line))),
        {s: tuple(many[f"lock.{s}"]) for s in ("held", "stale", "waiting") if f"lock.{s}" in many},
        tuple(many.get("lacks", ())),
        tuple(many.get("cpu_flag", ())),
    )


def _amd(raw: dict[str, str]) -> Gpu:
    per_cu, version = _int(raw.get("simd_per_cu")) or 0, _int(raw.get("gfx_target_version")) or 0
    sensors = {
        k.removeprefix("sensor."): n for k, v in raw.items() if k.startswith("sensor.") and (n := _int(v)) is not None
    }
    power = sensors.pop("power", None)
    processes = {
        k.removeprefix("process."): n for k, v in raw.items() if k.startswith("process.") and (n := _int(v)) is not None
    }
    uncorrectable = {}
    for key, counts in raw.items():
        words = counts.split()
        if key.startswith("ras.") and "ue:" in words[:-1]:
            count = _int(words[words.index("ue:") + 1])
            if count:
                uncorrectable[key.removeprefix("ras.")] = count
    modes = (raw.get("current_compute_partition", ""), raw.get("current_memory_partition", ""))
    return Gpu(
        vendor="amd",
        gfx=gfx_of_target(version),
        cu_num=(_int(raw.get("simd_count")) or 0) // per_cu if per_cu else None,
        render=raw.get("render", ""),
        pci=raw.get("pci", ""),
        numa=_int(raw.get("numa_node")),
        cpus=raw.get("local_cpulist", ""),
        id=raw.get("unique_id", ""),
        partition="/".join(m for m in modes if m),
        use_pct=_int(raw.get("gpu_busy_percent")),
        memory_used=_int(raw.get("mem_info_vram_used")),
        memory_total=_int(raw.get("mem_info_vram_total")),
        temperature_c={label: value / 1000 for label, value in sensors.items()},
        power_w=None if power is None else power / 1e6,
        uncorrectable=uncorrectable,
        processes=processes,
    )


def _nvidia(line: str) -> list[Gpu]:
    """A line of the script's nvidia-smi query: index, name, capability, MiB total, MiB used, %, C, uuid."""
    cells = [c.strip() for c in line.split(",")]
    known = parse_nvidia_smi(",".join(cells[1:4])) if len(cells) == 8 else []
    if not known:
        return []
    total, used, use, degrees = (_int(c) for c in cells[3:7])
    return [
        Gpu(
            vendor="nvidia",
            gfx=str(known[0]["gfx"]),
            cu_num=None,
            device=str(known[0]["device"]),
            id=cells[7],
            use_pct=use,
            memory_used=None if used is None else used * 2**20,
            memory_total=None if total is None else total * 2**20,
            temperature_c={} if degrees is None else {"gpu": float(degrees)},
        )
    ]


def _container(line: str) -> Container | None:
    cells = line.split("|")
    if len(cells) != 8:
        return None
    devices = tuple(d for d in cells[7].split(",") if d)
    id_, name, image, status, run, node, slot, _ = cells
    return Container(id_[:12], name.lstrip("/"), image, status, run, node, slot, devices)


def _int(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 19 else None
