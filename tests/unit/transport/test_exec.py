"""Files by a kept shell and tar streams, over a transport that has nothing but commands: here of this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.errors import SlowError, TransportError
from orchestrator.transport.base import RemoteFile
from orchestrator.transport.commands import UNPACK, command_line, stream
from orchestrator.transport.exec import SCRIPT, ExecTransport
from orchestrator.transport.local import ProcessChannel
from tests.support.processes import Here


def test_a_command_line_gives_each_word_as_it_is() -> None:
    words = ["a b", "$HOME", "it's", "*", "~", "A=b", "", "\\", "new\nline", "-n", "`id`", "!x", ";", '"']
    done = subprocess.run(["sh", "-c", command_line("n", ["printf", "%s\\0", *words])], capture_output=True, check=True)
    assert done.stdout.decode().split("\0") == [*words, ""]


@pytest.fixture
def transport(tmp_path: Path) -> Iterator[ExecTransport]:
    with contextlib.closing(ExecTransport("n", Here(), f"cd {tmp_path}; ")) as made:
        made.connect()
        yield made


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


def test_a_command_that_the_node_ended_took_too_long_although_nobody_looked(
    transport: ExecTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = ProcessChannel.read
    monkeypatch.setattr(ProcessChannel, "read", lambda channel, size, deadline=None: read(channel, size))
    with pytest.raises(SlowError, match=r"sleep took longer than 0\.1 s"):
        transport.run(["sleep", "60"], timeout=0.1)


@pytest.mark.skipif(not shutil.which("busybox"), reason="needs busybox")
def test_busybox_is_enough_on_the_node(
    transport: ExecTransport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools, home = tmp_path / "tools", tmp_path / "home"
    tools.mkdir()
    shutil.copy(str(shutil.which("busybox")), tools / "busybox")
    for name in ("sh", "tar", "head", "mv", "mkdir", "rm", "chmod", "find", "cat", "wc", "mktemp"):
        (tools / name).symlink_to("busybox")
    monkeypatch.setenv("PATH", str(tools))
    transport.connect()
    assert b"BusyBox" in transport.run(["sh", "-c", "tar --help 2>&1"]).out
    names = ["-rf", "a b", "quote'\"", "$(touch x)", "new\nline", "ü\\t", "*", "~", "#", ".hidden", "{a,b}", "x" * 200]
    files = {f"{d}{n}": RemoteFile(n.encode() * 99, 0o700) for n in names for d in ("", f"{n}.d/e/")}
    for _ in range(2):  # into a new folder, then over what is there
        transport.put(str(home), files, ["empty"])
        for name, file in files.items():
            path = home / name
            assert (path.read_bytes(), path.stat().st_mode & 0o777) == (file.data, 0o700)
    transport.put(str(home), {"inbox/a": RemoteFile(b"\0spec" * 1000)})
    renamed = [transport.rename(f"{home}/inbox/a", f"{home}/b") for _ in range(2)]
    assert renamed == [True, False]
    assert (home / "b").read_bytes() == b"\0spec" * 1000
    with pytest.raises(TransportError, match="cannot write"):
        transport.put("/proc/version/w", {"a": RemoteFile(b"x" * 100_000)})
    assert sorted(os.listdir(home)) == sorted([*names, *(f"{n}.d" for n in names), "empty", "inbox", "b"])
