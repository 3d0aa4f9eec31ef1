"""Verdict on a node from its facts and its inventory entry: ok, warning or unusable, each finding with the way out.

Behind `nodes check` and the live half of `status`. Knows nothing of transports.
"""

from __future__ import annotations

import json
import os
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.command_hints import command
from orchestrator.engines import OK, RANK, UNUSABLE, WARNING, Finding, find_engine
from orchestrator.inventory.model import OWN_RENDER_NODE
from orchestrator.inventory.values import REFERENCE_RE, has_reference
from orchestrator.nodes.facts import NodeFacts, read_facts
from orchestrator.nodes.occupancy import gpus_of, occupants
from worker.device.health import HOT_C
from worker.text import plural

if TYPE_CHECKING:
    from orchestrator.inventory import Node
    from orchestrator.nodes.facts import Gpu
    from orchestrator.transport import Completed

CLOCK_S = 5.0
MIN_FREE, LOW_FREE = 256 * 2**20, 4 * 2**30
"""Bytes free for the workdir: below the first nothing starts, below the second there is a warning."""

_REMOTE_FS = ("nfs", "nfs4", "smb", "smb2", "cifs", "lustre", "gpfs", "beegfs", "fuseblk", "fuse", "ceph", "9p", "v9fs")


def findings(node: Node, facts: NodeFacts, skew: float | None, run: str) -> Iterator[Finding]:
    """Yield every problem of a node. `skew`: the node's clock minus ours; `run`: our own run."""
    yield from _clock(skew)
    yield from _tools(node, facts)
    yield from _workdir(facts)
    yield from find_engine(node.engine).preflight(node, facts)
    yield from _aiter(node, facts)
    yield from _devices(node, facts)
    yield from _gpus(node, facts)
    yield from _health(facts)
    yield from _occupants(node, facts, run)


def gpus_in_words(facts: NodeFacts) -> str:
    """`8 x gfx950 (SPX/NPS1)`."""
    kinds = Counter(f"{g.gfx} ({g.partition})" if g.partition else g.gfx for g in facts.gpus)
    return ", ".join(f"{n} x {kind}" for kind, n in kinds.items()) or (facts.gfx or "")


def _clock(skew: float | None) -> Iterator[Finding]:
    if skew is not None and abs(skew) > CLOCK_S:
        what = f"its clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} ours"
        yield Finding(WARNING, "clock", what, "set it (timedatectl set-ntp true); times of its rows are off until then")


def _tools(node: Node, facts: NodeFacts) -> Iterator[Finding]:
    needed = find_engine(node.engine).needs
    for tool in facts.lacks:
        if tool in needed:
            yield Finding(
                UNUSABLE, "tools", f"the node has no `{tool}`", "install util-linux, coreutils, findutils, tar"
            )


def _workdir(facts: NodeFacts) -> Iterator[Finding]:
    folder = facts.values.get("workdir", "?")
    mounted, _, mode = facts.values.get("workdir_mount", "").rpartition(" ")
    if mode == "ro":
        what = f"{folder} is read-only: the file system at {mounted} is mounted so"
        yield Finding(UNUSABLE, "workdir", what, "mount it rw, or give another `workdir:`")
        return  # it may be full as well, which cannot be changed
    if facts.values.get("workdir_writable") == "no":
        user = facts.values.get("user", "your login")
        yield Finding(
            UNUSABLE, "workdir", f"{folder} may not be written by {user}", "give another `workdir:`, or its owner"
        )
    free = (facts.number("workdir_free_kb") or 0) * 1024 if "workdir_free_kb" in facts.values else None
    if free is not None and free < LOW_FREE:
        level = UNUSABLE if free < MIN_FREE else WARNING
        what = f"{folder} has {free / 2**20:.0f} MiB free"
        yield Finding(level, "disk", what, f"free some space ({command('runs prune')}), or give another `workdir:`")
    if facts.number("workdir_free_inodes") == 0 and facts.values.get("workdir_fs") not in ("btrfs", "zfs"):
        yield Finding(UNUSABLE, "disk", f"{folder} has no inode free", "remove files, or give another `workdir:`")
    fs = facts.values.get("workdir_fs", "")
    if fs in _REMOTE_FS:
        yield Finding(WARNING, "disk", f"{folder} is on {fs}", "a local disk is faster, and root may be squashed there")


