"""Files of nodes that are torn, hostile, replaced, lost, or without room: they are data, and change nothing else
(laws 1, 4 and 12)."""

from __future__ import annotations

import json
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from orchestrator import events as ev
from tests.fleet.kit import Fleet
from tests.waiting import wait_until

ESC = "\x1b"


def bad_lines(fleet: Fleet) -> dict[tuple[str, str], int]:
    """Lines that are no records of ours, by node and stream."""
    with fleet.ledger() as ledger:
        return {(n, s): bad for n, s, bad in ledger.query("SELECT node, stream, bad FROM offsets WHERE bad > 0")}


def append(path: Path, *lines: bytes) -> None:
    """In one write, so that it tears no record of the worker's."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.write(fd, b"".join(line + b"\n" for line in lines))
    os.close(fd)


def hostile_lines() -> list[bytes]:
    """Whole lines, none of which is a record of ours."""
    row = {"us": 1.0, "status": "ok", "kernelName": "evil", "libtype": "x"}
    records: list[dict[str, Any]] = [
        {"type": "shape_tuned", "t": 1.0, "attempt": "../../../etc/passwd", "shape": 1, "row": row},
        {"type": "shape_tuned", "t": 1.0, "attempt": "g9999-1", "shape": 1, "row": row},
        {"type": "shape_tuned", "t": 1.0, "attempt": f"{ESC}]0;owned\a", "shape": 1, "row": row},
        {"type": "attempt_ended", "t": 1.0, "attempt": "g9999-1", "outcome": "done", "seconds": 1.0},
        {"type": f"{ESC}[2J{ESC}[31mhello", "t": 1.0},
        {"type": "drop_table", "t": "now"},
    ]
    return [
        *(json.dumps(r).encode() for r in records),
        b"\x1b[2J\x1b[1;1Hall is well",
        b"\xff\xfe\x00\x01 no text",
        b'{"type":"shape_tuned","t":1,"attempt":"g0001-1","sha',
        b"[" * 50_000,
        b"x" * 300_000,
        os.urandom(3_000_000).replace(b"\n", b" "),
    ]


def test_hostile_lines_change_nothing(fleet: Fleet) -> None:
    n = fleet.shapes(groups=12)
    run = fleet.begun(3)
    lines = hostile_lines()
    for path in (fleet.events("h2"), fleet.folder("h2") / "logs" / "0.log"):
        append(path, *lines)
    wait_until(lambda: bad_lines(fleet).get(("h2", "E"), 0) >= len(lines), "they are read")
    fleet.finish(run, n)
    assert bad_lines(fleet).keys() == {("h2", "E")}
    with fleet.ledger() as ledger:
        assert not any(r.kernel_name == "evil" for r in ledger.profile_rows())
    assert ESC not in run.out
    assert "evil" not in fleet.paths.tuned.read_text()
    for argv in (["status"], ["explain"], ["explain", "h2"]):
        done = fleet.command(*argv)
        assert ESC not in done.out + done.err


@pytest.mark.parametrize("how", ["symlink", "folder", "truncated"])
def test_a_results_file_that_is_none_any_more_costs_its_node(fleet: Fleet, how: str) -> None:
    """Nothing of another file is read as ours, the node is given up, the others do its work."""
    n = fleet.shapes(groups=18)
    run = fleet.begun(6, lost_after_s=0.5)
    wait_until(lambda: fleet.at_work("h2"), "it has results")
    path = fleet.events("h2")
    if how == "truncated":
        os.truncate(path, 100)
    else:
        path.rename(path.with_suffix(".aside"))
        path.symlink_to("/etc/passwd") if how == "symlink" else path.mkdir()
        fleet.link("h2", "cut 0")  # what a stream had open, it reads on
    wait_until(lambda: fleet.of("h2", ev.NodeLost), "it is given up")
    fleet.release()
    run.ends_with(0)
    assert "0.jsonl" in run.out
    fleet.check_books(n)  # no worker is left, also not of the node that was given up


def test_offsets_are_committed_with_what_was_read(fleet: Fleet) -> None:
    """A ledger that lost its last commit reads the same bytes again, and books nothing twice."""
    n = fleet.shapes(groups=12)
    run = fleet.begun(3)
    run.signal(signal.SIGSTOP)
    before = fleet.paths.ledger.with_suffix(".before")
    fleet.copy_ledger(before)
    run.signal(signal.SIGCONT)
    fleet.release()
    wait_until(lambda: fleet.tuned() >= 6, "more is tuned")
    run.kill()
    for path in fleet.paths.root.glob("ledger.db*"):
        path.unlink()
    before.rename(fleet.paths.ledger)
    fleet.resume()
    fleet.check_books(n)
    assert set(fleet.starts().values()) == {1}


def test_a_disk_that_is_full_costs_nothing_but_time(fleet: Fleet) -> None:
    """The kernel lets the worker write no more: it waits for room with what it measured, and the others go on."""
    n = fleet.shapes(groups=12, per_group=2)
    run = fleet.begun(4)
    wait_until(lambda: fleet.at_work("h2"), "it works")
    (pid,) = fleet.workers("h2").values()
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (fleet.events("h2").stat().st_size, resource.RLIM_INFINITY))
    written = fleet.measured("h2")
    fleet.release()
    wait_until(lambda: not any(list(fleet.folder(x).glob("inbox/*.json")) for x in ("h1", "h3")), "the others go on")
    assert run.poll() is None, run.out
    assert fleet.tuned_by()["h2"] <= written
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    run.ends_with(0)
    fleet.check_books(n)
    assert {end.outcome.value for end in fleet.journal(ev.AttemptEnded)} <= {"done", "disk_full"}
    assert all("disk" in q.why for q in fleet.journal(ev.Quarantine))
