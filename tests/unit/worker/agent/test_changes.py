"""Changes in folders as the kernel tells of them, and the stream where it tells of none, or not of all."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import PATIENCE_S, wait_until
from worker.agent import follow as following
from worker.agent.follow import MODIFY, NEW_NAMES, Changes, Stream, follow
from worker.protocol import NodePaths


@pytest.fixture
def changes(tmp_path: Path) -> Iterator[Changes]:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "there").touch()
    told = Changes([tmp_path / "one", tmp_path / "two"])
    yield told
    told.close()


def test_writes_and_new_names_are_told_apart_and_each_once(tmp_path: Path, changes: Changes) -> None:
    with open(tmp_path / "two" / "there", "ab", buffering=0) as f:
        f.write(b"x")
    assert changes.wait(PATIENCE_S) == MODIFY
    assert changes.wait(0.0) == 0
    (tmp_path / "one" / "new").touch()
    assert changes.wait(PATIENCE_S) & NEW_NAMES
    (tmp_path / "elsewhere").touch()
    os.rename(tmp_path / "elsewhere", tmp_path / "one" / "moved")
    assert changes.wait(PATIENCE_S) & NEW_NAMES
    assert changes.wait(0.0) == 0


def test_more_changes_than_the_kernel_keeps_count_as_new_names(tmp_path: Path, changes: Changes) -> None:
    kept = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    with open(tmp_path / "two" / "there", "ab", buffering=0) as f, open(tmp_path / "one" / "a", "ab", buffering=0) as g:
        changes.wait(PATIENCE_S)
        for _ in range(kept // 2 + 1):  # in turn: equal ones that follow each other are one
            f.write(b"x")
            g.write(b"x")
    assert changes.wait(PATIENCE_S) & NEW_NAMES


def test_a_missing_folder_is_an_error_that_leaves_nothing_open(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="inotify_add_watch"):
        Changes([tmp_path, tmp_path / "missing"])
    assert len(os.listdir("/proc/self/fd")) == len(before)


class NoInotify:
    """A C library that has none."""

    def __init__(self, *args: Any, **kw: Any) -> None: ...


class NoMoreInotify(NoInotify):
    """A C library whose kernel gives no more instances."""

    def inotify_init1(self, flags: int) -> int:
        return -1


@pytest.mark.parametrize("library", [NoInotify, NoMoreInotify])
def test_a_kernel_that_refuses_is_an_oserror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: type) -> None:
    monkeypatch.setattr(ctypes, "CDLL", library)
    with pytest.raises(OSError, match="inotify"):
        Changes([tmp_path])


# --- the stream -------------------------------------------------------------------------------------------------------


class Blind(Changes):
    """Changes that are never told of: another machine writes."""

    closed = False

    def __init__(self) -> None: ...

    def wait(self, seconds: float) -> int:
        return 0

    def close(self) -> None:
        self.closed = True


class Told(Changes):
    """Changes of which the waits are kept."""

    closed = False

    def __init__(self, folders: list[Path]) -> None:
        super().__init__(folders)
        self.waits: list[int] = []

    def wait(self, seconds: float) -> int:
        self.waits.append(super().wait(seconds))
        return self.waits[-1]

    def close(self) -> None:
        self.closed = True
        super().close()


@contextlib.contextmanager
def streaming(paths: NodePaths, changes: Changes | None) -> Iterator[bytearray]:
    """The frames of a node folder, as they come."""
    out, end = os.pipe()
    got = bytearray()

    def send() -> None:
        with contextlib.suppress(BrokenPipeError):
            follow(Stream(paths), end, changes)

    def read() -> None:
        while data := os.read(out, 65536):
            got.extend(data)
            if over.is_set():
                break
        os.close(out)

    over = threading.Event()
    threads = [threading.Thread(target=send), threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    try:
        yield got
    finally:
        over.set()  # the next beat ends both
        threads[1].join()
        threads[0].join()
        os.close(end)


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NodePaths:
    monkeypatch.setattr(following, "BEAT_S", 0.2)
    for name in ("events", "logs", "claimed"):
        (tmp_path / name).mkdir()
    return NodePaths(tmp_path)


@pytest.mark.parametrize("changes", ["none", "blind", "told"])
def test_all_comes_whether_it_is_told_of_or_not(paths: NodePaths, changes: str) -> None:
    given = {"none": None, "blind": Blind(), "told": Told([paths.root / n for n in following.FOLDERS])}[changes]
    with streaming(paths, given) as got:
        wait_until(lambda: b"B " in got, "it runs")
        for slot in ("0", "1"):  # files that were not there before
            with open(paths.events(slot), "ab", buffering=0) as f:
                for n in range(3):
                    line = b'{"slot":%s,"n":%d}\n' % (slot.encode(), n)
                    f.write(line)
                    wait_until(lambda line=line: line in got, "the line")  # type: ignore[misc]
        paths.log("0").write_bytes(b"z" * (5 * following.CHUNK))
        wait_until(lambda: got.count(b"z") >= 5 * following.CHUNK, "more than one frame takes")
        if isinstance(given, Blind):
            assert given.closed, "once something was not told of, the files are polled"
        if isinstance(given, Told):
            assert any(w & MODIFY for w in given.waits)
            assert not given.closed, "it told of all"
    if isinstance(given, Told):
        given.close()
