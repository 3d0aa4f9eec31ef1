"""One heavy node: how to reach it, and everything that can go wrong with it."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.integration.heavy.outer import HeavyError, Outer
from tests.waiting import PATIENCE_S

REPAIR = r"""
while iptables -w -D INPUT -i eth0 -j DROP 2>/dev/null; do :; done
while iptables -w -D OUTPUT -o eth0 -j DROP 2>/dev/null; do :; done
if ! { [ -s /run/node-sshd ] && kill -0 "$(cat /run/node-sshd)"; } 2>/dev/null; then
    rm -f /run/node-sshd; kill -USR2 1; until [ -s /run/node-sshd ]; do sleep 0.02; done
fi
if ! kill -CONT "$(cat /run/node-dockerd)" 2>/dev/null; then
    rm -f /run/docker.pid; kill -USR1 1; until docker info >/dev/null 2>&1; do sleep 0.05; done
fi
"""
"""Undoes what is done below to links, sshd and engine."""


@dataclass(frozen=True)
class HeavyNode:
    """A host of its own. `user` logs in over SSH with `identity`; /data is its small disk (512 MB)."""

    name: str
    address: str
    user: str
    identity: Path
    container: str
    folder: Path
    """The kit's files of this node (mounted at /fleet there)."""
    outer: Outer
    port: int = 22

    @property
    def known_hosts(self) -> str:
        """The line of this node in a known_hosts file."""
        return " ".join([self.address, *(self.folder / "hostkey.pub").read_text().split()[:2]])

    def exec(
        self, argv: Sequence[str], *, user: str = "root", stdin: bytes | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a command on the node, not over SSH."""
        return self.outer.run(["exec", "-i", "-u", user, self.container, *argv], stdin=stdin)

    def sh(self, script: str, *, user: str = "root") -> str:
        """The output of a shell script on the node; HeavyError where it fails."""
        done = self.exec(["sh", "-c", script], user=user)
        if done.returncode != 0:
            raise HeavyError(f"{self.name}: {script!r} ended with code {done.returncode}: {done.stderr.decode()}")
        return done.stdout.decode().strip()

    def containers(self, *filters: str) -> list[str]:
        """Names of the containers on the node, dead ones too."""
        flags = " ".join(f"--filter {shlex.quote(f)}" for f in filters)
        return self.sh(f"docker ps -a --format '{{{{.Names}}}}' {flags}").split()

    def wait_ready(self) -> None:
        """Until sshd and dockerd answer and the images are loaded."""
        until = time.monotonic() + PATIENCE_S
        while (asked := self.exec(["test", "-e", "/run/node-ready"])).returncode != 0:
            if b"No such container" in asked.stderr:
                raise HeavyError(f"{self.name} is gone")
            if time.monotonic() > until:
                log = self.outer.run(["exec", self.container, "tail", "-n", "20", "/var/log/dockerd.log"])
                raise HeavyError(f"{self.name} is not ready after {PATIENCE_S:g} s: {log.stdout.decode()}")
            time.sleep(0.05)

    def remove_containers(self, found_by: str) -> None:
        """Remove containers by force, until none is left: one that is being removed is an error for docker rm."""
        found = f"docker ps -aq --filter {shlex.quote(found_by)}"
        self.sh(f'while [ -n "$({found})" ]; do {found} | xargs -r docker rm -f >/dev/null 2>&1 || sleep 0.2; done')

    def repair(self) -> None:
        """Undo all that was done to its links, its sshd and its engine."""
        self.wait_ready()
        self.sh(REPAIR)

    def partition(self) -> None:
        """Packets vanish in both directions; nothing is closed."""
        self.sh("iptables -w -I INPUT -i eth0 -j DROP && iptables -w -I OUTPUT -o eth0 -j DROP")

    def heal(self) -> None:
        for chain in ("INPUT -i", "OUTPUT -o"):
            self.sh(f"while iptables -w -D {chain} eth0 -j DROP 2>/dev/null; do :; done")

    def drop_connections(self) -> None:
        """Kill every open SSH session; the server keeps listening."""
        self.sh('for p in $(pgrep -x sshd); do [ "$p" = "$(cat /run/node-sshd)" ] || kill -9 "$p"; done; true')

    def stop_sshd(self) -> None:
        """No SSH at all: the server and its sessions die; new connections are refused."""
        self.sh("pkill -9 -x sshd; while pgrep -x sshd >/dev/null; do sleep 0.02; done; rm -f /run/node-sshd")

    def start_sshd(self) -> None:
        self.sh("kill -USR2 1; until [ -s /run/node-sshd ]; do sleep 0.02; done")

    def set_sshd_options(self, *options: str) -> None:
        """Lines of this node's sshd_config, e.g. `MaxSessions 4`, over the system's own; restarts sshd."""
        write_sshd_config(self.folder, options)
        self.stop_sshd()
        self.start_sshd()

    def stop_dockerd(self) -> None:
        """Stop the node's Docker and with it all its containers."""
        self.sh('p=$(cat /run/node-dockerd); kill "$p"; while kill -0 "$p" 2>/dev/null; do sleep 0.05; done')

    def start_dockerd(self) -> None:
        self.sh("rm -f /run/docker.pid; kill -USR1 1; until docker info >/dev/null 2>&1; do sleep 0.05; done")

    def stall_dockerd(self) -> None:
        """Docker takes connections and answers nothing."""
        self.sh('kill -STOP "$(cat /run/node-dockerd)"')

    def unstall_dockerd(self) -> None:
        self.sh('kill -CONT "$(cat /run/node-dockerd)"')

    def kill_worker(self, container: str) -> None:
        """Kill the first process of a container from outside, which Docker sees as its death."""
        self.sh(f"kill -KILL \"$(docker inspect -f '{{{{.State.Pid}}}}' {shlex.quote(container)})\"")


def write_sshd_config(folder: Path, options: Sequence[str]) -> None:
    """Write the file that the node's sshd reads: the first setting of an option wins, so ours come first."""
    (folder / "sshd_config").write_text("".join(f"{o}\n" for o in (*options, "Include /etc/ssh/sshd_config")))
