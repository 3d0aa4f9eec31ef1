"""Promises of every transport: this machine, a real sshd, a real Slurm and a real Kubernetes API server.

Each node is this machine, so a test looks at its files and processes itself. What only one transport has (logins,
sessions, a scheduler, a protocol) is tested in test_ssh.py, test_slurm.py, test_kubernetes.py and tests/unit/transport.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from orchestrator.errors import SlowError, TransportError, UnreachableError
from orchestrator.inventory.model import Node
from orchestrator.leases.kubernetes import KubernetesSource
from orchestrator.leases.lease import Lease, LeaseSource, LeaseState
from orchestrator.leases.slurm import SlurmSource
from orchestrator.transport.base import RemoteFile, Transport
from orchestrator.transport.local import LocalTransport
from orchestrator.transport.ssh import SshTransport
from tests.integration.slurm import PARTITION, SlurmCluster
from tests.integration.slurm import missing as no_slurm
from tests.integration.sshd import SSHD, light_fleet, plain_login, tree
from tests.support.kube import Cluster, why_not
from tests.waiting import PATIENCE_S, wait_until


@dataclass
class Way:
    """A node, and how its connections are broken and held up."""

    transport: Callable[[], Transport]
    folder: Path
    """A folder of this machine in which the node's user may write."""
    cut: Callable[[], None] = lambda: None
    stall: Callable[[], None] = lambda: None
    resume: Callable[[], None] = lambda: None


Open = Callable[[pytest.FixtureRequest, Path], AbstractContextManager[Way]]


@contextmanager
def local(request: pytest.FixtureRequest, folder: Path) -> Iterator[Way]:
    yield Way(lambda: LocalTransport("here"), folder)


@contextmanager
def ssh(request: pytest.FixtureRequest, folder: Path) -> Iterator[Way]:
    with plain_login() as user, light_fleet(user) as fleet:
        node = fleet.add()
        work = fleet.folder / "work"
        work.mkdir()
        work.chmod(0o777)

        def transport() -> Transport:
            options = {"port": node.port, "config": fleet.config, "connect_timeout": PATIENCE_S}
            return SshTransport(node.name, node.address, **options)  # type: ignore[arg-type]

        yield Way(transport, work, node.drop, node.pause, node.resume)


@contextmanager
def leased(source: LeaseSource) -> Iterator[Lease]:
    source.ask(1)
    try:
        wait_until(lambda: source.list()[0].state is LeaseState.READY, "the lease is ready")
        yield source.list()[0]
    finally:
        source.release(source.list())
        source.close()


@contextmanager
def srun(request: pytest.FixtureRequest, folder: Path) -> Iterator[Way]:
    cluster: SlurmCluster = request.getfixturevalue("slurm_nodes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
        wanted = Node(name="p", lease="slurm", partition=PARTITION, workdir=str(folder / "work"))
        source = SlurmSource(folder.name, wanted, str(folder / "out"))
        with leased(source) as lease:
            node = cluster.node(lease.host)

            def send(number: int) -> None:
                for pid in node.pids():
                    with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                        os.kill(pid, number)

            yield Way(
                lambda: source.transport(lease, "n1"), folder / "files", kill_sruns,
                lambda: send(signal.SIGSTOP), lambda: send(signal.SIGCONT),
            )  # fmt: skip
        cluster.mend()


def kill_sruns() -> None:
    for pid in tree(os.getpid()):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if Path(f"/proc/{pid}/comm").read_text() == "srun\n":
                os.kill(pid, signal.SIGKILL)


@contextmanager
def pod(request: pytest.FixtureRequest, folder: Path) -> Iterator[Way]:
    cluster: Cluster = request.getfixturevalue("cluster")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(cluster.kubeconfig()))
        source = KubernetesSource(
            "20260131-154500-c0de", Node(name="pool", lease="kubernetes", image="rocm/pytorch", gpus=2)
        )
        with leased(source) as lease:
            yield Way(
                lambda: source.transport(lease, "pool-1"), folder / "files", lambda: cluster.fault("cut", lease.id),
                lambda: cluster.fault("freeze", lease.id), lambda: cluster.fault("revive", lease.host),
            )  # fmt: skip
        wait_until(lambda: not cluster.pods(), "no pod is left")


def _param(way: Open, why: str, *marks: pytest.MarkDecorator) -> object:
    return pytest.param(
        way, id=way.__name__, marks=[pytest.mark.system, pytest.mark.skipif(bool(why), reason=why), *marks]
    )


REMOTE = [
    _param(ssh, "" if Path(SSHD).exists() else "no sshd here (Debian: openssh-server)"),
    _param(srun, no_slurm(), pytest.mark.xdist_group("slurm")),
    _param(pod, why_not(), pytest.mark.xdist_group("kubernetes")),
]
over_a_link = pytest.mark.parametrize("way", REMOTE, indirect=True)


