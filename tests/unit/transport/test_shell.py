"""Files by a kept shell and tar streams, over a transport that has nothing but commands: here of this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from orchestrator.errors import TransportError
from orchestrator.transport import Completed, RemoteFile
from orchestrator.transport.kept_shell import SCRIPT, KeptShell
from orchestrator.transport.local import ProcessChannel
from orchestrator.transport.quoting import command_line
from orchestrator.transport.shell import SMALL_FILES, UNPACK, ShellTransport, stream


def test_a_command_line_gives_each_word_as_it_is() -> None:
    words = ["a b", "$HOME", "it's", "*", "~", "A=b", "", "\\", "new\nline", "-n", "`id`", "!x", ";", '"']
    done = subprocess.run(["sh", "-c", command_line(["printf", "%s\\0", *words])], capture_output=True, check=True)
    assert done.stdout.decode().split("\0") == [*words, ""]


class PipeTransport(ShellTransport):
    """Counts the commands that it runs and the shells that it starts."""

    def __init__(self) -> None:
        self.node = "n"
        self.commands = 0
        self.shells: list[ProcessChannel] = []
        self._shell = KeptShell("n", self._start)

    def _start(self, line: str, deadline: float) -> ProcessChannel:
        self.shells.append(ProcessChannel("n", ["sh", "-c", line]))
        return self.shells[-1]

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float = 60.0) -> Completed:
        return self._run(argv, stdin, timeout, argv[0])

    def _run(self, argv: Sequence[str], stdin: bytes, timeout: float, name: str) -> Completed:
        self.commands += 1
        done = subprocess.run(argv, input=stdin, capture_output=True, timeout=timeout)
        return Completed(done.returncode, done.stdout, done.stderr)

    @contextlib.contextmanager
    def _kept_shell(self, deadline: float) -> Iterator[KeptShell]:
        yield self._shell

    def close(self) -> None:
        self._shell.close()


@pytest.fixture
def transport() -> Iterator[PipeTransport]:
    with contextlib.closing(PipeTransport()) as made:
        yield made


def test_a_few_small_files_take_no_command_of_their_own(transport: PipeTransport, tmp_path: Path) -> None:
    folder = f"{tmp_path}/a folder"
    transport.put(folder, {"it's ~ $x": RemoteFile(b"one\0two\n"), "below/run.sh": RemoteFile(b"", 0o700)})
    assert (tmp_path / "a folder" / "it's ~ $x").read_bytes() == b"one\0two\n"
    assert (tmp_path / "a folder" / "below" / "run.sh").stat().st_mode & 0o777 == 0o700
    assert transport.rename(f"{folder}/it's ~ $x", f"{folder}/there")
    assert not transport.rename(f"{folder}/it's ~ $x", f"{folder}/there")
    assert transport.commands == 0
    assert len(transport.shells) == 1


def test_many_files_go_as_one_stream(transport: PipeTransport, tmp_path: Path) -> None:
    files = {f"f{n}/{n}": RemoteFile(b"%d" % n) for n in range(SMALL_FILES + 1)}
    for _ in range(2):  # into a new folder, and into one that is there
        transport.put(f"{tmp_path}/new", files, ["empty"])
    found = {str(p.relative_to(tmp_path / "new")): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert found == {name: f.data for name, f in files.items()}
    assert (tmp_path / "new" / "empty").is_dir()
    assert transport.commands == 2
    assert not transport.shells


def test_a_lost_shell_is_started_again(transport: PipeTransport, tmp_path: Path) -> None:
    transport.put(str(tmp_path), {"a": RemoteFile(b"1")})
    transport.shells[0]._p.kill()
    transport.shells[0]._p.wait()
    transport.put(str(tmp_path), {"a": RemoteFile(b"2")})
    assert (tmp_path / "a").read_bytes() == b"2"
    assert len(transport.shells) == 2


def test_what_a_put_left_behind_is_removed_once_it_is_old(transport: PipeTransport, tmp_path: Path) -> None:
    files = {f"f{i}": RemoteFile(b"x") for i in range(9)}
    for name in (".put-old", ".put-new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "f").touch()
    before = time.time() - 7200
    os.utime(tmp_path / ".put-old", (before, before))
    transport.put(str(tmp_path), files)
    assert sorted(os.listdir(tmp_path)) == [".put-new", *sorted(files)]


def test_a_put_that_is_cut_leaves_nothing(tmp_path: Path) -> None:
    home = tmp_path / "work"
    whole = stream(".put-x", {f"d/f{i}": RemoteFile(b"x" * 700) for i in range(5)}, ["empty"])
    line = f"w 1 1000 600 {home} {home}/.aside.tmp {home}/spec\n".encode()
    last = whole.rindex(b"place\0")  # the header of the script, which comes last
    cut_at = [0, 100, 512, 1024, 2048, last // 2, last, last + 100, last + 512, last + 600]
    for argv, sent in [
        *((["sh", "-c", UNPACK, "sh", str(home), ".put-x"], whole[:n]) for n in cut_at),
        *((["sh", "-c", SCRIPT, "ready"], line + b"y" * n) for n in (0, 1, 999)),
    ]:
        subprocess.run(argv, input=sent, capture_output=True, check=False)
        left = [p for p in tmp_path.rglob("*") if p != home]
        assert left == [], (argv[2][:10], len(sent))


@pytest.mark.skipif(not shutil.which("busybox"), reason="needs busybox")
def test_busybox_is_enough_on_the_node(
    transport: PipeTransport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools, home = tmp_path / "tools", tmp_path / "home"
    tools.mkdir()
    shutil.copy(str(shutil.which("busybox")), tools / "busybox")
    for name in ("sh", "tar", "head", "mv", "mkdir", "rm", "chmod", "find", "cat", "wc"):
        (tools / name).symlink_to("busybox")
    monkeypatch.setenv("PATH", str(tools))
    assert b"BusyBox" in transport.run(["sh", "-c", "tar --help 2>&1"]).out
    names = ["-rf", "a b", "quote'\"", "$(touch x)", "new\nline", "ü\\t", "*", "~", "#", ".hidden", "{a,b}", "x" * 200]
    files = {f"{d}{n}": RemoteFile(n.encode() * 99, 0o700) for n in names for d in ("", f"{n}.d/e/")}
    for _ in range(2):
        transport.put(str(home), files, ["empty"])
        for name, file in files.items():
            path = home / name
            assert (path.read_bytes(), path.stat().st_mode & 0o777) == (file.data, 0o700)
    transport.put(str(home), {"inbox/a": RemoteFile(b"\0spec" * 1000)})
    assert transport.rename(f"{home}/inbox/a", f"{home}/b") is True
    assert transport.rename(f"{home}/inbox/a", f"{home}/b") is False
    assert (home / "b").read_bytes() == b"\0spec" * 1000
    with pytest.raises(TransportError, match="cannot write"):
        transport.put("/proc/version/w", {"a": RemoteFile(b"x" * 100_000)})
    assert sorted(os.listdir(home)) == sorted([*names, *(f"{n}.d" for n in names), "empty", "inbox", "b"])
