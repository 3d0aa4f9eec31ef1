"""Deploy to, and status of, many nodes over SSH: by ours and by each peer in turn.

Nodes are real sshd processes on loopback addresses, which share this machine's cores with the client. Everybody gets
the same files (those of a run's node folder; the peers as one tar, packed beforehand) and runs the same command. After
each deploy, the files on every node are compared with what was to be sent.
"""

from __future__ import annotations

import io
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.figure import LeftOutError
from benchmarks.peers.callers import PEERS, WORKS, PeerError
from benchmarks.peers.environment import Environment
from benchmarks.peers.table import Row
from orchestrator.inventory.load import load_inventory
from orchestrator.machines.node_files import node_files, node_folders
from orchestrator.machines.node_plan import plan_nodes
from orchestrator.transport.base import RemoteFile
from tests.integration.sshd import SSHD, LightFleet, Sshd, light_fleet, plain_login

STATUS = "cat /proc/loadavg; uname -n; df -Pk . | tail -n 1"
SFTP = "Subsystem sftp internal-sftp"
"""pyinfra and Ansible send files by it."""
RUN = "r" * 20
"""Stands for the name of a run; a repetition's has as many letters, so that its files are as long."""


@dataclass(frozen=True)
class Fleet:
    """Nodes of a round. `sizes`: bytes of the files that a deploy puts into a node folder, by path."""

    ssh: LightFleet
    nodes: Sequence[Sshd]
    tar: Path
    sizes: dict[str, int]

    def job(self, scratch: Path) -> dict[str, Any]:
        """Facts that a caller needs; `scratch` is its folder, whose name is the run's."""
        return {
            "run": scratch.name, "scratch": str(scratch), "inventory": str(_inventory(self.ssh, self.nodes)),
            "command": STATUS, "user": self.ssh.user, "key": str(self.ssh.key), "ssh_config": str(self.ssh.config),
            "known_hosts": str(self.ssh.known_hosts), "tar": str(self.tar),
            "nodes": [
                {"name": n.name, "address": n.address, "port": n.port, "to": str(to), "take": take(to)}
                for n in self.nodes
                for to in [self.ssh.folder / "deployed" / scratch.name / n.name]
            ],
        }  # fmt: skip

    def check_deployed(self, job: dict[str, Any]) -> None:
        """Compare what every node has with what was to be sent, and remove it. Raises PeerError."""
        for node in job["nodes"]:
            if (found := sizes(Path(node["to"]))) != self.sizes:
                raise PeerError(f"{node['name']} has {len(found)} files, not the {len(self.sizes)} that were sent")
        shutil.rmtree(self.ssh.folder / "deployed" / job["run"])


def need_sshd() -> None:
    """Raise LeftOutError where light nodes cannot be had."""
    if not Path(SSHD).exists():
        raise LeftOutError("it needs sshd (on Debian or Ubuntu: apt-get install openssh-server)")


def take(to: Path) -> str:
    """Command that unpacks a tar from its standard input into a new folder."""
    return f"umask 077; mkdir -p {to} && tar -xpf - -C {to}"


def sizes(folder: Path) -> dict[str, int]:
    """Bytes of the files below a folder, by path."""
    return {p.relative_to(folder).as_posix(): p.stat().st_size for p in folder.rglob("*") if p.is_file()}


def rows(environment: Environment, counts: Sequence[int], turns: int, log: Callable[[str], None]) -> list[Row]:
    """A row for each time taken and number of nodes: `turns` repetitions, all callers in turn in each, after one that
    fills caches and is not counted."""
    out: list[Row] = []
    with _fleet(max(counts)) as whole:
        for count in counts:
            fleet = replace(whole, nodes=whole.nodes[:count])
            found = {name: Row(f"{name}, {count} nodes", "s") for names in WORKS.values() for name in names}
            for turn in range(turns + 1):
                log(f"{count} nodes, turn {turn} of {turns}")
                names = list(PEERS)
                for who in names[turn % len(names) :] + names[: turn % len(names)]:
                    for work in WORKS:
                        _measure(environment, fleet, who, work, found, counted=turn > 0)
            out += found.values()
    return out


def _measure(
    environment: Environment, fleet: Fleet, who: str, work: str, found: dict[str, Row], *, counted: bool
) -> None:
    """One repetition; who failed once is not called for this work again."""
    whole = found[WORKS[work][0]]
    if why := environment.missing.get(PEERS[who].package):
        whole.missing[who] = why
    if who in whole.missing:
        return
    scratch = fleet.ssh.folder / f"r{time.monotonic_ns():0{len(RUN) - 1}d}"
    scratch.mkdir()
    job = fleet.job(scratch)
    try:
        seconds = PEERS[who].call(environment, work, job)
        if work == "deploy":
            fleet.check_deployed(job)
    except PeerError as e:
        whole.missing[who] = str(e)
        for name in WORKS[work]:
            found[name].values.pop(who, None)
    else:
        for name, value in seconds.items() if counted else ():
            found[name].values.setdefault(who, []).append(value)
    finally:
        shutil.rmtree(scratch)


@contextmanager
def _fleet(count: int) -> Iterator[Fleet]:
    # a plain login: root's on a work machine may run anybody's .bashrc
    with plain_login() as user, light_fleet(user) as ssh:
        nodes = ssh.up(count, SFTP)
        ssh.write_config("".join(f"Host {n.name}\n  HostName {n.address}\n  Port {n.port}\n" for n in nodes))
        (ssh.folder / "deployed").mkdir()
        (ssh.folder / "deployed").chmod(0o777)
        plan = plan_nodes(load_inventory(_inventory(ssh, nodes)), RUN, ssh.folder, {})[0]
        files = node_files(plan, RUN, "replay", {}, 600.0)
        tar = ssh.folder / "node.tar"
        pack(tar, files, node_folders(plan.slots))
        yield Fleet(ssh, nodes, tar, {name: len(f.data) for name, f in files.items()})


def _inventory(ssh: LightFleet, nodes: Sequence[Sshd]) -> Path:
    """Our inventory of these nodes."""
    path = ssh.folder / f"inventory-{len(nodes)}.yaml"
    path.write_text(
        "defaults:\n  family: a16w16\n  tuner: replay\n  transport: ssh\n  engine: process\n  gpus: 0\n"
        f"  workdir: {ssh.folder / 'deployed'}\n  ssh_config: {ssh.config}\n"
        "nodes:\n" + "".join(f"  {n.name}: {{}}\n" for n in nodes)
    )
    return path


def pack(path: Path, files: dict[str, RemoteFile], folders: Sequence[str]) -> None:
    """Write a tar of files, of the folders above them, and of empty ones."""
    with tarfile.open(path, "w") as tar:
        for name in sorted({*folders, *(str(p) for file in files for p in Path(file).parents)} - {"."}):
            info = tarfile.TarInfo(name)
            info.type, info.mode = tarfile.DIRTYPE, 0o700
            tar.addfile(info)
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode, info.mtime = len(content.data), content.mode, int(time.time())
            tar.addfile(info, io.BytesIO(content.data))
    path.chmod(0o644)
