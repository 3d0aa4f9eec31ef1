"""Real Slurm on this machine: slurmctld and slurmd of Debian's packages, each slurmd a node with GPUs of its own.

A node is a slurmd with a host name (a UTS namespace) and port of its own; its GPUs are device files that do nothing.
Everything lies in one folder that is removed in the end, and whatever runs in the nodes' namespaces ends with them.
Needs root.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.kube import free_ports
from tests.waiting import PATIENCE_S, wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
PARTITION, URGENT = "gpu", "urgent"
"""Partitions of all nodes; jobs of the second preempt those of the first."""
GPUS, NODES = 2, 3
"""GPUs of a node, and nodes."""
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
PropagateResourceLimits=NONE
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
ReturnToService=2
SlurmdTimeout=10
KillWait=3
MinJobAge=600
JobRequeue=1
AccountingStorageType=accounting_storage/none
PartitionName=gpu Nodes=ALL Default=YES PriorityTier=1 MaxTime=12:00:00 State=UP
PartitionName=urgent Nodes=ALL PriorityTier=10 State=UP
"""


def missing() -> str:
    """Reason why Slurm cannot be started here; "" where it can."""
    gone = [p for p in PROGRAMS if shutil.which(p, path=_PATH) is None]
    if gone:
        return f"no {gone[0]} here (Debian: munge slurmctld slurmd slurm-client)"
    return "" if os.getuid() == 0 else "Slurm's nodes need root"


@dataclass
class SlurmNode:
    """One slurmd and the jobs on it."""

    name: str
    process: subprocess.Popen[bytes] | None = None
    namespace: int = -1
    """An open descriptor of its UTS namespace, which is kept so that nobody else gets its number."""

    def pids(self) -> list[int]:
        """Its processes: slurmd, and everything of every job."""
        own, out = os.fstat(self.namespace).st_ino if self.namespace >= 0 else -1, []
        for proc in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.stat(proc / "ns/uts").st_ino == own:
                    out.append(int(proc.name))
        return out


class SlurmCluster:
    """A cluster with nodes g1, g2, ... Its commands find it by `environment`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes = [SlurmNode(f"g{i + 1}") for i in range(NODES)]
        self.environment = {"SLURM_CONF": f"{folder}/slurm.conf", "PATH": _PATH}
        """Environment of its commands."""
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("state", "dev", "log", "munge"):
            (folder / name).mkdir()
        for i in range(GPUS):  # each like /dev/null
            os.mknod(folder / f"dev/gpu{i}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        key = folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        for path in (key.parent, key):
            shutil.chown(path, "munge", "munge")
        port, *ports = free_ports(NODES + 1)
        text = CONFIGURATION.format(host=socket.gethostname().partition(".")[0], port=port, folder=folder)
        for node, its in zip(self.nodes, ports, strict=True):
            text += f"NodeName={node.name} NodeAddr=127.0.0.1 Port={its} CPUs=8 RealMemory=4000 Gres=gpu:{GPUS}\n"
        (folder / "slurm.conf").write_text(text)
        devices = f"NodeName=g[1-{NODES}] Name=gpu File={folder}/dev/gpu[0-{GPUS - 1}] Flags=amd_gpu_env\n"
        (folder / "gres.conf").write_text(devices)

    def start(self) -> None:
        munge, folder = pwd.getpwnam("munge"), self.folder / "munge"
        files = [x for name in ("key", "pid", "log", "seed") for x in (f"--{name}-file", str(folder / name))]
        self._spawn("munged", "setpriv", f"--reuid={munge.pw_uid}", f"--regid={munge.pw_gid}", "--clear-groups",
                    "munged", "--foreground", "--socket", str(folder / "socket"), *files)  # fmt: skip
        wait_until((folder / "socket").exists, "munged listens")
        self._spawn("slurmctld", "slurmctld", "-D")
        wait_until(lambda: self.run("scontrol", "ping", check=False).returncode == 0, "slurmctld answers")
        for node in self.nodes:
            self._start_node(node)
        self.wait_idle()

    def stop(self) -> None:
        for node in self.nodes:
            self.kill_node(node)
        for process in reversed(self._daemons.values()):
            process.kill()
            process.wait()

    def _start_node(self, node: SlurmNode) -> None:
        script = 'hostname "$1" && exec slurmd -D -N "$1"'
        node.process = self._spawn(node.name, "unshare", "--uts", "--", "sh", "-c", script, "sh", node.name)
        pid, ours = node.process.pid, os.stat("/proc/self/ns/uts").st_ino
        wait_until(lambda: os.stat(f"/proc/{pid}/ns/uts").st_ino != ours, "the node has a name of its own")
        if node.namespace >= 0:
            os.close(node.namespace)
        node.namespace = os.open(f"/proc/{pid}/ns/uts", os.O_RDONLY)

    def kill_node(self, node: SlurmNode) -> None:
        """The machine is gone: slurmd, and everything of every job."""
        if node.process is None:
            return
        while pids := node.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.process.wait(0.05)
        node.process.wait()
        node.process = None

    def node(self, name: str) -> SlurmNode:
        return next(n for n in self.nodes if n.name == name)

    def _spawn(self, name: str, *argv: str) -> subprocess.Popen[bytes]:
        with (self.folder / "log" / name).open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/",
                env=self.environment,
            )  # fmt: skip
        return self._daemons[name]

    def run(self, *argv: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """A command of Slurm as a person runs it."""
        done = subprocess.run(
            argv, capture_output=True, text=True, env=self.environment, timeout=PATIENCE_S, check=False
        )
        assert not check or done.returncode == 0, (argv, done.stderr)
        return done

    def wait_idle(self) -> None:
        """Until no job is there and every node is idle."""

        def idle() -> bool:
            self.run("scancel", "--user=root", check=False)
            states = self.run("sinfo", "-h", "-N", "-p", PARTITION, "-o", "%t", check=False).stdout.split()
            return states == ["idle"] * NODES and not self.run("squeue", "-h", check=False).stdout.strip()

        wait_until(idle, "all nodes are idle")

    def jobs(self) -> str:
        """Jobs that wait or run, as squeue prints them."""
        return self.run("squeue", "-h", "-r", "-o", "%i %j %T %N").stdout

    def fill(self) -> str:
        """A job of higher priority that takes every node, and whatever runs there; its id."""
        words = ("sbatch", "--parsable", "-p", URGENT, "-N3", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 600")
        return self.run(*words).stdout.strip()

    def begin_soon(self, job: str) -> None:
        """Let a job that was queued again begin now, which would be in two minutes.

        Not within the second of its end: slurmd refuses credentials as old as the last revoked one, and the job fails.
        """
        state = ("squeue", "-h", "-j", job, "-o", "%T")
        wait_until(lambda: self.run(*state, check=False).stdout.split() == ["PENDING"], "it is queued again")
        self.run("scontrol", "update", f"jobid={job}", "StartTime=now+2")

    def mend(self) -> None:
        """Restore the state before a test: every daemon runs, there are no jobs, every node is idle."""
        for node in self.nodes:
            if node.process is None or node.process.poll() is not None:
                self._start_node(node)
        self.run("scontrol", "update", f"NodeName=g[1-{NODES}]", "State=RESUME", check=False)
        self.wait_idle()


@contextlib.contextmanager
def slurm_cluster() -> Iterator[SlurmCluster]:
    """A cluster whose nodes are idle; nothing is left of it."""
    folder = Path(tempfile.mkdtemp(prefix="gf-slurm-"))
    folder.chmod(0o755)
    cluster = SlurmCluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)
