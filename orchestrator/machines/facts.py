"""Facts about a node: what its check script found (check_script.py), and those that a run keeps for later plans.

A run keeps few of them in `nodes/NAME/facts.json` of its folder (`save_facts`), so that `resume` and `status` can plan
the same slots without asking the nodes.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from worker.device import cpu_flags, cpu_name, identify

FILE = "facts.json"
"""Name of the file with the facts that a run keeps."""
KEPT = frozenset(("end", "machine", "cores"))
"""Values that a run keeps. None of them may hold the name of a user, host or folder, because these may be values of
references (`${env:NAME}`), which stay out of files."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of a node. Unknown values are None or empty; memory is in bytes."""

    vendor: str
    """`amd` or `nvidia`."""
    gfx: str
    cu_num: int | None
    device: str = ""
    """Its product name."""
    render: str = ""
    """Its render node, such as `renderD128`."""
    pci: str = ""
    numa: int | None = None
    cpus: str = ""
    """The cores near it, as the kernel lists them (0-63,128-191)."""
    id: str = ""
    """Its stable id; partitions of a GPU share it."""
    partition: str = ""
    """Modes of compute and memory, such as `SPX/NPS1`."""
    use_pct: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    temperature_c: dict[str, float] = field(default_factory=dict)
    """Degrees by sensor."""
    power_w: float | None = None
    uncorrectable: dict[str, int] = field(default_factory=dict)
    """Errors since the driver was loaded, by block; blocks without errors are left out."""
    processes: dict[str, int] = field(default_factory=dict)
    """Bytes of its memory by process id (KFD)."""


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
    """Facts about a node from its check script."""

    values: dict[str, str]
    """The keys that the script prints once, such as `{"cores": "128", "workdir_fs": "xfs"}` (check_script.FACTS)."""
    gpus: tuple[Gpu, ...] = ()
    devices: dict[str, str] = field(default_factory=dict)
    """Path of a device -> `GID GROUP MODE open|closed`, or `missing`."""
    containers: tuple[Container, ...] = ()
    locks: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Locks by state:
    held: RUN/NODE/DEVICE of living workers in any workdir;
    closed: `DEVICE PATH of OWNER, mode MODE` of locks that cannot be opened (DEVICE `all`: the whole folder);
    stale, waiting: lock files of slots without a worker, below this workdir."""
    lacks: tuple[str, ...] = ()
    """Tools that the node does not have."""
    cpu_flags: tuple[str, ...] = ()
    greeting: str = ""
    """Text that the login shell prints before the output of a command, in quotes; empty if it prints nothing."""

    def number(self, key: str) -> int | None:
        """A value as a whole number, None if it is something else."""
        return whole_number(self.values.get(key, "").split(" ")[0])

    @property
    def complete(self) -> bool:
        """Return whether the script ran to its end."""
        return self.values.get("end") == "1"

    @property
    def gfx(self) -> str | None:
        """gfx of the first GPU as in tuned rows, or the CPU's name if there is no GPU."""
        if self.gpus:
            return self.gpus[0].gfx
        machine = self.values.get("machine", "")
        return cpu_name(machine, self.cpu_flags) if machine else None

    @property
    def cu_num(self) -> int | None:
        """Compute units of the first GPU, or the CPU's usable cores."""
        return self.gpus[0].cu_num if self.gpus else self.number("cores")


def gpus_in_words(facts: NodeFacts) -> str:
    """`8 x gfx950 (SPX/NPS1)`."""
    kinds = Counter(f"{g.gfx} ({g.partition})" if g.partition else g.gfx for g in facts.gpus)
    return ", ".join(f"{n} x {kind}" for kind, n in kinds.items()) or (facts.gfx or "")


def whole_number(text: str) -> int | None:
    """A number from a node, None if it is something else or too long for one."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def facts_here() -> NodeFacts:
    """The facts of this machine that a plan needs. Does not run the script."""
    machine = identify({})
    gpus = [Gpu(g["vendor"], g["gfx"], g["cu_num"], g["device"], memory_total=g["memory"]) for g in machine["gpus"]]
    values = {
        "machine": machine["machine"],
        "cores": str(machine["cores"]),
        "end": "1",
        "memory_kb": str(machine["memory"] // 1024),
    }
    return NodeFacts(values, tuple(gpus), cpu_flags=tuple(cpu_flags()))


def save_facts(run_folder: Path, facts: Mapping[str, NodeFacts]) -> None:
    """Store the facts that `plan_nodes` needs in the run's folder, so that a later plan need not ask the nodes."""
    for node, node_facts in facts.items():
        if not node_facts.complete:
            continue
        folder = run_folder / "nodes" / node
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        kept = {
            "values": {key: value for key, value in node_facts.values.items() if key in KEPT},
            "gpus": [asdict(gpu) for gpu in node_facts.gpus],
            "cpu_flags": list(node_facts.cpu_flags),
        }
        temporary = folder / f".{FILE}.tmp"
        temporary.write_text(json.dumps(kept, indent=1) + "\n")
        os.rename(temporary, folder / FILE)


def load_facts(run_folder: Path, nodes: Iterable[str]) -> dict[str, NodeFacts]:
    """Facts that `save_facts` stored. Nodes whose facts are missing or unreadable are left out."""
    facts = {}
    for node in nodes:
        try:
            kept = json.loads((run_folder / "nodes" / node / FILE).read_text())
            gpus = tuple(Gpu(**gpu) for gpu in kept["gpus"])
            facts[node] = NodeFacts(dict(kept["values"]), gpus, cpu_flags=tuple(kept["cpu_flags"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return facts
