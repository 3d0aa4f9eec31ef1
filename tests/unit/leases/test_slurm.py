"""Requests to Slurm's commands and the meaning of their answers; a real Slurm is in tests/integration/test_slurm.py."""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Sequence

import pytest

from orchestrator.errors import TransportError, UnreachableError
from orchestrator.leases.base import BEGIN, END, EndCause, Lease, LeaseState
from orchestrator.leases.slurm import SlurmPool, SlurmSource
from orchestrator.transport.base import Completed
from orchestrator.transport.local import LocalTransport

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
        self.outputs: list[Completed] = []
        """Answers to reading a holder's output."""

    def connect(self) -> None: ...

    def close(self) -> None: ...

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float = 60.0) -> Completed:
        words = [*argv]
        if words[-1].startswith("exec cat"):
            self.calls.append(words[-1:])
            return self.outputs.pop(0)
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
    return SlurmSource(SlurmPool("r1", "p", **request), "~/out", lambda name: login)  # type: ignore[arg-type,return-value]


WHOLE = ("--exclusive", "--mem=0")


@pytest.mark.parametrize(
    ("request_", "n", "avoid", "options"),
    [
        ({}, 1, (), [*WHOLE, "--gres=gpu:4"]),  # what all its nodes with GPUs have
        ({"gpus": 8}, 1, (), [*WHOLE, "--gres=gpu:8"]),
        ({"gpus": 4}, 1, (), ["--cpus-per-task=48", "--mem=500000", "--gres=gpu:4"]),
        ({"gpus": 1, "partition": "old"}, 1, (),
         ["--cpus-per-task=4", "--mem=2000", "--gres=gpu:1", "--partition=old"]),
        ({"partition": "cpu"}, 1, (), [*WHOLE, "--partition=cpu"]),
        ({"gpus": 8, "time_s": 90.0, "account": "k", "extra": ("--constraint=x", "--mem=9G")}, 64, ("b2", "a1"),
         [*WHOLE, "--gres=gpu:8", "--account=k", "--time=2", "--constraint=x", "--mem=9G", "--array=0-63",
          "--exclude=a1,b2"]),
        ({"extra": ("--exclude=z9,y[1-3]",)}, 1, ("a1",),
         [*WHOLE, "--gres=gpu:4", "--exclude=z9,y[1-3]", "--exclude=a1,z9,y[1-3]"]),
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


def test_jobs_are_leases_oldest_first(login: Login) -> None:
    soon = int(time.time()) + 3600
    login.squeue(
        "20|1|25|PENDING|Resources||N/A|N/A|0|N/A|0|1",
        f"20|0|24|PENDING|Priority||{soon}|{soon + 60}|0|N/A|0|1",
        "9|N/A|9|RUNNING|None|g2|1000|4600|0|N/A|0|96",
        "11|N/A|11|SUSPENDED|None|g3|1000|4600|0|N/A|0|96",
    )
    running, suspended, first, second = source(login).list()
    assert running == Lease("9", READY, "g2", "", 4600.0, way=("--jobid=9", "--cpus-per-task=96"))
    assert (suspended.state, suspended.why) == (READY, "SUSPENDED")
    assert (first.id, first.state) == ("20_0", QUEUED)
    assert first.why.startswith("Priority, expected start ")
    assert first.why.endswith(time.strftime("%H:%M", time.localtime(soon)))
    assert second == Lease("20_1", QUEUED, "", "Resources")


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


def test_a_job_that_is_queued_again_is_another_lease(login: Login) -> None:
    s = source(login)
    later = int(time.time()) + 3600
    for row, state in (
        (f"9|N/A|9|COMPLETING|None|g2|1000|{later}|1|N/A|0|1", QUEUED),
        ("9|N/A|9|COMPLETING|None|g2|N/A|N/A|1|N/A|0|1", QUEUED),
        ("9|N/A|9|PENDING|BeginTime||N/A|N/A|1|N/A|0|1", QUEUED),
        ("9|N/A|9|COMPLETING|None|g1|1000|2000|1|N/A|0|1", ENDED),
        (f"9|N/A|9|RUNNING|None|g1|1000|{later}|1|N/A|0|1", READY),
    ):
        login.squeue(row)
        before, now = s.list()
        assert (before.id, before.state, before.cause) == ("9", ENDED, EndCause.PREEMPTED)
        assert (now.id, now.state) == ("9r1", state)
    s.release([before])
    assert "scancel" not in [c[0] for c in login.calls], "its job goes on"
    s.release([now, Lease("12_3", QUEUED)])
    assert login.calls[-1] == ["scancel", "--quiet", "12_3", "9"]


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


def test_rows_are_those_of_the_run_and_awaited_while_the_job_ends(login: Login) -> None:
    rows = f"{BEGIN}\n{base64.b64encode(b'rows').decode()}\n{END}\n".encode()
    login.outputs = [Completed(1, b"", b"no such file"), Completed(0, b"words\n", b""), Completed(0, rows, b"")]
    s = source(login)
    login.squeue("9|N/A|9|COMPLETING|None|g1|1000|2000|0|N/A|0|1")
    assert s.leftovers(s.list()[0]) == b"rows"
    assert login.calls[-1] == ['exec cat -- "$HOME"/out/r1/9.out']
    login.outputs = [Completed(1, b"", b"no such file")]
    assert s.leftovers(Lease("8", ENDED)) is None, "one that is over has none"


def test_jobs_do_not_get_our_whole_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TOKEN_OF_OURS", "TMPDIR", "SLURM_JOB_ID", "SBATCH_ACCOUNT", "LC_TIME"):
        monkeypatch.setenv(name, "here")
    reached = SlurmSource(SlurmPool("r", "p"), "/out")._reach("n")
    assert isinstance(reached, LocalTransport)
    there = dict(line.split("=", 1) for line in reached.run(["env"]).out.decode().splitlines())
    assert {"SBATCH_ACCOUNT", "LC_TIME", "PATH"} <= there.keys() <= {*os.environ, "_", "PWD", "SHLVL"}
    assert not {"TOKEN_OF_OURS", "TMPDIR", "SLURM_JOB_ID"} & there.keys()
