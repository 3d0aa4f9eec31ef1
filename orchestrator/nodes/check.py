"""The verdict on a node, from its facts and what the inventory asks of it: ok, warning or unusable, each finding
with the way out. Behind `nodes check`, and the live half of `status`. Knows nothing of transports.
"""

from __future__ import annotations

import json
import os
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.inventory.references import REFERENCE_RE, has_reference
from orchestrator.nodes.facts import NodeFacts, read_facts
from orchestrator.nodes.findings import OK, RANK, UNUSABLE, WARNING, Finding, findings, gpus_in_words

if TYPE_CHECKING:
    from orchestrator.inventory import Node
    from orchestrator.transport import Completed


@dataclass(frozen=True, slots=True)
class NodeReport:
    """A node's verdict. `skew_s`: the node's clock minus ours, None where it did not say."""

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
        """What is not well, a sentence each, with the node's name."""
        return [f"{self.node}: {f}" for f in self.findings if f.level != OK]

    def row(self) -> tuple[str, ...]:
        """For a table, in the order of COLUMNS."""
        f = self.facts
        free, image = f.number("workdir_free_kb"), f.values.get("image", "")
        digest = (
            "" if not image else "missing" if image == "missing" else image.split(" ")[0].removeprefix("sha256:")[:12]
        )
        told = [str(x) for x in self.findings if x.level != OK]
        return (
            self.node,
            self.state,
            gpus_in_words(f),
            f.values.get("docker.version", "").split(" ")[-1],
            digest,
            "" if free is None else f"{free / 2**20:.0f} GiB",
            "" if self.skew_s is None else f"{self.skew_s:+.0f} s",
            "; ".join(told),
        )

    def to_json(self) -> dict[str, Any]:
        """For `nodes check --json`."""
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
    """The verdict on the answer of the check script. `now`: our clock (epoch seconds) about when it ran;
    `run`: our own run, whose containers and locks are no strangers."""
    facts = read_facts(done)
    if not facts.complete:
        words = done.text.splitlines()
        why = f"the check ended with code {done.code}" + (f": {words[-1][:300]}" if words else "")
        return NodeReport(node.name, (Finding(UNUSABLE, "check", why, "log in and run sh by hand"),), facts)
    clock = facts.number("clock")
    skew = None if clock is None else clock - now
    return NodeReport(node.name, tuple(findings(node, facts, skew, run)), facts, skew)


def unreachable(node: Node, why: str) -> NodeReport:
    """The verdict on a node that did not answer."""
    if node.transport == "local":
        return NodeReport(node.name, (Finding(UNUSABLE, "here", why),))
    return NodeReport(node.name, (Finding(UNUSABLE, "ssh", why, f"try: {login_line(node)}"),))


def login_line(node: Node) -> str:
    """How a person reaches the node as the inventory says it; a reference is the variable's name, as in a shell."""
    flags = (("-F", node.ssh_config), ("-p", node.port), ("-i", node.identity), ("-J", node.proxy_jump))
    words = [w for flag, value in flags if value is not None for w in (flag, _typed(str(value)))]
    user = f"{_typed(node.user)}@" if node.user else ""
    return " ".join(["ssh", *words, f"{user}{_typed(node.host or node.name)}", "true"])


def _typed(text: str) -> str:
    if has_reference(text):
        return '"' + REFERENCE_RE.sub(r"${\1}", text) + '"'
    return text if text.startswith("~/") and shlex.quote(text[2:]) == text[2:] else shlex.quote(text)


def compare(reports: Sequence[NodeReport]) -> list[NodeReport]:
    """The same with what shows only between nodes: an image or a gfx that is not the one of most nodes."""
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
    """Keep in the run's folder what `plan_nodes` needs to know of the nodes, so that a later plan asks nobody."""
    for report in reports:
        if report.facts.complete:
            folder = run_folder / "nodes" / report.node
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            aside = folder / f".{FACTS}.tmp"
            aside.write_text(json.dumps(report.facts.for_plan(), indent=1) + "\n")
            os.rename(aside, folder / FACTS)


def load_facts(run_folder: Path, names: Iterable[str]) -> dict[str, NodeFacts]:
    """What `save_facts` kept; without the nodes of which nothing (readable) is there."""
    out = {}
    for name in names:
        try:
            out[name] = NodeFacts.from_plan(json.loads((run_folder / "nodes" / name / FACTS).read_text()))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return out
