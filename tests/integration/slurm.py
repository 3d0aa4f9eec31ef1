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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.waiting import PATIENCE_S, wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
PARTITION, URGENT = "gpu", "urgent"
"""Partitions of all nodes; jobs of the second preempt those of the first."""
GPUS = 2
"""GPUs of a node."""
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


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
    port: int
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


@dataclass
class SlurmCluster:
    """A cluster with `count` nodes g1, g2, ... Its commands find it by `environment`."""

    folder: Path
    count: int
    nodes: list[SlurmNode] = field(default_factory=list)

    def __post_init__(self) -> None:
        ports = _free_ports(self.count + 1)
        self.nodes = [SlurmNode(f"g{i + 1}", ports[i + 1]) for i in range(self.count)]
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("state", "dev", "log", "munge"):
            (self.folder / name).mkdir()
        for i in range(GPUS):  # each like /dev/null
            os.mknod(self.folder / f"dev/gpu{i}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        for path in (key.parent, key):
            shutil.chown(path, "munge", "munge")
        (self.folder / "slurm.conf").write_text(self._configuration(ports[0]))
        devices = f"NodeName=g[1-{self.count}] Name=gpu File={self.folder}/dev/gpu[0-{GPUS - 1}] Flags=amd_gpu_env\n"
        (self.folder / "gres.conf").write_text(devices)

    def _configuration(self, port: int) -> str:
        d = self.folder
        lines = [
            "ClusterName=test",
            f"SlurmctldHost={socket.gethostname().partition('.')[0]}(127.0.0.1)",
            f"SlurmctldPort={port}",
            "SlurmUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={d}/munge/socket",
            "CredType=cred/munge",
            f"StateSaveLocation={d}/state",
            f"SlurmctldPidFile={d}/slurmctld.pid",
            f"SlurmdPidFile={d}/slurmd.%n.pid",
            f"SlurmdSpoolDir={d}/spool.%n",
            "SlurmdParameters=config_overrides",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "PropagateResourceLimits=NONE",
            "SwitchType=switch/none",
            "MpiDefault=none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_CPU",
            "SchedulerType=sched/backfill",
            "SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0",
            "PreemptType=preempt/partition_prio",
            "PreemptMode=REQUEUE",
            "GresTypes=gpu",
            "ReturnToService=2",
            "SlurmdTimeout=10",
            "KillWait=3",
            "MinJobAge=600",
            "JobRequeue=1",
            "AccountingStorageType=accounting_storage/none",
            *(
                f"NodeName={n.name} NodeAddr=127.0.0.1 Port={n.port} CPUs=8 RealMemory=4000 Gres=gpu:{GPUS}"
                for n in self.nodes
            ),
            f"PartitionName={PARTITION} Nodes=ALL Default=YES PriorityTier=1 MaxTime=12:00:00 State=UP",
            f"PartitionName={URGENT} Nodes=ALL PriorityTier=10 State=UP",
        ]
        return "\n".join(lines) + "\n"

    @property
    def environment(self) -> dict[str, str]:
        """Environment of its commands."""
        return {"SLURM_CONF": f"{self.folder}/slurm.conf", "PATH": _PATH}

    # --- start and stop -------------------------------------------------------------------------------------------

    def start(self) -> None:
        munge = pwd.getpwnam("munge")
        folder = self.folder / "munge"
        words = [
            "--key-file",
            "key",
            "--socket",
            "socket",
            "--pid-file",
            "pid",
            "--log-file",
            "log",
            "--seed-file",
            "seed",
        ]
        words = [w if w.startswith("--") else str(folder / w) for w in words]
        self._daemons["munged"] = self._spawn(
            "munged", ["setpriv", f"--reuid={munge.pw_uid}", f"--regid={munge.pw_gid}", "--clear-groups",
                       "munged", "--foreground", *words],
        )  # fmt: skip
        wait_until((folder / "socket").exists, "munged listens")
        self.start_controller()
        for node in self.nodes:
            self.start_node(node)
        self.wait_idle()

    def stop(self) -> None:
        for node in self.nodes:
            self.kill_node(node)
        for process in reversed(self._daemons.values()):
            _end(process, signal.SIGKILL)

    def start_controller(self) -> None:
        self._daemons["slurmctld"] = self._spawn("slurmctld", ["slurmctld", "-D"])
        wait_until(lambda: self.run("scontrol", "ping", check=False).returncode == 0, "slurmctld answers")

    def stop_controller(self) -> None:
        """It answers no more; the jobs go on."""
        _end(self._daemons.pop("slurmctld"), signal.SIGTERM)

    def start_node(self, node: SlurmNode) -> None:
        argv = ["unshare", "--uts", "--", "sh", "-c", 'hostname "$1" && exec slurmd -D -N "$1"', "sh", node.name]
        node.process = self._spawn(node.name, argv)
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

    def _spawn(self, name: str, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        with (self.folder / "log" / name).open("ab") as log:
            return subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/",
                env=self.environment,
            )  # fmt: skip

    # --- its commands ---------------------------------------------------------------------------------------------

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
            return states == ["idle"] * self.count and not self.run("squeue", "-h", check=False).stdout.strip()

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
        wait_until(
            lambda: self.run("squeue", "-h", "-j", job, "-o", "%T", check=False).stdout.split() == ["PENDING"],
            "it is queued again",
        )
        self.run("scontrol", "update", f"jobid={job}", "StartTime=now+2")

    def mend(self) -> None:
        """As a test found it: every daemon runs, no job is there, every node is idle."""
        if "slurmctld" not in self._daemons:
            self.start_controller()
        for node in self.nodes:
            if node.process is None or node.process.poll() is not None:
                self.start_node(node)
        self.run("scontrol", "update", f"NodeName=g[1-{self.count}]", "State=RESUME", check=False)
        self.wait_idle()


@contextlib.contextmanager
def slurm_cluster(count: int = 3) -> Iterator[SlurmCluster]:
    """A cluster whose nodes are idle; nothing is left of it."""
    folder = Path(tempfile.mkdtemp(prefix="gf-slurm-"))
    folder.chmod(0o755)
    cluster = SlurmCluster(folder, count)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _end(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    process.send_signal(number)
    process.wait()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
