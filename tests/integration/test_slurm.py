"""Leases on a real Slurm: requested, reached, lost in every way, given back."""

from __future__ import annotations

import contextlib
import io
import secrets
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from orchestrator.engine.process import ProcessEngine
from orchestrator.errors import TransportError, UnreachableError
from orchestrator.inventory.model import Node
from orchestrator.leases.lease import EndCause, Lease, LeaseState
from orchestrator.leases.slurm import SlurmSource
from orchestrator.machines.node_files import node_files, node_folders
from orchestrator.machines.node_plan import NodePlan
from orchestrator.transport.base import RemoteFile, connected
from orchestrator.transport.exec import ExecTransport
from orchestrator.transport.ssh import SshTransport
from tests.integration.slurm import GPUS, PARTITION, SlurmCluster
from tests.integration.sshd import NO_BASHRC, light_fleet
from tests.waiting import wait_until

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("slurm")]

QUEUED, READY, ENDED = LeaseState


class Pool:
    """A source with what it opened; its node folders lie in `leases`."""

    def __init__(self, folder: Path, via: Callable[[str], SshTransport] | None = None, **request: object) -> None:
        self.leases = folder / "work/leases"
        values = {"name": "p", "lease": "slurm", "partition": PARTITION, "workdir": str(folder / "work"), **request}
        self.source = SlurmSource(folder.name, Node.model_validate(values), str(folder / "out"), via)
        self._stack = contextlib.ExitStack()
        self.close = self._stack.close
        self._stack.callback(self.source.close)

    def lease(self, id: str) -> Lease | None:
        return next((x for x in self.source.list() if x.id == id), None)

    def ready(self, count: int = 1) -> list[Lease]:
        """Wait for this many ready leases and return them."""

        def look() -> list[Lease]:
            return [x for x in self.source.list() if x.state is READY]

        wait_until(lambda: len(look()) >= count, f"{count} leases are ready")
        return look()

    def asked(self, count: int = 1) -> list[Lease]:
        self.source.ask(count)
        return self.ready(count)

    def ended(self, lease: Lease) -> Lease:
        """The same lease once it has ended, and its cause is known for sure."""
        found = wait_until(
            lambda: (x := self.lease(lease.id)) and x.state is ENDED and "COMPLETING" not in x.why and x, "it ended"
        )
        assert isinstance(found, Lease)
        return found

    def connect(self, lease: Lease) -> ExecTransport:
        return self._stack.enter_context(connected(self.source.transport(lease, f"node-{lease.id}")))

    def workers(self, lease: Lease) -> list[int]:
        """Their process ids, once they have records."""
        node = self.leases / lease.id / "r1/n1"
        events = [node / "events" / f"{slot}.jsonl" for slot in ("0", "1")]
        wait_until(lambda: all(x.exists() and x.stat().st_size for x in events), "the workers have records")
        return [int((node / "claimed" / slot / "lock").read_text()) for slot in ("0", "1")]


Make = Callable[..., Pool]


@pytest.fixture
def make(slurm: SlurmCluster, tmp_path: Path) -> Iterator[Make]:
    with contextlib.ExitStack() as stack:
        yield lambda **request: stack.enter_context(contextlib.closing(Pool(tmp_path, **request)))


def deploy(t: ExecTransport, **env: str) -> ProcessEngine:
    """A node folder with workers of the recorded tuner, in the lease."""
    plan = NodePlan(
        t.node, "r1/n1", ("0", "1"), "exec", "process", sys.executable, {}, {}, source=Node(name="n1", lease="slurm")
    )
    t.put("r1/n1", node_files(plan, "r1", "replay", {}, 600.0), node_folders(plan.slots))
    engine = ProcessEngine(t, "r1/n1")
    engine.start(env=env)
    return engine


