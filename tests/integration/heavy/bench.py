"""The bench of tests on real nodes: its inventory is a heavy fleet, a slot a node."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.integration.heavy.fleet import HeavyFleet
from tests.integration.heavy.images import WORKER_IMAGE
from tests.integration.heavy.node import HeavyNode
from tests.integration.heavy.outer import why_not
from tests.kits.fleet import Bench

OURS = "label=gemmfleet.run"
NAMES = ("h1", "h2", "h3")
USERS = ("root", "tuner", "tuner")
"""Nodes of the fleet that all tests of a session share, and who logs in to each."""


def on_nodes(group: str = "nodes") -> list[pytest.MarkDecorator]:
    """The pytestmark of modules that need nodes; those of a group run in one process, which has one fleet."""
    reason = why_not()
    return [pytest.mark.system, pytest.mark.skipif(bool(reason), reason=reason), pytest.mark.xdist_group(group)]


class NodesBench(Bench):
    """A bench on the nodes of a fleet. What a run left there is removed when it is closed."""

    def __init__(self, root: Path, fleet: HeavyFleet) -> None:
        super().__init__(root)
        self.fleet = fleet
        self.write_inventory()

    def write_inventory(self, image: str = WORKER_IMAGE) -> None:
        lines = "".join(f"  {node.name}: {{}}\n" for node in self.fleet.nodes)
        self.inventory.write_text(
            f"defaults:\n  tuner: replay\n  transport: ssh\n  engine: docker\n  image: {image}\n"
            f"  ssh_config: {self.fleet.folder}/ssh_config\n  gpus: 0\nnodes:\n{lines}"
        )

    def release(self, until: str = "released") -> None:
        """Let what is held go on, not through the network."""
        for node in self.fleet.nodes:
            for folder in (self.node_folder(node), f"/data/work/{self.paths.run}/{node.name}"):
                node.sh(f"if [ -d {folder} ]; then touch {folder}/{until}; fi")

    def containers(self) -> list[str]:
        """Containers of ours on all nodes, dead ones too."""
        return [name for node in self.fleet.nodes for name in node.containers(OURS)]

    def node_folder(self, node: HeavyNode) -> str:
        """The run's folder on the node."""
        home = "/root" if node.user == "root" else f"/home/{node.user}"
        return f"{home}/.gemmfleet/{self.paths.run}/{node.name}"

    def measured(self, node: HeavyNode) -> int:
        """Shapes that the node's workers have tuned so far, whoever has heard of it."""
        return int(node.sh(f"cat {self.node_folder(node)}/events/*.jsonl | grep -c '\"shape_tuned\"' || true"))

    def claimed(self, node: HeavyNode) -> int:
        """Groups that workers of the node are at."""
        return int(node.sh(f"find {self.node_folder(node)}/claimed -name '*.json' | wc -l"))

    def tuned_by_node(self) -> Counter[str]:
        with self.ledger() as ledger:
            return Counter(shape.node for shape in ledger.shapes("tuned"))

    def steps(self, what: str, *kinds: str) -> list[dict[str, Any]]:
        """Steps of `explain WHAT --json`, of some kinds."""
        (story,) = self.run("explain", what, "--json").json()["stories"]
        return [s for s in story["steps"] if s["kind"] in kinds]

    def finish(self, run: subprocess.Popen[str], code: int = 0) -> str:
        """The same, and no container of ours is left."""
        out = super().finish(run, code)
        assert self.containers() == []
        return out


def mend(node: HeavyNode) -> None:
    """Undo whatever a test did to a node, and remove what the run left there."""
    node.repair()
    node.remove_containers(OURS)
    node.sh("rm -rf /data/work /root/.gemmfleet /home/*/.gemmfleet")
