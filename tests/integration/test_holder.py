"""The holder of a lease, run by hand: workers are its children, and rows outlive it."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from orchestrator.controller.node_plan import NodePlan, node_files, node_folders
from orchestrator.engine.process import ProcessEngine
from orchestrator.errors import EngineError
from orchestrator.leases import holder
from orchestrator.transport import LocalTransport
from orchestrator.transport.exec import ExecTransport
from orchestrator.transport.local import ProcessChannel
from tests.waiting import wait_until


class Here:
    """Opener of commands on this machine."""

    def connect(self) -> None: ...

    def close(self) -> None: ...

    def start(self, command: str, deadline: float) -> ProcessChannel:
        return ProcessChannel("n1", ["sh", "-c", command])


class Held:
    """A holder with a deployed node folder."""

    def __init__(
        self, workdir: Path, shell: str, *, idle_s: int = 3600, results: str = "", out: str = "", most: int = 0
    ) -> None:
        self.workdir, self.folder = workdir, workdir / "leases" / "l1"
        text = holder.script("r1", "p", str(workdir), idle_s=idle_s, out=out, most=most)
        text = text.replace("sleep 2 ", "sleep 0.1 ")
        self.out = workdir.parent / "out"
        with self.out.open("wb") as out_file:
            self.process = subprocess.Popen(
                [shell, "-c", text], stdin=subprocess.DEVNULL, stdout=out_file, start_new_session=True,
                env={**os.environ, "GEMMFLEET_LEASE": "l1"},
            )  # fmt: skip
        self.transport = ExecTransport("n1", Here(), holder.prelude(str(workdir), "l1"))
        self.transport.connect()
        env = {"GEMMFLEET_RESULTS": results} if results else {}
        plan = NodePlan("n1", "r1/n1", ("0", "1"), "exec", "process", sys.executable, env, {})
        self.transport.put("r1/n1", node_files(plan, "r1", "replay", {}, 60.0), node_folders(plan.slots))
        self.engine = ProcessEngine(self.transport, "r1/n1")

    def states(self) -> dict[str, str]:
        return {w.slot: w.state for w in self.engine.list()}

    def parents(self, pid: int) -> Iterator[int]:
        while pid > 1:
            yield pid
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

    def looks(self, times: int) -> None:
        """Until it has looked around so often, and has not ended."""
        for _ in range(times):
            wait_until(partial(self._looked, self._children()), "it looks around")
            assert self.process.poll() is None

    def _looked(self, before: str) -> bool:
        return self._children() != before

    def _children(self) -> str:
        pid = self.process.pid
        return Path(f"/proc/{pid}/task/{pid}/children").read_text()

    def worker(self, slot: str) -> int:
        """Its process id, once it has records."""
        folder = self.folder / "r1/n1"
        events = folder / "events" / f"{slot}.jsonl"
        wait_until(lambda: events.exists() and events.stat().st_size, "the worker has records")
        return int((folder / "claimed" / slot / "lock").read_text())


@pytest.fixture(params=["sh", "bash"])
def shell(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def made() -> Iterator[list[Held]]:
    held: list[Held] = []
    yield held
    for h in held:
        h.transport.close()
        if h.process.poll() is None:
            os.killpg(h.process.pid, signal.SIGTERM)
        h.process.wait()


def test_workers_are_children_of_the_holder_and_end_with_it(tmp_path: Path, made: list[Held], shell: str) -> None:
    secret = "s3cret-of-the-lease"
    made.append(held := Held(tmp_path / "w", shell))
    assert held.states() == {"0": "absent", "1": "absent"}
    held.engine.start(env={"TOKEN": secret})
    assert held.states() == {"0": "running", "1": "running"}
    pids = [held.worker(slot) for slot in ("0", "1")]
    for pid in pids:
        assert held.process.pid in held.parents(pid)
        assert f"TOKEN={secret}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    held.engine.start(env={"TOKEN": "another"})
    assert [held.worker(slot) for slot in ("0", "1")] == pids, "what runs is left alone"
    # neither in a file nor on a command line
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and secret.encode() in p.read_bytes()]
    lines = [p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if p.exists()]
    assert not [line for line in lines if secret.encode() in line]
    held.transport.close()
    held.process.terminate()
    assert held.process.wait() == 143
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert not held.folder.exists()
    data = holder.leftovers_in(held.out.read_bytes())
    assert data is not None
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert "r1/n1/events/0.jsonl" in tar.getnames()
        events = tar.extractfile("r1/n1/events/1.jsonl")
        assert events is not None
        assert b'"worker_stopped"' in events.read().splitlines()[-1]


def test_a_worker_that_ended_is_started_again(tmp_path: Path, made: list[Held], shell: str) -> None:
    made.append(held := Held(tmp_path / "w", shell))
    held.engine.start(["1"])
    held.engine.stop()
    wait_until(lambda: held.states()["1"] == "ended", "it ended")
    held.engine.start(["1"])
    assert held.states() == {"0": "absent", "1": "running"}


def test_it_ends_by_itself_once_nothing_runs_and_nobody_is_connected(
    tmp_path: Path, made: list[Held], shell: str
) -> None:
    made.append(held := Held(tmp_path / "w", shell, idle_s=20, results=str(tmp_path / "kept")))
    held.engine.start()
    held.transport.close()
    pid = held.worker("0")
    stop = LocalTransport("n1").run(["sh", f"{held.folder}/r1/n1/launch.sh", "stop"])
    assert stop.code == 0
    assert held.process.wait() == 0
    assert not Path(f"/proc/{pid}").exists()
    assert (tmp_path / "kept/events/0.jsonl").stat().st_size
    assert not held.folder.exists()
    assert holder.leftovers_in(held.out.read_bytes()) is None, "the folder of results has them"


@pytest.mark.full
def test_a_connected_controller_keeps_it(tmp_path: Path, made: list[Held], shell: str) -> None:
    made.append(held := Held(tmp_path / "w", shell, idle_s=20))
    stream = held.transport.open(["sh", "-c", "echo there; cat"])
    assert stream.read(100) == b"there\n"
    held.looks(30)
    held.transport.close()
    held.looks(30)
    stream.close()
    assert held.process.wait() == 0


@pytest.mark.full
@pytest.mark.parametrize("why", ["standard output is nobody's", "it keeps no more than 10 bytes"])
def test_rows_that_nobody_could_read_keep_the_lease_until_its_time_is_up(
    tmp_path: Path, made: list[Held], shell: str, why: str
) -> None:
    options: dict[str, Any] = {"out": str(tmp_path / "elsewhere")} if "nobody" in why else {"most": 10}
    made.append(held := Held(tmp_path / "w", shell, idle_s=20, **options))
    held.engine.start()
    held.worker("0")
    held.engine.stop()
    wait_until(lambda: set(held.states().values()) == {"ended"}, "all ended")
    held.transport.close()
    held.looks(30)
    held.process.terminate()
    assert held.process.wait() == 143
    assert (held.folder / "r1/n1/events/0.jsonl").stat().st_size


def test_a_folder_whose_holder_has_ended_starts_nothing(tmp_path: Path, made: list[Held], shell: str) -> None:
    made.append(held := Held(tmp_path / "w", shell))
    held.process.kill()
    held.process.wait()
    with pytest.raises(EngineError, match="the holder of this lease does not answer"):
        held.engine.start()
