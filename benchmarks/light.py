"""A run over SSH on light nodes: real sshd processes on loopback addresses, workers as processes, the replay tuner.

Nodes and client share this machine's cores: what is measured here is an upper bound of what our side costs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figure import LeftOutError
from tests.integration.kit import Bench
from tests.integration.sshd import SSHD, LightFleet, Sshd, light_fleet, plain_login


def need_sshd() -> None:
    """Raises LeftOutError where light nodes cannot be had."""
    if not Path(SSHD).exists():
        raise LeftOutError("it needs sshd (on Debian or Ubuntu: apt-get install openssh-server)")


@dataclass
class LightRun:
    """A folder to run commands in, and the nodes of its inventory."""

    bench: Bench
    fleet: LightFleet
    nodes: list[Sshd]

    def folder(self, node: Sshd) -> Path:
        """The node folder of the latest run."""
        return self.bench.workdir / self.bench.paths.run / node.name

    def busy_slots(self) -> int:
        """Slots with an attempt under way, as the ledger has it."""
        with contextlib.suppress(Exception), self.bench.ledger() as ledger:
            return ledger.replayed.running
        return 0


@contextlib.contextmanager
def light_run(folder: Path, nodes: int) -> Iterator[LightRun]:
    """`nodes` nodes of a slot, up and in the inventory; whatever still works there is ended afterwards."""
    need_sshd()
    # a plain login: root's on a work machine may run anybody's .bashrc
    with plain_login() as user, light_fleet(user) as fleet:
        up = fleet.up(nodes)
        fleet.write_config("".join(f"Host {n.name}\n  HostName {n.address}\n  Port {n.port}\n" for n in up))
        bench = Bench(folder)
        bench.workdir = fleet.folder / "nodes"
        bench.workdir.mkdir()
        bench.workdir.chmod(0o777)
        bench.inventory.write_text(
            f"defaults:\n  family: a16w16\n  tuner: replay\n  transport: ssh\n  engine: process\n"
            f"  gpus: 0\n  workdir: {bench.workdir}\n  ssh_config: {fleet.config}\n"
            "nodes:\n" + "".join(f"  {n.name}: {{}}\n" for n in up)
        )
        try:
            yield LightRun(bench, fleet, up)
        finally:
            bench.close()
