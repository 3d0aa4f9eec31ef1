"""The connection of the transport `ssh`: sessions, loss, connecting again; test_transports.py has the rest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from orchestrator.transport import RemoteFile, SshTransport, UnreachableError
from tests.integration.sshd import LightFleet, Sshd, light_fleet, plain_login
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.system

Connect = Callable[..., SshTransport]


@pytest.fixture(scope="module")
def user() -> Iterator[str]:
    with plain_login() as user:
        yield user


@pytest.fixture
def fleet(user: str) -> Iterator[LightFleet]:
    with light_fleet(user) as fleet:
        yield fleet


@pytest.fixture
def connect(fleet: LightFleet) -> Iterator[Connect]:
    """An open transport to a node; closed in the end."""
    made: list[SshTransport] = []

    def make(node: Sshd, timeout: float = PATIENCE_S) -> SshTransport:
        made.append(SshTransport(node.name, node.address, port=node.port, config=fleet.config, connect_timeout=timeout))
        made[-1].connect()
        return made[-1]

    yield make
    for t in made:
        t.close()


def test_a_host_with_few_sessions_is_used_with_fewer(fleet: LightFleet, connect: Connect) -> None:
    t = connect(fleet.add("MaxSessions 4"))
    stream = t.open(["sh", "-c", "echo there; cat"])
    assert stream.read(100) == b"there\n"
    with ThreadPoolExecutor(16) as pool:
        out = list(pool.map(lambda i: t.run(["sh", "-c", f"sleep 0.05; echo {i}"]).out, range(48)))
    assert out == [f"{i}\n".encode() for i in range(48)]
    stream.close()


def test_beside_a_stream_one_session_is_enough(fleet: LightFleet, connect: Connect) -> None:
    home = fleet.folder / "home"
    home.mkdir()
    home.chmod(0o777)
    t = connect(fleet.add("MaxSessions 2"))
    stream = t.open(["cat"])
    for i in range(3):
        t.put(f"{home}/work", {"a": RemoteFile(b"%d" % i)})
        assert t.run(["cat", f"{home}/work/a"]).out == b"%d" % i
    stream.close()


def test_connect_waits_for_a_server_that_comes_back(fleet: LightFleet, connect: Connect) -> None:
    node = fleet.add()
    t = connect(node)
    node.kill()
    threading.Timer(1.0, lambda: node.start(wait=False)).start()
    t.connect()
    assert t.run(["echo", "again"]).out == b"again\n"


def test_stopping_ends_a_connect_at_once(fleet: LightFleet) -> None:
    node = fleet.add()
    node.pause()
    t = SshTransport("n", node.address, port=node.port, config=fleet.config, connect_timeout=3600.0)
    threading.Timer(0.3, t.close).start()
    with pytest.raises(UnreachableError, match="stopped"):
        t.connect()
    node.resume()