def _aiter(node: Node, facts: NodeFacts) -> Iterator[Finding]:
    wrong = {"missing": "there is no", "empty": "there is no AITER (aiter/jit/core.py) in"}
    if found := wrong.get(facts.values.get("aiter_root", "")):
        where = "of the image" if find_engine(node.engine).runs_images else "there"
        what = f"{found} {node.aiter.root} {where}"
        yield Finding(UNUSABLE, "aiter", what, "correct `aiter: {root: PATH}`, or leave it out and AITER is looked for")


def _devices(node: Node, facts: NodeFacts) -> Iterator[Finding]:
    for path, what in facts.devices.items():
        if what == "missing":
            yield Finding(
                UNUSABLE, "devices", f"there is no {path}", "load the GPU's driver, or correct docker.devices"
            )
    if OWN_RENDER_NODE in (node.docker.devices or ()) and not any(p.startswith("/dev/dri") for p in facts.devices):
        yield Finding(UNUSABLE, "devices", "there is no render node in /dev/dri", "load the GPU's driver")
    ours = {n: facts.gpus[n] for n in gpus_of(node, facts) if n < len(facts.gpus)}
    if ours and find_engine(node.engine).runs_images:
        check = _named_devices if node.docker.devices is not None else _own_gpus
        yield from check(node, facts, ours)


def _own_gpus(node: Node, facts: NodeFacts, ours: Mapping[int, Gpu]) -> Iterator[Finding]:
    """Findings on the GPUs that containers get because the inventory names no devices; what they get is one, too."""
    if any(gpu.vendor == "nvidia" for gpu in ours.values()):
        if facts.values.get("docker.gpus") == "no":
            what = "Docker cannot hand out NVIDIA GPUs (--gpus) there"
            yield Finding(UNUSABLE, "devices", what, "install the NVIDIA Container Toolkit, and restart Docker")
        yield Finding(OK, "devices", "each container gets its slot's GPU by --gpus device=N")
        return
    for number, gpu in ours.items():
        if f"/dev/dri/{gpu.render}" not in facts.devices:
            what = f"GPU {number} has no render node /dev/dri/{gpu.render}"
            yield Finding(UNUSABLE, "devices", what, "see why the driver does not show it, or leave it out of `gpus:`")
    renders = ", ".join(f"{number}: {gpu.render}" for number, gpu in ours.items())
    what = f"each container gets /dev/kfd, the render node of its slot's GPU ({renders}), and their groups"
    yield Finding(OK, "devices", what)


def _named_devices(node: Node, facts: NodeFacts, ours: Mapping[int, Gpu]) -> Iterator[Finding]:
    """Findings on GPUs that the devices of the inventory do not give to their slot's container."""
    named = {device.partition(":")[0] for device in node.docker.devices or ()}
    way = "drop docker.devices, and each container gets its slot's GPU; or name"
    if any(gpu.vendor == "nvidia" for gpu in ours.values()):
        if not any(device.startswith("/dev/nvidia") for device in named):
            what = (
                "docker.devices names no NVIDIA device: containers see a GPU only if Docker's default runtime adds it"
            )
            yield Finding(WARNING, "devices", what, f"{way} /dev/nvidia*")
        return
    blind = [n for n, gpu in ours.items() if not named & {OWN_RENDER_NODE, f"{OWN_RENDER_NODE}/{gpu.render}"}]
    if "/dev/kfd" not in named or blind:
        which = ", ".join(map(str, ours if "/dev/kfd" not in named else blind))
        what = (
            f"docker.devices gives the containers of GPU {which} no /dev/kfd or no render node: they would see no GPU"
        )
        yield Finding(UNUSABLE, "devices", what, f"{way} /dev/kfd and {OWN_RENDER_NODE}")


def _gpus(node: Node, facts: NodeFacts) -> Iterator[Finding]:
    found = len(facts.gpus)
    wanted = node.gpus if isinstance(node.gpus, int) else 0 if node.gpus == "auto" else max(node.gpus) + 1
    if wanted > found:
        what = f"gpus: {node.gpus if isinstance(node.gpus, int) else list(node.gpus)}, but {found} were found"
        yield Finding(UNUSABLE, "gpus", what, "correct `gpus:`, or see why the driver does not show the others")
    first = facts.gpus[0] if facts.gpus else None
    if first and node.gfx and first.gfx != node.gfx:
        way = "correct or drop gfx and cu_num in the inventory"
        yield Finding(UNUSABLE, "gfx", f"its GPUs are {first.gfx}, not {node.gfx}", way)
    elif first and node.cu_num and first.cu_num not in (None, node.cu_num):
        way = "correct or drop gfx and cu_num in the inventory"
        yield Finding(UNUSABLE, "gfx", f"a GPU has {first.cu_num} compute units, not {node.cu_num}", way)
    kinds = {(g.gfx, g.cu_num, g.partition) for g in facts.gpus}
    if len(kinds) > 1:
        what = "its GPUs differ: " + gpus_in_words(facts)
        yield Finding(WARNING, "gpus", what, "list those of one kind in `gpus:`, or set one partition mode")


