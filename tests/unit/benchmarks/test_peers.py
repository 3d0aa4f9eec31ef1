"""The benchmark beside peers: its tables, what it reads of pip and of the peers' programs, and a deploy's check."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.peers import __main__ as peers
from benchmarks.peers import tasks
from benchmarks.peers.callers import PEERS
from benchmarks.peers.environment import REQUIREMENTS, make, requirements
from benchmarks.peers.reach import pack, sizes, take
from benchmarks.peers.table import OURS, Row
from orchestrator.transport import RemoteFile


def test_every_peer_is_required_once_in_a_pinned_range() -> None:
    wanted = requirements(REQUIREMENTS.read_text())
    assert {p.package for p in PEERS.values()} - {""} | {"hyperqueue"} == set(wanted)
    assert all(">=" in line and ",<" in line for line in wanted.values())
    assert requirements("# a\nx-y >= 1,<2  # why\n\nz\n") == {"x-y": "x-y >= 1,<2", "z": "z"}


def test_a_peer_that_pip_cannot_install_is_missing_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip itself, in an environment that is there, without any index."""
    environment = tmp_path / "environment"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr("benchmarks.peers.environment.REQUIREMENTS", tmp_path / "requirements.txt")
    (tmp_path / "requirements.txt").write_text("no-such-peer>=1,<2\n")
    made = make(environment)
    assert made.versions == {}
    assert "no-such-peer" in made.missing["no-such-peer"]


def test_the_tar_of_the_peers_unpacks_into_what_is_compared(tmp_path: Path) -> None:
    files = {"launch.sh": RemoteFile(b"#!/bin/sh\n", 0o700), "code/a/x.py": RemoteFile(b"x = 1\n")}
    tar, to = tmp_path / "node.tar", tmp_path / "deployed" / "n001"
    pack(tar, files, ["inbox", "claimed/0"])
    subprocess.run(["sh", "-c", take(to)], input=tar.read_bytes(), check=True)
    assert sizes(to) == {"launch.sh": 10, "code/a/x.py": 6}
    assert {p.relative_to(to).as_posix(): p.stat().st_mode & 0o777 for p in to.rglob("*")} == {
        "claimed": 0o700, "claimed/0": 0o700, "code": 0o700, "code/a": 0o700, "inbox": 0o700, "launch.sh": 0o700,
        "code/a/x.py": 0o600,
    }  # fmt: skip
    (to / "more.txt").write_text("")
    assert sizes(to)["more.txt"] == 0


def test_ours_is_held_to_the_fastest_command_line() -> None:
    row = Row("deploy", "s", {OURS: [2.0], "asyncssh": [1.0], "pyinfra": [3.0], "Ansible": [4.0]})
    figure = peers.reached(row)[0]
    assert (figure.value, figure.bound, figure.holds) == (2.0, 4.5, True)
    assert peers.reached(Row("deploy", "s", {OURS: [2.0], "asyncssh": [1.0]})) == []
    with pytest.raises(SystemExit, match="lost"):
        peers.reached(Row("deploy", "s", {}, {OURS: "lost"}))


def test_the_makespan_is_ours_and_the_even_splits(capsys: pytest.CaptureFixture[str]) -> None:
    rows = tasks.makespan_rows((3,), print, job="few")
    assert [set(row.values) for row in rows] == [{OURS, tasks.EVEN}] * 2
    assert rows[0].median(OURS) < rows[1].median(OURS), "faults cost time"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--only", "reach", "rest"], "argument --only: invalid choice: 'rest'"),
        (["--nodes", "16", "many"], "argument --nodes: invalid int value: 'many'"),
        (["--turns", "0"], "argument --turns: invalid choice: 0"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        peers.main(words)
    assert why in capsys.readouterr().err.splitlines()[-1]