@pytest.fixture(scope="module", params=[*REMOTE, pytest.param(local, id="local")])  # in this order, each is opened once
def way(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Way]:
    open_way: Open = request.param
    with open_way(request, tmp_path_factory.mktemp("way")) as way:
        yield way


@pytest.fixture
def t(way: Way) -> Iterator[Transport]:
    """A transport of the test's own."""
    transport = way.transport()
    transport.connect()
    yield transport
    transport.close()


@pytest.fixture
def home(way: Way) -> Path:
    """A folder of the node that is not there yet."""
    return way.folder / secrets.token_hex(4)


def runs(*argv: str) -> bool:
    """Return whether a process of this machine has exactly these words."""
    line = "\0".join(argv).encode() + b"\0"
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes() == line:
                return True
    return False


def mark() -> str:
    return f"7{secrets.randbelow(10**8):08}"


def test_a_command_gets_its_words_its_input_and_gives_its_code(t: Transport) -> None:
    words = ["a b", "$HOME", "it's", "*", "~", "A=b", "", "\\", "new\nline", "ü", "-n", "`id`", "!x"]
    assert t.run(["printf", "%s\\0", *words]).out == b"".join(w.encode() + b"\0" for w in words)
    done = t.run(["sh", "-c", "cat; echo err >&2; exit 7"], stdin=b"in\0put")
    assert (done.code, done.out, done.err) == (7, b"in\0put", b"err\n")
    assert t.run(["sh", "-c", "kill -9 $$"]).code == -9
    with pytest.raises(TransportError, match="cannot run no-such-command"):
        t.run(["no-such-command"])


def test_much_input_and_much_output_at_once_do_not_block_each_other(t: Transport) -> None:
    data = os.urandom(1 << 20) * 6
    done = t.run(["sh", "-c", "tee /dev/stderr"], stdin=data)
    assert done.out == data
    assert data.endswith(done.err)
    assert len(done.err) > 100_000
    assert t.run(["head", "-c", "3"], stdin=data).out == data[:3], "a command that reads only a part is not an error"
    if not isinstance(t, LocalTransport):
        with pytest.raises(TransportError, match="printed more than 64 MiB"):
            t.run(["head", "-c", "90000000", "/dev/zero"])
        assert t.run(["true"]).code == 0


def test_a_command_that_takes_too_long_leaves_nothing_and_others_go_on(t: Transport) -> None:
    """Neither itself nor what it started, though it reads and writes nothing."""
    number = mark()
    script = f"trap '' TERM; sleep {number} & timeout --foreground {number} sleep {number}"
    t.run(["true"])
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(t.run, ["sh", "-c", script], timeout=1.0)
        wait_until(lambda: runs("sleep", number) or slow.done(), "it runs")
        assert [t.run(["echo", str(i)]).out for i in range(20)] == [b"%d\n" % i for i in range(20)]
        with pytest.raises(SlowError, match="sh took longer than 1 s"):
            slow.result()
    t.close()  # not even where the connection is gone
    wait_until(lambda: not runs("sleep", number), "nothing is left")
    t.connect()
    assert t.run(["echo", "on"]).out == b"on\n"


NASTY = [
    "-rf", "a b", "quote'\"", "$(touch x)", "new\nline", "ü\\t", "*", "~", "#", ".hidden", "w=1", "{a,b}", "x" * 200,
]  # fmt: skip


def test_files_arrive_whole_with_their_modes_whatever_their_names(t: Transport, home: Path) -> None:
    user = t.run(["id", "-un"]).out.decode().strip()
    files = {
        f"{d}{n}": RemoteFile(n.encode(), 0o700 if i % 2 else 0o640)
        for i, n in enumerate(NASTY)
        for d in ("", f"{n}.d/e/")
    } | {"big": RemoteFile(os.urandom(1 << 20) * 20)}

    def there() -> dict[str, RemoteFile]:
        found = (p for p in home.rglob("*") if p.is_file())
        return {str(p.relative_to(home)): RemoteFile(p.read_bytes(), p.stat().st_mode & 0o777) for p in found}

    for _ in range(2):  # into a new folder, then over what is there
        t.put(str(home), files, ["empty/below", "-x"])
        assert there() == files
        for p in [home, *(p for p in home.rglob("*") if p.is_dir())]:
            assert (p.stat().st_mode & 0o777, p.owner()) == (0o700, user), p
        assert (home / "empty/below").is_dir()
        assert (home / "-x").is_dir()
    single = {f"single/{name}": RemoteFile(b"\0one\n", 0o711) for name in NASTY}
    for name, file in single.items():  # and one by one
        t.put(str(home), {name: file})
    assert there() == files | single
    for name in ("/etc/x", "../x", "a/../x", "a//b", "", "a/.", "a\0b"):
        with pytest.raises(TransportError, match="not a plain path"):
            t.put(str(home), {name: RemoteFile(b"")})


