"""Reaching many nodes over SSH against a plain asyncssh gather that does the same, turn by turn.

Light nodes: real sshd processes on loopback addresses of this machine, which share its cores with the client. Cold
means new connections, known_hosts checked, closed in the end. The peer is given what we read from the ssh_config, and
unpacks its tar stream in place, where we unpack aside and rename.
"""

from __future__ import annotations

import asyncio
import io
import shlex
import statistics
import tarfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.figure import Figure, LeftOutError, show
from benchmarks.light import need_sshd
from orchestrator.controller.node_plan import worker_code
from orchestrator.transport import RemoteFile, SshTransport
from tests.integration.sshd import LightFleet, Sshd, light_fleet, plain_login

TURNS = 5
STATUS = ["sh", "-c", "cat /proc/loadavg; uname -n; df -Pk . | tail -n 1"]
CONNECT_S = 30.0
Act = Callable[[Sequence[Sshd], int], None]


def run(folder: Path) -> list[Figure]:
    """Medians of whole rounds; everything lies in the fleet's own folder, which other users can reach."""
    try:
        import asyncssh  # noqa: F401
    except ImportError:
        raise LeftOutError("it needs asyncssh as its peer (pip install asyncssh)") from None
    need_sshd()
    figures: list[Figure] = []
    # a plain login: root's on a work machine may run anybody's .bashrc
    with plain_login() as user, light_fleet(user) as fleet:
        deployed = fleet.folder / "deployed"
        deployed.mkdir()
        deployed.chmod(0o777)
        nodes = fleet.up(64)
        for count in (16, 64):
            figures += _cold(fleet, nodes[:count], deployed)
        figures.append(_warm(fleet, nodes))
    return figures


def _cold(fleet: LightFleet, nodes: Sequence[Sshd], folder: Path) -> list[Figure]:
    numbers = iter(range(1000))
    pairs: list[tuple[str, float, Act, Act]] = [
        ("status", 1.3, lambda n, _: _status(fleet, n), lambda n, _: _peer_status(fleet, n)),
        (
            "deploy",
            1.5,
            lambda n, i: _deploy(fleet, n, folder / f"o{len(nodes)}-{i}"),
            lambda n, i: _peer_deploy(fleet, n, folder / f"t{len(nodes)}-{i}"),
        ),
    ]
    out = []
    for what, factor, ours, theirs in pairs:
        us, them = [], []
        for turn in range(TURNS + 1):
            seconds = (_seconds(ours, nodes, next(numbers)), _seconds(theirs, nodes, next(numbers)))
            if turn:  # the first one imports
                us.append(seconds[0])
                them.append(seconds[1])
        peer = statistics.median(them)
        out.append(
            Figure(
                f"cold {what} of {len(nodes)} nodes", statistics.median(us), factor * peer, "s",
                f"median of {TURNS}; bound: {factor} x asyncssh gather ({peer:.2f} s)",
            )
        )  # fmt: skip
    return out


def _seconds(what: Act, nodes: Sequence[Sshd], number: int) -> float:
    began = time.perf_counter()
    what(nodes, number)
    return time.perf_counter() - began


# --- ours -------------------------------------------------------------------------------------------------------------


def _transport(fleet: LightFleet, node: Sshd) -> SshTransport:
    return SshTransport(
        node.name, node.address, port=node.port, user=fleet.user, identity=str(fleet.key),
        config=fleet.config, connect_timeout=CONNECT_S,
    )  # fmt: skip


def _status(fleet: LightFleet, nodes: Sequence[Sshd]) -> None:
    def one(node: Sshd) -> None:
        transport = _transport(fleet, node)
        transport.connect()
        assert transport.run(STATUS).code == 0
        transport.close()

    _together(one, nodes)


def _deploy(fleet: LightFleet, nodes: Sequence[Sshd], folder: Path) -> None:
    files = {name: RemoteFile(data) for name, data in worker_code()[1].items()}

    def one(node: Sshd) -> None:
        transport = _transport(fleet, node)
        transport.connect()
        transport.put(str(folder / node.name), files, ["inbox", "claimed"])
        transport.close()

    _together(one, nodes)
    assert all((folder / n.name / "worker" / "protocol" / "spec.py").exists() for n in nodes)


def _together(one: Callable[[Any], object], things: Sequence[object]) -> None:
    with ThreadPoolExecutor(len(things)) as pool:
        list(pool.map(one, things))


def _warm(fleet: LightFleet, nodes: Sequence[Sshd]) -> Figure:
    transports = [_transport(fleet, n) for n in nodes]
    _together(SshTransport.connect, transports)
    rounds = []
    for _ in range(TURNS):
        began = time.perf_counter()
        _together(lambda t: t.run(STATUS), transports)
        rounds.append(time.perf_counter() - began)
    _together(SshTransport.close, transports)
    return Figure(
        f"warm poll of {len(nodes)} nodes", statistics.median(rounds), 1.0, "s",
        f"median of {TURNS}; one command a node on open connections",
    )  # fmt: skip


# --- the peer ---------------------------------------------------------------------------------------------------------


def _gather(fleet: LightFleet, nodes: Sequence[Sshd], one: Callable[[Any, Sshd], Any]) -> None:
    import asyncssh

    async def node(n: Sshd) -> None:
        async with asyncssh.connect(
            n.address, n.port, username=fleet.user, client_keys=[str(fleet.key)], known_hosts=str(fleet.known_hosts),
            config=None, agent_path=None, connect_timeout=CONNECT_S,
        ) as connection:  # fmt: skip
            await one(connection, n)

    async def everything() -> None:
        await asyncio.gather(*map(node, nodes))

    asyncio.run(everything())


def _peer_status(fleet: LightFleet, nodes: Sequence[Sshd]) -> None:
    async def one(connection: Any, node: Sshd) -> None:
        await connection.run(shlex.join(STATUS), check=True)

    _gather(fleet, nodes, one)


def _peer_deploy(fleet: LightFleet, nodes: Sequence[Sshd], folder: Path) -> None:
    code = worker_code()[1]

    async def one(connection: Any, node: Sshd) -> None:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as tar:
            for name, data in code.items():
                info = tarfile.TarInfo(name)
                info.size, info.mode, info.mtime = len(data), 0o600, int(time.time())
                tar.addfile(info, io.BytesIO(data))
        place = shlex.quote(str(folder / node.name))
        command = f"umask 077; mkdir -p {place}/inbox {place}/claimed && tar -xpf - -C {place}"
        await connection.run(command, input=out.getvalue(), encoding=None, check=True)

    _gather(fleet, nodes, one)
    assert all((folder / n.name / "worker" / "protocol" / "spec.py").exists() for n in nodes)


if __name__ == "__main__":
    show(run(Path()))
