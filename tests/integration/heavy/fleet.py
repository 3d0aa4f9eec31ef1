"""HeavyFleet: brings nodes up, all at once, and takes every trace of them away."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.integration.heavy.images import WORKER_IMAGE, Say, node_image, quiet, torch_archive, worker_archive
from tests.integration.heavy.node import HeavyNode, write_sshd_config
from tests.integration.heavy.outer import HeavyError, Outer, locked

LABEL = "gemmfleet.test"
INIT = Path(__file__).with_name("node-init")
DOCKERD = "--bridge=none --iptables=false --ip6tables=false --ip-masq=false --insecure-registry=198.18.0.0/15"
"""The nodes' own Docker has no network: nothing of Docker's private ranges appears anywhere."""
RIGHTS = (
    *(f"--cap-add={cap}" for cap in ("SYS_ADMIN", "NET_ADMIN", "SYS_PTRACE", "SYS_NICE", "SYSLOG")),
    *(f"--security-opt={name}=unconfined" for name in ("seccomp", "apparmor", "systempaths")),
    "--device-cgroup-rule=a *:* rwm",
)  # fmt: skip
"""Rights of a node. Not `--privileged`: a machine that is a container itself may not have all that this asks for."""


class HeavyFleet:
    """Nodes in containers on a 198.18.x network. `folder` holds keys and what the nodes mount."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.identity = folder, folder / "id_ed25519"
        """`identity`: the private key that every user of every node accepts."""
        self.id = secrets.token_hex(3)
        self.nodes: list[HeavyNode] = []
        self._outer = Outer()
        self._subnet = ""

    @property
    def gateway(self) -> str:
        """This machine's address on the nodes' network."""
        return f"{self._subnet}.1"

    def start(
        self, n: int = 3, users: Sequence[str] = ("root", "tuner"), *, torch: bool = False, say: Say = quiet
    ) -> list[HeavyNode]:
        """Bring up n nodes; users are given out in turn.

        `root`; `tuner`, who is in the group docker; `nodocker`, who is not, and may say `sudo -n docker`.
        `torch`: they have TORCH_IMAGE in place of the small worker image. `say` is told what takes long.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._outer.acquire()
        try:
            with ThreadPoolExecutor(2) as pool:
                image = pool.submit(node_image, self._outer, say)
                worker = pool.submit(torch_archive if torch else worker_archive, self._outer, say)
                node, archive = image.result(), worker.result()
            self._sweep()
            self._network()
            _keygen(self.identity, "gemmfleet-test")
            with ThreadPoolExecutor(n) as pool:
                try:
                    self.nodes = list(pool.map(lambda i: self._node(i, node, users[i % len(users)], archive), range(n)))
                except BaseException:
                    self._remove(self._mine)  # who still waits for a node sees that it is gone
                    raise
            (self.folder / "known_hosts").write_text("".join(f"{x.known_hosts}\n" for x in self.nodes))
            (self.folder / "ssh_config").write_text(self._ssh_config())
        except BaseException:
            self.stop()
            raise
        return self.nodes

    def stop(self) -> None:
        """Remove the nodes, their volumes and their network."""
        self._remove(self._mine)
        if self._subnet:
            _blackhole("del", self._subnet)
        self.nodes, self._subnet = [], ""
        self._outer.release()

    def _ssh_config(self) -> str:
        """Text of `folder`/ssh_config: every node by its name."""
        return "".join(
            f"Host {n.name}\n  HostName {n.address}\n  Port {n.port}\n  User {n.user}\n  IdentityFile {n.identity}\n"
            f"  IdentitiesOnly yes\n  UserKnownHostsFile {self.folder}/known_hosts\n  GlobalKnownHostsFile /dev/null\n"
            for n in self.nodes
        )

    def inventory(self, image: str = WORKER_IMAGE, tuner: str = "replay") -> str:
        """Text of an inventory of all nodes, each one slot; they are looked up in `folder`/ssh_config."""
        return (
            "defaults:\n  family: a16w16\n"
            f"  tuner: {tuner}\n  transport: ssh\n  engine: docker\n  image: {image}\n"
            f"  docker: {{pull: never}}\n  ssh_config: {self.folder}/ssh_config\n"
            "  gpus: 0   # no GPU: a node is one slot with all its cores\n"
            "nodes:\n" + "".join(f"  {n.name}: {{}}   # {n.user}@{n.address}\n" for n in self.nodes)
        )

    def _node(self, i: int, image: str, user: str, archive: Path) -> HeavyNode:
        name, address = f"h{i + 1}", f"{self._subnet}.{10 + i}"
        folder = self.folder / name
        (folder / "images").mkdir(parents=True)
        _keygen(folder / "hostkey", name)
        shutil.copy(self.identity.with_suffix(".pub"), folder / "authorized_keys")
        write_sshd_config(folder, ())
        (folder / "dockerd.args").write_text(DOCKERD)
        (folder / "images" / archive.name).touch()
        mounts = [f"{folder}:/fleet:ro", f"{INIT}:/node-init:ro", "/var/lib/docker", "/disk"]
        mounts.append(f"{archive}:/fleet/images/{archive.name}:ro")
        node = HeavyNode(name, address, user, self.identity, f"gemmfleet-test-{self.id}-{name}", folder, self._outer)
        self._outer.docker(
            "run", "-d", "--name", node.container, "--hostname", name, "--label", f"{LABEL}={self.id}",
            "--label", f"{LABEL}.owner={os.getpid()}", "--network", self._network_name, "--ip", address,
            *RIGHTS, *(x for m in mounts for x in ("-v", m)), image, "/node-init",
        )  # fmt: skip
        node.wait_ready()
        return node

    @property
    def _mine(self) -> str:
        return f"label={LABEL}={self.id}"

    @property
    def _network_name(self) -> str:
        return f"gemmfleet-test-{self.id}"

    def _network(self) -> None:
        """A bridge without a way out, on the first free 198.18.x.0/24."""
        with locked("network"):
            for third in range(100, 200):
                subnet = f"198.18.{third}"
                if _taken(subnet):
                    continue
                labels = ["--label", f"{LABEL}={self.id}", "--label", f"{LABEL}.owner={os.getpid()}"]
                argv = ["network", "create", "--internal", "--subnet", f"{subnet}.0/24", *labels, self._network_name]
                if self._outer.run(argv).returncode == 0:
                    self._subnet = subnet
                    # what is not on the bridge must not leave this machine by the default route
                    _blackhole("replace", subnet)
                    return
        raise HeavyError("no free network 198.18.100.0/24 to 198.18.199.0/24")

    def _remove(self, flt: str) -> None:
        with contextlib.suppress(HeavyError, subprocess.TimeoutExpired):
            containers = self._outer.docker("ps", "-aq", "--filter", flt).split()
            if containers:
                self._outer.docker("rm", "-f", "-v", *containers)
            networks = self._outer.docker("network", "ls", "-q", "--filter", flt).split()
            if networks:
                self._outer.docker("network", "rm", *networks)

    def _sweep(self) -> None:
        """Remove what test runs left behind that were killed."""
        label = f"{LABEL}.owner"
        listed = self._outer.docker("ps", "-a", "--format", f'{{{{.Label "{label}"}}}}')
        listed += "\n" + self._outer.docker("network", "ls", "--format", f'{{{{.Label "{label}"}}}}')
        for owner in set(listed.split()):
            if owner.isdigit() and not Path(f"/proc/{owner}").exists():
                self._remove(f"label={label}={owner}")


def _keygen(path: Path, comment: str) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)], check=True)


def _taken(subnet: str) -> bool:
    """Return whether a bridge has the addresses without Docker's knowledge: its daemon was killed, its data removed."""
    shown = subprocess.run(["ip", "-4", "-o", "addr", "show", "to", f"{subnet}.0/24"], capture_output=True, text=True)
    return bool(shown.stdout.strip())


def _blackhole(verb: str, subnet: str) -> None:
    subprocess.run(["ip", "route", verb, "blackhole", f"{subnet}.0/24", "metric", "4096"], capture_output=True)
