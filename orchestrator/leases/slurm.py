"""Leases of Slurm: one job or array task each, requested with sbatch, seen by squeue and reached by steps of srun.

Three things are here: the commands (`SlurmSource`), what sinfo tells of a partition's nodes (`kinds_of`), and the
leases in the output of squeue (`leases_of`). Commands run here or on a login node (`via`). A job that Slurm queues
again counts as a new lease: job 17 is followed by `17r1`.

We read `squeue -O`, which all versions have. Its `--json` prints in 22.05 every job of the cluster, whatever we select.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from orchestrator.engines import OK, UNUSABLE, WARNING, Finding
from orchestrator.errors import SlowError, TransportError, UnreachableError
from orchestrator.inventory.model import Node
from orchestrator.leases.holder import folder_word, holder_script, leftovers_in, prelude
from orchestrator.leases.lease import EndCause, Lease, LeaseState
from orchestrator.transport.base import Completed
from orchestrator.transport.commands import quote
from orchestrator.transport.exec import ExecTransport, SrunOpener
from orchestrator.transport.local import LocalTransport
from orchestrator.transport.ssh import SshTransport

COMMAND_S = 30.0
"""Seconds for a command of Slurm."""
TERM_S = 60
"""Seconds before its time limit at which a lease gets a SIGTERM."""
ENDED_BY_TERM = str(143 << 8)
"""The exit status, as squeue prints it, of a holder that this signal ended. No other process of a job gets it."""
CLOCK_S = 10.0
"""A job that is COMPLETING, with an end more than this in the future, is being queued again."""
LAST_ROWS_S = 5.0
"""Any other COMPLETING job may take this long to write the rows that it leaves behind."""
LEAST_MEMORY_MB = 1024
"""A node with less has no memory configured."""
EXCLUDE = "--exclude="
"""The option of sbatch that names hosts to avoid. It may be given once."""
KEPT_ENV = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TZ", "LD_LIBRARY_PATH", "SLURM_CONF", "SLURM_JWT")
"""Variables that Slurm's commands get from our environment, with LC_* and SBATCH_*. They get no others, because Slurm
writes the environment to files and gives it to jobs."""
NO_ANSWER = (
    "Unable to contact slurm controller",
    "Unable to establish",
    "Socket timed out",
    "Connection refused",
    "Zero Bytes were transmitted",
    "Transport endpoint is not connected",
    "Connection timed out",
)
"""Words of Slurm's commands if slurmctld does not answer."""
SINFO = "%P|%c|%m|%G|%l"
FIELDS = (
    "ArrayJobID",
    "ArrayTaskID",
    "JobID",
    "State",
    "Reason",
    "NodeList",
    "StartTime",
    "EndTime",
    "RestartCnt",
    "PreemptTime",
    "exit_code",
    "NumCPUs",
)
SQUEUE = ",".join(f"{field}:|" for field in FIELDS)
"""Formats of sinfo and squeue."""
QUEUED = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
RUNNING = {"RUNNING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"}
CAUSES = {
    "COMPLETED": EndCause.RELEASED,
    **dict.fromkeys(("CANCELLED", "REVOKED", "PREEMPTED"), EndCause.PREEMPTED),
    **dict.fromkeys(("TIMEOUT", "DEADLINE"), EndCause.TIME_LIMIT),
}
"""Cause of an end by the job's state; FAILED for any other."""
COMPLETING_CAUSES = {"TimeLimit": EndCause.TIME_LIMIT, "NodeDown": EndCause.FAILED, "OutOfMemory": EndCause.FAILED}
"""Cause of an end by the job's reason: while it is COMPLETING, squeue does not show its final state."""


@dataclass(frozen=True, slots=True)
class NodeKind:
    """Nodes of a partition that are alike."""

    partition: str
    is_default: bool
    """It is the cluster's default partition."""
    cpus: int
    """The cores of each node; `memory_mb` and `gpus` are those of each node too."""
    memory_mb: int
    gpus: int
    max_s: float
    """The longest time limit of a job there."""


