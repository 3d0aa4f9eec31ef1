"""The benchmark beside peers: the peers that it needs, and a deploy's check."""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.peers.callers import PEERS
from benchmarks.peers.environment import REQUIREMENTS, requirements
from benchmarks.peers.reach import pack, sizes, take
from orchestrator.transport.base import RemoteFile


def test_every_peer_is_required_once_in_a_pinned_range() -> None:
    wanted = requirements(REQUIREMENTS.read_text())
    assert {p.package for p in PEERS.values()} - {""} | {"hyperqueue"} == set(wanted)
    assert all(">=" in line and ",<" in line for line in wanted.values())


def test_the_tar_of_the_peers_unpacks_into_what_is_compared(tmp_path: Path) -> None:
    files = {"launch.sh": RemoteFile(b"#!/bin/sh\n", 0o700), "code/a/x.py": RemoteFile(b"x = 1\n")}
    tar, to = tmp_path / "node.tar", tmp_path / "deployed" / "n001"
    pack(tar, files, ["inbox", "claimed/0"])
    subprocess.run(["sh", "-c", take(to)], input=tar.read_bytes(), check=True)
    assert sizes(to) == {"launch.sh": 10, "code/a/x.py": 6}
    assert (to / "claimed/0").stat().st_mode & 0o777 == (to / "launch.sh").stat().st_mode & 0o777 == 0o700
