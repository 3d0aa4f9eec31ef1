"""Checks all nodes at once before a run, and reports on each: its facts, and findings that say what to do.

`check_nodes` sends the rendered check script (check_script.py) to every node, reads the answers, and asks the questions
of node_questions.py. Last it compares the nodes (`compare`, gpu_names.py). node_poll.py polls nodes during a run.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.engines import OK, RANK, UNUSABLE, WARNING, Finding
from orchestrator.errors import HostKeyError, NoUsableNodeError, OrchestratorError, SlowError
from orchestrator.inventory.load import check_references, load_inventory, resolved
from orchestrator.inventory.model import Node
from orchestrator.machines.check_script import ARGV, TIMEOUT_S, read_facts, render_script
from orchestrator.machines.facts import NodeFacts, gpus_in_words
from orchestrator.machines.gpu_names import gpus_with_two_names
from orchestrator.machines.node_link import login_line, transport_to
from orchestrator.machines.node_poll import ask_all
from orchestrator.machines.node_questions import findings
from orchestrator.paths import DEFAULT_RUNS
from orchestrator.transport.base import Completed, connected
from worker.text import and_more

CHECK_S = 90.0
"""No check takes longer: logins and the script have shorter limits."""
MAX_PARALLEL = 64
"""Most nodes checked at a time. More logins at once would need too much CPU time, and some would time out."""
CLOCK_STEP_S = 1.0
"""A smaller difference of two clocks cannot be measured: the node prints whole seconds, and its `date` may run up to a
second after we sent the script that begins with it."""
_TURNS = threading.Semaphore(MAX_PARALLEL)


@dataclass(frozen=True, slots=True)
class NodeReport:
    """The report on a node."""

    node: str
    findings: tuple[Finding, ...]
    facts: NodeFacts = field(default_factory=lambda: NodeFacts({}))
    skew_s: float | None = None
    """The node's clock minus ours, 0 if the difference is too small to be measured, None if unknown."""

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

    def problem_text(self) -> str:
        """Its problems in one line, without its name."""
        return "; ".join(str(f) for f in self.findings if f.level != OK)

    def with_finding(self, *finding: str) -> NodeReport:
        """The report with one more finding."""
        return replace(self, findings=(*self.findings, Finding(*finding)))

    def devices(self) -> str:
        """The devices that its containers get if the inventory does not name any, in words; "" for none."""
        return next((f.what for f in self.findings if (f.level, f.about) == (OK, "devices")), "")

    def row(self) -> tuple[str, ...]:
        """Row of a table, in the order of COLUMNS."""
        image = self.facts.values.get("image", "")
        if image not in ("", "missing"):
            image = image.split(" ")[0].removeprefix("sha256:")[:12]
        free_kb = self.facts.number("workdir_free_kb")
        return (
            self.node,
            self.state,
            gpus_in_words(self.facts),
            self.facts.values.get("docker.version", "").split(" ")[-1],
            image,
            "" if free_kb is None else f"{free_kb / 2**20:.0f} GiB",
            "" if self.skew_s is None else f"{round(self.skew_s):+d} s",
            self.problem_text(),
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
    """Make the report from the check script's answer. `now`: our clock (epoch seconds) when it was sent. `run`: our
    own run; its containers and locks are not foreign. `runs`: our folder of runs."""
    facts = read_facts(done)
    if not facts.complete:
        output = done.text.splitlines()
        why = f"the check ended with code {done.code}"
        if output:
            why += f": {output[-1][:300]}"
        return NodeReport(node.name, (Finding(UNUSABLE, "check", why, "log in and run sh by hand"),), facts)
    skew = _measure_skew(facts, now)
    return NodeReport(node.name, tuple(findings(node, facts, skew, run, runs)), facts, skew)


def _measure_skew(facts: NodeFacts, now: float) -> float | None:
    """Return the node's clock minus ours, as `NodeReport` has it. `now`: our clock when the script was sent."""
    clock = facts.number("clock")
    if clock is None:
        return None
    difference = clock - now
    return 0.0 if abs(difference) <= CLOCK_STEP_S else difference


def unreachable(node: Node, why: str) -> NodeReport:
    """Report on a node that did not answer."""
    way = "" if node.is_here else f"try: {login_line(node)}"
    return NodeReport(node.name, (Finding(UNUSABLE, "here" if node.is_here else "ssh", why, way),))


def compare(reports: Sequence[NodeReport]) -> list[NodeReport]:
    """Add findings that show only between nodes: an image or a gfx that differs from the most frequent one."""
    images = {r.node: r.facts.values.get("image", "").split(" ")[0].replace("missing", "") for r in reports}
    by_image = _mark_unusual(reports, images, "image", "name the image by digest, because no table takes rows of both")
    chips = {r.node: r.facts.gfx or "" for r in reports if r.facts.complete}
    return _mark_unusual(by_image, chips, "gfx", "pick nodes of one kind with --limit")


def _mark_unusual(reports: Sequence[NodeReport], values: Mapping[str, str], about: str, fix: str) -> list[NodeReport]:
    """The reports, with a finding on each node whose value is not the most frequent one. Nodes without a value do not
    count."""
    frequencies = Counter(value for value in values.values() if value)
    if not frequencies:
        return list(reports)
    usual = frequencies.most_common(1)[0][0]
    usual_nodes = and_more([node for node, value in values.items() if value == usual], 2)
    marked = []
    for report in reports:
        value = values.get(report.node, "")
        if value and value != usual:
            what = f"its {about} {value[:19]} is not the {usual[:19]} of {usual_nodes}"
            report = report.with_finding(WARNING, about, what, fix)
        marked.append(report)
    return marked


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
    by_name = {n.name: n for n in nodes}
    check_references(by_name.values())
    reports: dict[str, NodeReport] = {}
    questions = {name: partial(_check, node, runs, accept_new_host_keys) for name, node in by_name.items()}
    for name, report in ask_all(questions, CHECK_S * (1 + len(by_name) // MAX_PARALLEL)):
        reports[name] = report or unreachable(by_name[name], "its check did not end")
        answered(reports[name])
    for name, why in dict(gpus_with_two_names(by_name, {n: r.facts for n, r in reports.items()})).items():
        reports[name] = reports[name].with_finding(UNUSABLE, "gpus", why)
    return compare([reports[name] for name in by_name])


def chips_of(inventory: Path) -> set[tuple[str, int]]:
    """Return (gfx, cu_num) of each node, from the inventory or else by a check. Raises NoUsableNodeError."""
    nodes = load_inventory(inventory).nodes.values()
    chips = {(n.gfx, n.cu_num) for n in nodes if n.gfx and n.cu_num}
    for report in check_nodes([n for n in nodes if not (n.gfx and n.cu_num)]):
        if not (report.facts.gfx and report.facts.cu_num):
            why = "; ".join(report.problems()) or f"{report.node}: its GPU is unknown"
            raise NoUsableNodeError(f"{why}\ngive gfx and cu_num in the inventory, or --gfx and --cu-num")
        chips.add((report.facts.gfx, report.facts.cu_num))
    return chips


def _check(node: Node, runs: Path, accept_new_host_keys: bool) -> NodeReport:
    try:
        check_script = render_script(resolved(node))
        with _TURNS, connected(transport_to(node, accept_new_host_keys=accept_new_host_keys)) as transport:
            began = time.time()
            done = transport.run(ARGV, stdin=check_script, timeout=TIMEOUT_S)
            return check_node(node, done, began, runs=runs)
    except HostKeyError as e:  # it names the ways out itself
        return NodeReport(node.name, (Finding(UNUSABLE, "ssh", e.reason),))
    except SlowError:
        return unreachable(node, f"its check took longer than {TIMEOUT_S:g} s: the node or one of its disks hangs")
    except OrchestratorError as e:
        return unreachable(node, e.reason)