class SlurmSource:
    """Leases of one pool of one run (LeaseSource)."""

    def __init__(self, run: str, pool: Node, out: str, via: Callable[[str], SshTransport] | None = None) -> None:
        """`pool`: the inventory's node. Without `gpus: N` a lease is a whole node; its `extra` wins over our options.
        `out`: folder for the holders' output where commands run, absolute or beginning with ~/; "": nothing is kept.

        `via`: makes transports to the login node where commands run, given a name for messages; None: they run here.
        """
        self._run = run
        self._pool = pool
        self._job = f"gemmfleet-{run}-{pool.name}"
        self._gpus = pool.gpus if isinstance(pool.gpus, int) else None
        self._workdir = pool.workdir or ""
        self._partition_wanted = pool.partition or ""
        # each run has a folder of its own, because numbers of jobs come again, and other clusters have them too
        self._out = f"{folder_word(out)}/{quote(run)}" if out else ""
        self._via = via
        self._name = f"Slurm for {pool.name}"
        self._login = self._reach(self._name)
        self._is_connected = False
        self._connecting = threading.Lock()
        self._kinds: list[NodeKind] = []

    def ask(self, count: int, avoid: Collection[str] = ()) -> None:
        """Ask for `count` more leases, as one array of jobs, none of them on a host of `avoid`."""
        options = []
        if count > 1:
            options.append(f"--array=0-{count - 1}")
        if avoid:
            # our option would replace the user's, so it names the user's hosts too
            theirs = [option.removeprefix(EXCLUDE) for option in self._pool.extra if option.startswith(EXCLUDE)]
            options.append(EXCLUDE + ",".join((*sorted(avoid), *theirs)))
        self._submit(*options)

    def release(self, leases: Collection[Lease]) -> None:
        """Cancel jobs. A lease that ended is left alone, because its job may be queued again, as another lease."""
        numbers = sorted({lease.id.partition("r")[0] for lease in leases if lease.state is not LeaseState.ENDED})
        if numbers:
            self._scheduler("scancel", "--quiet", *numbers, passes="Invalid job id")

    def _submit(self, *more: str) -> str:
        """Submit the holder with sbatch, and return the answer."""
        # the file `here` shows a holder that we read this folder (holder.py)
        text = f'mkdir -p -m 700 -- {self._out} && : >{self._out}/here && exec "$@"'
        script = holder_script(self._run, self._pool.name, self._workdir, out=self._out)
        before = ("sh", "-c", text, "sh") if self._out else ()
        done = self._scheduler("sbatch", *self._options(), *more, before=before, stdin=script.encode())
        return (done.out + done.err).decode("utf-8", "replace").strip()

    def _options(self) -> Iterator[str]:
        pool = self._pool
        yield from (f"--job-name={self._job}", "--nodes=1", "--ntasks=1", "--no-requeue", "--output=/dev/null")
        yield from ("--chdir=/", f"--signal=B:TERM@{TERM_S}")
        yield from _share(self._gpus, self._kinds_of_partition())
        for name, value in (("partition", pool.partition), ("account", pool.account), ("time", pool.time_s // 60)):
            if value:
                yield f"--{name}={value}"
        yield from pool.extra

    def list(self) -> Sequence[Lease]:
        """All jobs of the pool that Slurm knows, by one squeue; oldest first."""
        argv = ("--me", "-h", "-r", "-t", "all", f"--name={self._job}", "-O", SQUEUE)
        return leases_of(self._scheduler("squeue", *argv, before=("env", "SLURM_TIME_FORMAT=%s")).out)

    def transport(self, lease: Lease, node: str) -> ExecTransport:
        """Files and commands in a running job, by steps. `node`: its name in messages."""
        if not lease.way:
            raise TransportError(node, f"Slurm runs no job {lease.id}")
        opener = SrunOpener(self._reach(node), lease.way)
        return ExecTransport(node, opener, prelude(self._workdir, lease.id))

    def leftovers(self, lease: Lease) -> bytes | None:
        """The archive that a job's holder wrote into its output, or None. If the job is COMPLETING, wait for it."""
        until = time.monotonic() + (LAST_ROWS_S if lease.why.startswith("COMPLETING") else 0.0)
        while True:
            done = self._command(["sh", "-c", f"exec cat -- {self._out}/{quote(lease.id)}.out"])
            archive = leftovers_in(done.out) if done.code == 0 else None
            if archive is not None or time.monotonic() > until:
                return archive
            time.sleep(0.1)

    def forget(self) -> None:
        """Remove the folder of the holders' output of this run."""
        living = [lease.id for lease in self.list() if lease.state is not LeaseState.ENDED]
        if living:
            raise TransportError(self._name, f"job {', '.join(living[:3])} has not ended, so its output stays")
        if self._out:
            self._command(["sh", "-c", f'exec "$@" {self._out}', "sh", "rm", "-rf", "--"])

    def check(self) -> Sequence[Finding]:
        """Findings on partition and GPUs, and what sbatch would do with the request."""
        kinds = self._kinds_of_partition()
        if not kinds:
            return [self._no_partition()]
        partition = kinds[0].partition
        most_gpus = max(kind.gpus for kind in kinds)
        if (self._gpus or 0) > most_gpus:
            what = f"no node of the partition {partition} has {self._gpus} GPUs: {most_gpus} are the most"
            way = f"set `gpus:` to {most_gpus} at most" if most_gpus else "name another `partition:`"
            return [Finding(UNUSABLE, "gpus", what, way)]
        time_s = self._pool.time_s
        longest_s = max(kind.max_s for kind in kinds)
        if time_s > longest_s:  # sbatch would let it wait for ever
            what = f"the partition {partition} allows {longest_s / 60:g} minutes, and `time:` is {time_s / 60:g}"
            return [Finding(UNUSABLE, "time", what, "set a shorter `time:`")]
        return [self._try_request()]

    def _no_partition(self) -> Finding:
        names = ", ".join(sorted({kind.partition for kind in self._kinds})) or "none"
        wanted = self._partition_wanted
        what = f"there is no partition {wanted!r}" if wanted else "the cluster has no default partition"
        return Finding(UNUSABLE, "partition", what, f"`partition:` may be {names}")

    def _try_request(self) -> Finding:
        """Ask sbatch what it would do with the request."""
        try:
            answer = self._submit("--test-only").removeprefix("sbatch: ")
        except UnreachableError:
            raise
        except TransportError as e:
            return Finding(UNUSABLE, "request", e.reason, "see `account:`, `time:`, `gpus:` and `extra:`")
        if starts_late(answer, time.time()):
            way = "ask for fewer `gpus:`, a shorter `time:`, or another partition"
            return Finding(WARNING, "request", answer, way)
        return Finding(OK, "request", answer)

    def _kinds_of_partition(self) -> Sequence[NodeKind]:
        """Kinds of nodes of the pool's partition, read once."""
        self._kinds = self._kinds or kinds_of(self._scheduler("sinfo", "-h", "-e", "-o", SINFO).out)
        if not self._partition_wanted:
            return [kind for kind in self._kinds if kind.is_default]
        partitions = self._partition_wanted.split(",")
        return [kind for kind in self._kinds if kind.partition in partitions]

    def _scheduler(
        self, name: str, *words: str, before: Sequence[str] = (), stdin: bytes = b"", passes: str | None = None
    ) -> Completed:
        """Run a command of Slurm after the words `before`. Raises UnreachableError if slurmctld does not answer, and
        TransportError if the command fails, unless it prints `passes`."""
        done = self._command([*before, name, *words], stdin)
        if done.code == 0 or (passes is not None and passes in done.text):
            return done
        message = done.text.replace(f"{name}: error: ", "") or f"code {done.code}"
        if any(words in message for words in NO_ANSWER):
            raise UnreachableError(self._name, f"the scheduler does not answer: {message}")
        raise TransportError(self._name, f"{name}: {message}")

    def _command(self, argv: Sequence[str], stdin: bytes = b"") -> Completed:
        """Run a command where Slurm's commands are. Raises UnreachableError if we cannot get there."""
        with self._connecting:
            if not self._is_connected:
                self._login.connect()
                self._is_connected = True
        try:
            return self._login.run(argv, stdin=stdin, timeout=COMMAND_S)
        except SlowError as e:
            raise UnreachableError(self._name, f"the scheduler does not answer: {e.reason}") from e
        except UnreachableError:
            self._is_connected = False
            raise

    def _reach(self, name: str) -> LocalTransport | SshTransport:
        """A transport to where Slurm's commands are. `name`: its name in messages."""
        if self._via:
            return self._via(name)
        kept = {k: v for k, v in os.environ.items() if k in KEPT_ENV or k.startswith(("LC_", "SBATCH_"))}
        return LocalTransport(name, kept)

    def close(self) -> None:
        """The jobs go on."""
        self._is_connected = False
        self._login.close()


def _share(gpus: int | None, kinds: Sequence[NodeKind]) -> Iterator[str]:
    """Options of sbatch for a whole node, or for some of its GPUs with their share of its CPUs and memory. `gpus`: None
    for a whole node."""
    fitting = [kind for kind in kinds if kind.gpus >= (gpus or 1)]
    if gpus is None or not fitting or gpus == max(kind.gpus for kind in fitting):
        yield from ("--exclusive", "--mem=0")
        gpus = gpus or min((kind.gpus for kind in fitting), default=None)
    else:
        yield f"--cpus-per-task={max(1, min(kind.cpus * gpus // kind.gpus for kind in fitting))}"
        memory_mb = min(kind.memory_mb * gpus // kind.gpus for kind in fitting)
        if memory_mb >= LEAST_MEMORY_MB:
            yield f"--mem={memory_mb}"
    if gpus:
        yield f"--gres=gpu:{gpus}"


def kinds_of(printed: bytes) -> list[NodeKind]:
    """Kinds of nodes in the output of sinfo (SINFO)."""
    kinds = []
    for name, cpus, memory, gres, limit in _rows(printed, 5):
        gpus = sum(int(count) for count in re.findall(r"\bgpu(?::[^:,()]+)?:(\d+)", gres))
        is_default = name.endswith("*")
        kinds.append(
            NodeKind(name.rstrip("*"), is_default, _number(cpus), _number(memory), gpus, _limit_seconds(limit))
        )
    return kinds


def _limit_seconds(limit: str) -> float:
    """Seconds of [days-][hours:]minutes:seconds; without end for a word such as infinite."""
    parts = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", limit)
    if parts is None:
        return math.inf
    days, hours, minutes, seconds = (float(part or 0) for part in parts.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def leases_of(printed: bytes) -> list[Lease]:
    """Leases in the output of squeue (SQUEUE), oldest first."""
    rows = sorted(_rows(printed, len(FIELDS)), key=lambda row: [_number(cell) for cell in row[:2]])
    return [lease for row in rows for lease in _leases(JobRow(*row))]


def _rows(printed: bytes, cells: int) -> Iterator[list[str]]:
    rows = (line.split("|") for line in printed.decode("utf-8", "replace").splitlines())
    return (row[:cells] for row in rows if len(row) >= cells)


def _number(text: str) -> int:
    """The number with which a text begins, 0 for none."""
    digits = re.match(r"\d+", text)
    return int(digits[0]) if digits else 0


class JobRow(NamedTuple):
    """A row of squeue, in the order of FIELDS, such as `17|2|19|RUNNING|None|g1|1700000000|1700014400|0|N/A|0|8`."""

    array: str
    task: str
    number: str
    state: str
    reason: str
    host: str
    start: str
    end: str
    restarts: str
    preempted: str
    exit_code: str
    cpus: str


def _leases(job: JobRow) -> Iterator[Lease]:
    """The leases of a row of squeue: those that ended when the job was queued again, and the present one."""
    base = f"{job.array}_{job.task}" if job.task.isdigit() else job.number
    times_queued_again = _number(job.restarts)
    ids = [base, *(f"{base}r{n + 1}" for n in range(times_queued_again))]
    for earlier_id in ids[:-1]:
        why = "Slurm has queued this job again"
        yield Lease(earlier_id, LeaseState.ENDED, why=why, cause=EndCause.PREEMPTED)
    state = job.state
    reason = job.reason if job.reason != "None" else ""
    has_ended = job.end.isdigit() and float(job.end) < time.time() + CLOCK_S
    is_queued_again = state == "COMPLETING" and times_queued_again > 0 and not has_ended
    if state in QUEUED or is_queued_again:
        yield Lease(ids[-1], LeaseState.QUEUED, why=(reason or state) + _expected(job.start))
    elif state in RUNNING:
        way = (f"--jobid={job.number}", f"--cpus-per-task={max(1, _number(job.cpus))}")
        ends_at = float(job.end) if job.end.isdigit() else None
        yield Lease(ids[-1], LeaseState.READY, job.host, "" if state == "RUNNING" else state, ends_at, way=way)
    else:
        why = f"{state} ({reason})" if reason else state
        yield Lease(ids[-1], LeaseState.ENDED, job.host, why, cause=_cause(job))


def _cause(job: JobRow) -> EndCause:
    """The cause of a job's end."""
    if job.preempted.isdigit() and job.state != "COMPLETED":
        return EndCause.PREEMPTED
    if job.state in ("COMPLETING", "FAILED") and job.exit_code == ENDED_BY_TERM:
        return EndCause.TIME_LIMIT
    if job.state == "COMPLETING":
        return COMPLETING_CAUSES.get(job.reason, EndCause.PREEMPTED)
    return CAUSES.get(job.state, EndCause.FAILED)


LATE_S = 24 * 3600.0
"""A queue longer than a day is worth a warning: most runs are over sooner."""


def starts_late(words: str, now: float) -> bool:
    """Return whether sbatch --test-only expects the job to start more than LATE_S from now (`... to start at
    2027-01-01T00:00:00 using 8 processors ...`, in the local time of its machine)."""
    start = re.search(r"to start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", words)
    if start is None:
        return False
    return time.mktime(time.strptime(start[1], "%Y-%m-%dT%H:%M:%S")) > now + LATE_S


def _expected(start: str) -> str:
    """`, expected start 14:20` from the epoch seconds that squeue prints, "" if it expects no start."""
    if not start.isdigit():
        return ""
    local = time.localtime(int(start))
    is_today = local[:3] == time.localtime()[:3]
    return f", expected start {time.strftime('%H:%M' if is_today else '%Y-%m-%d %H:%M', local)}"
