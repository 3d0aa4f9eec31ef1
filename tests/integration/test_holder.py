"""The holder of a lease, run by hand: workers are its children, and rows outlive it."""

from __future__ import annotations

import base64
import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.controller.node_plan import NodePlan, node_files, node_folders
from orchestrator.engine.process import ProcessEngine
from orchestrator.errors import EngineError
from orchestrator.leases.base import BEGIN, END, folder_word, holder_script, leftovers_in, prelude
from orchestrator.transport.exec import ExecTransport
from orchestrator.transport.local import LocalTransport
from tests.support.processes import Here
from tests.waiting import wait_until


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
        plan = NodePlan("n1", "r1/n1", ("0", "1"), "exec", "process", sys.executable, env, {})
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


def parents(pid: int) -> Iterator[int]:
    while pid > 1:
        yield pid
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_workers_are_children_of_the_holder_and_end_with_it(tmp_path: Path, hold: Hold) -> None:
    secret = "s3cret-of-the-lease"
    held = hold()
    assert held.states() == {"0": "absent", "1": "absent"}
    held.engine.start(env={"TOKEN": secret})
    assert held.states() == {"0": "running", "1": "running"}
    pids = [held.worker(slot) for slot in ("0", "1")]
    for pid in pids:
        assert held.process.pid in parents(pid)
        assert f"TOKEN={secret}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    held.engine.start(env={"TOKEN": "another"})
    assert [held.worker(slot) for slot in ("0", "1")] == pids, "what runs is left alone"
    # neither in a file nor on a command line
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and secret.encode() in p.read_bytes()]
    lines = [p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if p.exists()]
    assert not [line for line in lines if secret.encode() in line]
    held.engine.stop()
    wait_until(lambda: held.states()["1"] == "ended", "it ended")
    held.engine.start(["1"])
    assert held.states() == {"0": "ended", "1": "running"}, "one that ended is started again"
    pids.append(held.worker("1"))
    held.transport.close()
    held.process.terminate()
    assert held.process.wait() == 143
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert not held.folder.exists()
    data = leftovers_in(held.out.read_bytes())
    assert data is not None
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert "r1/n1/events/0.jsonl" in tar.getnames()
        events = tar.extractfile("r1/n1/events/1.jsonl")
        assert events is not None
        assert b'"worker_stopped"' in events.read().splitlines()[-1]


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


def test_a_folder_whose_holder_has_ended_starts_nothing(hold: Hold) -> None:
    held = hold()
    held.process.kill()
    held.process.wait()
    with pytest.raises(EngineError, match="the holder of this lease does not answer"):
        held.engine.start()


@pytest.mark.parametrize("workdir", ["", "~/a b", "/scratch/$(touch hacked)'"])
def test_the_script_and_the_way_into_it_pass_the_shell_and_shellcheck(tmp_path: Path, workdir: str) -> None:
    script, way = tmp_path / "lease.sh", tmp_path / "way.sh"
    script.write_text(holder_script("r1", "p", workdir, out=folder_word("~/out 'put")))
    way.write_text(f"#!/bin/sh\n{prelude(workdir, '17_3')}\n")
    for shell in ("sh", "bash"):
        for path in (script, way):
            subprocess.run([shell, "-n", path], check=True)
    line = f"printf '%s|' {folder_word(workdir)}"
    env = {"HOME": "/home/u x", "TMPDIR": "/t p"}
    one = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True, env=env).stdout
    assert one == (f"{workdir.replace('~', '/home/u x')}|" if workdir else f"/t p/gemmfleet-{os.getuid()}|")
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", "-S", "warning", script, way], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_the_last_whole_archive_of_an_output_is_found() -> None:
    def block(data: bytes, end: str = END) -> bytes:
        return f"{BEGIN}\n".encode() + base64.encodebytes(data) + f"{end}\n".encode()

    for out, found in (
        (b"", None),
        (b"words\n" + block(b"x" * 200), b"x" * 200),
        (block(b"first") + block(b"second") + b"words", b"second"),
        (block(b"cut off", ""), None),
        (f"{BEGIN}\n?\n{END}\n".encode(), None),
    ):
        assert leftovers_in(out) == found