def _health(facts: NodeFacts) -> Iterator[Finding]:
    for i, gpu in enumerate(facts.gpus):
        if gpu.uncorrectable:
            counts = ", ".join(f"{block} {n}" for block, n in gpu.uncorrectable.items())
            way = "keep an eye on it; leave it out of `gpus:` if attempts fault there"
            yield Finding(WARNING, "health", f"GPU {i} has counted uncorrectable errors ({counts})", way)
        hot = max(gpu.temperature_c.values(), default=0.0)
        if hot >= HOT_C:
            yield Finding(
                WARNING, "health", f"GPU {i} is at {hot:.0f} C", "see to its cooling: its numbers will be low"
            )


def _occupants(node: Node, facts: NodeFacts, run: str) -> Iterator[Finding]:
    at_work = any(c.run for c in facts.containers) or bool(facts.locks.get("held"))
    holders = {o.id: o for o in occupants(facts, gpus_of(node, facts), run)}
    for id_, other in holders.items():
        # load on a GPU while our workers run there is most likely theirs
        if id_.startswith("GPU") and not at_work:
            yield Finding(WARNING, "busy", other.words, "wait for them, or leave it out of `gpus:`; see --busy")
    strangers = [c for c in facts.containers if not c.run]
    for holds, what, way in (
        (True, "holding its GPUs", "see --busy wait|skip|share"),
        (False, "running", "not on its GPUs, but perhaps on its cores"),
    ):
        found = [c for c in strangers if (f"container {c.name}" in holders) is holds]
        if found:
            names = ", ".join(f"{c.name} ({c.image})" for c in found[:3]) + (", ..." if len(found) > 3 else "")
            about = "busy" if holds else "containers"
            yield Finding(WARNING, about, f"{plural(len(found), 'foreign container')} {what}: {names}", way)
    runs = sorted({c.run for c in facts.containers if c.run and c.slot and c.run != run})
    if runs:
        way = f"end it first ({command('cancel')}), or see --busy wait|skip|share"
        yield Finding(WARNING, "busy", f"run {', '.join(runs)} works there", way)
    later = f"{command('resume')} picks it up; {command('runs prune')} removes it"
    for state, what, way in (
        ("stale", "left claimed work behind", later),
        ("waiting", "left work in an inbox behind", later),
        ("held", "has workers that live", f"end it first ({command('cancel')}), or see --busy wait|skip|share"),
    ):
        left = sorted({path.partition("/")[0] for path in facts.locks.get(state, ())} - {run} - set(runs))
        if left:
            yield Finding(WARNING, "locks", f"run {', '.join(left)} {what}", way)


@dataclass(frozen=True, slots=True)
class NodeReport:
    """Report on a node. `skew_s`: the node's clock minus ours, None where unknown."""

    node: str
    findings: tuple[Finding, ...]
    facts: NodeFacts = field(default_factory=lambda: NodeFacts({}))
    skew_s: float | None = None

    @property
    def state(self) -> str:
        """The worst of its findings."""
        return max((f.level for f in self.findings), key=RANK.__getitem__, default=OK)

    @property
    def usable(self) -> bool:
        return self.state != UNUSABLE

    def problems(self) -> list[str]:
        """Sentences on its problems, each with the node's name."""
        return [f"{self.node}: {f}" for f in self.findings if f.level != OK]

    def devices(self) -> str:
        """The devices that its containers get if the inventory names none, in words; "" for nothing."""
        return next((f.what for f in self.findings if (f.level, f.about) == (OK, "devices")), "")

    def row(self) -> tuple[str, ...]:
        """Row of a table, in the order of COLUMNS."""
        f = self.facts
        free, image = f.number("workdir_free_kb"), f.values.get("image", "")
        digest = (
            "" if not image else "missing" if image == "missing" else image.split(" ")[0].removeprefix("sha256:")[:12]
        )
        problems = [str(x) for x in self.findings if x.level != OK]
        return (
            self.node,
            self.state,
            gpus_in_words(f),
            f.values.get("docker.version", "").split(" ")[-1],
            digest,
            "" if free is None else f"{free / 2**20:.0f} GiB",
            "" if self.skew_s is None else f"{self.skew_s:+.0f} s",
            "; ".join(problems),
        )

    def to_json(self) -> dict[str, Any]:
        """Entry of `nodes check --json`."""
        f = self.facts
        return {
            "name": self.node,
            "state": self.state,
            "findings": [asdict(x) for x in self.findings],
            "skew_s": self.skew_s,
            "facts": dict(f.values),
            "gpus": [asdict(g) for g in f.gpus],
            "devices": f.devices,
            "containers": [asdict(c) for c in f.containers],
            "locks": {k: list(v) for k, v in f.locks.items()},
        }


