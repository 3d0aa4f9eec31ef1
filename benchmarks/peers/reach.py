"""Deploy to, and status of, many nodes over SSH: whole commands, by ours and by each peer in turn.

Nodes are real sshd processes on loopback addresses, which share this machine's cores with the client. Everybody gets
the same files (those of a real run's node folder; the peers as one tar, packed beforehand) and runs the same command.
After each deploy, every node's folder is compared with what it should hold.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.peers.environment import Environment, last_error
from benchmarks.peers.table import OURS, Row
from orchestrator.dispatch.deploy import node_files, node_folders
from orchestrator.inventory import load_inventory
from orchestrator.nodes.plan import plan_nodes
from tests.integration.kit import ROOT
from tests.integration.sshd import LightFleet, Sshd, light_fleet, plain_login

CLIENTS = Path(__file__).parent / "clients"
STATUS = "cat /proc/loadavg; uname -n; df -Pk . | tail -n 1"
PATIENCE_S = 900.0
SFTP = "Subsystem sftp internal-sftp"
"""pyinfra and Ansible send files by it."""
RUN = "r" * 20
"""Stands for the name of a run; a repetition's has as many letters, so that its files are as long."""
STATUS_WHOLE, STATUS_INSIDE, AGAIN = "status, whole command", "status, program running", "status, connections open"
DEPLOY_WHOLE, DEPLOY_INSIDE = "deploy, whole command", "deploy, program running"
WORKS = {"status": (STATUS_WHOLE, STATUS_INSIDE, AGAIN), "deploy": (DEPLOY_WHOLE, DEPLOY_INSIDE)}
"""Times that are taken of each work: with the program's start; from its imports on, where the peer is a library; and of
a second round over connections that are kept."""


class PeerError(Exception):
    """A peer did not do the work; the text is a table's cell."""


@dataclass(frozen=True)
class Fleet:
    """Nodes of one round, and what every client is given for them. `folder`: all users can reach it."""

    ssh: LightFleet
    nodes: Sequence[Sshd]
    folder: Path
    inventory: Path
    tar: Path
    tree: dict[str, int]
    """Bytes of each file that belongs in a node folder, by path; -1 for a folder."""

    def job(self, scratch: Path) -> dict[str, Any]:
        """What a client is to do; node folders are `deployed/SCRATCH/NODE`, ours as the peers'."""
        where = self.folder / "deployed" / scratch.name
        return {
            "run": scratch.name, "scratch": str(scratch), "inventory": str(self.inventory), "command": STATUS,
            "user": self.ssh.user, "key": str(self.ssh.key), "known_hosts": str(self.ssh.known_hosts),
            "tar": str(self.tar), "nodes": [
                {
                    "name": n.name, "address": n.address, "port": n.port, "folder": str(where / n.name),
                    "unpack": f"umask 077; mkdir -p {where / n.name} && tar -xpf - -C {where / n.name}",
                }
                for n in self.nodes
            ],
        }  # fmt: skip

    def check(self, job: dict[str, Any]) -> None:
        """Compare the deployed folders with `tree`, and remove them. Raises PeerError."""
        for node in job["nodes"]:
            root = Path(node["folder"])
            found = {p.relative_to(root).as_posix(): p.stat().st_size if p.is_file() else -1 for p in root.rglob("*")}
            if differing := {name for name, size in self.tree.items() if found.get(name) != size}:
                raise PeerError(f"error: {node['name']} lacks {len(differing)} of {len(self.tree)} files")
        shutil.rmtree(self.folder / "deployed" / job["run"])


# --- how each client is called ----------------------------------------------------------------------------------------

Client = Callable[[Environment, Fleet, str, dict[str, Any], Path], dict[str, float]]
"""(environment, fleet, work, job, scratch folder) -> seconds by time taken."""


def _script(name: str) -> Client:
    def call(environment: Environment, fleet: Fleet, work: str, job: dict[str, Any], scratch: Path) -> dict[str, float]:
        path = scratch / "job.json"
        path.write_text(json.dumps(job))
        python = sys.executable if name == OURS else environment.python
        argv = [python, str(CLIENTS / f"with_{name}.py"), work, str(path)]
        seconds, out = timed(argv, {"PYTHONPATH": str(ROOT)} if name == OURS else {})
        inside, again = map(float, out.split())
        if work == "deploy":
            return {DEPLOY_WHOLE: seconds, DEPLOY_INSIDE: inside}
        return {STATUS_WHOLE: seconds - again, STATUS_INSIDE: inside, AGAIN: again}

    return call


