"""Leases on a real Slurm: requested, reached, lost in every way, given back."""

from __future__ import annotations

import hashlib
import io
import os
import secrets
import signal
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.dispatch.deploy import NodePlan, node_files, node_folders
from orchestrator.engine.process import ProcessEngine
from orchestrator.errors import SlowError, TransportError, UnreachableError
from orchestrator.leases import holder
from orchestrator.leases.base import EndCause, Lease, LeaseState
from orchestrator.leases.jobs import SlurmPool
from orchestrator.leases.slurm import SlurmSource
from orchestrator.transport import RemoteFile, SshTransport
from orchestrator.transport.exec.transport import ExecTransport
from tests.integration.slurm import GPUS, PARTITION, URGENT, SlurmCluster
from tests.integration.sshd import NO_BASHRC, light_fleet
from tests.waiting import wait_until

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("slurm")]

QUEUED, READY, ENDED = LeaseState


class Pool:
    """A source with what it opened."""

    def __init__(self, folder: Path, via: Callable[[str], SshTransport] | None = None, **request: object) -> None:
        values = {"partition": PARTITION, "workdir": str(folder / "work"), **request}
        self.request = SlurmPool(run=folder.name, pool="p", **values)  # type: ignore[arg-type]
        self.source = SlurmSource(self.request, str(folder / "out"), via)
        self._opened: list[ExecTransport] = []

    def lease(self, id: str) -> Lease | None:
        return next((x for x in self.source.list() if x.id == id), None)

    def ready(self, count: int = 1) -> list[Lease]:
        """So many, once they are."""

        def look() -> list[Lease]:
            return [x for x in self.source.list() if x.state is READY]

        wait_until(lambda: len(look()) >= count, f"{count} leases are ready")
        return look()

    def ended(self, lease: Lease) -> Lease:
        """The same lease once it has ended, and its cause is known for sure."""
        found = wait_until(
            lambda: (x := self.lease(lease.id)) and x.state is ENDED and "COMPLETING" not in x.why and x, "it ended"
        )
        assert isinstance(found, Lease)
        return found

    def connect(self, lease: Lease) -> ExecTransport:
        transport = self.source.transport(lease, f"node-{lease.id}")
        self._opened.append(transport)
        transport.connect()
        return transport

    def close(self) -> None:
        for transport in self._opened:
            transport.close()
        self.source.close()


@pytest.fixture
def make(slurm: SlurmCluster, tmp_path: Path) -> Iterator[Callable[..., Pool]]:
    made: list[Pool] = []

    def pool(**request: object) -> Pool:
        made.append(Pool(tmp_path, **request))  # type: ignore[arg-type]
        return made[-1]

    yield pool
    for p in made:
        p.close()


def test_leases_are_asked_for_used_and_given_back(slurm: SlurmCluster, make: Callable[..., Pool]) -> None:
    """Two of three nodes: commands, files, a stream, exactly the granted devices; another controller finds them."""
    pool = make(time_s=600)
    assert pool.source.list() == []
    pool.source.ask(2, avoid=["g2"])
    leases = pool.ready(2)
    assert {x.host for x in leases} == {"g1", "g3"}
    assert all(x.ends_at and 500 < x.ends_at - time.time() <= 600 for x in leases)
    for lease in leases:
        t = pool.connect(lease)
        done = t.run(["sh", "-c", "hostname; echo $ROCR_VISIBLE_DEVICES; cat; exit 7"], stdin=b"in\0put")
        assert (done.code, done.out) == (7, f"{lease.host}\n0,1\n".encode() + b"in\0put")
        assert t.run(["nproc"]).code == 0
        words = ["a b", "$HOME", "it's", "*", "~", "A=b", "", "\\", "new\nline", "ü", "-n", "`id`", "!x"]
        assert t.run(["printf", "%s\\0", *words]).out == b"".join(w.encode() + b"\0" for w in words)
        assert t.run(["sh", "-c", "kill -9 $$"]).code == -9
        with pytest.raises(TransportError, match="cannot run no-such-command"):
            t.run(["no-such-command"])
        data = os.urandom(3_000_000)
        t.put("run/node", {"a/blob": RemoteFile(data, 0o640), "new\nline": RemoteFile(b"x")}, ["empty"])
        t.put("run/node", {"small": RemoteFile(b"\0small")})
        digest = t.run(["sha256sum", "run/node/a/blob"]).out.split()[0].decode()
        assert digest == hashlib.sha256(data).hexdigest()
        assert t.rename("run/node/small", "run/node/s\n2")
        assert not t.rename("run/node/small", "run/node/small2")
        assert t.run(["head", "-c", "3"], stdin=data).out == data[:3], "who reads only a little of it is no error"
    # another controller, which knows run and pool alone
    other = make(time_s=600)
    assert {x.id for x in other.source.list()} == {x.id for x in leases}
    assert other.connect(leases[0]).run(["cat", "run/node/s\n2"]).out == b"\0small"
    pool.source.release([x.id for x in leases])
    assert [pool.ended(x).cause for x in leases] == [EndCause.RELEASED] * 2
    assert not slurm.jobs()
    pool.source.release([*(x.id for x in leases), "99999", "99999_3"])
    with pytest.raises(TransportError):
        pool.connect(leases[0])


