"""Commands as steps of a running Slurm job, started here or on a login node."""

from __future__ import annotations

from orchestrator.transport.local import LocalTransport, ProcessChannel
from orchestrator.transport.ssh import SshTransport
from orchestrator.transport.ssh.link import SshChannel

SRUN = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--mpi=none", "--unbuffered", "--quiet")


class SrunOpener:
    """Starts steps that share the job's resources with all its other steps."""

    def __init__(self, transport: LocalTransport | SshTransport, job: str, cpus: int) -> None:
        """`transport`: to where `srun` runs, for this alone. `job`, `cpus`: the job's id and its CPUs."""
        self._transport = transport
        self._argv = (*SRUN, f"--jobid={job}", f"--cpus-per-task={cpus}", "sh", "-c")

    def connect(self) -> None:
        self._transport.connect()

    def start(self, command: str, deadline: float) -> ProcessChannel | SshChannel:
        """Start a line of shell text as a step. Raises TransportError."""
        return self._transport.open([*self._argv, command])

    def close(self) -> None:
        self._transport.close()