def _ansible(environment: Environment, fleet: Fleet, work: str, job: dict[str, Any], scratch: Path) -> dict[str, float]:
    hosts = {
        n["name"]: {"ansible_host": n["address"], "ansible_port": n["port"], "to": n["folder"]} for n in job["nodes"]
    }
    common = {
        "ansible_user": job["user"], "ansible_ssh_private_key_file": job["key"],
        "ansible_python_interpreter": "/usr/bin/python3",
    }  # fmt: skip
    (scratch / "hosts.json").write_text(json.dumps({"all": {"hosts": hosts, "vars": common}}))
    unarchive = {"src": job["tar"], "dest": "{{ to }}"}
    tasks = [{"ansible.builtin.raw": "umask 077; mkdir -p {{ to }}"}, {"ansible.builtin.unarchive": unarchive}]
    play = {"hosts": "all", "gather_facts": False, "tasks": tasks}
    (scratch / "deploy.json").write_text(json.dumps([play]))
    control = scratch / "cp"
    env = {
        "LC_ALL": "C.UTF-8", "ANSIBLE_HOME": str(scratch), "ANSIBLE_FORKS": str(len(hosts)), "ANSIBLE_PIPELINING": "1",
        "ANSIBLE_SSH_CONTROL_PATH_DIR": str(control),
        "ANSIBLE_SSH_ARGS": f"-F {fleet.ssh.config} -o ControlMaster=auto -o ControlPersist=60s",
    }  # fmt: skip
    status = [environment.program("ansible"), "all", "-i", str(scratch / "hosts.json"), "-m", "raw", "-a", STATUS]
    deploy = [environment.program("ansible-playbook"), "-i", str(scratch / "hosts.json"), str(scratch / "deploy.json")]
    try:
        if work == "deploy":
            return {DEPLOY_WHOLE: timed(deploy, env)[0]}
        return {STATUS_WHOLE: timed(status, env)[0], AGAIN: timed(status, env)[0]}
    finally:
        for socket in control.glob("*") if control.is_dir() else ():
            argv = ["ssh", "-F", "/dev/null", "-o", f"ControlPath={socket}", "-O", "exit", "node"]
            subprocess.run(argv, capture_output=True)


PYINFRA_DEPLOY = """\
from pyinfra import host
from pyinfra.operations import files, server

files.put(src=host.data.tar, dest=host.data.to + ".tar")
server.shell(["umask 077; mkdir -p {0} && tar -xpf {0}.tar -C {0}".format(host.data.to)])
"""


def _pyinfra(environment: Environment, fleet: Fleet, work: str, job: dict[str, Any], scratch: Path) -> dict[str, float]:
    common = {
        "ssh_user": job["user"], "ssh_key": job["key"], "ssh_config_file": str(fleet.ssh.config),
        "ssh_allow_agent": False, "ssh_known_hosts_file": job["known_hosts"], "ssh_strict_host_key_checking": "yes",
        "tar": job["tar"],
    }  # fmt: skip
    nodes = [
        (n["name"], {**common, "ssh_hostname": n["address"], "ssh_port": n["port"], "to": n["folder"]})
        for n in job["nodes"]
    ]
    (scratch / "hosts.py").write_text(f"nodes = {nodes!r}\n")
    (scratch / "deploy.py").write_text(PYINFRA_DEPLOY)
    what = [str(scratch / "deploy.py")] if work == "deploy" else ["exec", "--", STATUS]
    argv = [environment.program("pyinfra"), "-y", "--parallel", str(len(nodes)), str(scratch / "hosts.py"), *what]
    return {WORKS[work][0]: timed(argv, {})[0]}


@dataclass(frozen=True)
class Peer:
    """A column of the table. `note`: its settings, and where it does less than ours, or more."""

    package: str
    client: Client
    note: str


PEERS = {
    OURS: Peer(
        "", _script(OURS),
        "transport and deployer of a run, one thread a node, `ssh -G` for each, host keys checked; renders the scripts "
        "and packs for each node, asks for code that is there, writes aside and renames into place. Not in it: workers",
    ),
    "asyncssh": Peer(
        "asyncssh", _script("asyncssh"),
        "one gather over all nodes, host keys checked; no ssh_config; sends what was packed, unpacks in place",
    ),
    "parallel-ssh": Peer(
        "parallel-ssh", _script("parallel_ssh"),
        "native client, pool_size = nodes, **checks no host keys**; no ssh_config; sends what was packed, unpacks in place",
    ),
    "pyinfra": Peer(
        "pyinfra", _pyinfra,
        "`--parallel` = nodes, host keys checked; keeps no connections; deploy is files.put of the tar and a shell operation "
        "that unpacks in place. More: compares before it writes; a language for the state of hosts",
    ),
    "Ansible": Peer(
        "ansible-core", _ansible,
        "forks = nodes, pipelining, ControlPersist, no compression, no facts gathered, interpreter given, host keys checked; "
        "status is the module raw, deploy raw mkdir and unarchive. More: compares before it writes; modules for everything",
    ),
}  # fmt: skip


# --- the rounds -------------------------------------------------------------------------------------------------------


