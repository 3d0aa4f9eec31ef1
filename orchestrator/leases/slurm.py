"""Leases of Slurm: one job or array task each, requested with sbatch, seen by squeue and reached by steps of srun.

Commands run here or on a login node (`via`). `squeue -O` is the format that all versions have; `--json` prints every
job of the cluster in 22.05, whatever was to be selected.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from orchestrator.engines import OK, UNUSABLE, WARNING, Finding
from orchestrator.errors import SlowError, TransportError, UnreachableError
from orchestrator.inventory.model import Node
from orchestrator.leases.base import EndCause, Lease, LeaseState, folder_word, holder_script, leftovers_in, prelude
from orchestrator.transport.base import Completed, quote
from orchestrator.transport.exec import ExecTransport, SrunOpener
from orchestrator.transport.local import LocalTransport
from orchestrator.transport.ssh import SshTransport

COMMAND_S = 30.0
TERM_S, ENDED_BY_TERM = 60, str(143 << 8)
"""Seconds before its time limit at which a lease gets a SIGTERM, and the status of a holder that this signal, which is
for it alone, has ended."""
CLOCK_S, LAST_ROWS_S = 10.0, 5.0
"""A job that is COMPLETING, with an end more than CLOCK_S in the future, is being queued again; any other may take
LAST_ROWS_S to write the rows that it leaves behind."""
LEAST_MEMORY_MB = 1024
"""A node with less has no memory configured."""
EXCLUDE = "--exclude="
KEPT_ENV = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TZ", "LD_LIBRARY_PATH", "SLURM_CONF", "SLURM_JWT")
"""Variables kept of our environment, which Slurm writes to files and gives to jobs; also those of LC_* and SBATCH_*."""
NO_ANSWER = (
    "Unable to contact slurm controller", "Unable to establish", "Socket timed out", "Connection refused",
    "Zero Bytes were transmitted", "Transport endpoint is not connected", "Connection timed out",
)  # fmt: skip
"""Words of Slurm's commands where slurmctld does not answer."""
SINFO = "%P|%c|%m|%G|%l"
FIELDS = (
    "ArrayJobID", "ArrayTaskID", "JobID", "State", "Reason", "NodeList", "StartTime", "EndTime", "RestartCnt",
    "PreemptTime", "exit_code", "NumCPUs",
)  # fmt: skip
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
    """Nodes of a partition that are alike, with the CPUs, memory and GPUs of each. `max_s`: the longest time limit."""

    partition: str
    is_default: bool
    cpus: int
    memory_mb: int
    gpus: int
    max_s: float


