"""The least rights that SECURITY.md names are enough for a run: a limited key, a plain user, a container of Docker's
defaults. And what these rights then do not allow."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from paramiko import ChannelException, SSHException

from orchestrator.engine.docker_options import container_options
from orchestrator.errors import UnreachableError
from orchestrator.inventory.load import load_inventory
from orchestrator.transport.base import connected
from orchestrator.transport.ssh import SshTransport
from tests.integration.heavy import WORKER_IMAGE, HeavyFleet
from tests.integration.heavy.bench import NodesBench, on_nodes
from tests.integration.sshd import SSHD, Sshd, light_fleet, plain_login
from tests.kits.fleet import Bench
from tests.paths import ROOT
from tests.waiting import PATIENCE_S, wait_until

EXAMPLE = (ROOT / "inventories" / "mi355x.example.yaml").read_text()
needs_sshd = pytest.mark.skipif(not Path(SSHD).exists(), reason="no sshd here (Debian: openssh-server)")
PROBE = """
import ctypes, json, os
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *args):
    return libc.syscall(number, *args) >= 0 or os.strerror(ctypes.get_errno())
print(json.dumps({
    "move_pages": call(279, 0, 0, None, None, None, 0),
    "mbind": call(237, None, 0, 0, None, 0, 0),
    "ptrace": call(101, 0, 0, 0, 0),
    "CapEff": next(l.split()[1] for l in open("/proc/self/status") if l.startswith("CapEff")),
}))
"""
"""Calls of x86-64: without seccomp in the way each succeeds, because it asks for nothing."""


def limited_line(line: str) -> str:
    """The line of authorized_keys that SECURITY.md shows, for another key."""
    (shown,) = re.findall(r"^ *(restrict\S*) ssh-ed25519 ", (ROOT / "SECURITY.md").read_text(), re.MULTILINE)
    return f"{shown} {line}"


def check_forwarding(transport: SshTransport) -> None:
    """The key opens no connection from the node, and has no terminal and no listening port there."""
    with connected(transport):
        raw = transport._connected()._transport
        with pytest.raises(ChannelException) as e:
            raw.open_channel("direct-tcpip", ("127.0.0.1", 1), ("127.0.0.1", 1))
        assert e.value.code == 1, "prohibited, not refused"
        with pytest.raises(SSHException, match="denied"):
            raw.request_port_forward("127.0.0.1", 0)
        with pytest.raises(SSHException, match="closed"):
            raw.open_session().get_pty()


@pytest.mark.system
@needs_sshd
def test_a_plain_user_and_a_limited_key_are_enough_for_processes(bench: Bench) -> None:
    with plain_login() as user, light_fleet(user) as fleet:
        fleet.authorized.write_text(limited_line(fleet.authorized.read_text()))
        node = fleet.add()
        bench.inventory.write_text(
            f"defaults: {{tuner: replay, transport: ssh, ssh_config: {fleet.config}, gpus: 0, port: {node.port}}}\n"
            f"nodes:\n  n1: {{host: {node.address}, workdir: '~/work'}}\n"
        )
        n = bench.shapes(groups=6)
        bench.tune().ok()
        assert bench.tuned() == n
        check_forwarding(SshTransport("n1", node.address, port=node.port, config=fleet.config))


@needs_sshd
def test_a_limited_key_of_a_jump_host_reaches_its_node_alone() -> None:
    with light_fleet() as fleet:
        node, other = fleet.up(2)
        keys = fleet.folder / "jump_keys"
        keys.write_text(f'restrict,port-forwarding,permitopen="{node.place}" {fleet.authorized.read_text()}')
        jump = fleet.add(f"AuthorizedKeysFile {keys}")

        def through(to: Sshd) -> SshTransport:
            return SshTransport("n", to.address, port=to.port, proxy_jump=jump.place, config=fleet.config)

        with connected(through(node)) as t:
            assert t.run(["echo", "here"]).out == b"here\n"
        with pytest.raises(UnreachableError, match="the jump host does not let us through"):
            through(other).connect()


@needs_sshd
@pytest.mark.skipif(shutil.which("ssh-agent") is None, reason="needs the OpenSSH client")
def test_your_agent_stays_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ForwardAgent yes` gives the node of `ssh` an agent, and ours none."""
    ask = "echo agent: $SSH_AUTH_SOCK"
    with light_fleet() as fleet:
        node, listens, config = fleet.add(), fleet.folder / "agent", fleet.config
        config.write_text(config.read_text().replace("IdentityAgent none", "ForwardAgent yes"))
        monkeypatch.setenv("SSH_AUTH_SOCK", str(listens))
        agent = subprocess.Popen(["ssh-agent", "-D", "-a", listens], stdout=subprocess.DEVNULL)
        try:
            wait_until(listens.exists, "the agent listens")
            argv = ["ssh", "-F", str(config), "-p", str(node.port), node.address, ask]
            assert subprocess.run(argv, capture_output=True, text=True).stdout.startswith("agent: /")
            with connected(SshTransport("n", node.address, port=node.port, config=config)) as t:
                assert t.run(["sh", "-c", ask]).out.strip() == b"agent:"
        finally:
            agent.terminate()
            agent.wait()