FACTS = "facts.json"
COLUMNS = ("node", "state", "GPUs", "docker", "image", "free", "clock", "notes")


def check_node(node: Node, done: Completed, now: float, run: str = "") -> NodeReport:
    """Report made of the answer of the check script. `now`: our clock (epoch seconds) about when it ran;
    `run`: our own run, whose containers and locks do not count as another's."""
    facts = read_facts(done)
    if not facts.complete:
        words = done.text.splitlines()
        why = f"the check ended with code {done.code}" + (f": {words[-1][:300]}" if words else "")
        return NodeReport(node.name, (Finding(UNUSABLE, "check", why, "log in and run sh by hand"),), facts)
    clock = facts.number("clock")
    skew = None if clock is None else clock - now
    return NodeReport(node.name, tuple(findings(node, facts, skew, run)), facts, skew)


def unreachable(node: Node, why: str) -> NodeReport:
    """Report on a node that did not answer."""
    if node.is_here:
        return NodeReport(node.name, (Finding(UNUSABLE, "here", why),))
    return NodeReport(node.name, (Finding(UNUSABLE, "ssh", why, f"try: {login_line(node)}"),))


def login_line(node: Node) -> str:
    """Command that logs in to the node as the inventory describes it; a reference becomes a shell variable."""
    flags = (("-F", node.ssh_config), ("-p", node.port), ("-i", node.identity), ("-J", node.proxy_jump))
    words = [w for flag, value in flags if value is not None for w in (flag, _typed(str(value)))]
    user = f"{_typed(node.user)}@" if node.user else ""
    return " ".join(["ssh", *words, f"{user}{_typed(node.host or node.name)}", "true"])


def _typed(text: str) -> str:
    if has_reference(text):
        return '"' + REFERENCE_RE.sub(r"${\1}", text) + '"'
    return text if text.startswith("~/") and shlex.quote(text[2:]) == text[2:] else shlex.quote(text)


def compare(reports: Sequence[NodeReport]) -> list[NodeReport]:
    """Reports with findings that show only between nodes: an image or a gfx that is not the one of most nodes."""
    out = list(reports)
    for about, of in (("image", lambda r: r.facts.image_id), ("gfx", _gfx)):
        known = {r.node: value for r in reports if (value := of(r))}
        if len(set(known.values())) < 2:
            continue
        usual, _ = Counter(known.values()).most_common(1)[0]
        for i, report in enumerate(out):
            value = known.get(report.node, usual)
            if value != usual:
                what = f"its {about} {value[:19]} is not the {usual[:19]} of most nodes"
                way = "name the image by digest" if about == "image" else "pick nodes of one kind with --limit"
                out[i] = replace(report, findings=(*report.findings, Finding(WARNING, about, what, way)))
    return out


def _gfx(report: NodeReport) -> str:
    return report.facts.gfx or "" if report.facts.complete else ""


def save_facts(run_folder: Path, reports: Iterable[NodeReport]) -> None:
    """Keep the facts that `plan_nodes` needs in the run's folder, so that a later plan needs no node."""
    for report in reports:
        if report.facts.complete:
            folder = run_folder / "nodes" / report.node
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            aside = folder / f".{FACTS}.tmp"
            aside.write_text(json.dumps(report.facts.for_plan(), indent=1) + "\n")
            os.rename(aside, folder / FACTS)


def load_facts(run_folder: Path, names: Iterable[str]) -> dict[str, NodeFacts]:
    """Facts that `save_facts` kept, without nodes whose facts are missing or unreadable."""
    out = {}
    for name in names:
        try:
            out[name] = NodeFacts.from_plan(json.loads((run_folder / "nodes" / name / FACTS).read_text()))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return out
