"""Light nodes: real sshd processes on loopback addresses, each with its own host keys and limits.

Run as root, a node lets several users in; run as another user, only that one. Everything lies in one folder that is
removed in the end; the only thing outside is the test user (`plain_login`) and sshd's own /run/sshd.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path

from tests.waiting import wait_until
from worker.protocol import LOCKS_ENV

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
NO_BASHRC = "SHLVL=1"
"""For `SetEnv`: bash then reads no ~/.bashrc, which is this machine's own. pyenv's takes a lock there that outlives a
session which is killed, and the next ones wait a minute for it."""


def keygen(path: Path, kind: str = "ed25519", password: str = "") -> Path:
    """A new key pair; returns `path`."""
    bits = ["-b", "2048"] if kind == "rsa" else []
    subprocess.run(["ssh-keygen", "-q", "-t", kind, *bits, "-N", password, "-C", "gf", "-f", str(path)], check=True)
    return path


def public(path: Path) -> str:
    """The line of `path`.pub without its comment."""
    return " ".join(path.with_name(path.name + ".pub").read_text().split()[:2])


@contextlib.contextmanager
def plain_login() -> Iterator[str]:
    """A login without root for as long as the block lasts; where we are not root, ourselves."""
    if os.getuid() != 0:
        yield getpass.getuser()
        return
    name = f"gf-test-{os.getpid()}"
    # "*": no password fits, but the account is not locked, which sshd would refuse
    subprocess.run(["useradd", "--create-home", "--shell", "/bin/sh", "--password", "*", name], check=True)
    try:
        yield name
    finally:
        for _ in range(50):
            done = subprocess.run(["userdel", "--remove", name], capture_output=True, text=True)
            if done.returncode != 8:  # 8: still logged in
                break
            time.sleep(0.1)


def tree(pid: int) -> list[int]:
    """A process and all below it, the process first."""
    out = [pid]
    for children in glob(f"/proc/{pid}/task/*/children"):
        with contextlib.suppress(OSError):  # the thread ended meanwhile
            for child in Path(children).read_text().split():
                out += tree(int(child))
    return out


@dataclass
class Sshd:
    """One node. `options`: more lines for its sshd_config; the first of a setting wins, so these come first."""

    name: str
    address: str
    folder: Path
    authorized: Path
    options: Sequence[str]
    port: int

    def __post_init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.folder.mkdir(parents=True)
        locks = self.folder / "locks"
        locks.mkdir()
        locks.chmod(0o1777)  # for every user of the node, as in /tmp
        key = keygen(self.folder / "host_key")
        lines = [
            *self.options,
            f"SetEnv {NO_BASHRC} {LOCKS_ENV}={self.folder}/locks",
            f"ListenAddress {self.address}:{self.port}",
            f"HostKey {key}",
            f"AuthorizedKeysFile {self.authorized}",
            "PidFile none",
            "StrictModes no",
            "PermitRootLogin prohibit-password",
            *(f"{off} no" for off in ("PasswordAuthentication", "KbdInteractiveAuthentication", "UsePAM", "UseDNS")),
            *(f"{off} no" for off in ("PrintMotd", "PrintLastLog")),
            "MaxStartups 200:30:400",
            "LogLevel VERBOSE",
        ]
        (self.folder / "sshd_config").write_text("\n".join(lines) + "\n")

    @property
    def place(self) -> str:
        return f"{self.address}:{self.port}"

    @property
    def known_name(self) -> str:
        return f"[{self.address}]:{self.port}"

    def known_line(self) -> str:
        """Its line of a known_hosts file."""
        return f"{self.known_name} {public(self.folder / 'host_key')}\n"

    @property
    def log(self) -> str:
        return (self.folder / "sshd.log").read_text("utf-8", "replace")

    def start(self, *, wait: bool = True) -> None:
        with (self.folder / "sshd.log").open("ab") as log:
            self._process = subprocess.Popen(
                [SSHD, "-D", "-e", "-f", str(self.folder / "sshd_config")],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
            )  # fmt: skip
        if wait:
            self.wait()

    def wait(self) -> None:
        """Until it answers."""

        def answers() -> bool:
            assert self._process is not None
            assert self._process.poll() is None, f"{self.name} does not start: {self.log[-2000:]}"
            with contextlib.suppress(OSError), socket.create_connection((self.address, self.port), 1.0) as s:
                return bool(s.recv(4))
            return False

        wait_until(answers, f"{self.name} answers")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def sessions(self) -> list[int]:
        """Its processes for live connections, with all that runs in them."""
        return tree(self.pid)[1:]

    def kill(self) -> None:
        """Node death: the server, its connections and what runs in them."""
        if self._process is not None:
            _signal(tree(self.pid), signal.SIGKILL)
            self._process.wait()
            self._process = None

    def drop(self) -> None:
        """Cut all connections; the server goes on listening."""
        _signal(self.sessions(), signal.SIGKILL)

    def pause(self) -> None:
        """Freeze everything of the node."""
        _signal(tree(self.pid), signal.SIGSTOP)

    def resume(self) -> None:
        _signal(tree(self.pid), signal.SIGCONT)


def _signal(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@dataclass
class LightFleet:
    """Nodes and what a client needs for them: a key, known_hosts, an ssh_config."""

    folder: Path
    user: str
    nodes: list[Sshd] = field(default_factory=list)
    port: int = 0
    """The same for all nodes, as far as it is free on their addresses."""

    def __post_init__(self) -> None:
        self.key = keygen(self.folder / "id_client")
        self.authorized = self.folder / "authorized_keys"
        self.authorized.write_text(public(self.key) + "\n")
        self.authorized.chmod(0o644)
        self.known_hosts, self.config = self.folder / "known_hosts", self.folder / "ssh_config"
        self.known_hosts.touch()
        self.write_config()
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)

    def add(self, *options: str, wait: bool = True) -> Sshd:
        """One more node, on an address of its own, whose key is known; `options` are lines for its sshd_config."""
        n = len(self.nodes) + 1
        name, address = f"n{n:03d}", f"127.0.{10 + n // 250}.{n % 250 + 1}"
        node = Sshd(name, address, self.folder / name, self.authorized, options, self._port(address))
        self.nodes.append(node)
        with self.known_hosts.open("a") as f:
            f.write(node.known_line())
        node.start(wait=wait)
        return node

    def _port(self, address: str) -> int:
        with socket.socket() as s:
            try:
                s.bind((address, self.port))
            except OSError:
                s.bind((address, 0))
            self.port = self.port or int(s.getsockname()[1])
            return int(s.getsockname()[1])

    def up(self, count: int, *options: str) -> list[Sshd]:
        """`count` nodes, started at the same time; `options` as for `add`."""
        nodes = [self.add(*options, wait=False) for _ in range(count)]
        for node in nodes:
            node.wait()
        return nodes

    def write_config(self, text: str = "") -> None:
        """The client's ssh_config: `text`, then what holds for all hosts."""
        self.config.write_text(
            f"{text}\nHost *\n  User {self.user}\n  IdentityFile {self.key}\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self.known_hosts}\n  GlobalKnownHostsFile /dev/null\n  IdentityAgent none\n"
        )


@contextlib.contextmanager
def light_fleet(user: str | None = None) -> Iterator[LightFleet]:
    """A fleet without nodes yet, in a folder that other users may pass through."""
    folder = Path(tempfile.mkdtemp(prefix="gf-sshd-"))
    folder.chmod(0o755)
    fleet = LightFleet(folder, user or pwd.getpwuid(os.getuid()).pw_name)
    try:
        yield fleet
    finally:
        for node in fleet.nodes:
            node.kill()
        shutil.rmtree(folder, ignore_errors=True)
