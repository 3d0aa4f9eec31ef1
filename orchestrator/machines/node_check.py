"""Asks all nodes at once: the check before a run, with its findings, and the polls during a run.

Both run the same rendered script (facts.py). A poll runs only its brief part, and adds the engine's list of workers.
The table QUESTIONS has the questions to a node's facts. Each answer is a finding (ok, warning or unusable) that says
what to do. The connections of polls stay open, so that the next round needs no login.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from orchestrator.command_hints import command
from orchestrator.engines import OK, RANK, UNUSABLE, WARNING, Engine, Finding, WorkerState, find_engine
from orchestrator.errors import HostKeyError, NoUsableNodeError, OrchestratorError, SlowError, UnreachableError
from orchestrator.inventory.load import check_references, load_inventory, resolved
from orchestrator.inventory.model import OWN_RENDER_NODE, Node
from orchestrator.machines.facts import ARGV, TIMEOUT_S, NodeFacts, gpus_in_words, read_facts, script
from orchestrator.machines.node_plan import NodePlan, engine_of, login_line, node_of, transport_to
from orchestrator.machines.occupancy import gpus_of, occupants, twice
from orchestrator.paths import DEFAULT_RUNS, command_on_run, runs_option
from orchestrator.transport.base import Completed, Transport, connected
from worker.protocol import HOT_C
from worker.text import and_more, plural

T = TypeVar("T")
# No check takes longer: logins and the script have shorter limits.
CHECK_S = 90.0
# Most nodes checked at a time. More logins at once would need too much CPU time, and some would time out.
MAX_PARALLEL = 64
_TURNS = threading.Semaphore(MAX_PARALLEL)
CLOCK_S = 5.0
# Free bytes for the workdir: below the first number nothing starts; below the second there is a warning.
MIN_FREE, LOW_FREE = 256 * 2**20, 4 * 2**30
_REMOTE_FS = ("nfs", "nfs4", "smb", "smb2", "cifs", "lustre", "gpfs", "beegfs", "fuseblk", "fuse", "ceph", "9p", "v9fs")
_NO_AITER = {"missing": "there is no", "empty": "there is no AITER (aiter/jit/core.py) in"}


class Look:
    """A node's facts and its entry in the inventory, for QUESTIONS. `skew`: its clock minus ours. `run`: our own run;
    its containers and locks are not foreign. `runs`: our folder of runs."""

    def __init__(self, node: Node, facts: NodeFacts, skew: float | None, run: str, runs: Path) -> None:
        self.node, self.facts, self.values, self.skew, self._run = node, facts, facts.values, skew or 0.0, run
        self.folder_of_runs = runs
        self.spec, self.folder = find_engine(node.engine), facts.values.get("workdir", "?")
        self.mount, _, mode = facts.values.get("workdir_mount", "").rpartition(" ")
        self.writable = mode != "ro"  # a read-only file system may be full as well; one finding is enough
        kb = facts.number("workdir_free_kb")
        self.free = math.inf if kb is None or not self.writable else kb * 1024
        numbers = gpus_of(node, facts)
        self.wanted = max(numbers, default=-1) + 1
        ours = {n: facts.gpus[n] for n in numbers if n < len(facts.gpus) and self.spec.runs_images}
        self.nvidia = any(gpu.vendor == "nvidia" for gpu in ours.values())
        self.amd = {} if self.nvidia else ours
        named = node.docker.devices
        self.named = None if named is None else {device.partition(":")[0] for device in named}
        self.holders = {o.id: o.words for o in occupants(facts, numbers, run)}
        self.runs = sorted({c.run for c in facts.containers if c.run and c.slot and c.run != run})

    def blind(self) -> list[int]:
        """AMD GPUs that the inventory's devices do not pass to their slot's container."""
        named = self.named if self.named is not None else {"/dev/kfd", OWN_RENDER_NODE}
        lit = {gpu.render for gpu in self.amd.values() if named & {OWN_RENDER_NODE, f"{OWN_RENDER_NODE}/{gpu.render}"}}
        return [n for n, gpu in self.amd.items() if "/dev/kfd" not in named or gpu.render not in lit]

    def strangers(self, what: str, *, holding: bool) -> str:
        """Foreign containers: those that hold our GPUs, or those that only run."""
        found = [c for c in self.facts.containers if not c.run and (f"container {c.name}" in self.holders) is holding]
        names = ", ".join(f"{c.name} ({c.image})" for c in found[:3]) + (", ..." if len(found) > 3 else "")
        return f"{plural(len(found), 'foreign container')} {what}: {names}" if found else ""

    def locked(self, state: str) -> list[str]:
        """Other runs that have a lock in this state. Runs with running containers are reported by their containers."""
        return sorted({path.partition("/")[0] for path in self.facts.locks.get(state, ())} - {self._run, *self.runs})

    def owner_of(self, run: str) -> str:
        """The user whose workers hold a device for the run; "" if that is our login, or unknown."""
        owner = self.values.get(f"lock.owner.{run}", "")
        return "" if owner == self.values.get("user") else owner


class Question(NamedTuple):
    """A question to a node. `what` returns one problem in words, or several, or nothing. `way`: what to do;
    `<runs prune>` stands for that command."""

    level: str
    about: str
    what: Callable[[Look], str | Iterable[str]]
    way: str = ""


_GPUS_WAY = "drop docker.devices, and each container gets its slot's GPU; or name"
_KIND_WAY = "correct or drop gfx and cu_num in the inventory"
_BUSY = "--busy wait|skip|share"
_SPACE_WAY = "free some space (<runs prune>), or give another `workdir:`"
QUESTIONS = (
    Question(
        WARNING, "clock",
        lambda n: f"its clock is {abs(n.skew):.0f} s {'ahead of' if n.skew > 0 else 'behind'} ours"
        if abs(n.skew) > CLOCK_S else "",
        "set it (timedatectl set-ntp true); until then the times of its rows are wrong",
    ),
    Question(
        UNUSABLE, "tools", lambda n: (f"the node has no `{tool}`" for tool in n.facts.lacks if tool in n.spec.needs),
        "install util-linux, coreutils, findutils, tar",
    ),
    Question(
        UNUSABLE, "workdir",
        lambda n: "" if n.writable else f"{n.folder} is read-only: the file system at {n.mount} is mounted read-only",
        "mount it rw, or give another `workdir:`",
    ),
    Question(
        UNUSABLE, "workdir",
        lambda n: f"{n.folder} may not be written by {n.values.get('user', 'your login')}"
        if n.writable and n.values.get("workdir_writable") == "no" else "",
        "give another `workdir:`, or its owner",
    ),
    Question(
        UNUSABLE, "disk",
        lambda n: f"{n.folder} has {n.free / 2**20:.0f} MiB free" if n.free < MIN_FREE else "", _SPACE_WAY,
    ),
    Question(
        WARNING, "disk",
        lambda n: f"{n.folder} has {n.free / 2**20:.0f} MiB free" if MIN_FREE <= n.free < LOW_FREE else "", _SPACE_WAY,
    ),
    Question(
        UNUSABLE, "disk",
        lambda n: f"{n.folder} has no inode free" if n.writable and n.facts.number("workdir_free_inodes") == 0
        and n.values.get("workdir_fs") not in ("btrfs", "zfs") else "",
        "remove files, or give another `workdir:`",
    ),
    Question(
        WARNING, "disk",
        lambda n: f"{n.folder} is on {n.values['workdir_fs']}"
        if n.writable and n.values.get("workdir_fs") in _REMOTE_FS else "",
        "a local disk is faster, and root may be squashed there",
    ),
    Question(
        UNUSABLE, "aiter",
        lambda n: f"{wrong} {n.node.aiter.root} {'of the image' if n.spec.runs_images else 'there'}"
        if (wrong := _NO_AITER.get(n.values.get("aiter_root", ""))) else "",
        "correct `aiter: {root: PATH}`, or leave it out and we search for AITER",
    ),
    Question(
        UNUSABLE, "devices",
        lambda n: (f"there is no {path}" for path, what in n.facts.devices.items() if what == "missing"),
        "load the GPU's driver, or correct docker.devices",
    ),
    Question(
        UNUSABLE, "devices",
        lambda n: "there is no render node in /dev/dri" if OWN_RENDER_NODE in (n.node.docker.devices or ())
        and not any(path.startswith("/dev/dri") for path in n.facts.devices) else "",
        "load the GPU's driver",
    ),
    Question(
        UNUSABLE, "devices",
        lambda n: "Docker cannot hand out NVIDIA GPUs (--gpus) there"
        if n.nvidia and n.named is None and n.values.get("docker.gpus") == "no" else "",
        "install the NVIDIA Container Toolkit, and restart Docker",
    ),
    Question(
        OK, "devices",
        lambda n: "each container gets its slot's GPU by --gpus device=N" if n.nvidia and n.named is None else "",
    ),
    Question(
        UNUSABLE, "devices",
        lambda n: (f"GPU {number} has no render node /dev/dri/{gpu.render}" for number, gpu in n.amd.items()
                   if n.named is None and f"/dev/dri/{gpu.render}" not in n.facts.devices),
        "find out why the driver does not show it, or leave it out of `gpus:`",
    ),
    Question(
        OK, "devices",
        lambda n: "each container gets /dev/kfd, the render node of its slot's GPU"
        f" ({', '.join(f'{number}: {gpu.render}' for number, gpu in n.amd.items())}), and their groups"
        if n.amd and n.named is None else "",
    ),
    Question(
        WARNING, "devices",
        lambda n: "docker.devices names no NVIDIA device: containers see a GPU only if Docker's default runtime adds it"
        if n.nvidia and n.named is not None and not any(d.startswith("/dev/nvidia") for d in n.named) else "",
        f"{_GPUS_WAY} /dev/nvidia*",
    ),
    Question(
        UNUSABLE, "devices",
        lambda n: f"docker.devices gives the containers of GPU {', '.join(map(str, blind))} no /dev/kfd or no render"
        " node: they would see no GPU" if (blind := n.blind()) else "",
        f"{_GPUS_WAY} /dev/kfd and {OWN_RENDER_NODE}",
    ),
    Question(
        UNUSABLE, "gpus",
        lambda n: f"gpus: {n.node.gpus if isinstance(n.node.gpus, int) else list(n.node.gpus)}, but"
        f" {len(n.facts.gpus)} were found" if n.wanted > len(n.facts.gpus) else "",
        "correct `gpus:`, or find out why the driver does not show the others",
    ),
    Question(
        UNUSABLE, "gfx",
        lambda n: (f"its GPUs are {gpu.gfx}, not {n.node.gfx}" for gpu in n.facts.gpus[:1]
                   if n.node.gfx not in (None, gpu.gfx)),
        _KIND_WAY,
    ),
    Question(
        UNUSABLE, "gfx",
        lambda n: (f"a GPU has {gpu.cu_num} compute units, not {n.node.cu_num}" for gpu in n.facts.gpus[:1]
                   if n.node.gfx == gpu.gfx and gpu.cu_num not in (None, n.node.cu_num)),
        _KIND_WAY,
    ),
    Question(
        WARNING, "gpus",
        lambda n: f"its GPUs differ: {gpus_in_words(n.facts)}"
        if len({(g.gfx, g.cu_num, g.partition) for g in n.facts.gpus}) > 1 else "",
        "list those of one kind in `gpus:`, or set one partition mode",
    ),
    Question(
        WARNING, "health",
        lambda n: (f"GPU {i} has counted uncorrectable errors ({', '.join(f'{b} {c}' for b, c in errors.items())})"
                   for i, gpu in enumerate(n.facts.gpus) if (errors := gpu.uncorrectable)),
        "keep an eye on it; leave it out of `gpus:` if attempts fault there",
    ),
    Question(
        WARNING, "health",
        lambda n: (f"GPU {i} is at {hot:.0f} C" for i, gpu in enumerate(n.facts.gpus)
                   if (hot := max(gpu.temperature_c.values(), default=0.0)) >= HOT_C),
        "check its cooling: it will measure low numbers",
    ),
    Question(  # if our workers run there, load on a GPU is most likely theirs
        WARNING, "busy",
        lambda n: (words for id_, words in n.holders.items() if id_.startswith("GPU")
                   and not any(c.run for c in n.facts.containers) and not n.facts.locks.get("held")),
        "wait for them, or leave it out of `gpus:`; see --busy",
    ),
    Question(
        WARNING, "busy", lambda n: n.strangers("holding its GPUs", holding=True), f"see {_BUSY}"
    ),
    Question(
        WARNING, "containers", lambda n: n.strangers("running", holding=False),
        "not on its GPUs, but perhaps on its cores",
    ),
)  # fmt: skip


def findings_on_other_runs(look: Look) -> Iterator[Finding]:
    """Findings on runs that work there or left something, each with a command for that run and no other."""
    living = [("busy", run, "works there") for run in look.runs]
    living += [("locks", run, "has workers that live") for run in look.locked("held")]
    for about, run, what in living:
        owner = look.owner_of(run)
        cancel = command_on_run("cancel", run, look.folder_of_runs)
        way = f"{owner} can end it ({cancel})" if owner else f"end it first ({cancel})"
        yield Finding(WARNING, about, f"run {run}{f' of {owner}' if owner else ''} {what}", f"{way}, or see {_BUSY}")
    left = [(run, "left claimed work behind") for run in look.locked("stale")]
    left += [(run, "left work in an inbox behind") for run in look.locked("waiting")]
    prune = command(f"runs prune --unfinished{runs_option(look.folder_of_runs)}")
    for run, what in left:
        resume = command_on_run("resume", run, look.folder_of_runs)
        yield Finding(WARNING, "locks", f"run {run} {what}", f"{resume} picks it up; {prune} removes old runs")


def findings(
    node: Node, facts: NodeFacts, skew: float | None, run: str, runs: Path = DEFAULT_RUNS
) -> Iterator[Finding]:
    """Yield every problem of a node. `skew`: the node's clock minus ours. `run`: our own run. `runs`: our folder of
    runs."""
    look = Look(node, facts, skew, run, runs)
    prune = command(f"runs prune{runs_option(runs)}")
    for level, about, what, way in QUESTIONS:
        said = what(look)
        for words in (said,) if isinstance(said, str) else said:
            if words:
                yield Finding(level, about, words, way.replace("<runs prune>", prune))
    yield from findings_on_other_runs(look)
    yield from look.spec.preflight(node, facts)


@dataclass(frozen=True, slots=True)
class NodeReport:
    """The report on a node. `skew_s`: the node's clock minus ours, None if unknown."""

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

    def with_finding(self, *finding: str) -> NodeReport:
        """The report with one more finding."""
        return replace(self, findings=(*self.findings, Finding(*finding)))

    def devices(self) -> str:
        """The devices that its containers get if the inventory does not name any, in words; "" for none."""
        return next((f.what for f in self.findings if (f.level, f.about) == (OK, "devices")), "")

    def row(self) -> tuple[str, ...]:
        """Row of a table, in the order of COLUMNS."""
        free, image = self.facts.number("workdir_free_kb"), self.facts.values.get("image", "")
        return (
            self.node,
            self.state,
            gpus_in_words(self.facts),
            self.facts.values.get("docker.version", "").split(" ")[-1],
            image if image in ("", "missing") else image.split(" ")[0].removeprefix("sha256:")[:12],
            "" if free is None else f"{free / 2**20:.0f} GiB",
            "" if self.skew_s is None else f"{round(self.skew_s):+d} s",
            "; ".join(str(f) for f in self.findings if f.level != OK),
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
            "containers": [c._asdict() for c in f.containers],
            "locks": {k: list(v) for k, v in f.locks.items()},
        }


