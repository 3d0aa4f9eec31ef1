"""Leases of Slurm: one job or array task each, requested with sbatch and reached by steps of srun.

Commands run here or on a login node (`via`), at most four in any second. `squeue -O` is the format that all versions
have; `--json` prints every job of the cluster in 22.05, whatever was to be selected.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.engines import OK, UNUSABLE, WARNING, Finding
from orchestrator.errors import SlowError, TransportError, UnreachableError
from orchestrator.leases import holder
from orchestrator.leases.base import EndCause, Lease, LeaseState
from orchestrator.transport.base import Completed
from orchestrator.transport.exec.srun import SrunOpener
from orchestrator.transport.exec.transport import ExecTransport
from orchestrator.transport.local import LocalTransport
from orchestrator.transport.quoting import quote
from orchestrator.transport.ssh import SshTransport

COMMAND_S = 30.0
EXCLUDE = "--exclude="
MOST_COMMANDS, WITHIN_S = 4, 1.0
"""Commands to the scheduler that begin within so many seconds at most, of all pools together."""
LAST_ROWS_S = 5.0
"""So long a job that is COMPLETING may take to write the rows that it leaves behind."""
TERM_S = 60
"""Seconds before its time limit at which a lease gets the signal to end."""
ENDED_BY_TERM = str(143 << 8)
"""Status of a holder after a SIGTERM that was for it alone: the one before the time limit."""
CLOCK_S = 10.0
"""A job that is COMPLETING and ends later than in so many seconds is being queued again."""
LEAST_MEMORY_MB = 1024
"""A node with less has no memory configured."""
KEPT_ENV = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TZ", "LD_LIBRARY_PATH", "SLURM_CONF", "SLURM_JWT")
"""Variables kept of our environment, which Slurm writes to files and gives to jobs; also those of LC_* and SBATCH_*."""
FIELDS = (
    "ArrayJobID", "ArrayTaskID", "JobID", "State", "Reason", "NodeList", "StartTime", "EndTime", "RestartCnt",
    "PreemptTime", "exit_code", "NumCPUs",
)  # fmt: skip
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
NO_ANSWER = (
    "Unable to contact slurm controller", "Unable to establish", "Socket timed out", "Connection refused",
    "Zero Bytes were transmitted", "Transport endpoint is not connected", "Connection timed out",
)  # fmt: skip
"""Words of Slurm's commands where slurmctld does not answer."""


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
class _Job:
    """A lease and its job."""

    lease: Lease
    number: str
    cpus: int


class Pace:
    """Turns of callers, of which at most `most` are within any `within_s` seconds."""

    def __init__(self, most: int, within_s: float) -> None:
        self._within_s = within_s
        self._last: deque[float] = deque([-within_s] * most, most)
        self._one = threading.Lock()

    def wait(self) -> None:
        """Return when it is the caller's turn."""
        with self._one:
            time.sleep(max(0.0, self._last[0] + self._within_s - time.monotonic()))
            self._last.append(time.monotonic())


PACE = Pace(MOST_COMMANDS, WITHIN_S)


