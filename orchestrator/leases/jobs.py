"""Jobs of Slurm as leases, apart from any I/O: options of the request, and the meaning of what sinfo and squeue print.

`squeue -O` is the format that all versions have; `--json` prints every job of the cluster in 22.05, whatever was to be
selected.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from orchestrator.engines import OK, UNUSABLE, WARNING, Finding
from orchestrator.leases.base import EndCause, Lease, LeaseState

TERM_S = 60
"""Seconds before its time limit at which a lease gets the signal to end."""
ENDED_BY_TERM = str(143 << 8)
"""Status of a holder after a SIGTERM that was for it alone: the one before the time limit."""
CLOCK_S = 10.0
"""A job that is COMPLETING and ends later than in so many seconds is being queued again."""
LEAST_MEMORY_MB = 1024
"""A node with less has no memory configured."""
SINFO = "%P|%a|%l|%D|%T|%c|%m|%G"
"""Format of sinfo."""
FIELDS = (
    "ArrayJobID", "ArrayTaskID", "JobID", "State", "Reason", "NodeList", "StartTime", "EndTime", "RestartCnt",
    "PreemptTime", "exit_code", "NumCPUs",
)  # fmt: skip
SQUEUE = ",".join(f"{field}:|" for field in FIELDS)
"""Format of squeue."""
QUEUED = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
RUNNING = {"RUNNING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"}
CAUSES = {
    "COMPLETED": EndCause.RELEASED,
    "CANCELLED": EndCause.CANCELLED,
    "REVOKED": EndCause.CANCELLED,
    "PREEMPTED": EndCause.PREEMPTED,
    "TIMEOUT": EndCause.TIME_LIMIT,
    "DEADLINE": EndCause.TIME_LIMIT,
    "NODE_FAIL": EndCause.NODE_FAILURE,
    "BOOT_FAIL": EndCause.NODE_FAILURE,
    "OUT_OF_MEMORY": EndCause.OUT_OF_MEMORY,
    "FAILED": EndCause.FAILED,
}
COMPLETING_CAUSES = {
    "TimeLimit": EndCause.TIME_LIMIT,
    "NodeDown": EndCause.NODE_FAILURE,
    "OutOfMemory": EndCause.OUT_OF_MEMORY,
}
"""Cause of an end by the job's reason: while it is COMPLETING, squeue does not show its final state."""


@dataclass(frozen=True, slots=True)
class SlurmPool:
    """Request for the leases of a pool."""

    run: str
    pool: str
    partition: str = ""
    """"": the cluster's default."""
    account: str = ""
    time_s: float | None = None
    """Time limit of a lease; None: the partition's default."""
    gpus: int | None = None
    """GPUs of a lease; None: whole nodes."""
    extra: tuple[str, ...] = ()
    """Further options of sbatch; they win over ours."""
    workdir: str = ""
    """Folder on the nodes, absolute or beginning with ~/; "": one of the user's own in $TMPDIR."""

    @property
    def job(self) -> str:
        """Name of its jobs."""
        return f"gemmfleet-{self.run}-{self.pool}"


@dataclass(frozen=True, slots=True)
class NodeKind:
    """Nodes of a partition that are alike."""

    partition: str
    is_default: bool
    is_up: bool
    max_s: float
    """Longest time limit in seconds; infinity for none."""
    count: int
    state: str
    cpus: int
    memory_mb: int
    gpus: int
    """GPUs of each."""


@dataclass(frozen=True, slots=True)
class Job:
    """A lease and its job."""

    lease: Lease
    number: str
    cpus: int


# --- the request ------------------------------------------------------------------------------------------------------


def options(pool: SlurmPool, kinds: Sequence[NodeKind]) -> Iterator[str]:
    """Options of sbatch. `kinds`: nodes of the partition."""
    yield from (f"--job-name={pool.job}", "--nodes=1", "--ntasks=1", "--no-requeue", "--output=/dev/null", "--chdir=/")
    yield f"--signal=B:TERM@{TERM_S}"
    yield from _share(pool.gpus, kinds)
    if pool.partition:
        yield f"--partition={pool.partition}"
    if pool.account:
        yield f"--account={pool.account}"
    if pool.time_s is not None:
        yield f"--time={math.ceil(pool.time_s / 60)}"
    yield from pool.extra