COLUMNS = ("node", "state", "GPUs", "docker", "image", "free", "clock", "notes")


def check_node(node: Node, done: Completed, now: float, run: str = "", runs: Path = DEFAULT_RUNS) -> NodeReport:
    """Make the report from the check script's answer. `now`: our clock (epoch seconds) at about the time it ran. `run`:
    our own run; its containers and locks are not foreign. `runs`: our folder of runs."""
    facts = read_facts(done)
    if not facts.complete:
        words = done.text.splitlines()
        why = f"the check ended with code {done.code}" + (f": {words[-1][:300]}" if words else "")
        return NodeReport(node.name, (Finding(UNUSABLE, "check", why, "log in and run sh by hand"),), facts)
    clock = facts.number("clock")
    skew = None if clock is None else clock - now
    return NodeReport(node.name, tuple(findings(node, facts, skew, run, runs)), facts, skew)


def unreachable(node: Node, why: str) -> NodeReport:
    """Report on a node that did not answer."""
    way = "" if node.is_here else f"try: {login_line(node)}"
    return NodeReport(node.name, (Finding(UNUSABLE, "here" if node.is_here else "ssh", why, way),))


def compare(reports: Sequence[NodeReport]) -> list[NodeReport]:
    """Add findings that show only between nodes: an image or a gfx that differs from the most frequent one."""
    out = list(reports)
    ways: tuple[tuple[str, str, Callable[[NodeFacts], str | None]], ...] = (
        (
            "image",
            "name the image by digest, because no table takes rows of both",
            lambda f: f.values.get("image", "").split(" ")[0].replace("missing", ""),
        ),
        ("gfx", "pick nodes of one kind with --limit", lambda f: f.gfx if f.complete else ""),
    )
    for about, way, value_of in ways:
        values = [value_of(r.facts) or "" for r in reports]
        usual = Counter(v for v in values if v).most_common(1)
        for i, value in enumerate(values):
            if value and value != usual[0][0]:
                usually = and_more([r.node for r, v in zip(reports, values, strict=True) if v == usual[0][0]], 2)
                what = f"its {about} {value[:19]} is not the {usual[0][0][:19]} of {usually}"
                out[i] = out[i].with_finding(WARNING, about, what, way)
    return out