def rows(environment: Environment, counts: Sequence[int], turns: int, log: Callable[[str], None]) -> list[Row]:
    """A row for each work and number of nodes: `turns` repetitions, all clients in turn in each, after one that is not
    counted (it fills caches)."""
    out = []
    with _fleet(max(counts)) as whole:
        for count in counts:
            nodes = whole.nodes[:count]
            fleet = replace(whole, nodes=nodes, inventory=_inventory(whole.ssh, nodes))
            found = {time: Row(f"{time}, {count} nodes", "s") for times in WORKS.values() for time in times}
            for turn in range(turns + 1):
                log(f"{count} nodes, turn {turn} of {turns}")
                for who in _rotated(list(PEERS), turn):
                    for work in WORKS:
                        _measure(environment, fleet, who, work, found, counted=turn > 0)
            out += found.values()
    return out


def _rotated(names: list[str], by: int) -> list[str]:
    by %= len(names)
    return names[by:] + names[:by]


def _measure(
    environment: Environment, fleet: Fleet, who: str, work: str, rows: dict[str, Row], *, counted: bool
) -> None:
    """One repetition; a client that failed once is not called for this work again."""
    peer, whole = PEERS[who], rows[WORKS[work][0]]
    if why := environment.missing.get(peer.package):
        whole.missing[who] = why
    if who in whole.missing:
        return
    scratch = fleet.folder / f"r{time.monotonic_ns():0{len(RUN) - 1}d}"
    scratch.mkdir()
    job = fleet.job(scratch)
    try:
        seconds = peer.client(environment, fleet, work, job, scratch)
        if work == "deploy":
            fleet.check(job)
    except PeerError as e:
        whole.missing[who] = str(e)
        for name in WORKS[work]:
            rows[name].values.pop(who, None)
    else:
        for name, value in seconds.items() if counted else ():
            rows[name].values.setdefault(who, []).append(value)
    finally:
        shutil.rmtree(scratch)


def timed(argv: Sequence[str], env: dict[str, str], cwd: Path | None = None) -> tuple[float, str]:
    """Seconds of a whole command, and its output. Raises PeerError where it fails, or takes longer than PATIENCE_S."""
    began = time.perf_counter()
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S, cwd=cwd,
            env={**os.environ, **env},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise PeerError(f"error: not done in {PATIENCE_S:g} s") from None
    if done.returncode:
        raise PeerError(f"failed: {last_error(done.stdout + done.stderr)}")
    return time.perf_counter() - began, done.stdout


@contextmanager
def _fleet(count: int) -> Iterator[Fleet]:
    # a plain login: root's on a work machine may run anybody's .bashrc
    with plain_login() as user, light_fleet(user) as ssh:
        nodes = ssh.up(count, SFTP)
        ssh.write_config("".join(f"Host {n.name}\n  HostName {n.address}\n  Port {n.port}\n" for n in nodes))
        deployed = ssh.folder / "deployed"
        deployed.mkdir()
        deployed.chmod(0o777)
        inventory, tar = _inventory(ssh, nodes), ssh.folder / "node.tar"
        plan = plan_nodes(load_inventory(inventory), RUN, ssh.folder, {})[0]
        files = {name: (f.data, f.mode) for name, f in node_files(plan, RUN, "replay", {}, 600.0).items()}
        yield Fleet(ssh, nodes, ssh.folder, inventory, tar, pack(tar, files, node_folders(plan.slots)))


def _inventory(ssh: LightFleet, nodes: Sequence[Sshd]) -> Path:
    """Our inventory of these nodes."""
    path = ssh.folder / f"inventory-{len(nodes)}.yaml"
    path.write_text(
        "defaults:\n  family: a16w16\n  tuner: replay\n  transport: ssh\n  engine: process\n  gpus: 0\n"
        f"  workdir: {ssh.folder / 'deployed'}\n  ssh_config: {ssh.config}\n"
        "nodes:\n" + "".join(f"  {n.name}: {{}}\n" for n in nodes)
    )
    return path


def pack(path: Path, files: dict[str, tuple[bytes, int]], folders: Sequence[str]) -> dict[str, int]:
    """Write a tar of (bytes, mode) by path, and of empty folders; its tree: bytes of each file, -1 of each folder."""
    tree: dict[str, int] = {}
    with tarfile.open(path, "w") as tar:
        above = {str(p) for name in files for p in Path(name).parents} - {"."}
        for name in sorted({*folders, *above}):
            info = tarfile.TarInfo(name)
            info.type, info.mode, tree[name] = tarfile.DIRTYPE, 0o700, -1
            tar.addfile(info)
        for name, (data, mode) in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode, info.mtime = len(data), mode, int(time.time())
            tar.addfile(info, io.BytesIO(data))
            tree[name] = len(data)
    path.chmod(0o644)
    return tree