def _share(gpus: int | None, kinds: Sequence[NodeKind]) -> Iterator[str]:
    """Options for a whole node, or for so many of its GPUs with their share of its CPUs and memory."""
    fit = [k for k in kinds if k.gpus >= (gpus or 1)]
    if gpus is None or not fit or gpus == max(k.gpus for k in fit):
        yield from ("--exclusive", "--mem=0")
        gpus = gpus or min((k.gpus for k in fit), default=None)
    else:
        yield f"--cpus-per-task={max(1, min(k.cpus * gpus // k.gpus for k in fit))}"
        memory = min(k.memory_mb * gpus // k.gpus for k in fit)
        if memory >= LEAST_MEMORY_MB:
            yield f"--mem={memory}"
    if gpus:
        yield f"--gres=gpu:{gpus}"


def findings(pool: SlurmPool, kinds: Sequence[NodeKind]) -> Iterator[Finding]:
    """Findings on a request, by the nodes of its partition."""
    name, most, longest = kinds[0].partition, max(k.gpus for k in kinds), max(k.max_s for k in kinds)
    states = ", ".join(f"{k.count} {k.state}" for k in kinds)
    if any(not re.match("down|drain|fail|maint", k.state) for k in kinds):
        yield Finding(OK, "nodes", f"{name}: {states}; {most} GPUs a node at most")
    else:
        yield Finding(WARNING, "nodes", f"no node of the partition {name} works now: {states}", "leases would wait")
    if not any(k.is_up for k in kinds):
        yield Finding(UNUSABLE, "partition", f"the partition {name} is down", "wait, or name another `partition:`")
    if pool.gpus is not None and pool.gpus > most:
        what = f"no node of the partition {name} has {pool.gpus} GPUs: {most} are the most"
        yield Finding(UNUSABLE, "gpus", what, f"set `gpus:` to {most} at most" if most else "name another `partition:`")
    if pool.time_s is not None and pool.time_s > longest:
        what = f"the partition {name} allows {longest / 60:g} minutes, and `time:` is {pool.time_s / 60:g}"
        yield Finding(UNUSABLE, "time", what, "set a shorter `time:`")


# --- what Slurm prints ------------------------------------------------------------------------------------------------


def kinds_of(printed: bytes) -> list[NodeKind]:
    """Kinds of nodes in the output of sinfo (SINFO)."""
    rows = (line.split("|") for line in printed.decode("utf-8", "replace").splitlines())
    return [_kind(*row) for row in rows if len(row) == 8]


def jobs_of(printed: bytes) -> list[Job]:
    """Leases in the output of squeue (SQUEUE), oldest first."""
    rows = [line.split("|") for line in printed.decode("utf-8", "replace").splitlines()]
    rows.sort(key=lambda row: [int(cell) if cell.isdigit() else 0 for cell in row[:2]])
    return [job for row in rows for job in _jobs(*row[: len(FIELDS)])]


def _kind(name: str, up: str, limit: str, count: str, state: str, cpus: str, memory: str, gres: str) -> NodeKind:
    """A row of sinfo."""
    gpus = sum(int(n) for n in re.findall(r"\bgpu(?::[^:,()]+)?:(\d+)", gres))
    nodes, cpu_count, megabytes = (int(m[0]) if (m := re.match(r"\d+", n)) else 0 for n in (count, cpus, memory))
    default = name.endswith("*")
    return NodeKind(name.rstrip("*"), default, up == "up", _seconds(limit), nodes, state, cpu_count, megabytes, gpus)


def _seconds(limit: str) -> float:
    """Seconds of Slurm's [days-][hours:]minutes:seconds; infinity for anything else."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", limit)
    if match is None:
        return math.inf
    days, hours, minutes, seconds = (int(g or 0) for g in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _jobs(
    array: str, task: str, number: str, state: str, reason: str, host: str, start: str, end: str, restarts: str,
    preempted: str, code: str, cpus: str,
) -> Iterator[Job]:  # fmt: skip
    """Leases of a row of squeue (FIELDS): the job's, and those before it was queued again."""
    base = f"{array}_{task}" if task.isdigit() else number
    last = int(restarts) if restarts.isdigit() else 0
    ids = [base, *(f"{base}r{n + 1}" for n in range(last))]
    for lease_id in ids[:-1]:
        words = "Slurm has queued this job again"
        yield Job(Lease(lease_id, LeaseState.ENDED, why=words, cause=EndCause.PREEMPTED), "", 1)
    given = reason if reason not in ("None", "") else ""
    again = state == "COMPLETING" and last and not (end.isdigit() and float(end) < time.time() + CLOCK_S)
    if state in QUEUED or again:
        lease = Lease(ids[-1], LeaseState.QUEUED, why=(given or state) + _expected(start))
    elif state in RUNNING:
        words = "" if state == "RUNNING" else state
        lease = Lease(ids[-1], LeaseState.READY, host, words, float(end) if end.isdigit() else None)
    else:
        words = f"{state} ({given})" if given else state
        lease = Lease(ids[-1], LeaseState.ENDED, host, words, cause=_cause(state, reason, preempted, code))
    yield Job(lease, number, int(cpus) if cpus.isdigit() else 1)


def _expected(start: str) -> str:
    """Words on the start that the scheduler expects, in epoch seconds where it does."""
    if not start.isdigit():
        return ""
    at = time.localtime(int(start))
    today = at[:3] == time.localtime()[:3]
    return f", expected start {time.strftime('%H:%M' if today else '%Y-%m-%d %H:%M', at)}"


def _cause(state: str, reason: str, preempted: str, code: str) -> EndCause:
    if preempted.isdigit() and state != "COMPLETED":
        return EndCause.PREEMPTED
    if state in ("COMPLETING", "FAILED") and code == ENDED_BY_TERM:
        return EndCause.TIME_LIMIT
    if state == "COMPLETING":
        return COMPLETING_CAUSES.get(reason, EndCause.CANCELLED)
    return CAUSES.get(state, EndCause.UNKNOWN)
