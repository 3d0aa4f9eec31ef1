"""launch.sh by hand, as a person on the node would use it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.engine.process import ProcessEngine
from orchestrator.machines.node_files import node_files, node_folders
from orchestrator.machines.node_plan import NodePlan
from orchestrator.transport.local import LocalTransport
from tests.waiting import wait_until
from worker.process import WorkerEnd


class Node:
    """A deployed node folder with its engine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        plan = NodePlan("n1", str(folder), ("0", "1"), "local", "process", sys.executable, {}, {})
        transport = LocalTransport("n1")
        transport.put(str(folder), node_files(plan, "r1", "replay", {}, 60.0), node_folders(plan.slots))
        self.engine = ProcessEngine(transport, str(folder))

    def running(self) -> bool:
        return {w.slot: w.state for w in self.engine.list()}["0"] == "running"

    def pid(self) -> int:
        """The worker's process id from its lock; 0 if it has no lock yet."""
        lock = self.folder / "claimed/0/lock"
        return int(lock.read_text() or 0) if lock.exists() else 0


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    n = Node(tmp_path / "node")
    yield n
    n.engine.stop(kill=True)
    wait_until(lambda: not n.running(), "all is stopped")


def test_a_worker_that_outlives_its_supervisor_is_seen_and_stopped(node: Node) -> None:
    node.engine.start(["0"], env={"MY_TOKEN": "s3cr3t with ' quotes"})
    wait_until(lambda: node.pid() and node.running(), "it runs")
    worker = node.pid()
    # values on standard input reach the worker and no file
    assert b"MY_TOKEN=s3cr3t with ' quotes" in Path(f"/proc/{worker}/environ").read_bytes().split(b"\0")
    assert subprocess.run(["grep", "-rl", "s3cr3t", node.folder], capture_output=True).stdout == b""
    os.kill(int((node.folder / "supervisor/0.pid").read_text()), signal.SIGKILL)
    assert node.running()
    node.engine.start(["0"])
    assert node.pid() == worker, "it is not started twice"
    (node.folder / "claimed/0/lock").write_text(f"{worker}\nother/n")  # as it signs while it waits for its device
    node.engine.stop()
    wait_until(lambda: not node.running(), "it is stopped all the same")


def test_the_end_of_a_worker_is_noted_for_the_next_one(node: Node) -> None:
    node.engine.start(["0"])
    wait_until(lambda: node.pid() and node.running(), "it runs")
    os.kill(node.pid(), signal.SIGKILL)
    wait_until(lambda: WorkerEnd.read(node.folder / "supervisor/0.ended"), "its supervisor notes it")
    end = WorkerEnd.read(node.folder / "supervisor/0.ended")
    assert end is not None
    assert end.words.startswith("it ended with code 137 (SIGKILL) after ")
    assert end.began <= end.ended <= time.time()
