"""Callers of the programs that are compared, with fair settings for each; how they differ is in their notes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.environment import Environment, last_error
from benchmarks.peers.table import OURS
from tests.paths import ROOT

CLIENT = str(Path(__file__).with_name("client.py"))
PATIENCE_S = 900.0
STATUS_WHOLE, STATUS_INSIDE, AGAIN = "status, whole command", "status, program running", "status, connections open"
DEPLOY_WHOLE, DEPLOY_INSIDE = "deploy, whole command", "deploy, program running"
WORKS = {"status": (STATUS_WHOLE, STATUS_INSIDE, AGAIN), "deploy": (DEPLOY_WHOLE, DEPLOY_INSIDE)}
"""Times taken of each work: with the program's start; without its imports, where it is a library; and of a second round
over connections that are kept."""

Call = Callable[[Environment, str, dict[str, Any]], dict[str, float]]
"""(environment, work, job) -> seconds by time taken. Raises PeerError."""


class PeerError(Exception):
    """A peer did not do the work; the text is a table's cell."""


@dataclass(frozen=True)
class Peer:
    """A column of the table. `note`: its settings, and where it does less than ours, or more."""

    package: str
    call: Call
    note: str


def timed(argv: Sequence[str], env: Mapping[str, str] = {}) -> tuple[float, str]:
    """Seconds of a whole command, and its output. Raises PeerError where it fails, or takes longer than PATIENCE_S."""
    began = time.perf_counter()
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            env={**os.environ, **env},
        )
    except subprocess.TimeoutExpired:
        raise PeerError(f"not done in {PATIENCE_S:g} s") from None
    if done.returncode:
        raise PeerError(f"failed: {last_error(done.stdout + done.stderr)}")
    return time.perf_counter() - began, done.stdout


def library(name: str) -> Call:
    """Caller of a library, by client.py."""

    def call(environment: Environment, work: str, job: dict[str, Any]) -> dict[str, float]:
        path = Path(job["scratch"]) / "job.json"
        path.write_text(json.dumps(job))
        python = sys.executable if name == OURS else environment.program("python")
        seconds, out = timed([python, CLIENT, name, work, str(path)], {"PYTHONPATH": str(ROOT) if name == OURS else ""})
        return library_times(work, seconds, out)

    return call


def library_times(work: str, seconds: float, out: str) -> dict[str, float]:
    """Times of a client.py. It took `seconds` with its second round, and printed the times of both rounds."""
    inside, again = map(float, out.split())
    if work == "deploy":
        return {DEPLOY_WHOLE: seconds, DEPLOY_INSIDE: inside}
    return {STATUS_WHOLE: seconds - again, STATUS_INSIDE: inside, AGAIN: again}


def ansible(environment: Environment, work: str, job: dict[str, Any]) -> dict[str, float]:
    """Status by the module raw, twice over its kept connections; deploy by a playbook. They are closed in the end."""
    scratch = Path(job["scratch"])
    hosts, play, kept = scratch / "hosts.json", scratch / "play.json", scratch / "kept"
    named = {n["name"]: {"ansible_host": n["address"], "ansible_port": n["port"], "to": n["to"]} for n in job["nodes"]}
    login = {"ansible_user": job["user"], "ansible_ssh_private_key_file": job["key"]}
    given = {**login, "ansible_python_interpreter": "/usr/bin/python3"}
    hosts.write_text(json.dumps({"all": {"hosts": named, "vars": given}}))
    tasks = [{"raw": "umask 077; mkdir -p {{ to }}"}, {"unarchive": {"src": job["tar"], "dest": "{{ to }}"}}]
    play.write_text(json.dumps([{"hosts": "all", "gather_facts": False, "tasks": tasks}]))
    env = {
        "LC_ALL": "C.UTF-8", "ANSIBLE_HOME": str(scratch), "ANSIBLE_FORKS": str(len(named)), "ANSIBLE_PIPELINING": "1",
        "ANSIBLE_SSH_CONTROL_PATH_DIR": str(kept),
        "ANSIBLE_SSH_ARGS": f"-F {job['ssh_config']} -o ControlMaster=auto -o ControlPersist=60s",
    }  # fmt: skip
    status = [environment.program("ansible"), "all", "-i", str(hosts), "-m", "raw", "-a", job["command"]]
    try:
        if work == "deploy":
            return {DEPLOY_WHOLE: timed([environment.program("ansible-playbook"), "-i", str(hosts), str(play)], env)[0]}
        return {STATUS_WHOLE: timed(status, env)[0], AGAIN: timed(status, env)[0]}
    finally:
        for socket in kept.glob("*") if kept.is_dir() else ():
            argv = ["ssh", "-F", "/dev/null", "-o", f"ControlPath={socket}", "-O", "exit", "node"]
            subprocess.run(argv, capture_output=True)


PYINFRA_DEPLOY = """\
from pyinfra import host
from pyinfra.operations import files, server

files.put(src=host.data.tar, dest=host.data.to + ".tar")
server.shell(["umask 077; mkdir -p {0} && tar -xpf {0}.tar -C {0}".format(host.data.to)])
"""


def pyinfra(environment: Environment, work: str, job: dict[str, Any]) -> dict[str, float]:
    """Status by exec, deploy by a deploy file."""
    hosts, deploy = Path(job["scratch"]) / "hosts.py", Path(job["scratch"]) / "deploy.py"
    given = {
        "ssh_user": job["user"], "ssh_key": job["key"], "ssh_config_file": job["ssh_config"], "ssh_allow_agent": False,
        "ssh_known_hosts_file": job["known_hosts"], "ssh_strict_host_key_checking": "yes", "tar": job["tar"],
    }  # fmt: skip
    nodes = job["nodes"]
    named = [(n["name"], {**given, "ssh_hostname": n["address"], "ssh_port": n["port"], "to": n["to"]}) for n in nodes]
    hosts.write_text(f"nodes = {named!r}\n")
    deploy.write_text(PYINFRA_DEPLOY)
    what = [str(deploy)] if work == "deploy" else ["exec", "--", job["command"]]
    argv = [environment.program("pyinfra"), "-y", "--parallel", str(len(nodes)), str(hosts), *what]
    return {WORKS[work][0]: timed(argv)[0]}


PEERS = {
    OURS: Peer(
        "",
        library("gemmfleet"),
        "transport and deployer of a run, a thread a node, `ssh -G` for each, host keys checked; renders and packs for "
        "each node, asks for code that is there, writes aside and renames into place. Not in it: starting workers",
    ),
    "asyncssh": Peer(
        "asyncssh",
        library("asyncssh"),
        "one gather, host keys checked. Less: no ssh_config, sends what was packed before, unpacks in place",
    ),
    "parallel-ssh": Peer(
        "parallel-ssh",
        library("parallel-ssh"),
        "native client, pool_size = nodes. Less: **checks no host keys**, no ssh_config, sends what was packed before, "
        "unpacks in place",
    ),
    "pyinfra": Peer(
        "pyinfra",
        pyinfra,
        "`--parallel` = nodes, host keys checked; deploy is files.put of the tar and a shell operation. Less: unpacks "
        "in place, keeps no connections. More: compares before it writes, describes the state of hosts",
    ),
    "Ansible": Peer(
        "ansible-core",
        ansible,
        "forks = nodes, pipelining, ControlPersist, no compression, no facts, interpreter given, host keys checked; "
        "status is the module raw, deploy raw mkdir and unarchive. Less: unpacks in place. More: compares before it "
        "writes, modules for everything",
    ),
}
