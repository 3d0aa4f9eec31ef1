"""Leases of Slurm: one job or array task each, requested with sbatch and reached by steps of srun.

Commands run here or on a login node (`via`), at most four in any second.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from orchestrator.engines import OK, UNUSABLE, Finding
from orchestrator.errors import SlowError, TransportError, UnreachableError
from orchestrator.leases import holder, jobs
from orchestrator.leases.base import EndCause, Lease, LeaseState
from orchestrator.leases.jobs import Job, NodeKind, SlurmPool
from orchestrator.transport.base import Completed
from orchestrator.transport.exec.transport import ExecTransport, SrunOpener
from orchestrator.transport.local import LocalTransport
from orchestrator.transport.quoting import quote
from orchestrator.transport.ssh import SshTransport

COMMAND_S = 30.0
EXCLUDE = "--exclude="
MOST_COMMANDS, WITHIN_S = 4, 1.0
"""Commands to the scheduler that begin within so many seconds at most, of all pools together."""
LAST_ROWS_S = 5.0
"""So long a job that is COMPLETING may take to write the rows that it leaves behind."""
KEPT_ENV = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TZ", "LD_LIBRARY_PATH", "SLURM_CONF", "SLURM_JWT")
"""Variables kept of our environment, which Slurm writes to files and gives to jobs; also those of LC_* and SBATCH_*."""
NO_ANSWER = (
    "Unable to contact slurm controller", "Unable to establish", "Socket timed out", "Connection refused",
    "Zero Bytes were transmitted", "Transport endpoint is not connected", "Connection timed out",
)  # fmt: skip
"""Words of Slurm's commands where slurmctld does not answer."""


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
        self._jobs: dict[str, Job] = {}
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
        numbers = sorted({i.partition("r")[0] for i in ids if i not in gone})
        if numbers:
            done = self._command(["scancel", "--quiet", *numbers])
            if done.code != 0 and "Invalid job id" not in done.text:
                raise self._error("scancel", done)

    def _submit(self, *more: str) -> str:
        """Run sbatch; its answer."""
        argv = ["sbatch", *jobs.options(self.pool, self._partition()), *more]
        # the file shows a holder that this folder is the one which we read
        text = f'mkdir -p -m 700 -- {self._out} && : >{self._out}/here && exec "$@"'
        script = holder.script(self.pool.run, self.pool.pool, self.pool.workdir, out=self._out)
        done = self._command(["sh", "-c", text, "sh", *argv], script.encode())
        if done.code != 0:
            raise self._error("sbatch", done)
        return (done.out + done.err).decode("utf-8", "replace").strip()

    # --- what is there --------------------------------------------------------------------------------------------

    def list(self) -> Sequence[Lease]:
        """All jobs of the pool that Slurm knows, by one squeue; oldest first."""
        argv = ["env", "SLURM_TIME_FORMAT=%s", "squeue", "--me", "-h", "-r", "-t", "all", f"--name={self.pool.job}"]
        done = self._command([*argv, "-O", jobs.SQUEUE])
        if done.code != 0:
            raise self._error("squeue", done)
        found = {job.lease.id: job for job in jobs.jobs_of(done.out)}
        forgotten = [i for i, j in self._jobs.items() if i not in found and j.lease.state is not LeaseState.ENDED]
        states = self._accounted(forgotten) if forgotten else {}
        for lease_id in forgotten:
            words, before = states.get(lease_id, "Slurm knows this job no more"), self._jobs[lease_id]
            cause = jobs.CAUSES.get(words.partition(" ")[0], EndCause.UNKNOWN)
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
        found = list(jobs.findings(self.pool, there))
        if any(f.level == UNUSABLE for f in found):
            return found
        try:
            answer = Finding(OK, "request", self._submit("--test-only").removeprefix("sbatch: "))
        except UnreachableError:
            raise
        except TransportError as e:
            answer = Finding(UNUSABLE, "request", e.reason, "see `account:`, `time:`, `gpus:` and `extra:`")
        return [*found, answer]

    def _partition(self) -> Sequence[NodeKind]:
        """Kinds of nodes of the pool's partition, read once."""
        if not self._kinds:
            done = self._command(["sinfo", "-h", "-e", "-o", jobs.SINFO])
            if done.code != 0:
                raise self._error("sinfo", done)
            self._kinds += jobs.kinds_of(done.out)
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