def test_leases_are_asked_for_used_and_given_back(
    slurm: SlurmCluster, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Halves of one host, exactly the granted devices; another controller finds them and what lies in their folders."""
    monkeypatch.setenv("OUR_TOKEN", token := secrets.token_hex(16))
    pool = make(time="10m", gpus=GPUS // 2)
    assert pool.source.list() == []
    pool.source.ask(2, avoid=["g1", "g3"])
    leases = pool.ready(2)
    assert {x.host for x in leases} == {"g2"}
    devices = set()
    assert all(x.ends_at and 500 < x.ends_at - time.time() <= 600 for x in leases)
    for lease in leases:
        t = pool.connect(lease)
        done = t.run(["sh", "-c", "hostname; echo $ROCR_VISIBLE_DEVICES"])
        assert done.code == 0
        devices.add(done.out)
        # of our environment a job has what Slurm needs
        assert token not in t.run(["sh", "-c", "env; cat /proc/$(cat ready)/environ"]).out.decode()
        t.put("run/node", {"small": RemoteFile(b"\0small")})
    assert devices == {b"g2\n0\n", b"g2\n1\n"}
    assert not [p for p in slurm.folder.rglob("*") if p.is_file() and token.encode() in p.read_bytes()]
    # another controller, which knows run and pool alone
    other = make(time="10m")
    assert {x.id for x in other.source.list()} == {x.id for x in leases}
    assert other.connect(leases[0]).run(["cat", "run/node/small"]).out == b"\0small"
    pool.source.release(leases)
    assert [pool.ended(x).cause for x in leases] == [EndCause.PREEMPTED] * 2, "by whom, the scheduler does not say"
    assert not slurm.jobs()
    pool.source.release([*leases, Lease("99999", READY), Lease("99999_3", READY)])
    with pytest.raises(TransportError):
        pool.connect(leases[0])


def test_workers_end_with_a_lease_that_is_cancelled_or_out_of_time_and_their_rows_come_back(
    slurm: SlurmCluster, make: Make, tmp_path: Path
) -> None:
    secret = secrets.token_hex(16)
    pool = make(time="10m")
    late, lost, kept = pool.asked(3)
    engines = {x.id: deploy(pool.connect(x), TOKEN=secret) for x in (late, lost, kept)}
    pids = {x.id: pool.workers(x) for x in (late, lost)}
    slurm.run("scontrol", "update", f"jobid={late.id}", "TimeLimit=1")
    for pid in pids[lost.id]:
        assert f"TOKEN={secret}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    # not even Slurm's own files know it
    for place in (tmp_path, slurm.folder):
        assert not [p for p in place.rglob("*") if p.is_file() and secret.encode() in p.read_bytes()]
    slurm.run("scancel", lost.id)
    assert (pool.ended(lost).cause, pool.ended(lost).why) == (EndCause.PREEMPTED, "CANCELLED")
    assert pool.ended(late).cause is EndCause.TIME_LIMIT
    for lease in (lost, late):
        assert not [pid for pid in pids[lease.id] if Path(f"/proc/{pid}").exists()]
        data = wait_until(partial(pool.source.leftovers, pool.ended(lease)), "its rows are there")
        assert not (pool.leases / lease.id).exists()
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            events = tar.extractfile("r1/n1/events/0.jsonl")
            assert events is not None
            assert b'"worker_stopped"' in events.read().splitlines()[-1], "it closed its books"
        with pytest.raises(TransportError):
            engines[lease.id].list()
    assert {w.state for w in engines[kept.id].list()} == {"running"}
    assert pool.source.leftovers(kept) is None


def test_a_requeued_job_is_another_lease(slurm: SlurmCluster, make: Make) -> None:
    pool = make(extra=("--requeue",))
    (lease,) = pool.asked()
    deploy(pool.connect(lease))
    slurm.run("scontrol", "requeue", lease.id)
    again = wait_until(lambda: pool.lease(f"{lease.id}r1"), "it is queued again")
    assert again.state is QUEUED
    before = pool.lease(lease.id)
    assert before is not None
    assert (before.state, before.cause) == (ENDED, EndCause.PREEMPTED)
    pool.source.release([before])
    slurm.begin_soon(lease.id)
    (second,) = pool.ready()
    assert second.id == f"{lease.id}r1"
    assert pool.connect(second).run(["pwd"]).out.decode().strip().endswith(second.id)


def test_a_lease_that_waits_is_quoted_and_given_back(slurm: SlurmCluster, make: Make) -> None:
    pool = make(time="5m")
    pool.source.ask(4)
    pool.ready(3)
    words = ("Resources, expected start", "Priority, expected start")
    (waiting,) = wait_until(lambda: [x for x in pool.source.list() if x.why.startswith(words)], "it is queued")
    assert (waiting.state, waiting.host) == (QUEUED, "")
    pool.source.release([waiting])
    assert pool.ended(waiting).cause is EndCause.PREEMPTED


def test_through_a_login_node(slurm: SlurmCluster, make: Make) -> None:
    environment = " ".join(f"{k}={v}" for k, v in slurm.environment.items())
    with light_fleet("root") as fleet:
        login = fleet.add(f"SetEnv {environment} {NO_BASHRC}")
        pool = make(via=lambda name: SshTransport(name, login.address, port=login.port, config=fleet.config))
        (lease,) = pool.asked()
        t = pool.connect(lease)
        assert t.run(["hostname"]).out.decode().strip() == lease.host
        engine = deploy(t)
        pool.workers(lease)
        login.drop()
        with pytest.raises(UnreachableError):
            t.run(["hostname"])
        with pytest.raises(UnreachableError):
            pool.source.list()
        assert pool.lease(lease.id) == lease
        t.connect()
        assert {w.state for w in engine.list()} == {"running"}
        pool.source.release([lease])
        assert pool.source.leftovers(pool.ended(lease))
        pool.close()


def test_what_the_scheduler_says_without_a_lease(slurm: SlurmCluster, make: Make) -> None:
    assert [f.level for f in make(gpus=GPUS, time="1h").source.check()] == ["ok"]
    for request, about, words in (
        ({"partition": "nosuch"}, "partition", r"there is no partition 'nosuch': `partition:` may be gpu, urgent"),
        ({"gpus": GPUS + 1}, "gpus", f"no node of the partition gpu has {GPUS + 1} GPUs: {GPUS} are the most"),
        ({"time": "1d"}, "time", "the partition gpu allows 720 minutes, and `time:` is 1440"),
        ({"extra": ("--constraint=nosuch",)}, "request", "nvalid feature"),
    ):
        finding = make(**request).source.check()[-1]
        assert (finding.level, finding.about) == ("unusable", about)
        assert words in str(finding)
    with pytest.raises(TransportError, match=r"sbatch: .*nvalid partition"):
        make(partition="nosuch").source.ask(1)
    assert not slurm.jobs()