class SlurmSource:
    """Leases of one pool of one run (LeaseSource)."""

    def __init__(
        self,
        pool: SlurmPool,
        out: str,
        via: Callable[[str], SshTransport] | None = None,
        kinds: list[NodeKind] | None = None,
    ) -> None:
        """`out`: folder for the holders' output where commands run, absolute or beginning with ~/.

        `via`: makes transports to the login node where commands run, given a name for messages; None: they run here.
        `kinds`: those of the cluster, shared by its sources; the first that needs them reads them into it.
        """
        self.pool = pool
        # of this run alone: the numbers of jobs come again, and other clusters have them, too
        self._out, self._via = f"{holder.folder_word(out)}/{quote(pool.run)}", via
        self._name = f"Slurm for {pool.pool}"
        self._one = threading.Lock()
        self._login: LocalTransport | SshTransport | None = None
        self._kinds = kinds if kinds is not None else []
        self._jobs: dict[str, _Job] = {}
        self._released: set[str] = set()

    # --- requests -------------------------------------------------------------------------------------------------

    def ask(self, n: int, avoid: Collection[str] = ()) -> None:
        """Ask for `n` more, as one array of jobs; none of them on a host of `avoid`."""
        array = (f"--array=0-{n - 1}",) if n > 1 else ()
        theirs = [option.removeprefix(EXCLUDE) for option in self.pool.extra if option.startswith(EXCLUDE)]
        self._submit(*array, *((EXCLUDE + ",".join((*sorted(avoid), *theirs)),) if avoid else ()))

    def release(self, ids: Collection[str]) -> None:
        """Cancel jobs; unknown and ended ones do no harm."""
        self._released |= set(ids)
        # of a job that was queued again, only the last lease is cancelled with it
        gone = {i for i, j in self._jobs.items() if j.lease.state is LeaseState.ENDED}
        jobs = sorted({i.partition("r")[0] for i in ids if i not in gone})
        if jobs:
            done = self._command(["scancel", "--quiet", *jobs])
            if done.code != 0 and "Invalid job id" not in done.text:
                raise self._error("scancel", done)

    def _submit(self, *more: str) -> str:
        """Run sbatch; its answer."""
        p = self.pool
        argv = ["sbatch", f"--job-name={p.job}", "--nodes=1", "--ntasks=1", "--no-requeue", "--output=/dev/null"]
        argv += ["--chdir=/", f"--signal=B:TERM@{TERM_S}", *_share(p.gpus, self._partition())]
        argv += [f"--partition={p.partition}"] if p.partition else []
        argv += [f"--account={p.account}"] if p.account else []
        argv += [f"--time={math.ceil(p.time_s / 60)}"] if p.time_s is not None else []
        # the file shows a holder that this folder is the one which we read
        text = f'mkdir -p -m 700 -- {self._out} && : >{self._out}/here && exec "$@"'
        script = holder.script(p.run, p.pool, p.workdir, out=self._out)
        done = self._command(["sh", "-c", text, "sh", *argv, *p.extra, *more], script.encode())
        if done.code != 0:
            raise self._error("sbatch", done)
        return (done.out + done.err).decode("utf-8", "replace").strip()

    # --- what is there --------------------------------------------------------------------------------------------

    def list(self) -> Sequence[Lease]:
        """All jobs of the pool that Slurm knows, by one squeue; oldest first."""
        form = ",".join(f"{f}:|" for f in FIELDS)
        argv = ["env", "SLURM_TIME_FORMAT=%s", "squeue", "--me", "-h", "-r", "-t", "all", f"--name={self.pool.job}"]
        done = self._command([*argv, "-O", form])
        if done.code != 0:
            raise self._error("squeue", done)
        rows = [line.split("|") for line in done.out.decode("utf-8", "replace").splitlines()]
        rows.sort(key=lambda row: [int(cell) if cell.isdigit() else 0 for cell in row[:2]])
        found = {job.lease.id: job for row in rows for job in _jobs(*row[: len(FIELDS)])}
        forgotten = [i for i, j in self._jobs.items() if i not in found and j.lease.state is not LeaseState.ENDED]
        states = self._accounted(forgotten) if forgotten else {}
        for lease_id in forgotten:
            words, before = states.get(lease_id, "Slurm knows this job no more"), self._jobs[lease_id]
            cause = CAUSES.get(words.partition(" ")[0], EndCause.UNKNOWN)
            gone = replace(before.lease, state=LeaseState.ENDED, cause=cause, why=words, ends_at=None)
            found[lease_id] = replace(before, lease=gone)
        for lease_id in self._released & found.keys():
            if (lease := found[lease_id].lease).cause in (EndCause.CANCELLED, EndCause.UNKNOWN):
                found[lease_id] = replace(found[lease_id], lease=replace(lease, cause=EndCause.RELEASED))
        self._jobs = found
        return [j.lease for j in found.values()]

    def _accounted(self, ids: Sequence[str]) -> Mapping[str, str]:
        """Last states of jobs that squeue does not show any more, where the cluster keeps accounts."""
        done = self._command(["sacct", "-n", "-P", "-X", "-o", "JobID,State", "-j", ",".join(ids)])
        rows = (line.partition("|") for line in done.out.decode("utf-8", "replace").splitlines())
        return {job: state for job, bar, state in rows if bar} if done.code == 0 else {}

    def transport(self, lease: Lease, node: str) -> ExecTransport:
        """Files and commands in a running job, by steps. `node`: its name in messages."""
        if lease.id not in self._jobs:
            self.list()
        job = self._jobs.get(lease.id)
        if job is None or not job.number:
            raise TransportError(node, f"Slurm runs no job {lease.id}")
        opener = SrunOpener(self._reach(node), job.number, job.cpus)
        return ExecTransport(node, opener, holder.prelude(self.pool.workdir, lease.id))

    def leftovers(self, lease_id: str) -> bytes | None:
        """The rows that a job's holder wrote into its output, or None. One that is about to is waited for."""
        until = time.monotonic() + LAST_ROWS_S
        while True:
            job = self._jobs.get(lease_id)
            closing = job is not None and job.lease.why.startswith("COMPLETING")
            done = self._command(["sh", "-c", f"exec cat -- {self._out}/{quote(lease_id)}.out"], scheduler=False)
            rows = holder.leftovers_in(done.out) if done.code == 0 else None
            if rows is not None or not closing or time.monotonic() > until:
                return rows
            time.sleep(0.1)

    # --- checks ---------------------------------------------------------------------------------------------------

    def check(self) -> Sequence[Finding]:
        """Findings on partition, GPUs and time limit, and what sbatch would do with the request."""
        there = self._partition()
        if not there:
            names = ", ".join(sorted({k.partition for k in self._kinds})) or "none"
            wanted = self.pool.partition
            what = f"there is no partition {wanted!r}" if wanted else "the cluster has no default partition"
            return [Finding(UNUSABLE, "partition", what, f"`partition:` may be {names}")]
        findings = list(_partition_findings(self.pool, there))
        if any(f.level == UNUSABLE for f in findings):
            return findings
        try:
            answer = Finding(OK, "request", self._submit("--test-only").removeprefix("sbatch: "))
        except UnreachableError:
            raise
        except TransportError as e:
            answer = Finding(UNUSABLE, "request", e.reason, "see `account:`, `time:`, `gpus:` and `extra:`")
        return [*findings, answer]

    def _partition(self) -> Sequence[NodeKind]:
        """Kinds of nodes of the pool's partition, read once."""
        if not self._kinds:
            done = self._command(["sinfo", "-h", "-e", "-o", "%P|%a|%l|%D|%T|%c|%m|%G"])
            if done.code != 0:
                raise self._error("sinfo", done)
            rows = (line.split("|") for line in done.out.decode("utf-8", "replace").splitlines())
            self._kinds += [_kind(*row) for row in rows if len(row) == 8]
        wanted = self.pool.partition.split(",")
        return [k for k in self._kinds if k.partition in wanted or (not self.pool.partition and k.is_default)]

    # --- commands -------------------------------------------------------------------------------------------------

    def _command(self, argv: Sequence[str], stdin: bytes = b"", *, scheduler: bool = True) -> Completed:
        """Run a command where Slurm's commands are. Raises UnreachableError where there is no way there."""
        if scheduler:
            PACE.wait()
        with self._one:
            login = self._login
            if login is None:
                login = self._reach(self._name)
                login.connect()
                self._login = login
        try:
            return login.run(argv, stdin=stdin, timeout=COMMAND_S)
        except SlowError as e:
            raise UnreachableError(self._name, f"the scheduler does not answer: {e.reason}") from e
        except UnreachableError:
            with self._one:
                if self._login is login:
                    self._login = None
            login.close()
            raise

    def _reach(self, name: str) -> LocalTransport | SshTransport:
        return self._via(name) if self._via else LocalTransport(name, _environment())

    def _error(self, command: str, done: Completed) -> TransportError:
        words = done.text.replace(f"{command}: error: ", "") or f"code {done.code}"
        if any(silent in words for silent in NO_ANSWER):
            return UnreachableError(self._name, f"the scheduler does not answer: {words}")
        return TransportError(self._name, f"{command}: {words}")

    def close(self) -> None:
        """The jobs go on."""
        with self._one:
            login, self._login = self._login, None
        if login is not None:
            login.close()


def _environment() -> dict[str, str]:
    """Part of our environment that Slurm's commands need, and jobs may see."""
    return {k: v for k, v in os.environ.items() if k in KEPT_ENV or k.startswith(("LC_", "SBATCH_"))}


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


def _partition_findings(pool: SlurmPool, kinds: Sequence[NodeKind]) -> Iterator[Finding]:
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


def _jobs(
    array: str, task: str, number: str, state: str, reason: str, host: str, start: str, end: str, restarts: str,
    preempted: str, code: str, cpus: str,
) -> Iterator[_Job]:  # fmt: skip
    """Leases of a row of squeue (FIELDS): the job's, and those before it was queued again."""
    base = f"{array}_{task}" if task.isdigit() else number
    last = int(restarts) if restarts.isdigit() else 0
    ids = [base, *(f"{base}r{n + 1}" for n in range(last))]
    for lease_id in ids[:-1]:
        words = "Slurm has queued this job again"
        yield _Job(Lease(lease_id, LeaseState.ENDED, why=words, cause=EndCause.PREEMPTED), "", 1)
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
    yield _Job(lease, number, int(cpus) if cpus.isdigit() else 1)


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