def check_nodes(
    nodes: Iterable[Node],
    *,
    runs: Path = DEFAULT_RUNS,
    accept_new_host_keys: bool = False,
    answered: Callable[[NodeReport], None] = lambda report: None,
) -> list[NodeReport]:
    """Check all nodes at once and return their reports in the same order. `answered` is called with each as it comes.
    `runs`: our folder of runs, for commands in the findings.

    Changes nothing on a node. A node that does not answer gets a report too. If the variable of a reference in the
    inventory is not set, that is the user's mistake: raises InventoryError before any node is checked.
    """
    wanted = {n.name: n for n in nodes}
    check_references(wanted.values())
    reports: dict[str, NodeReport] = {}
    asked = {name: partial(_check, node, runs, accept_new_host_keys) for name, node in wanted.items()}
    for name, report in ask_all(asked, CHECK_S * (1 + len(wanted) // MAX_PARALLEL)):
        reports[name] = report or unreachable(wanted[name], "its check did not end")
        answered(reports[name])
    for name, why in dict(twice(wanted, {n: r.facts for n, r in reports.items()})).items():
        reports[name] = reports[name].with_finding(UNUSABLE, "gpus", why)
    return compare([reports[name] for name in wanted])


def chips_of(inventory: Path) -> set[tuple[str, int]]:
    """Return (gfx, cu_num) of each node, from the inventory or else by a check. Raises NoUsableNodeError."""
    nodes = load_inventory(inventory).nodes.values()
    out = {(n.gfx, n.cu_num) for n in nodes if n.gfx and n.cu_num}
    for report in check_nodes([n for n in nodes if not (n.gfx and n.cu_num)]):
        if not (report.facts.gfx and report.facts.cu_num):
            why = "; ".join(report.problems()) or f"{report.node}: its GPU is unknown"
            raise NoUsableNodeError(f"{why}\ngive gfx and cu_num in the inventory, or --gfx and --cu-num")
        out.add((report.facts.gfx, report.facts.cu_num))
    return out


def _check(node: Node, runs: Path, accept_new_host_keys: bool) -> NodeReport:
    try:
        real = resolved(node)
        with _TURNS, connected(transport_to(node, accept_new_host_keys=accept_new_host_keys)) as transport:
            began = time.time()
            return check_node(node, transport.run(ARGV, stdin=script(real), timeout=TIMEOUT_S), began, runs=runs)
    except HostKeyError as e:  # it names the ways out itself
        return NodeReport(node.name, (Finding(UNUSABLE, "ssh", e.reason),))
    except OrchestratorError as e:
        return unreachable(node, e.reason)


# A node that has not answered by then is slow if it accepted the connection, else unreachable.
LIMIT_S = 4.5
# The calls to a node get this much less than the limit, so that their result arrives in time.
ASIDE_S = 0.2
# Seconds between two rounds of `Watch`.
EVERY_S = 3.0


@dataclass(frozen=True, slots=True)
class NodeAnswer:
    """A node's answer, or `error`: why it did not answer. `at`: epoch seconds. `slow`: it is reachable, but did not
    answer in time."""

    node: str
    at: float
    workers: tuple[WorkerState, ...] = ()
    facts: NodeFacts | None = None
    error: str = ""
    slow: bool = False


class NodePoll:
    """Polls a node, in one thread at a time. `limit_s`: seconds that an answer may take."""

    def __init__(self, plan: NodePlan, limit_s: float = LIMIT_S) -> None:
        self._plan, self._limit_s = plan, limit_s
        self.opened: tuple[Transport, Engine, bytes] | None = None

    def ask(self, *, keep: bool = False) -> NodeAnswer:
        """Poll once. Never raises for trouble with the node. `keep`: leave the connection open for the next time."""
        name, until = self._plan.node, time.monotonic() + self._limit_s - ASIDE_S
        try:
            if self.opened is None:
                node = node_of(self._plan)
                transport = transport_to(node, patient=False, connect_s=self._limit_s - ASIDE_S)
                transport.connect()
                self.opened = (transport, engine_of(self._plan, transport), script(resolved(node), brief=True))
            transport, engine, text = self.opened
            facts = read_facts(transport.run(ARGV, stdin=text, timeout=max(0.1, until - time.monotonic())))
            return NodeAnswer(name, time.time(), tuple(engine.list()), facts if facts.complete else None)
        except OrchestratorError as e:
            keep = False
            greeted = isinstance(e, SlowError) or (isinstance(e, UnreachableError) and e.greeted)
            silent = isinstance(e, UnreachableError) and e.silent
            return no_answer(name, self._limit_s, greeted) if greeted or silent else NodeAnswer(
                name, time.time(), error=e.reason
            )  # fmt: skip
        finally:
            if not keep:
                self.close()

    def close(self) -> None:
        opened, self.opened = self.opened, None
        if opened is not None:
            opened[1].close()
            opened[0].close()


def no_answer(node: str, limit_s: float, greeted: bool) -> NodeAnswer:
    """The answer for a node that gave none in time. `greeted`: it is there, but too busy to answer in time."""
    why = ", though it accepted the connection; --timeout gives it longer" if greeted else ""
    return NodeAnswer(node, time.time(), error=f"no answer within {limit_s:g} s{why}", slow=greeted)


def poll(plans: Sequence[NodePlan], limit_s: float = LIMIT_S) -> Iterator[NodeAnswer]:
    """Poll every node once and yield the answers as they come. Nodes without one within `limit_s` come last."""
    polls = {p.node: NodePoll(p, limit_s) for p in plans}
    for name, answer in ask_all({name: node.ask for name, node in polls.items()}, limit_s):
        yield answer or no_answer(name, limit_s, polls[name].opened is not None)


def ask_all(questions: Mapping[str, Callable[[], T]], limit_s: float) -> Iterator[tuple[str, T | None]]:
    """Call all at once, each in a thread. Yield (name, answer) as they come, and at the end (name, None) for those
    without an answer within `limit_s`."""
    answers: queue.SimpleQueue[tuple[str, T]] = queue.SimpleQueue()

    def ask(name: str, question: Callable[[], T]) -> None:
        answers.put((name, question()))

    until, silent = time.monotonic() + limit_s, dict.fromkeys(questions)
    for name, question in questions.items():  # daemons: a node that hangs must not keep the program from ending
        threading.Thread(target=ask, args=(name, question), name=f"ask {name}", daemon=True).start()
    with contextlib.suppress(queue.Empty):
        while silent:
            name, answer = answers.get(timeout=max(0.0, until - time.monotonic()))
            del silent[name]
            yield name, answer
    yield from silent.items()


class Watch:
    """The latest answers, renewed every EVERY_S in the background until `close`."""

    def __init__(self, plans: Sequence[NodePlan], limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._latest: dict[str, NodeAnswer] = {}
        self._stop = threading.Event()
        for plan in plans:
            threading.Thread(target=self._keep, args=(plan,), name=f"watch {plan.node}", daemon=True).start()

    def answers(self) -> list[NodeAnswer]:
        """The latest answer of each node; an error if its answer is too old."""
        latest, old = list(self._latest.values()), time.time() - EVERY_S - self._limit_s
        return [
            NodeAnswer(a.node, a.at, error=f"no answer for {time.time() - a.at:.0f} s") if a.at < old and not a.error
            else a for a in latest
        ]  # fmt: skip

    def close(self) -> None:
        self._stop.set()

    def _keep(self, plan: NodePlan) -> None:
        with contextlib.closing(NodePoll(plan, self._limit_s)) as node:
            while not self._stop.is_set():
                self._latest[plan.node] = node.ask(keep=True)
                self._stop.wait(EVERY_S)
