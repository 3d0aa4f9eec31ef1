"""launch.sh by hand, as a person on the node would use it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.controller.node_plan import NodePlan, node_files, node_folders
from orchestrator.engine.process import ProcessEngine
from orchestrator.transport import LocalTransport
from tests.waiting import wait_until


class Node:
    """A deployed node folder with its engine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        plan = NodePlan("n1", str(folder), ("0", "1"), "local", "process", sys.executable, {}, {})
        self.transport = LocalTransport("n1")
        self.transport.put(str(folder), node_files(plan, "r1", "replay", {}, 60.0), node_folders(plan.slots))
        self.engine = ProcessEngine(self.transport, str(folder))

    def states(self) -> dict[str, str]:
        return {w.slot: w.state for w in self.engine.list()}

    def pid(self, slot: str) -> int:
        """The worker's, from its lock."""
        return int((self.folder / "claimed" / slot / "lock").read_text() or 0)

    def supervisor(self, slot: str) -> int:
        return int((self.folder / "supervisor" / f"{slot}.pid").read_text())

    def up(self, slot: str = "0") -> bool:
        lock = self.folder / "claimed" / slot / "lock"
        return lock.exists() and bool(lock.read_text()) and self.states()[slot] == "running"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    n = Node(tmp_path / "node")
    yield n
    n.engine.stop(kill=True)
    wait_until(lambda: "running" not in n.states().values(), "all is stopped")


def test_a_worker_that_outlives_its_supervisor_is_seen_and_stopped(node: Node) -> None:
    node.engine.start(["0"])
    wait_until(node.up, "it runs")
    worker = node.pid("0")
    os.kill(node.supervisor("0"), signal.SIGKILL)
    assert node.states()["0"] == "running"
    node.engine.start(["0"])
    assert node.pid("0") == worker, "it is not started twice"
    node.engine.stop()
    wait_until(lambda: node.states()["0"] != "running", "it is stopped all the same")


def test_values_on_standard_input_reach_the_worker_and_no_file(node: Node) -> None:
    node.engine.start(["0"], env={"MY_TOKEN": "s3cr3t with ' quotes"})
    wait_until(node.up, "it runs")
    environ = Path(f"/proc/{node.pid('0')}/environ").read_bytes().split(b"\0")
    assert b"MY_TOKEN=s3cr3t with ' quotes" in environ
    found = subprocess.run(["grep", "-rl", "s3cr3t", node.folder], capture_output=True, text=True)
    assert found.stdout == ""


def test_a_group_by_hand(node: Node, tmp_path: Path) -> None:
    spec = (
        '{"protocol":1,"attempt":"byhand-1","run":"r1","epoch":0,"group":"g1","family":"a16w16","tuner":"replay",'
        '"shapes":[{"id":1,"key":{"M":1,"N":16,"K":64}}]}'
    )
    (tmp_path / "group.json").write_text(spec)
    argv = ["sh", "node/tune.sh", "group.json"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (node.folder / "attempts" / "byhand-1" / "records.jsonl").exists()
