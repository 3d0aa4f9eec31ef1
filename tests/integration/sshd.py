"""Light nodes: real sshd processes on loopback addresses, each with its own host keys, users and limits.

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
from pathlib import Path

from tests.waiting import PATIENCE_S
from worker.protocol import LOCKS_ENV

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
HOST_KEYS = ("ed25519",)
NO_BASHRC = "SHLVL=1"
"""For `SetEnv`: bash then reads no ~/.bashrc, which is this machine's own. pyenv's takes a lock there that outlives a
session which is killed, and the next ones wait a minute for it."""


def keygen(path: Path, kind: str = "ed25519", password: str = "", comment: str = "gf") -> Path:
    """A new key pair; returns `path`."""
    bits = ["-b", "2048"] if kind == "rsa" else []
    subprocess.run(["ssh-keygen", "-q", "-t", kind, *bits, "-N", password, "-C", comment, "-f", str(path)], check=True)
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
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                out += tree(int(child))
    return out


@dataclass
class Sshd:
    """One node."""

    name: str
    address: str
    folder: Path
    authorized: Path
    key_types: Sequence[str]
    options: Sequence[str]
    """More lines for its sshd_config; the first of a setting wins, so these come first."""
    port: int
    _process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        for kind in self.key_types:
            keygen(self.host_key(kind), kind, comment=self.name)
        self.configure()

    def host_key(self, kind: str = "ed25519") -> Path:
        return self.folder / f"host_{kind}"

    @property
    def known_name(self) -> str:
        return f"[{self.address}]:{self.port}"

    def known_line(self, kind: str = "ed25519", name: str = "") -> str:
        """Its line of a known_hosts file."""
        return f"{name or self.known_name} {public(self.host_key(kind))}\n"

    def configure(self, *options: str) -> None:
        """Write its sshd_config anew; holds from the next start on."""
        lines = [
            *options,
            *self.options,
            f"SetEnv {NO_BASHRC} {LOCKS_ENV}={self.folder}/locks",
            f"ListenAddress {self.address}:{self.port}",
            *(f"HostKey {self.host_key(k)}" for k in self.key_types),
            f"AuthorizedKeysFile {self.authorized}",
            "PidFile none",
            "StrictModes no",
            "PermitRootLogin prohibit-password",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "UsePAM no",
            "UseDNS no",
            "PrintMotd no",
            "PrintLastLog no",
            "MaxStartups 200:30:400",
            "LogLevel VERBOSE",
        ]
        self.config.write_text("\n".join(lines) + "\n")

    @property
    def config(self) -> Path:
        return self.folder / "sshd_config"

    @property
    def log(self) -> str:
        return (self.folder / "sshd.log").read_text("utf-8", "replace")

    def start(self, *, wait: bool = True) -> None:
        with (self.folder / "sshd.log").open("ab") as log:
            self._process = subprocess.Popen(
                [SSHD, "-D", "-e", "-f", str(self.config)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
            )  # fmt: skip
        if wait:
            self.wait()

    def wait(self, seconds: float = PATIENCE_S) -> None:
        """Until it answers."""
        until = time.monotonic() + seconds
        while True:
            with contextlib.suppress(OSError), socket.create_connection((self.address, self.port), 1.0) as s:
                if s.recv(4):
                    return
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > until:
                raise AssertionError(f"{self.name} does not start: {self.log[-2000:]}")
            time.sleep(0.02)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def sessions(self) -> list[int]:
        """Its processes for live connections, with all that runs in them."""
        return tree(self.pid)[1:]

    def kill(self) -> None:
        """Node death: the server, its connections and what runs in them."""
        if self._process is None:
            return
        pids = tree(self.pid)
        _signal(pids, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def stop_listening(self) -> None:
        """The server goes, its connections stay."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def drop(self) -> None:
        """Cut all connections; the server goes on listening."""
        _signal(self.sessions(), signal.SIGKILL)

    def pause(self) -> None:
        """Freeze everything of the node."""
        _signal(tree(self.pid), signal.SIGSTOP)

    def resume(self) -> None:
        _signal(tree(self.pid), signal.SIGCONT)

    def restart(self) -> None:
        self.kill()
        self.start()


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
        self.known_hosts = self.folder / "known_hosts"
        self.known_hosts.write_text("")
        self.config = self.folder / "ssh_config"
        self.write_config()
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)

    def add(self, *options: str, key_types: Sequence[str] = HOST_KEYS, known: bool = True, start: bool = True) -> Sshd:
        """One more node, on an address of its own; `options` are lines for its sshd_config."""
        n = len(self.nodes) + 1
        name = f"n{n:03d}"
        address = f"127.0.{10 + n // 250}.{n % 250 + 1}"
        node = Sshd(name, address, self.folder / name, self.authorized, key_types, options, self._port(address))
        self.nodes.append(node)
        if known:
            self.trust(node)
        if start:
            node.start()
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
        nodes = [self.add(*options, start=False) for _ in range(count)]
        for node in nodes:
            node.start(wait=False)
        for node in nodes:
            node.wait()
        return nodes

    def trust(self, node: Sshd, kind: str = "", name: str = "") -> None:
        """Write its key into known_hosts."""
        with self.known_hosts.open("a") as f:
            f.write(node.known_line(kind or node.key_types[0], name))

    def write_config(self, text: str = "") -> None:
        """The client's ssh_config: `text`, then what holds for all hosts."""
        self.config.write_text(
            f"{text}\nHost *\n  User {self.user}\n  IdentityFile {self.key}\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self.known_hosts}\n  GlobalKnownHostsFile /dev/null\n  IdentityAgent none\n"
        )

    def close(self) -> None:
        for node in self.nodes:
            node.kill()


@contextlib.contextmanager
def light_fleet(user: str | None = None) -> Iterator[LightFleet]:
    """A fleet without nodes yet, in a folder that other users may pass through."""
    folder = Path(tempfile.mkdtemp(prefix="gf-sshd-"))
    folder.chmod(0o755)
    fleet = LightFleet(folder, user or pwd.getpwuid(os.getuid()).pw_name)
    try:
        yield fleet
    finally:
        fleet.close()
        shutil.rmtree(folder, ignore_errors=True)
