"""Commands, files and streams over real sshd, as root and as a user who is not root; and what breaks does."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from orchestrator.errors import SlowError, TransportError
from orchestrator.transport import LocalTransport, RemoteFile, SshTransport, UnreachableError
from orchestrator.transport.kept_shell import SCRIPT
from orchestrator.transport.ssh.link import SshChannel
from orchestrator.transport.tar_stream import UNPACK, stream
from tests.integration.sshd import NO_BASHRC, LightFleet, Sshd, light_fleet, plain_login
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.system

Connect = Callable[..., SshTransport]


@pytest.fixture(scope="module")
def plain_user() -> Iterator[str]:
    with plain_login() as user:
        yield user


@pytest.fixture(params=["root", "plain"])
def fleet(request: pytest.FixtureRequest, plain_user: str) -> Iterator[LightFleet]:
    if request.param == "root" and os.getuid() != 0:
        pytest.skip("a login as root needs root")
    with light_fleet("root" if request.param == "root" else plain_user) as fleet:
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


@pytest.fixture
def home(fleet: LightFleet) -> str:
    """A folder on the nodes that the user owns."""
    path = fleet.folder / "home"
    path.mkdir()
    path.chmod(0o777)
    return f"{path}/work"


# --- commands ---------------------------------------------------------------------------------------------------------


def test_a_command_gets_its_words_its_input_and_gives_its_code(fleet: LightFleet, connect: Connect) -> None:
    t = connect(fleet.add())
    words = ["a b", "$HOME", "it's", "*", "~", "A=b", "", "\\", "new\nline", "ü", "-n", "`id`", "!x"]
    done = t.run(["printf", "%s\\0", *words])
    assert done.out == b"".join(w.encode() + b"\0" for w in words)
    assert t.run(["id", "-un"]).out.decode().strip() == fleet.user
    done = t.run(["sh", "-c", "cat; echo err >&2; exit 7"], stdin=b"in\0put")
    assert (done.code, done.out, done.err) == (7, b"in\0put", b"err\n")
    assert t.run(["sh", "-c", "kill -9 $$"]).code == -9
    with pytest.raises(TransportError, match="cannot run no-such-command"):
        t.run(["no-such-command"])


def test_much_input_and_much_output_at_once_do_not_block_each_other(fleet: LightFleet, connect: Connect) -> None:
    t = connect(fleet.add())
    data = os.urandom(1 << 20) * 6
    done = t.run(["sh", "-c", "tee /dev/stderr"], stdin=data)
    assert done.out == data
    assert data.endswith(done.err)
    assert len(done.err) > 100_000
    # who reads only a little of it is no error
    assert t.run(["head", "-c", "3"], stdin=data).out == data[:3]


def test_too_much_output_is_an_error(fleet: LightFleet, connect: Connect) -> None:
    t = connect(fleet.add())
    with pytest.raises(TransportError, match="printed more than 64 MiB"):
        t.run(["head", "-c", "90000000", "/dev/zero"])
    assert t.run(["true"]).code == 0


def test_a_command_that_takes_too_long_is_given_up_and_the_next_one_runs(fleet: LightFleet, connect: Connect) -> None:
    t = connect(fleet.add())
    with pytest.raises(TransportError, match=r"sleep took longer than 0\.3 s"):
        t.run(["sleep", "3600"], timeout=0.3)
    assert t.run(["echo", "on"]).out == b"on\n"


def test_nothing_of_a_command_that_took_too_long_is_left_on_the_node(fleet: LightFleet, connect: Connect) -> None:
    """Neither itself nor what it started, though it reads and writes nothing; not even where the connection is gone."""
    t = connect(fleet.add())
    marks = [f"7{secrets.randbelow(10**8):08}" for _ in range(2)]
    for mark in marks:
        with pytest.raises(SlowError, match="sh took longer than"):
            t.run(["sh", "-c", f"trap '' TERM; sleep {mark} & timeout --foreground {mark} sleep {mark}"], timeout=0.5)
    t.close()
    wait_until(lambda: not any(runs(["sleep", mark]) for mark in marks), "nothing is left")


def test_a_local_command_that_took_too_long_leaves_nothing_either() -> None:
    mark = f"7{secrets.randbelow(10**8):08}"
    with pytest.raises(SlowError, match="sh took longer than"):
        LocalTransport("here").run(["sh", "-c", f"sleep {mark} & sleep {mark}"], timeout=0.5)
    wait_until(lambda: not runs(["sleep", mark]), "nothing is left")


def runs(argv: list[str]) -> bool:
    line = "\0".join(argv).encode() + b"\0"
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes() == line)
    return any(found)


def test_what_a_put_left_behind_is_removed_once_it_is_old(fleet: LightFleet, connect: Connect, home: str) -> None:
    t = connect(fleet.add())
    files = {f"f{i}": RemoteFile(b"x") for i in range(9)}
    t.put(home, files)
    script = 'cd "$1" && mkdir .put-old .put-new && echo x >.put-old/f && touch -d "2 hours ago" .put-old'
    assert t.run(["sh", "-c", script, "sh", home]).code == 0
    t.put(home, files)
    assert sorted(t.run(["ls", "-A", home]).out.decode().split()) == [".put-new", *sorted(files)]


def test_a_host_with_few_sessions_is_used_with_fewer(fleet: LightFleet, connect: Connect) -> None:
    t = connect(fleet.add("MaxSessions 4"))
    stream = t.open(["sh", "-c", "echo there; cat"])
    assert stream.read(100) == b"there\n"
    with ThreadPoolExecutor(16) as pool:
        out = list(pool.map(lambda i: t.run(["sh", "-c", f"sleep 0.05; echo {i}"]).out, range(48)))
    assert out == [f"{i}\n".encode() for i in range(48)]
    stream.close()


def test_where_the_kept_shell_has_the_last_session_it_makes_room(
    fleet: LightFleet, connect: Connect, home: str
) -> None:
    t = connect(fleet.add("MaxSessions 2"))
    stream = t.open(["cat"])
    for i in range(3):
        t.put(home, {"a": RemoteFile(b"%d" % i)})
        assert t.run(["cat", f"{home}/a"]).out == b"%d" % i
    stream.close()


# --- files ------------------------------------------------------------------------------------------------------------

NASTY = [
    "-rf",
    "a b",
    "quote'\"",
    "$(touch x)",
    "new\nline",
    "ü\\t",
    "*",
    "~",
    "#",
    ".hidden",
    "w=1",
    "{a,b}",
    "x" * 200,
]


def test_files_arrive_whole_with_their_modes_whatever_their_names(
    fleet: LightFleet, connect: Connect, home: str
) -> None:
    t = connect(fleet.add())
    files = {
        f"{d}{n}": RemoteFile(n.encode(), 0o700 if i % 2 else 0o640)
        for i, n in enumerate(NASTY)
        for d in ("", f"{n}.d/e/")
    }
    for _ in range(2):  # into a new folder, then over what is there
        t.put(home, files, ["empty/below", "-x"])
        root = Path(home)
        there = {str(p.relative_to(root)): p for p in root.rglob("*") if p.is_file()}
        assert set(there) == set(files)
        for name, file in files.items():
            assert there[name].read_bytes() == file.data
            assert there[name].stat().st_mode & 0o777 == file.mode
        for p in [root, *(p for p in root.rglob("*") if p.is_dir())]:
            assert p.stat().st_mode & 0o777 == 0o700, p
            assert p.owner() == fleet.user
        assert (root / "empty/below").is_dir()
        assert (root / "-x").is_dir()
    for name in NASTY:  # and one by one, through the kept shell
        t.put(home, {f"single/{name}": RemoteFile(b"\0one\n", 0o711)})
        path = Path(home) / "single" / name
        assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"\0one\n", 0o711)
    assert not [p for p in root.rglob("*") if ".put-" in p.name or p.name.endswith(".tmp")]
    assert sorted(p.name for p in (root / "single").iterdir()) == sorted(NASTY)


@pytest.mark.skipif(not shutil.which("busybox"), reason="needs busybox")
def test_busybox_is_enough_on_the_node(fleet: LightFleet, connect: Connect, home: str) -> None:
    tools = fleet.folder / "tools"
    tools.mkdir()
    shutil.copy(str(shutil.which("busybox")), tools / "busybox")
    for name in ("sh", "tar", "head", "mv", "mkdir", "rm", "chmod", "find", "cat", "wc"):
        (tools / name).symlink_to("busybox")
    t = connect(fleet.add(f"SetEnv PATH={tools} {NO_BASHRC}"))
    assert b"BusyBox" in t.run(["sh", "-c", "tar --help 2>&1"]).out
    files = {f"{d}{n}": RemoteFile(n.encode() * 99, 0o700) for n in NASTY for d in ("", f"{n}.d/e/")}
    for _ in range(2):
        t.put(home, files, ["empty"])
        for name, file in files.items():
            path = Path(home, name)
            assert (path.read_bytes(), path.stat().st_mode & 0o777) == (file.data, 0o700)
    t.put(home, {"inbox/a": RemoteFile(b"\0spec" * 1000)})
    assert t.rename(f"{home}/inbox/a", f"{home}/b") is True
    assert t.rename(f"{home}/inbox/a", f"{home}/b") is False
    assert Path(home, "b").read_bytes() == b"\0spec" * 1000
    with pytest.raises(TransportError, match="cannot write"):
        t.put("/proc/version/w", {"a": RemoteFile(b"x" * 100_000)})
    names = sorted(p.name for p in Path(home).iterdir())
    assert names == sorted([*NASTY, *(f"{n}.d" for n in NASTY), "empty", "inbox", "b"])


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../x", "a//b", "", "a/.", "a\0b"])
def test_names_that_lead_out_of_the_folder_are_refused(
    fleet: LightFleet, connect: Connect, home: str, name: str
) -> None:
    t = connect(fleet.add())
    with pytest.raises(TransportError, match="not a plain path"):
        t.put(home, {name: RemoteFile(b"")})


def test_a_put_that_is_cut_leaves_nothing(fleet: LightFleet, connect: Connect, home: str) -> None:
    t = connect(fleet.add())
    files = {f"d/f{i}": RemoteFile(b"x" * 700) for i in range(5)}
    whole = stream(".put-x", files, ["empty"])
    shell = f"w 1 1000 600 {home} {home}/.aside.tmp {home}/spec\n".encode()
    last = whole.rindex(b"place\0")  # the header of the script, which comes last
    cut_at = [0, 100, 512, 1024, 2048, last // 2, last, last + 100, last + 512, last + 600]
    for argv, sent in [
        *((["sh", "-c", UNPACK, "sh", home, ".put-x"], whole[:n]) for n in cut_at),
        *((["sh", "-c", SCRIPT, "ready"], shell + b"y" * n) for n in (0, 1, 999)),
    ]:
        c = t.open(argv)
        c.write(sent)
        c.end_input()
        while c.read(65536):
            pass
        c.close()
        left = [p for p in Path(home).parent.rglob("*") if not p.is_dir() or p.name not in ("home", "work")]
        assert left == [], (argv[2][:10], len(sent))


def test_fifty_megabytes(fleet: LightFleet, connect: Connect, home: str) -> None:
    t = connect(fleet.add())
    data = os.urandom(1 << 20) * 50
    t.put(home, {"big": RemoteFile(data), "small": RemoteFile(b"")})
    assert Path(home, "big").read_bytes() == data
    assert Path(home, "small").read_bytes() == b""


def test_small_files_from_eight_threads_are_cheap_and_each_whole(
    fleet: LightFleet, connect: Connect, home: str
) -> None:
    t = connect(fleet.add())
    spec = {i: os.urandom(2000 + i) for i in range(200)}

    def put(i: int) -> bool:
        t.put(home, {f"inbox/{i % 20}.json": RemoteFile(spec[i])})
        return t.rename(f"{home}/inbox/{i % 20}.json", f"{home}/{i}")

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(put, range(200)))
    there = {int(p.name): p.read_bytes() for p in Path(home).iterdir() if p.is_file()}
    # two threads may put the same name; what was renamed is always one of the whole files
    assert len(there) == sum(won)
    assert all(data in spec.values() for data in there.values())


def test_a_rename_tells_exactly_who_won(fleet: LightFleet, connect: Connect, home: str) -> None:
    node = fleet.add()
    ours, theirs = connect(node), connect(node)
    names = [f"s{i}" for i in range(60)]
    ours.put(home, {f"inbox/{n}": RemoteFile(b"") for n in names}, ["a", "b"])

    def race(t: SshTransport, to: str) -> list[bool]:
        return [t.rename(f"{home}/inbox/{n}", f"{home}/{to}/{n}") for n in names]

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(race, ours, "a"), pool.submit(race, theirs, "b")
        won, lost = first.result(), second.result()
    assert [w != v for w, v in zip(won, lost, strict=True)] == [True] * len(names)
    assert sorted(p.name for p in Path(home, "a").iterdir()) == sorted(n for n, w in zip(names, won, strict=True) if w)
    assert ours.rename(f"{home}/nothing", f"{home}/a/x") is False
    ours.put(home, {"new\nline": RemoteFile(b"")})
    assert ours.rename(f"{home}/new\nline", f"{home}/a/x") is True
    assert ours.rename(f"{home}/new\nline", f"{home}/a/x") is False
    with pytest.raises(TransportError, match=r"cannot rename .*a/x"):
        ours.rename(f"{home}/a/x", f"{home}/no-folder/x")


def test_a_folder_that_cannot_be_written_is_named(fleet: LightFleet, connect: Connect) -> None:
    t = connect(fleet.add())
    many = {f"f{i}": RemoteFile(b"x") for i in range(9)}
    for files in ({"one": RemoteFile(b"x")}, many):
        with pytest.raises(TransportError, match=r"cannot write (to )?/proc/version/w.*"):
            t.put("/proc/version/w", files)
    assert t.run(["true"]).code == 0


@pytest.mark.skipif(os.getuid() != 0, reason="a small file system needs root")
def test_a_full_disk_is_named_and_leaves_nothing_half_written(fleet: LightFleet, connect: Connect, home: str) -> None:
    t = connect(fleet.add())
    os.makedirs(home)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k,mode=777", "none", home]).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        t.put(home, {"spec": RemoteFile(b"old")})
        t.put(home, {"filler": RemoteFile(b"f" * 200_000)})
        with pytest.raises(TransportError, match=r"cannot write .*/spec: .*No space left"):
            t.put(home, {"spec": RemoteFile(b"n" * 200_000)})
        with pytest.raises(TransportError, match=r"(?s)cannot write to .*: .*No space left"):
            t.put(home, {"spec": RemoteFile(b"n" * 400_000), "filler": RemoteFile(b"")})
        assert Path(home, "spec").read_bytes() == b"old"
        assert sorted(os.listdir(home)) == ["filler", "spec"]
        t.put(home, {"spec": RemoteFile(b"new")})
        assert Path(home, "spec").read_bytes() == b"new"
    finally:
        t.close()
        subprocess.run(["umount", home], check=True)


# --- streams ----------------------------------------------------------------------------------------------------------


def test_a_stream_gives_what_is_there_takes_input_and_tells_its_end(fleet: LightFleet, connect: Connect) -> None:
    t = connect(fleet.add())
    c = t.open(["sh", "-c", "echo one; read x; echo got $x; echo last words >&2; exit 3"])
    assert c.read(65536) == b"one\n"
    c.write(b"it\n")
    assert c.read(65536) == b"got it\n"
    assert c.read(65536) == b""
    assert c.error() == "ended with code 3: last words"
    c.close()
    c.close()
    with pytest.raises(TransportError, match="takes no more input"):
        c.write(b"x")


def test_a_command_that_has_ended_takes_no_more_input(fleet: LightFleet, connect: Connect) -> None:
    stream = connect(fleet.add()).open(["true"])
    assert stream.read(1) == b""
    assert isinstance(stream, SshChannel)
    wait_until(lambda: stream.raw.closed, "the node closed it, too")
    with pytest.raises(ConnectionError):
        stream.send(b"x")


def test_closing_wakes_the_reader_and_ends_the_command(fleet: LightFleet, connect: Connect, home: str) -> None:
    t = connect(fleet.add())
    c = t.open(["sh", "-c", f"echo up; cat; echo over >{shlex.quote(home)}"])
    assert c.read(10) == b"up\n"
    threading.Timer(0.2, c.close).start()
    assert c.read(10) == b""
    wait_until(Path(home).exists, "the command saw the end of its input")


def test_a_stream_that_is_cut_ends_and_says_so_and_connect_mends_it(
    fleet: LightFleet, connect: Connect, home: str
) -> None:
    node = fleet.add()
    t = connect(node)
    t.put(home, {"a": RemoteFile(b"")})
    c = t.open(["sh", "-c", "echo up; cat"])
    assert c.read(10) == b"up\n"
    threading.Timer(0.2, node.drop).start()
    assert c.read(10) == b""
    assert "the connection broke" in c.error()
    c.close()
    for call in (
        lambda: t.run(["true"]),
        lambda: t.put(home, {"a": RemoteFile(b"")}),
        lambda: t.rename(f"{home}/a", f"{home}/b"),
        lambda: t.open(["true"]),
    ):
        with pytest.raises(UnreachableError, match="the connection broke"):
            call()
    t.connect()
    assert t.rename(f"{home}/a", f"{home}/b") is True
    t.close()
    with pytest.raises(UnreachableError, match="there is no connection"):
        t.run(["true"])


def test_a_frozen_node_holds_up_nobody(fleet: LightFleet, connect: Connect, home: str) -> None:
    node = fleet.add()
    t = connect(node)
    c = t.open(["cat"])
    node.pause()
    with pytest.raises(TransportError, match=r"did not answer in time|took longer"):
        t.run(["true"], timeout=0.5)
    # this does not fit into the link: the writer hangs, and must not hang the others
    with pytest.raises(TransportError):
        t.run(["cat"], stdin=b"x" * 30_000_000, timeout=0.5)
    c.close()
    assert c.read(10) == b""
    t.close()
    with pytest.raises(UnreachableError, match="did not answer within 1 s"):
        connect(node, timeout=1.0)
    node.resume()
    assert connect(node).run(["echo", "back"]).out == b"back\n"


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
    stop = threading.Event()
    t = SshTransport("n", node.address, port=node.port, config=fleet.config, connect_timeout=3600.0, stop=stop)
    for end in (stop.set, t.close):
        stop.clear()
        threading.Timer(0.3, end).start()
        with pytest.raises(UnreachableError, match="stopped"):
            t.connect()
    node.resume()