def runs(t: ExecTransport, mark: str) -> bool:
    """Return whether a command with this number runs there; the brackets keep it from finding itself."""
    return t.run(["pgrep", "-f", f"[{mark[0]}]{mark[1:]}"]).code == 0


def test_a_stream_of_many_lines_is_whole_and_ends_with_its_reader(make: Callable[..., Pool]) -> None:
    pool = make()
    pool.source.ask(1)
    t = pool.connect(pool.ready()[0])
    channel = t.open(["sh", "-c", 'seq 1 20000 | awk \'{printf "%s %090d\\n",$1,$1}\'; read -r line; echo "$line"'])
    text = bytearray()
    while text.count(b"\n") < 20000:
        text += channel.read(1 << 16)
    assert [int(line.split()[0]) for line in text.splitlines()] == list(range(1, 20001))
    channel.write(b"said\n")
    assert channel.read(100) == b"said\n"
    assert channel.read(100) == b""
    channel.close()
    assert "ended with code 0" in channel.error()
    mark = f"7{secrets.randbelow(10**8):08}"
    stream = t.open(["sh", "-c", f"echo there; cat; exec sleep {mark}"])
    assert stream.read(100) == b"there\n"
    waiting = threading.Thread(target=stream.read, args=(100,))
    waiting.start()
    stream.close()
    waiting.join()
    wait_until(lambda: not runs(t, mark), "the step is gone with its reader")


def test_a_command_that_takes_too_long_leaves_nothing_and_others_go_on(make: Callable[..., Pool]) -> None:
    pool = make()
    pool.source.ask(1)
    t = pool.connect(pool.ready()[0])
    mark = f"7{secrets.randbelow(10**8):08}"

    def sleep() -> None:
        with pytest.raises(SlowError, match="sleep took longer than 5 s"):
            t.run(["sleep", mark], timeout=5.0)

    slow = threading.Thread(target=sleep)
    slow.start()
    for i in range(50):
        assert t.run(["echo", str(i)]).out == f"{i}\n".encode()
    slow.join()
    wait_until(lambda: not runs(t, mark), "it is gone")


def deploy(t: ExecTransport, **env: str) -> ProcessEngine:
    """A node folder with workers of the recorded tuner, in the lease."""
    plan = NodePlan(t.node, "r1/n1", ("0", "1"), "exec", "process", sys.executable, {}, {})
    t.put("r1/n1", node_files(plan, "r1", "replay", {}, 600.0), node_folders(plan.slots))
    engine = ProcessEngine(t, "r1/n1")
    engine.start(env=env)
    return engine


def workers(folder: Path) -> list[int]:
    """Their process ids, once they have records."""
    node = folder / "r1/n1"
    events = [node / "events" / f"{slot}.jsonl" for slot in ("0", "1")]
    wait_until(lambda: all(x.exists() and x.stat().st_size for x in events), "the workers have records")
    return [int((node / "claimed" / slot / "lock").read_text()) for slot in ("0", "1")]


def test_workers_end_with_a_cancelled_lease_and_their_rows_come_back(
    slurm: SlurmCluster, make: Callable[..., Pool], tmp_path: Path
) -> None:
    secret = secrets.token_hex(16)
    pool = make()
    pool.source.ask(2)
    lost, kept = pool.ready(2)
    engines = {x.id: deploy(pool.connect(x), TOKEN=secret) for x in (lost, kept)}
    folder = tmp_path / "work/leases" / lost.id
    pids = workers(folder)
    for pid in pids:
        assert f"TOKEN={secret}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    # not even Slurm's own files know it
    for place in (tmp_path, slurm.folder):
        assert not [p for p in place.rglob("*") if p.is_file() and secret.encode() in p.read_bytes()]
    slurm.run("scancel", lost.id)
    end = pool.ended(lost)
    assert (end.cause, end.why) == (EndCause.CANCELLED, "CANCELLED")
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    data = wait_until(lambda: pool.source.leftovers(lost.id), "its rows are there")
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert {f"r1/n1/events/{slot}.jsonl" for slot in ("0", "1")} < set(tar.getnames())
    assert not folder.exists()
    with pytest.raises(TransportError):
        engines[lost.id].list()
    assert {w.state for w in engines[kept.id].list()} == {"running"}
    assert pool.source.leftovers(kept.id) is None


