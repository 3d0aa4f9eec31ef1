"""Questions to what is known of a node, before a run starts there. Each answer is a finding that says what to do.

A question is a function with the decorator `question`. It describes in words what it found: a problem, or with the
level OK something good to know; it returns None if there is neither. `findings` asks all of them in the order of this
file. To check something else, add a function here; if it needs a new fact, add that to facts.py first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from orchestrator.command_hints import command
from orchestrator.engines import OK, UNUSABLE, WARNING, Finding, find_engine
from orchestrator.inventory.model import OWN_RENDER_NODE, Node
from orchestrator.machines.facts import Container, NodeFacts, gpus_in_words
from orchestrator.machines.occupancy import gpus_of, occupants
from orchestrator.paths import DEFAULT_RUNS, command_on_run, runs_option
from worker.protocol import HOT_C
from worker.text import plural

MOST_SKEW_S = 5.0
"""A clock that is further away from ours makes the times of rows wrong."""
MIN_FREE = 256 * 2**20
"""With fewer bytes free in the workdir nothing starts."""
LOW_FREE = 4 * 2**30
"""With fewer bytes free in the workdir there is a warning."""
WITHOUT_INODE_LIMIT = ("btrfs", "zfs")
"""File systems that make inodes as they need them, and report 0 free ones."""
REMOTE_FILE_SYSTEMS = (
    "nfs",
    "nfs4",
    "smb",
    "smb2",
    "cifs",
    "lustre",
    "gpfs",
    "beegfs",
    "fuseblk",
    "fuse",
    "ceph",
    "9p",
    "v9fs",
)
NO_AITER = {"missing": "there is no", "empty": "there is no AITER (aiter/jit/core.py) in"}
"""The check script's word on `aiter: {root: PATH}` -> the beginning of the message."""
FREE_SPACE = "free some space (<runs prune>), or give another `workdir:`"
NAME_DEVICES = "drop docker.devices, and each container gets its slot's GPU; or name"
CORRECT_CHIP = "correct or drop gfx and cu_num in the inventory"
BUSY_OPTION = "--busy wait|skip|share"


class CheckedNode:
    """A node's entry in the inventory and its facts, as the questions need them."""

    def __init__(self, node: Node, facts: NodeFacts, skew: float | None, run: str, runs: Path) -> None:
        """`skew`: the node's clock minus ours. `run`: our own run; its containers and locks are not foreign. `runs`:
        our folder of runs."""
        self.node = node
        self.facts = facts
        self.values = facts.values
        self.skew = skew or 0.0
        self.folder_of_runs = runs
        self._run = run
        self.engine = find_engine(node.engine)
        self.workdir = facts.values.get("workdir", "?")
        self.file_system = facts.values.get("workdir_fs")
        self.mount, _, mode = facts.values.get("workdir_mount", "").rpartition(" ")
        self.workdir_is_mounted_writable = mode != "ro"
        free_kb = facts.number("workdir_free_kb")
        self.free_bytes = math.inf if free_kb is None else free_kb * 1024
        gpu_numbers = gpus_of(node, facts)
        self.gpus_wanted = max(gpu_numbers, default=-1) + 1
        in_containers = {}
        if self.engine.runs_images:
            in_containers = {n: facts.gpus[n] for n in gpu_numbers if n < len(facts.gpus)}
        self.has_nvidia = any(gpu.vendor == "nvidia" for gpu in in_containers.values())
        self.amd_gpus = {} if self.has_nvidia else in_containers
        self.named_devices: set[str] | None = None
        """Devices that the inventory gives to the containers; None if it leaves that to us."""
        if node.docker.devices is not None:
            self.named_devices = {device.partition(":")[0] for device in node.docker.devices}
        self.occupants = {o.id: o.words for o in occupants(facts, gpu_numbers, run)}
        self.other_runs = sorted({c.run for c in facts.containers if c.run and c.slot and c.run != run})

    def gpus_without_device(self) -> list[int]:
        """AMD GPUs that the inventory's devices do not pass to their slot's container."""
        if self.named_devices is None:
            return []
        if "/dev/kfd" not in self.named_devices:
            return list(self.amd_gpus)
        if OWN_RENDER_NODE in self.named_devices:
            return []
        return [n for n, gpu in self.amd_gpus.items() if f"{OWN_RENDER_NODE}/{gpu.render}" not in self.named_devices]

    def foreign_containers(self, *, on_our_gpus: bool) -> list[Container]:
        """Containers of no run: those that hold our GPUs, or those that only run."""
        foreign = [c for c in self.facts.containers if not c.run]
        return [c for c in foreign if (f"container {c.name}" in self.occupants) is on_our_gpus]

    def runs_with_lock(self, state: str) -> list[str]:
        """Other runs that have a lock in this state. Runs with running containers are reported by their containers."""
        owners = {path.partition("/")[0] for path in self.facts.locks.get(state, ())}
        return sorted(owners - {self._run, *self.other_runs})

    def holds_our_devices(self, run: str) -> bool:
        """Return whether workers of the run hold a GPU that the inventory gives us, or the cores that we compute on."""
        names = {f"container {c.name}" for c in self.facts.containers if c.run == run} | {f"run {run}"}
        return not names.isdisjoint(self.occupants)

    def owner_of(self, run: str) -> str:
        """The user whose workers hold a device for the run; "" if that is our login, or unknown."""
        owner = self.values.get(f"lock.owner.{run}", "")
        return "" if owner == self.values.get("user") else owner