def test_a_rename_tells_exactly_who_won(way: Way, t: Transport, home: Path) -> None:
    names = [f"s{i}" for i in range(40)]
    t.put(str(home), {f"inbox/{n}": RemoteFile(b"") for n in names}, ["a", "b"])
    other = way.transport()
    other.connect()

    def race(by: Transport, to: str) -> list[bool]:
        return [by.rename(f"{home}/inbox/{n}", f"{home}/{to}/{n}") for n in names]

    with contextlib.closing(other), ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(race, t, "a"), pool.submit(race, other, "b")
        won, lost = first.result(), second.result()
    assert [w != v for w, v in zip(won, lost, strict=True)] == [True] * len(names)
    assert sorted(p.name for p in (home / "a").iterdir()) == sorted(n for n, w in zip(names, won, strict=True) if w)
    assert t.rename(f"{home}/nothing", f"{home}/a/x") is False
    t.put(str(home), {"new\nline": RemoteFile(b"")})
    assert t.rename(f"{home}/new\nline", f"{home}/a/x") is True
    assert t.rename(f"{home}/new\nline", f"{home}/a/x") is False
    with pytest.raises(TransportError, match=r"cannot rename .*a/x"):
        t.rename(f"{home}/a/x", f"{home}/no-folder/x")


@pytest.mark.skipif(os.getuid() != 0, reason="a small file system needs root")
def test_what_cannot_be_written_is_named_and_a_full_disk_leaves_nothing_half_written(t: Transport, home: Path) -> None:
    one = RemoteFile(b"x")
    for files in ({"one": one}, {f"f{i}": one for i in range(9)}):
        with pytest.raises(TransportError, match=r"cannot write (to )?/proc/version/w"):
            t.put("/proc/version/w", files)
    home.mkdir(parents=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k,mode=777", "none", home]).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        t.put(str(home), {"spec": RemoteFile(b"old")})
        t.put(str(home), {"filler": RemoteFile(b"f" * 200_000)})
        for size, more in ((200_000, {}), (400_000, {"filler": RemoteFile(b"")})):
            with pytest.raises(TransportError, match=r"(?s)cannot write .*: .*No space left"):
                t.put(str(home), {"spec": RemoteFile(b"n" * size), **more})
        assert (home / "spec").read_bytes() == b"old"
        assert sorted(os.listdir(home)) == ["filler", "spec"]
    finally:
        subprocess.run(["umount", home], check=True)


def test_a_stream_gives_what_is_there_takes_input_and_tells_its_end(t: Transport) -> None:
    c = t.open(["sh", "-c", "echo one; read x; echo got $x; echo last words >&2; exit 3"])
    assert c.read(65536) == b"one\n"
    c.write(b"it\n")
    assert c.read(65536) == b"got it\n"
    assert c.read(65536) == b""
    assert c.error().startswith("ended with code 3: ")
    assert "last words" in c.error()
    c.close()
    c.close()
    with pytest.raises(TransportError):
        c.write(b"x")


def test_closing_wakes_the_reader_and_ends_the_command(t: Transport) -> None:
    argv = ["sh", "-c", "echo up; cat; true", mark()]
    c = t.open(argv)
    assert c.read(10) == b"up\n"
    assert runs(*argv)
    threading.Timer(0.2, c.close).start()
    assert c.read(10) == b""
    wait_until(lambda: not runs(*argv), "the command saw the end of its input")


@over_a_link
def test_a_stream_that_is_cut_ends_and_says_so_and_connect_mends_it(way: Way, t: Transport, home: Path) -> None:
    t.put(str(home), {"a": RemoteFile(b"")})
    c = t.open(["sh", "-c", "echo up; cat"])
    assert c.read(10) == b"up\n"
    threading.Timer(0.2, way.cut).start()
    assert c.read(10) == b""
    c.close()
    assert any(words in c.error() for words in ("the connection broke", "ended with code -9"))
    with pytest.raises(TransportError):
        c.write(b"x")
    t.connect()
    assert t.rename(f"{home}/a", f"{home}/b") is True
    assert t.run(["cat", f"{home}/b"]).code == 0
    t.close()
    with pytest.raises(UnreachableError, match="there is no connection"):
        t.run(["true"])


@over_a_link
def test_a_stalled_node_holds_up_nobody(way: Way, t: Transport) -> None:
    c = t.open(["cat"])
    c.write(b"x\n")
    assert c.read(10) == b"x\n"
    way.stall()
    try:
        with pytest.raises(TransportError, match=r"did not answer in time|took longer"):
            t.run(["true"], timeout=0.5)
        # this does not fit into the link: the writer hangs, and must not hang the others
        with pytest.raises(TransportError):
            t.run(["cat"], stdin=b"x" * 30_000_000, timeout=0.5)
        c.close()
        assert c.read(10) == b""
    finally:
        way.resume()
    t.connect()
    assert t.run(["echo", "back"]).out == b"back\n"