class SlurmSource:
    """Leases of one pool of one run (LeaseSource)."""

    def __init__(self, run: str, pool: Node, out: str, via: Callable[[str], SshTransport] | None = None) -> None:
        """`pool`: the inventory's node. Without `gpus: N` a lease is a whole node; its `extra` wins over our options.
        `out`: folder for the holders' output where commands run, absolute or beginning with ~/; "": nothing is kept.

        `via`: makes transports to the login node where commands run, given a name for messages; None: they run here.
        """
        self._run, self._pool, self._job = run, pool, f"gemmfleet-{run}-{pool.name}"
        self._gpus = pool.gpus if isinstance(pool.gpus, int) else None
        self._workdir, self._wanted = pool.workdir or "", pool.partition or ""
        # of this run alone: the numbers of jobs come again, and other clusters have them, too
        self._out, self._via = f"{folder_word(out)}/{quote(run)}" if out else "", via
        self._name = f"Slurm for {pool.name}"
        self._one, self._login, self._connected = threading.Lock(), self._reach(self._name), False
        self._kinds: list[NodeKind] = []

    def ask(self, n: int, avoid: Collection[str] = ()) -> None:
        """Ask for `n` more, as one array of jobs; none of them on a host of `avoid`."""
        array = (f"--array=0-{n - 1}",) if n > 1 else ()
        theirs = [option.removeprefix(EXCLUDE) for option in self._pool.extra if option.startswith(EXCLUDE)]
        self._submit(*array, *((EXCLUDE + ",".join((*sorted(avoid), *theirs)),) if avoid else ()))

    def release(self, leases: Collection[Lease]) -> None:
        """Cancel jobs. Those that ended are left alone: such a job may be queued again, as another lease."""
        numbers = sorted({x.id.partition("r")[0] for x in leases if x.state is not LeaseState.ENDED})
        if numbers:
            self._scheduler("scancel", "--quiet", *numbers, passes="Invalid job id")

    def _submit(self, *more: str) -> str:
        """Run sbatch; its answer."""
        # the file shows a holder that this folder is the one which we read
        text = f'mkdir -p -m 700 -- {self._out} && : >{self._out}/here && exec "$@"'
        script = holder_script(self._run, self._pool.name, self._workdir, out=self._out)
        before = ("sh", "-c", text, "sh") if self._out else ()
        done = self._scheduler("sbatch", *self._options(), *more, before=before, stdin=script.encode())
        return (done.out + done.err).decode("utf-8", "replace").strip()

    def _options(self) -> Iterator[str]:
        pool = self._pool
        yield from (f"--job-name={self._job}", "--nodes=1", "--ntasks=1", "--no-requeue", "--output=/dev/null")
        yield from ("--chdir=/", f"--signal=B:TERM@{TERM_S}", *_share(self._gpus, self._partition()))
        given = {"partition": pool.partition, "account": pool.account, "time": pool.time_s // 60}
        yield from (*(f"--{name}={value}" for name, value in given.items() if value), *pool.extra)

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
        """The rows that a job's holder wrote into its output, or None. One that is about to is waited for."""
        until = time.monotonic() + (LAST_ROWS_S if lease.why.startswith("COMPLETING") else 0.0)
        while True:
            done = self._command(["sh", "-c", f"exec cat -- {self._out}/{quote(lease.id)}.out"])
            rows = leftovers_in(done.out) if done.code == 0 else None
            if rows is not None or time.monotonic() > until:
                return rows
            time.sleep(0.1)

    def forget(self) -> None:
        """Remove the folder of the holders' output of this run."""
        if living := [lease.id for lease in self.list() if lease.state is not LeaseState.ENDED]:
            raise TransportError(self._name, f"job {', '.join(living[:3])} has not ended, so its output stays")
        if self._out:
            self._command(["sh", "-c", f'exec "$@" {self._out}', "sh", "rm", "-rf", "--"])

    def check(self) -> Sequence[Finding]:
        """Findings on partition and GPUs, and what sbatch would do with the request."""
        there, wanted = self._partition(), self._wanted
        if not there:
            names = ", ".join(sorted({k.partition for k in self._kinds})) or "none"
            what = f"there is no partition {wanted!r}" if wanted else "the cluster has no default partition"
            return [Finding(UNUSABLE, "partition", what, f"`partition:` may be {names}")]
        name, most = there[0].partition, max(k.gpus for k in there)
        if (self._gpus or 0) > most:
            what = f"no node of the partition {name} has {self._gpus} GPUs: {most} are the most"
            way = f"set `gpus:` to {most} at most" if most else "name another `partition:`"
            return [Finding(UNUSABLE, "gpus", what, way)]
        time_s, longest = self._pool.time_s, max(k.max_s for k in there)
        if time_s > longest:  # sbatch would let it wait for ever
            what = f"the partition {name} allows {longest / 60:g} minutes, and `time:` is {time_s / 60:g}"
            return [Finding(UNUSABLE, "time", what, "set a shorter `time:`")]
        try:
            words = self._submit("--test-only").removeprefix("sbatch: ")
        except UnreachableError:
            raise
        except TransportError as e:
            return [Finding(UNUSABLE, "request", e.reason, "see `account:`, `time:`, `gpus:` and `extra:`")]
        if starts_late(words, time.time()):
            way = "ask for fewer `gpus:`, a shorter `time:`, or another partition"
            return [Finding(WARNING, "request", words, way)]
        return [Finding(OK, "request", words)]

    def _partition(self) -> Sequence[NodeKind]:
        """Kinds of nodes of the pool's partition, read once."""
        self._kinds = self._kinds or kinds_of(self._scheduler("sinfo", "-h", "-e", "-o", SINFO).out)
        wanted = self._wanted.split(",")
        return [k for k in self._kinds if k.partition in wanted or (not self._wanted and k.is_default)]

    def _scheduler(
        self, name: str, *words: str, before: Sequence[str] = (), stdin: bytes = b"", passes: str | None = None
    ) -> Completed:
        """Run a command of Slurm's. Raises UnreachableError where slurmctld does not answer, TransportError where it
        refuses, except with the words `passes`."""
        done = self._command([*before, name, *words], stdin)
        if done.code == 0 or (passes is not None and passes in done.text):
            return done
        said = done.text.replace(f"{name}: error: ", "") or f"code {done.code}"
        if any(silent in said for silent in NO_ANSWER):
            raise UnreachableError(self._name, f"the scheduler does not answer: {said}")
        raise TransportError(self._name, f"{name}: {said}")

    def _command(self, argv: Sequence[str], stdin: bytes = b"") -> Completed:
        """Run a command where Slurm's commands are. Raises UnreachableError where there is no way there."""
        with self._one:
            if not self._connected:
                self._login.connect()
                self._connected = True
        try:
            return self._login.run(argv, stdin=stdin, timeout=COMMAND_S)
        except SlowError as e:
            raise UnreachableError(self._name, f"the scheduler does not answer: {e.reason}") from e
        except UnreachableError:
            self._connected = False
            raise

    def _reach(self, name: str) -> LocalTransport | SshTransport:
        if self._via:
            return self._via(name)
        kept = {k: v for k, v in os.environ.items() if k in KEPT_ENV or k.startswith(("LC_", "SBATCH_"))}
        return LocalTransport(name, kept)

    def close(self) -> None:
        """The jobs go on."""
        self._connected = False
        self._login.close()


def _share(gpus: int | None, kinds: Sequence[NodeKind]) -> Iterator[str]:
    """Options for a whole node, or for some of its GPUs with their share of its CPUs and memory."""
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


def kinds_of(printed: bytes) -> list[NodeKind]:
    """Kinds of nodes in the output of sinfo (SINFO)."""
    found = []
    for name, cpus, memory, gres, limit in _rows(printed, 5):
        gpus = sum(int(n) for n in re.findall(r"\bgpu(?::[^:,()]+)?:(\d+)", gres))
        of_each = (_number(cpus), _number(memory), gpus)
        # [days-][hours:]minutes:seconds, or a word such as infinite
        times = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", limit)
        days, hours, minutes, seconds = (float(t or 0) for t in times.groups()) if times else (math.inf, 0, 0, 0)
        max_s = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
        found.append(NodeKind(name.rstrip("*"), name.endswith("*"), *of_each, max_s))
    return found


def leases_of(printed: bytes) -> list[Lease]:
    """Leases in the output of squeue (SQUEUE), oldest first."""
    rows = sorted(_rows(printed, len(FIELDS)), key=lambda row: [_number(cell) for cell in row[:2]])
    return [lease for row in rows for lease in _leases(*row)]


def _rows(printed: bytes, cells: int) -> Iterator[list[str]]:
    rows = (line.split("|") for line in printed.decode("utf-8", "replace").splitlines())
    return (row[:cells] for row in rows if len(row) >= cells)


def _number(text: str) -> int:
    """The number with which a text begins, 0 for none."""
    return int(m[0]) if (m := re.match(r"\d+", text)) else 0


def _leases(
    array: str, task: str, number: str, state: str, reason: str, host: str, start: str, end: str, restarts: str,
    preempted: str, code: str, cpus: str,
) -> Iterator[Lease]:  # fmt: skip
    """Leases of a row of squeue (FIELDS): the job's, and those before it was queued again."""
    base, last = f"{array}_{task}" if task.isdigit() else number, _number(restarts)
    ids = [base, *(f"{base}r{n + 1}" for n in range(last))]
    for lease_id in ids[:-1]:
        words = "Slurm has queued this job again"
        yield Lease(lease_id, LeaseState.ENDED, why=words, cause=EndCause.PREEMPTED)
    given = reason if reason not in ("None", "") else ""
    again = state == "COMPLETING" and last and not (end.isdigit() and float(end) < time.time() + CLOCK_S)
    if state in QUEUED or again:
        yield Lease(ids[-1], LeaseState.QUEUED, why=(given or state) + _expected(start))
    elif state in RUNNING:
        way = (f"--jobid={number}", f"--cpus-per-task={max(1, _number(cpus))}")
        ends_at = float(end) if end.isdigit() else None
        yield Lease(ids[-1], LeaseState.READY, host, "" if state == "RUNNING" else state, ends_at, way=way)
    else:
        cause = CAUSES.get(state, EndCause.FAILED)
        if preempted.isdigit() and state != "COMPLETED":
            cause = EndCause.PREEMPTED
        elif state in ("COMPLETING", "FAILED") and code == ENDED_BY_TERM:
            cause = EndCause.TIME_LIMIT
        elif state == "COMPLETING":
            cause = COMPLETING_CAUSES.get(reason, EndCause.PREEMPTED)
        yield Lease(ids[-1], LeaseState.ENDED, host, f"{state} ({given})" if given else state, cause=cause)


LATE_S = 24 * 3600.0
"""A queue longer than a day is worth a warning: most runs are over sooner."""


def starts_late(words: str, now: float) -> bool:
    """Return whether sbatch --test-only expects the job to start more than LATE_S from now (`... to start at
    2027-01-01T00:00:00 using 8 processors ...`, in the local time of its machine)."""
    found = re.search(r"to start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", words)
    return found is not None and time.mktime(time.strptime(found[1], "%Y-%m-%dT%H:%M:%S")) > now + LATE_S


def _expected(start: str) -> str:
    """Words on the start that the scheduler expects, in epoch seconds where it does."""
    if not start.isdigit():
        return ""
    at = time.localtime(int(start))
    today = at[:3] == time.localtime()[:3]
    return f", expected start {time.strftime('%H:%M' if today else '%Y-%m-%d %H:%M', at)}"