Describe = Callable[[CheckedNode], str | Iterable[str] | None]


class Question(NamedTuple):
    """A question to a node. `fix` says what to do about a problem; `<runs prune>` in it stands for that command."""

    about: str
    level: str
    fix: str
    describe: Describe


QUESTIONS: list[Question] = []
"""All questions, in the order in which they are asked."""


def question(about: str, level: str, *, fix: str = "") -> Callable[[Describe], Describe]:
    """Make a function a question. It returns a problem in words, or None, or it yields several."""

    def register(describe: Describe) -> Describe:
        QUESTIONS.append(Question(about, level, fix, describe))
        return describe

    return register


@question("clock", WARNING, fix="set it (timedatectl set-ntp true); until then the times of its rows are wrong")
def clock_is_wrong(node: CheckedNode) -> str | None:
    if abs(node.skew) <= MOST_SKEW_S:
        return None
    direction = "ahead of" if node.skew > 0 else "behind"
    return f"its clock is {abs(node.skew):.0f} s {direction} ours"


@question("shell", UNUSABLE, fix="let its start-up file (~/.bashrc, ...) print on terminals only: [ -t 1 ] && echo ...")
def login_shell_prints(node: CheckedNode) -> str | None:
    """The stream of records and files that we read there would begin with it."""
    if node.facts.greeting:
        return f"its login shell prints text before the output of each command: {node.facts.greeting}"
    return None


@question("tools", UNUSABLE, fix="install util-linux, coreutils, findutils, tar")
def tools_are_missing(node: CheckedNode) -> Iterator[str]:
    for tool in node.facts.lacks:
        if tool in node.engine.needs:
            yield f"the node has no `{tool}`"


@question("workdir", UNUSABLE, fix="mount it rw, or give another `workdir:`")
def workdir_is_mounted_read_only(node: CheckedNode) -> str | None:
    """Such a file system may also be full or not ours to write; this finding is enough, so the next ones look at
    `workdir_is_mounted_writable` first."""
    if node.workdir_is_mounted_writable:
        return None
    return f"{node.workdir} is read-only: the file system at {node.mount} is mounted read-only"


@question("workdir", UNUSABLE, fix="give another `workdir:`, or its owner")
def workdir_is_not_ours_to_write(node: CheckedNode) -> str | None:
    if node.workdir_is_mounted_writable and node.values.get("workdir_writable") == "no":
        return f"{node.workdir} may not be written by {node.values.get('user', 'your login')}"
    return None


@question("disk", UNUSABLE, fix=FREE_SPACE)
def disk_is_full(node: CheckedNode) -> str | None:
    if node.workdir_is_mounted_writable and node.free_bytes < MIN_FREE:
        return f"{node.workdir} has {node.free_bytes / 2**20:.0f} MiB free"
    return None


@question("disk", WARNING, fix=FREE_SPACE)
def disk_is_almost_full(node: CheckedNode) -> str | None:
    if node.workdir_is_mounted_writable and MIN_FREE <= node.free_bytes < LOW_FREE:
        return f"{node.workdir} has {node.free_bytes / 2**20:.0f} MiB free"
    return None


@question("disk", UNUSABLE, fix="remove files, or give another `workdir:`")
def no_inode_is_free(node: CheckedNode) -> str | None:
    """File systems with a fixed number of inodes can be full while bytes are free."""
    if not node.workdir_is_mounted_writable or node.file_system in WITHOUT_INODE_LIMIT:
        return None
    if node.facts.number("workdir_free_inodes") == 0:
        return f"{node.workdir} has no inode free"
    return None


@question("disk", WARNING, fix="a local disk is faster, and root may be squashed there")
def workdir_is_remote(node: CheckedNode) -> str | None:
    if node.workdir_is_mounted_writable and node.file_system in REMOTE_FILE_SYSTEMS:
        return f"{node.workdir} is on {node.file_system}"
    return None