def test_a_lease_without_a_controller_ends_when_its_work_is_done(
    slurm: SlurmCluster, make: Callable[..., Pool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(holder, "IDLE_S", 4)
    pool = make()
    pool.source.ask(1)
    lease = pool.ready()[0]
    t = pool.connect(lease)
    deploy(t)
    workers(tmp_path / "work/leases" / lease.id)
    (tmp_path / "work/leases" / lease.id / "r1/n1/control/stop").write_text("drain\n")
    pool.close()  # nobody is there any more
    other = make()
    assert (other.ended(lease).cause, other.ended(lease).why) == (EndCause.RELEASED, "COMPLETED")
    assert other.source.leftovers(lease.id)


def test_why_leases_end(slurm: SlurmCluster, make: Callable[..., Pool], tmp_path: Path) -> None:
    """The time limit, a job of higher priority, and the death of a node, at the same time."""
    pool = make(time_s=120)
    pool.source.ask(3)
    leases = {x.host: x for x in pool.ready(3)}
    pids = {}
    for host, lease in leases.items():
        deploy(pool.connect(lease))
        pids[host] = workers(tmp_path / "work/leases" / lease.id)
    slurm.kill_node(slurm.node("g3"))
    slurm.run("sbatch", f"--partition={URGENT}", "--nodelist=g2", "--exclusive", "--wrap", "sleep 1", "-o", "/dev/null")
    ends = {host: pool.ended(lease) for host, lease in leases.items()}
    assert {host: x.cause for host, x in ends.items()} == {
        "g1": EndCause.TIME_LIMIT, "g2": EndCause.PREEMPTED, "g3": EndCause.NODE_FAILURE,
    }  # fmt: skip
    assert ends["g3"].why.startswith("NODE_FAIL")
    assert not [pid for found in pids.values() for pid in found if Path(f"/proc/{pid}").exists()]
    # before its time was up it closed its books
    data = pool.source.leftovers(leases["g1"].id)
    assert data is not None
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        events = tar.extractfile("r1/n1/events/0.jsonl")
        assert events is not None
        assert b'"worker_stopped"' in events.read().splitlines()[-1]
    assert pool.source.leftovers(leases["g3"].id) is None


def test_steps_whose_srun_was_killed_are_started_again(make: Callable[..., Pool]) -> None:
    pool = make()
    pool.source.ask(1)
    t = pool.connect(pool.ready()[0])
    stream = t.open(["sh", "-c", "echo there; cat"])
    assert stream.read(100) == b"there\n"
    ours = Path(f"/proc/{os.getpid()}")
    children = {int(pid) for task in (ours / "task").iterdir() for pid in (task / "children").read_text().split()}
    sruns = [pid for pid in children if Path(f"/proc/{pid}/comm").read_text() == "srun\n"]
    assert len(sruns) == 2
    for pid in sruns:
        os.kill(pid, signal.SIGKILL)
    assert stream.read(100) == b""
    stream.close()
    assert stream.error() == "ended with code -9"
    with pytest.raises(UnreachableError):
        t.run(["hostname"])
    assert t.run(["hostname"]).code == 0
    t.connect()
    assert t.run(["hostname"]).code == 0


def test_a_job_gets_nothing_of_our_environment_but_what_slurm_needs(
    make: Callable[..., Pool], monkeypatch: pytest.MonkeyPatch, slurm: SlurmCluster
) -> None:
    monkeypatch.setenv("OUR_TOKEN", token := secrets.token_hex(16))
    pool = make()
    pool.source.ask(1)
    t = pool.connect(pool.ready()[0])
    assert token not in t.run(["env"]).out.decode()
    assert token not in t.run(["sh", "-c", "cat /proc/$(cat ready)/environ"]).out.decode()
    assert not [p for p in slurm.folder.rglob("*") if p.is_file() and token.encode() in p.read_bytes()]


def test_a_requeued_job_is_another_lease(slurm: SlurmCluster, make: Callable[..., Pool]) -> None:
    pool = make(extra=("--requeue",))
    pool.source.ask(1)
    lease = pool.ready()[0]
    deploy(pool.connect(lease))
    slurm.run("scontrol", "requeue", lease.id)
    again = wait_until(lambda: pool.lease(f"{lease.id}r1"), "it is queued again")
    assert again.state is QUEUED
    before = pool.lease(lease.id)
    assert before is not None
    assert (before.state, before.cause) == (ENDED, EndCause.PREEMPTED)
    pool.source.release([lease.id])
    slurm.begin_soon(lease.id)
    (second,) = pool.ready()
    assert second.id == f"{lease.id}r1"
    t = pool.connect(second)
    assert t.run(["sh", "-c", "pwd; ls"]).out.decode().splitlines()[0].endswith(second.id)
    pool.source.release([second.id])
    assert pool.ended(second).cause is EndCause.RELEASED


def test_two_leases_share_a_host(slurm: SlurmCluster, make: Callable[..., Pool]) -> None:
    pool = make(gpus=GPUS // 2, extra=("--nodelist=g2",))
    pool.source.ask(2)
    one, two = pool.ready(2)
    assert one.host == two.host == "g2"
    devices = [pool.connect(x).run(["sh", "-c", "echo $ROCR_VISIBLE_DEVICES"]).out for x in (one, two)]
    assert sorted(devices) == [b"0\n", b"1\n"]


def test_a_lease_that_waits_is_quoted_and_given_back(slurm: SlurmCluster, make: Callable[..., Pool]) -> None:
    pool = make(time_s=300)
    pool.source.ask(4)
    pool.ready(3)
    waiting = wait_until(
        lambda: [x for x in pool.source.list() if x.state is QUEUED and "expected start" in x.why], "it is queued"
    )
    assert waiting[0].why.startswith(("Resources, expected start", "Priority, expected start"))
    assert waiting[0].host == ""
    pool.source.release([waiting[0].id])
    assert pool.ended(waiting[0]).cause is EndCause.RELEASED
    slurm.run("scontrol", "update", "NodeName=g[1-3]", "State=DRAIN", "Reason=test")
    assert len(pool.ready(3)) == 3, "a drained node finishes what it has"
    assert "3 draining" in str([str(f) for f in make().source.check()])


def test_through_a_login_node(slurm: SlurmCluster, make: Callable[..., Pool], tmp_path: Path) -> None:
    environment = " ".join(f"{k}={v}" for k, v in slurm.environment.items())
    with light_fleet("root") as fleet:
        login = fleet.add(f"SetEnv {environment} {NO_BASHRC}")

        def via(name: str) -> SshTransport:
            return SshTransport(name, login.address, port=login.port, config=fleet.config)

        pool = make(via=via)
        pool.source.ask(1)
        lease = pool.ready()[0]
        t = pool.connect(lease)
        assert t.run(["hostname"]).out.decode().strip() == lease.host
        engine = deploy(t)
        workers(tmp_path / "work/leases" / lease.id)
        login.drop()
        with pytest.raises(UnreachableError):
            t.run(["hostname"])
        with pytest.raises(UnreachableError):
            pool.source.list()
        assert pool.lease(lease.id) == lease
        t.connect()
        assert {w.state for w in engine.list()} == {"running"}
        pool.source.release([lease.id])
        pool.ended(lease)
        assert pool.source.leftovers(lease.id)
        pool.close()


@pytest.mark.soak
def test_a_scheduler_that_does_not_answer_is_unreachable_and_leases_go_on(
    slurm: SlurmCluster, make: Callable[..., Pool]
) -> None:
    pool = make()
    pool.source.ask(1)
    lease = pool.ready()[0]
    t = pool.connect(lease)
    slurm.stop_controller()
    with pytest.raises(UnreachableError, match="the scheduler does not answer"):
        pool.source.list()
    assert t.run(["hostname"]).out.decode().strip() == lease.host
    with pytest.raises(UnreachableError, match="the scheduler does not answer"):
        pool.source.ask(1)
    slurm.start_controller()
    assert [x.id for x in pool.source.list()] == [lease.id]


def test_what_the_scheduler_says_without_a_lease(slurm: SlurmCluster, make: Callable[..., Pool]) -> None:
    assert [f.level for f in make(gpus=GPUS, time_s=3600).source.check()] == ["ok", "ok"]
    for request, about, words in (
        ({"partition": "nosuch"}, "partition", r"there is no partition 'nosuch': `partition:` may be gpu, urgent"),
        ({"gpus": GPUS + 1}, "gpus", f"no node of the partition gpu has {GPUS + 1} GPUs: {GPUS} are the most"),
        ({"time_s": 86400.0}, "time", "the partition gpu allows 720 minutes, and `time:` is 1440"),
        ({"extra": ("--constraint=nosuch",)}, "request", "nvalid feature"),
    ):
        findings = make(**request).source.check()
        assert findings[-1].level == "unusable"
        assert findings[-1].about == about
        assert words in str(findings[-1])
    with pytest.raises(TransportError, match=r"sbatch: .*nvalid partition"):
        make(partition="nosuch").source.ask(1)
    assert not slurm.jobs()
