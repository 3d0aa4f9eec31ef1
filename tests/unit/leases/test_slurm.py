"""Requests to Slurm's commands and the meaning of their answers; a real Slurm is in tests/integration/test_slurm.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from orchestrator.errors import TransportError, UnreachableError
from orchestrator.inventory.load import load_inventory
from orchestrator.inventory.model import Node
from orchestrator.leases.lease import EndCause, Lease, LeaseState
from orchestrator.leases.pools import check_pools, pools_of
from orchestrator.leases.slurm import SlurmSource
from orchestrator.transport.base import Completed
from tests.support.files import write_program

SINFO = """\
gpu*|96|1000000|gpu:mi300x:8(S:0-1),nic:2|1-12:00:00
gpu*|64|500000|gpu:4|1-12:00:00
cpu|32|1|(null)|infinite
old|8|4000|gpu:2|60:00
"""
QUEUED, READY, ENDED = LeaseState


class Login:
    """A login node whose commands give planned answers."""

    def __init__(self) -> None:
        self.answers = {"sinfo": Completed(0, SINFO.encode(), b"")}
        self.calls: list[list[str]] = []
        self.scripts: list[bytes] = []

    def connect(self) -> None: ...

    def close(self) -> None: ...

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float = 60.0) -> Completed:
        words = [*argv]
        while words[0] in ("sh", "env"):
            words = words[4:] if words[0] == "sh" else words[2:]
        self.calls.append(words)
        self.scripts.append(stdin)
        return self.answers.get(words[0], Completed(0, b"17\n", b""))

    def squeue(self, *rows: str) -> None:
        lines = "".join(row + "|\n" for row in rows)
        self.answers["squeue"] = Completed(0, lines.encode(), b"")


@pytest.fixture
def login() -> Login:
    return Login()


def source(login: Login, **request: object) -> SlurmSource:
    pool = Node.model_validate({"name": "p", "lease": "slurm", **request})
    return SlurmSource("r1", pool, "~/out", lambda name: login)  # type: ignore[arg-type,return-value]


def test_the_output_of_holders_is_removed_once_all_leases_have_ended(login: Login) -> None:
    login.squeue("17|N/A|17|RUNNING|None|g2|1000|2000|0||0:0|1")
    with pytest.raises(TransportError, match="job 17 has not ended, so its output stays"):
        source(login).forget()
    assert login.calls[-1][0] == "squeue"
    login.squeue()
    source(login).forget()
    assert login.calls[-1] == ["rm", "-rf", "--"]


WHOLE = ("--exclusive", "--mem=0")


@pytest.mark.parametrize(
    ("request_", "n", "avoid", "options"),
    [
        ({}, 1, (), [*WHOLE, "--gres=gpu:4", "--time=240"]),  # what all its nodes with GPUs have
        ({"gpus": 4}, 1, (), ["--cpus-per-task=48", "--mem=500000", "--gres=gpu:4", "--time=240"]),
        ({"gpus": 1, "partition": "old"}, 1, (),
         ["--cpus-per-task=4", "--mem=2000", "--gres=gpu:1", "--partition=old", "--time=240"]),
        ({"gpus": 8, "time": "2m", "account": "k", "extra": ("--constraint=x", "--mem=9G")}, 64, ("b2", "a1"),
         [*WHOLE, "--gres=gpu:8", "--account=k", "--time=2", "--constraint=x", "--mem=9G", "--array=0-63",
          "--exclude=a1,b2"]),
        ({"extra": ("--exclude=z9,y[1-3]",)}, 1, ("a1",),
         [*WHOLE, "--gres=gpu:4", "--time=240", "--exclude=z9,y[1-3]", "--exclude=a1,z9,y[1-3]"]),
    ],
)  # fmt: skip
def test_what_is_asked_of_sbatch(
    login: Login, request_: dict[str, object], n: int, avoid: tuple[str, ...], options: list[str]
) -> None:
    """A whole node is exclusive and a part gets its share; several are one array; the user's options win."""
    source(login, **request_).ask(n, avoid)
    assert login.calls[-1] == [
        "sbatch", "--job-name=gemmfleet-r1-p", "--nodes=1", "--ntasks=1", "--no-requeue", "--output=/dev/null",
        "--chdir=/", "--signal=B:TERM@60", *options,
    ]  # fmt: skip
    assert login.scripts[-1].startswith(b"#!/bin/sh\n")