@question("aiter", UNUSABLE, fix="correct `aiter: {root: PATH}`, or leave it out and we search for AITER")
def aiter_root_has_no_aiter(node: CheckedNode) -> str | None:
    beginning = NO_AITER.get(node.values.get("aiter_root", ""))
    if beginning is None:
        return None
    return f"{beginning} {node.node.aiter.root} {'of the image' if node.engine.runs_images else 'there'}"


@question("devices", UNUSABLE, fix="load the GPU's driver, or correct docker.devices")
def named_devices_are_missing(node: CheckedNode) -> Iterator[str]:
    for path, state in node.facts.devices.items():
        if state == "missing":
            yield f"there is no {path}"


@question("devices", UNUSABLE, fix="load the GPU's driver")
def no_render_node_exists(node: CheckedNode) -> str | None:
    has_render_node = any(path.startswith("/dev/dri") for path in node.facts.devices)
    if OWN_RENDER_NODE in (node.node.docker.devices or ()) and not has_render_node:
        return "there is no render node in /dev/dri"
    return None


@question("devices", UNUSABLE, fix="install the NVIDIA Container Toolkit, and restart Docker")
def docker_has_no_nvidia_toolkit(node: CheckedNode) -> str | None:
    if node.has_nvidia and node.named_devices is None and node.values.get("docker.gpus") == "no":
        return "Docker cannot hand out NVIDIA GPUs (--gpus) there"
    return None


@question("devices", OK)
def containers_get_nvidia_gpus(node: CheckedNode) -> str | None:
    if node.has_nvidia and node.named_devices is None:
        return "each container gets its slot's GPU by --gpus device=N"
    return None


@question("devices", UNUSABLE, fix="find out why the driver does not show it, or leave it out of `gpus:`")
def gpus_have_no_render_node(node: CheckedNode) -> Iterator[str]:
    if node.named_devices is not None:
        return
    for number, gpu in node.amd_gpus.items():
        if f"/dev/dri/{gpu.render}" not in node.facts.devices:
            yield f"GPU {number} has no render node /dev/dri/{gpu.render}"


@question("devices", OK)
def containers_get_render_nodes(node: CheckedNode) -> str | None:
    if not node.amd_gpus or node.named_devices is not None:
        return None
    render_nodes = ", ".join(f"{number}: {gpu.render}" for number, gpu in node.amd_gpus.items())
    return f"each container gets /dev/kfd, the render node of its slot's GPU ({render_nodes}), and their groups"


@question("devices", WARNING, fix=f"{NAME_DEVICES} /dev/nvidia*")
def named_devices_lack_nvidia(node: CheckedNode) -> str | None:
    if not node.has_nvidia or node.named_devices is None:
        return None
    if any(device.startswith("/dev/nvidia") for device in node.named_devices):
        return None
    return "docker.devices names no NVIDIA device: containers see a GPU only if Docker's default runtime adds it"


@question("devices", UNUSABLE, fix=f"{NAME_DEVICES} /dev/kfd and {OWN_RENDER_NODE}")
def named_devices_lack_amd(node: CheckedNode) -> str | None:
    numbers = node.gpus_without_device()
    if not numbers:
        return None
    return (
        f"docker.devices gives the containers of GPU {', '.join(map(str, numbers))} no /dev/kfd or no render node:"
        " they would see no GPU"
    )


@question("gpus", UNUSABLE, fix="correct `gpus:`, or find out why the driver does not show the others")
def gpus_are_missing(node: CheckedNode) -> str | None:
    if node.gpus_wanted <= len(node.facts.gpus):
        return None
    option = node.node.gpus if isinstance(node.node.gpus, int) else list(node.node.gpus)
    return f"gpus: {option}, but {len(node.facts.gpus)} were found"


@question("gfx", UNUSABLE, fix=CORRECT_CHIP)
def gfx_is_another(node: CheckedNode) -> str | None:
    if not node.facts.gpus or node.node.gfx in (None, node.facts.gpus[0].gfx):
        return None
    return f"its GPUs are {node.facts.gpus[0].gfx}, not {node.node.gfx}"


@question("gfx", UNUSABLE, fix=CORRECT_CHIP)
def cu_num_is_another(node: CheckedNode) -> str | None:
    if not node.facts.gpus or node.node.gfx != node.facts.gpus[0].gfx:
        return None
    cu_num = node.facts.gpus[0].cu_num
    if cu_num in (None, node.node.cu_num):
        return None
    return f"a GPU has {cu_num} compute units, not {node.node.cu_num}"


@question("gpus", WARNING, fix="list those of one kind in `gpus:`, or set one partition mode")
def gpus_differ(node: CheckedNode) -> str | None:
    kinds = {(gpu.gfx, gpu.cu_num, gpu.partition) for gpu in node.facts.gpus}
    return f"its GPUs differ: {gpus_in_words(node.facts)}" if len(kinds) > 1 else None


