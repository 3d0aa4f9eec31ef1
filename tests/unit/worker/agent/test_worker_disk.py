"""A full disk: nothing half-written, nothing measured lost, and the work goes on when there is space again."""

from __future__ import annotations

import os
import resource
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.workernode import Node, node
from tests.waiting import wait_until
from worker.protocol import parse_record


def check_whole(n: Node) -> None:
    """Every line of the record file is a good record."""
    data = n.paths.events("0").read_bytes()
    assert data.endswith(b"\n")
    for line in data.splitlines():
        parse_record(line)


def test_asked_to_stop_on_a_full_disk_it_says_so_by_its_status(tmp_path: Path) -> None:
    with node(tmp_path, options={"seconds_per_shape": 0.02}) as n:
        agent = n.start()
        n.put("a-1")
        n.wait_ended("a-1")
        size = n.paths.events("0").stat().st_size
        resource.prlimit(agent.pid, resource.RLIMIT_FSIZE, (size + 300, size + 300))
        n.put("b-1", shapes=100)
        wait_until(lambda: "ended: disk_full" in n.paths.log("0").read_text(), "the attempt ended")
        agent.terminate()
        assert agent.wait(10) == 1
        check_whole(n)
        # the spec is claimed still, so that the next worker closes it
        n.start()
        assert n.wait_ended("b-1")["outcome"] == "worker_died"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 1 MB, or a skip."""
    disk = tmp_path / "disk"
    disk.mkdir()
    argv = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(argv, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("may not mount a tmpfs here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_and_space_again(small_disk: Path) -> None:
    with node(small_disk, options={"seconds_per_shape": 0.01}) as n:
        n.start()
        n.put("a-1")
        n.wait_ended("a-1")
        n.put("b-1", shapes=400, grace_s=2.0)
        n.wait_record("shape_tuned", count=3)
        after = n.put("c-1")
        filler = small_disk / "filler"
        with pytest.raises(OSError, match="No space left"):
            filler.write_bytes(b"x" * 2**20)
        # its log has no room either: what it says there is lost
        wait_until(lambda: os.statvfs(small_disk).f_bavail == 0, "the disk is full")
        time.sleep(0.7)
        check_whole(n)
        assert n.of("b-1", "attempt_ended") == []
        assert after.exists(), "claims nothing meanwhile"
        filler.unlink()
        ended = n.wait_ended("b-1")
        assert ended["outcome"] == "disk_full"
        assert ended["in_flight"] is not None
        # what the tuner had said by then is all there, in order and once
        rows = [(r["shape"], r["row"]["kernelId"]) for r in n.of("b-1", "row")]
        assert rows == sorted(set(rows))
        assert n.wait_ended("c-1")["outcome"] == "done"
        check_whole(n)