class TestContainers:
    pytestmark = on_nodes()

    @pytest.fixture
    def limited(self, fleet: HeavyFleet) -> Iterator[None]:
        """Every user of every node takes the key with its limits alone."""
        files = "/root/.ssh/authorized_keys /home/*/.ssh/authorized_keys"
        given = limited_line("").strip()
        for node in fleet.nodes:
            node.sh(f"sed -i 's|^|{given} |' {files}")
        yield
        for node in fleet.nodes:
            node.sh(f"sed -i 's|^{given} ||' {files}")

    def test_the_group_docker_and_a_limited_key_are_enough(
        self, fleet: HeavyFleet, remote: NodesBench, limited: None
    ) -> None:
        assert remote.run_plain("nodes", "check", "-i", remote.inventory).code == 0
        n = remote.shapes(groups=18)
        remote.tune(seconds=0.1).ok()
        remote.check_books(n)
        assert set(remote.tuned_by_node()) == {"h1", "h2", "h3"}
        node = fleet.nodes[1]
        assert node.user == "tuner"
        check_forwarding(SshTransport("h2", "h2", config=fleet.folder / "ssh_config", connect_timeout=PATIENCE_S))

    def test_what_containers_may_call(self, fleet: HeavyFleet) -> None:
        """With Docker's defaults, with the example's options, and with a capability in place of no profile at all."""
        node = fleet.nodes[1]

        def may(flags: str) -> dict[str, Any]:
            ran = node.exec(
                ["sh", "-c", f"docker run --rm -i --network none --user 1000:1000 {flags} {WORKER_IMAGE} python3 -"],
                user=node.user, stdin=PROBE.encode(),
            )  # fmt: skip
            assert ran.returncode == 0, ran.stderr
            said: dict[str, Any] = json.loads(ran.stdout)
            return said

        none, denied = "0" * 16, "Operation not permitted"
        nothing = {"move_pages": denied, "mbind": denied, "ptrace": True, "CapEff": none}
        assert may("") == may("--cap-add=SYS_PTRACE") == nothing
        example = may("--cap-add=SYS_PTRACE --security-opt=seccomp=unconfined")
        assert may("--cap-add=SYS_NICE") == {**nothing, "mbind": True}
        assert example == {"move_pages": True, "mbind": True, "ptrace": True, "CapEff": none}


def test_the_inventory_that_opts_out(tmp_path: Path) -> None:
    """SECURITY.md's options take back what the example for the MI355X asks for."""
    (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "SECURITY.md").read_text(), re.DOTALL)
    path = tmp_path / "inv.yaml"
    path.write_text(f"{EXAMPLE.split('  gpu-node-2:')[0]}{text}")
    given, least = (container_options(n, "r").flags() for n in load_inventory(path).nodes.values())
    assert {"--cap-add=SYS_PTRACE", "--security-opt=seccomp=unconfined", "--network=host", "--ipc=host"} <= set(given)
    assert least == ["--network=none", "--ipc=private", "--shm-size=16G"]
