"""The holder of a lease, run by hand: it ends by itself, and rows outlive it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.engine.process import ProcessEngine
from orchestrator.inventory.model import Node
from orchestrator.leases.holder import folder_word, holder_script, leftovers_in, prelude
from orchestrator.machines.node_files import node_files, node_folders
from orchestrator.machines.node_plan import NodePlan
from orchestrator.transport.exec import ExecTransport
from orchestrator.transport.local import LocalTransport
from tests.support.processes import Here
from tests.support.shells import check
from tests.waiting import wait_until

POOL = Node(name="n1", lease="slurm")


class Held:
    """A holder with a deployed node folder."""

    def __init__(self, root: Path, shell: str, *, idle_s: int = 3600, results: str = "", **of_script: Any) -> None:
        self.folder, self.out = root / "w/leases/l1", root / "out"
        text = holder_script("r1", "p", f"{root}/w", idle_s=idle_s, **of_script).replace("sleep 2 ", "sleep 0.1 ")
        with self.out.open("wb") as out_file:
            self.process = subprocess.Popen(
                [shell, "-c", text], stdin=subprocess.DEVNULL, stdout=out_file, start_new_session=True,
                env={**os.environ, "GEMMFLEET_LEASE": "l1"},
            )  # fmt: skip
        self.transport = ExecTransport("n1", Here(), prelude(f"{root}/w", "l1"))
        self.transport.connect()
        env = {"GEMMFLEET_RESULTS": results} if results else {}
        plan = NodePlan("n1", "r1/n1", ("0", "1"), "exec", "process", sys.executable, env, {}, source=POOL)
        self.transport.put("r1/n1", node_files(plan, "r1", "replay", {}, 60.0), node_folders(plan.slots))
        self.engine = ProcessEngine(self.transport, "r1/n1")

    def states(self) -> dict[str, str]:
        return {w.slot: w.state for w in self.engine.list()}

    def looks(self, times: int) -> None:
        """Until it has looked around so often, and has not ended."""
        for _ in range(times):
            before = self._children()
            wait_until(lambda before=before: self._children() != before, "it looks around")  # type: ignore[misc]
            assert self.process.poll() is None

    def _children(self) -> str:
        pid = self.process.pid
        return Path(f"/proc/{pid}/task/{pid}/children").read_text()

    def worker(self, slot: str) -> int:
        """Its process id, once it has records."""
        events = self.folder / f"r1/n1/events/{slot}.jsonl"
        wait_until(lambda: events.exists() and events.stat().st_size, "the worker has records")
        return int((self.folder / f"r1/n1/claimed/{slot}/lock").read_text())

    def close(self) -> None:
        self.transport.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        self.process.wait()


Hold = Callable[..., Held]


@pytest.fixture(params=["sh", "bash"])
def hold(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Hold]:
    with contextlib.ExitStack() as stack:
        yield lambda **kw: stack.enter_context(contextlib.closing(Held(tmp_path, request.param, **kw)))


def test_it_ends_by_itself_once_nothing_runs_and_nobody_is_connected(tmp_path: Path, hold: Hold) -> None:
    held = hold(idle_s=20, results=str(tmp_path / "kept"))
    held.engine.start()
    stream = held.transport.open(["sh", "-c", "echo there; cat"])
    assert stream.read(100) == b"there\n"
    held.transport.close()
    pid = held.worker("0")
    stop = LocalTransport("n1").run(["sh", f"{held.folder}/r1/n1/launch.sh", "stop"])
    assert stop.code == 0
    held.looks(30)
    stream.close()
    assert held.process.wait() == 0
    assert not Path(f"/proc/{pid}").exists()
    assert (tmp_path / "kept/events/0.jsonl").stat().st_size
    assert not held.folder.exists()
    assert leftovers_in(held.out.read_bytes()) is None, "the folder of results has them"


@pytest.mark.full
@pytest.mark.parametrize("options", [{"out": "/elsewhere"}, {"most": 10}], ids=["nobody reads its output", "too much"])
def test_rows_that_nobody_could_read_keep_the_lease_until_its_time_is_up(hold: Hold, options: dict[str, Any]) -> None:
    held = hold(idle_s=20, **options)
    held.engine.start()
    held.worker("0")
    held.engine.stop()
    wait_until(lambda: set(held.states().values()) == {"ended"}, "all ended")
    held.transport.close()
    held.looks(30)
    held.process.terminate()
    assert held.process.wait() == 143
    assert (held.folder / "r1/n1/events/0.jsonl").stat().st_size


@pytest.mark.parametrize("workdir", ["", "~/a b", "/scratch/$(touch hacked)'"])
def test_the_script_and_the_way_into_it_pass_the_shell_and_shellcheck(tmp_path: Path, workdir: str) -> None:
    script, way = tmp_path / "lease.sh", tmp_path / "way.sh"
    script.write_text(holder_script("r1", "p", workdir, out=folder_word("~/out 'put")))
    way.write_text(f"#!/bin/sh\n{prelude(workdir, '17_3')}\n")
    line = f"printf '%s|' {folder_word(workdir)}"
    env = {"HOME": "/home/u x", "TMPDIR": "/t p"}
    one = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True, env=env).stdout
    assert one == (f"{workdir.replace('~', '/home/u x')}|" if workdir else f"/t p/gemmfleet-{os.getuid()}|")
    check(script, way)