@question("health", WARNING, fix="keep an eye on it; leave it out of `gpus:` if attempts fault there")
def gpus_have_uncorrectable_errors(node: CheckedNode) -> Iterator[str]:
    for number, gpu in enumerate(node.facts.gpus):
        if gpu.uncorrectable:
            errors = ", ".join(f"{block} {count}" for block, count in gpu.uncorrectable.items())
            yield f"GPU {number} has counted uncorrectable errors ({errors})"


@question("health", WARNING, fix="check its cooling: it will measure low numbers")
def gpus_are_hot(node: CheckedNode) -> Iterator[str]:
    for number, gpu in enumerate(node.facts.gpus):
        hottest = max(gpu.temperature_c.values(), default=0.0)
        if hottest >= HOT_C:
            yield f"GPU {number} is at {hottest:.0f} C"


@question("busy", WARNING, fix=f"see {BUSY_OPTION}")
def locks_cannot_be_opened(node: CheckedNode) -> Iterator[str]:
    """A run gives the node up for such a lock, because it cannot tell who measures there."""
    for id_, words in node.occupants.items():
        if id_.startswith("lock "):
            yield words


@question("busy", WARNING, fix="wait for them, or leave it out of `gpus:`; see --busy")
def gpus_are_in_use(node: CheckedNode) -> Iterator[str]:
    """If workers of a run work there, load on a GPU is most likely theirs."""
    if any(c.run for c in node.facts.containers) or node.facts.locks.get("held"):
        return
    for id_, words in node.occupants.items():
        if id_.startswith("GPU"):
            yield words


@question("busy", WARNING, fix=f"see {BUSY_OPTION}")
def containers_hold_our_gpus(node: CheckedNode) -> str | None:
    return _describe_containers(node.foreign_containers(on_our_gpus=True), "holding its GPUs")


@question("containers", WARNING, fix="not on its GPUs, but perhaps on its cores")
def containers_run_there(node: CheckedNode) -> str | None:
    return _describe_containers(node.foreign_containers(on_our_gpus=False), "running")


def _describe_containers(containers: list[Container], doing: str) -> str | None:
    if not containers:
        return None
    names = ", ".join(f"{c.name} ({c.image})" for c in containers[:3])
    if len(containers) > 3:
        names += ", ..."
    return f"{plural(len(containers), 'foreign container')} {doing}: {names}"


def findings_on_other_runs(node: CheckedNode) -> Iterator[Finding]:
    """Findings on runs that work there or left something, each with a command for that run and no other."""
    living = [("busy", run, "works there") for run in node.other_runs]
    living += [("locks", run, "has workers that live") for run in node.runs_with_lock("held")]
    for about, run, what in living:
        if not node.holds_our_devices(run):
            yield Finding(WARNING, about, f"run {run} {what}", "not on its GPUs, but perhaps on its cores")
            continue
        owner = node.owner_of(run)
        cancel = command_on_run("cancel", run, node.folder_of_runs)
        subject, fix = f"run {run}", f"end it first ({cancel})"
        if owner:
            subject, fix = f"run {run} of {owner}", f"{owner} can end it ({cancel})"
        yield Finding(WARNING, about, f"{subject} {what}", f"{fix}, or see {BUSY_OPTION}")
    dead = [(run, "left claimed work behind") for run in node.runs_with_lock("stale")]
    dead += [(run, "left work in an inbox behind") for run in node.runs_with_lock("waiting")]
    prune = command(f"runs prune --unfinished{runs_option(node.folder_of_runs)}")
    for run, what in dead:
        resume = command_on_run("resume", run, node.folder_of_runs)
        yield Finding(WARNING, "locks", f"run {run} {what}", f"{resume} picks it up; {prune} removes old runs")


def findings(
    node: Node, facts: NodeFacts, skew: float | None, run: str, runs: Path = DEFAULT_RUNS
) -> Iterator[Finding]:
    """Yield every problem of a node: first the answers to QUESTIONS, then other runs there, then what the engine finds.

    `skew`: the node's clock minus ours. `run`: our own run. `runs`: our folder of runs.
    """
    checked = CheckedNode(node, facts, skew, run, runs)
    prune = command(f"runs prune{runs_option(runs)}")
    for asked in QUESTIONS:
        answer = asked.describe(checked)
        problems = [answer] if isinstance(answer, str) else answer or ()
        for problem in problems:
            yield Finding(asked.level, asked.about, problem, asked.fix.replace("<runs prune>", prune))
    yield from findings_on_other_runs(checked)
    yield from checked.engine.preflight(node, facts)