@pytest.mark.parametrize(
    ("state", "reason", "preempted", "status", "cause"),
    [
        ("COMPLETED", "None", "N/A", "0", EndCause.RELEASED),
        ("CANCELLED", "None", "N/A", "0", EndCause.PREEMPTED),
        ("FAILED", "NonZeroExitCode", "1000", "36608", EndCause.PREEMPTED),
        ("TIMEOUT", "TimeLimit", "N/A", "0", EndCause.TIME_LIMIT),
        ("FAILED", "NonZeroExitCode", "N/A", "36608", EndCause.TIME_LIMIT),
        ("FAILED", "NonZeroExitCode", "N/A", "256", EndCause.FAILED),
        ("NODE_FAIL", "NodeDown", "N/A", "0", EndCause.FAILED),
        ("OUT_OF_MEMORY", "OutOfMemory", "N/A", "0", EndCause.FAILED),
        ("COMPLETING", "None", "N/A", "0", EndCause.PREEMPTED),
        ("COMPLETING", "TimeLimit", "N/A", "0", EndCause.TIME_LIMIT),
        ("COMPLETING", "NodeDown", "N/A", "0", EndCause.FAILED),
        ("SOMETHING_NEW", "None", "N/A", "0", EndCause.FAILED),
    ],
)
def test_why_a_lease_ended(login: Login, state: str, reason: str, preempted: str, status: str, cause: EndCause) -> None:
    login.squeue(f"9|N/A|9|{state}|{reason}|g2|1000|2000|0|{preempted}|{status}|1")
    (lease,) = source(login).list()
    assert (lease.state, lease.cause) == (ENDED, cause)
    assert lease.why == (state if reason == "None" else f"{state} ({reason})")


def test_a_check_leaves_nothing_where_sbatch_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, does in (("sinfo", "printf 'gpu*|96|1000000|gpu:8|1:00:00\\n'"), ("sbatch", "cat >/dev/null; echo fine")):
        write_program(tmp_path / name, f"#!/bin/sh\n{does}\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "inv.yaml").write_text("nodes: {p: {lease: slurm, gpus: 8, time: 1h}}\n")
    inventory = load_inventory(tmp_path / "inv.yaml")
    assert [f.what for r in check_pools(inventory, "check") for f in r.findings] == ["fine"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["inv.yaml", "sbatch", "sinfo"]
    late = "sbatch: Job 7 to start at 2099-01-01T00:00:00 using 8 processors on nodes g1 in partition gpu"
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\ncat >/dev/null; echo '{late}'\n")
    (report,) = check_pools(inventory, "check")
    assert report.state == "warning"
    assert report.usable
    assert "to start at 2099" in report.problems()[0]
    pools_of(inventory, "r1")[0].source.ask(1)
    assert (tmp_path / ".gemmfleet/leases/r1/here").exists(), "a run has its folder"


def test_a_scheduler_that_is_away_and_one_that_refuses(login: Login) -> None:
    s = source(login)
    for name, words in (
        ("squeue", b"slurm_load_jobs error: Unable to contact slurm controller (connect failure)"),
        ("sbatch", b"sbatch: error: Batch job submission failed: Invalid account"),
        ("scancel", b"scancel: error: Kill job error on job id 99: Invalid job id specified"),
    ):
        login.answers[name] = Completed(1, b"", words)
    with pytest.raises(UnreachableError, match=r"the scheduler does not answer: .*connect failure"):
        s.list()
    with pytest.raises(TransportError, match="sbatch: Batch job submission failed: Invalid account") as refused:
        s.ask(1)
    assert not isinstance(refused.value, UnreachableError)
    assert "Invalid account" in str(s.check()[-1])
    login.answers["sinfo"] = Completed(0, b"", b"")
    assert "no default partition" in str(source(login).check()[0])
    s.release([Lease("99", QUEUED)])
