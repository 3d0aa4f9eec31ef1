"""One run at a time measures on a device of a host: the lock, and a worker that waits for it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kits.worker import RUN, Node, node
from tests.waiting import wait_until
from worker.agent.follow import Followed, Stream
from worker.agent.locks import DeviceLock
from worker.protocol import DEVICE_LOCK, DEVICE_SHARED, LOCKS_ENV, NodeConfig

NOBODY = 65534


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(LOCKS_ENV, str(tmp_path / "locks"))
    return tmp_path / "locks"


def test_a_device_has_one_holder_whose_name_the_others_read(folder: Path) -> None:
    before = os.umask(0o077)
    try:
        first, second, other = DeviceLock("gpu-0", "a/n1"), DeviceLock("gpu-0", "b/n1"), DeviceLock("gpu-1", "b/n1")
        assert [first.take(), first.take(), second.take(), other.take()] == [True, True, False, True]
        assert second.holder == "a/n1"
    finally:
        os.umask(before)
    # any user of the host may open the files, and remove only his own
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
    assert {stat.S_IMODE(p.stat().st_mode) for p in folder.iterdir()} == {0o666}
    os.close(first._fd)
    assert second.take()
    assert (folder / "gpu-0").read_text() == "b/n1"


@contextmanager
def plain_user() -> Iterator[None]:
    """The effective user of the context: nobody if we are root, else we."""
    us = os.geteuid()
    if us == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(us)


@pytest.mark.parametrize(
    ("prepare", "place"),
    [
        ("mkdir L; ln -s /etc/hostname L/cores", "L/cores of "),
        ("mkdir L; ln -s $PWD/mine L/cores", "L/cores of "),
        ("mkdir -p L/cores", "L/cores of "),
        ("mkdir L; mkfifo L/cores", "L/cores of "),
        ("mkdir L; : >L/cores; chmod 000 L/cores", "L/cores of "),
        ("mkdir L; : >L/cores; chmod 444 L/cores", "L/cores of "),
        ("mkdir L; : >L/cores; chmod 222 L/cores", "L/cores of "),
        ("mkdir L; : >L/cores; chmod 000 L", "L of "),
        ("mkdir L; chmod 555 L", "L of "),
        ("ln -s $PWD/gone L", "L of "),
        ("ln -s L L", "L of "),
        (": >L", "L of "),
        ("chmod 555 .", ""),
    ],
)
def test_a_lock_that_cannot_be_opened_is_closed(monkeypatch: pytest.MonkeyPatch, prepare: str, place: str) -> None:
    """Nothing is made or changed, and the holder names place and owner."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # which another user can reach
        root = Path(name)
        root.chmod(0o777)
        monkeypatch.setenv(LOCKS_ENV, str(root / "L"))
        with plain_user():
            subprocess.run(["sh", "-c", f"umask 0; {prepare}"], cwd=root, check=True)
            lock = DeviceLock("cores", "a/n1")
            assert (lock.take(), lock.is_closed) == (False, True)
            subprocess.run(["chmod", "-f", "700", ".", "L"], cwd=root, check=False)
        assert lock.holder.startswith(f"{root}/{place}" if place else str(root / "L"))
        assert not (root / "mine").exists()


def waits(n: Node) -> str:
    """The other run, in a beat of the node's stream as it would be sent now."""
    stream = Stream(n.paths, files={("E", "0"): Followed(Path("/none"), whole_lines=True)})
    return str(json.loads(stream.beat(0.0).partition(b"\n")[2])["slots"]["0"].get("waits", ""))


@pytest.mark.parametrize("shared", [False, True])
def test_a_worker_whose_lock_is_closed_measures_only_if_it_shares(folder: Path, tmp_path: Path, shared: bool) -> None:
    (folder / "cores").mkdir(parents=True)
    with node(tmp_path / "n") as n:
        config = NodeConfig.loads(n.paths.config.read_bytes())
        slot = {DEVICE_LOCK: "cores", **({DEVICE_SHARED: "1"} if shared else {})}
        n.paths.config.write_bytes(replace(config, slots={"0": slot}).dumps())
        n.put("g1-1")
        agent = n.start()
        wait_until(lambda: waits(n).startswith(f"{folder}/cores of "), "the beats tell of it")
        if shared:
            n.wait_ended("g1-1")
            assert waits(n), "also later"
        assert n.stop(agent) == 0
        assert bool(n.records("0")) is shared


@pytest.mark.parametrize("shared", [False, True])
def test_a_worker_waits_for_the_device_unless_it_is_shared(folder: Path, tmp_path: Path, shared: bool) -> None:
    other = DeviceLock("cores", "other-run/n7")
    assert other.take()
    with node(tmp_path / "n") as n:
        config = NodeConfig.loads(n.paths.config.read_bytes())
        slot = {DEVICE_LOCK: "cores", **({DEVICE_SHARED: "1"} if shared else {})}
        n.paths.config.write_bytes(replace(config, slots={"0": slot}).dumps())
        n.put("g1-1")
        agent = n.start()
        said = f"{'shares' if shared else 'waits for'} this slot's device, which other-run/n7 measures on"
        wait_until(lambda: n.paths.log("0").exists() and said in n.paths.log("0").read_text(), "it says so")
        if not shared:
            wait_until(lambda: waits(n) == "other-run/n7", "the beats tell of it")
            assert n.stop(agent) == 0, "a worker that waits can be stopped"
            assert n.records("0") == []
            agent = n.start()
            os.close(other._fd)
        n.wait_ended("g1-1")
        if shared:
            os.close(other._fd)
            n.put("g1-2")
            n.wait_ended("g1-2")
        assert (folder / "cores").read_text() == f"{RUN}/n1"
        assert waits(n) == ""
        assert n.stop(agent) == 0
