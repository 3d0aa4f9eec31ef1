"""The worker's parts without processes: record file, course of an attempt, text, evidence, the child's wire."""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.workernode import dump
from worker.agent.attempt import MessageCheck
from worker.agent.records import MAX_WAITING, RecordFile, attempt_records, in_flight
from worker.agent.tuner_main import Wire
from worker.agent.tuner_process import oom_counters, oom_killed
from worker.protocol import MAX_RECORD_BYTES, ProtocolError, Spec, SpecShape, checked_row, record
from worker.text import clean, tail
from worker.tuners.base import Emit
from worker.tuners.catalog import TunerNotFoundError, find_tuner

SPEC = Spec("g-1", "r", 1, shapes=tuple(SpecShape(i, {"M": i}) for i in (4, 7)))


def stopped(why: str) -> dict[str, Any]:
    return record("worker_stopped", 1.0, why=why)


# --- the record file ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"), [(b"", b""), (b"{}\n", b"{}\n"), (b'{}\n{"t', b'{}\n{"t\n'), (b"{}", b"{}\n")]
)
def test_a_torn_tail_is_healed_and_nothing_else(tmp_path: Path, before: bytes, after: bytes) -> None:
    path = tmp_path / "0.jsonl"
    path.write_bytes(before)
    records = RecordFile(path)
    records.append(stopped("x"))
    records.close()
    assert path.read_bytes() == after + b'{"type":"worker_stopped","t":1.0,"why":"x"}\n'


def test_a_record_file_is_a_plain_file(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic link"):
        RecordFile(tmp_path / "link")
    with pytest.raises(OSError, match="directory"):
        RecordFile(tmp_path)
    with pytest.raises(OSError, match="not a regular file"):
        RecordFile(Path("/dev/null"))
    assert not (tmp_path / "target").exists()


def test_a_record_too_large_is_refused(tmp_path: Path) -> None:
    records = RecordFile(tmp_path / "0.jsonl")
    with pytest.raises(ProtocolError, match="worker_stopped record of"):
        records.append(stopped("x" * MAX_RECORD_BYTES))
    records.close()
    assert (tmp_path / "0.jsonl").read_bytes() == b""


def test_on_a_full_disk_records_wait_whole_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "0.jsonl"
    records = RecordFile(path)
    records.append(stopped("first"))
    whole = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 20, hard))
    try:
        records.append(stopped("second"))
        records.append(stopped("third"))
        assert records.full
        assert path.read_bytes() == whole
        assert records.retry() is False
        row = record("row", 1.0, attempt="a", shape=1, row={})
        for _ in range(MAX_WAITING + 5):
            records.append(row)
        records.append(record("shape_tuned", 1.0, attempt="a", shape=1, row={}))
        assert path.read_bytes() == whole
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert records.retry() is True
    records.close()
    lines = path.read_bytes().splitlines()
    assert [b"first" in lines[0], b"second" in lines[1], b"third" in lines[2]] == [True] * 3
    assert len(lines) == 1 + MAX_WAITING + 1  # rows beyond the bound are gone, the winner is not
    assert b"shape_tuned" in lines[-1]


def test_the_records_of_an_attempt_are_found_from_the_end(tmp_path: Path) -> None:
    path = tmp_path / "0.jsonl"
    assert attempt_records(path, "a") == []
    path.write_bytes(b"")
    assert attempt_records(path, "a") == []

    def started(attempt: str, group: str) -> dict[str, Any]:
        return record("attempt_started", 1.0, attempt=attempt, group=group, device={})

    rows = [
        started("a", "old"),
        started("b", 'tricky "type":"attempt_started","attempt":"a"'),
        started("a", "new"),
        record("shape_started", 2.0, attempt="a", shape=1),
        record("shape_tuned", 3.0, attempt="a", shape=1, row={}),
        record("canary", 3.0, attempt=None, ok=True, us=1.0, detail=""),
        record("shape_started", 4.0, attempt="a", shape=2),
    ]
    path.write_bytes(
        b"".join(map(dump, rows[:5]))
        + b'{"type":"attempt_started","attempt":"a"\n'
        + b"".join(map(dump, rows[5:]))
        + b'{"torn'
    )
    assert attempt_records(path, "a") == [rows[2], rows[3], rows[4], rows[6]]
    assert in_flight(attempt_records(path, "a")) == 2
    assert attempt_records(path, "b") == [rows[1]]
    assert in_flight(attempt_records(path, "b")) is None
    assert attempt_records(path, "c") == []


# --- the course of an attempt -------------------------------------------------------------------------------------


def say(type_: str, shape: Any, **fields: Any) -> dict[str, Any]:
    return {"type": type_, "shape": shape, **fields}


def test_a_course_knows_what_is_in_flight() -> None:
    course = MessageCheck(SPEC)
    assert course.take(say("shape_started", 4), 1.0) == record("shape_started", 1.0, attempt="g-1", shape=4)
    assert [course.in_flight] == [4]
    made = course.take(say("row", 4, row={"us": 2, "kernelName": "k"}), 2.0)
    assert made == record("row", 2.0, attempt="g-1", shape=4, row={"us": 2, "kernelName": "k"})
    tuned = course.take(say("shape_tuned", 4, row={"us": 2.0}), 3.0)
    assert tuned is not None
    assert tuned["type"] == "shape_tuned"
    assert [course.in_flight] == [None]
    course.take(say("shape_started", 7), 4.0)
    failed = course.take(say("shape_failed", 7, reason="unsupported", detail="\x1b[31mno\x1b[0m"), 5.0)
    assert failed is not None
    assert (failed["reason"], failed["detail"]) == ("unsupported", "no")
    assert course.in_flight is None


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([say("shape_started", 5)], "5 is not an open shape"),
        ([say("shape_started", True)], "True is not an open shape"),
        ([say("shape_started", 4), say("shape_started", 7)], "7 was started while 4 was in flight"),
        ([say("row", 4, row={})], "row of shape 4 while None"),
        ([say("shape_tuned", None, row={"us": 1})], "shape_tuned of shape None while None"),
        ([say("shape_started", 4), say("row", 7, row={})], "row of shape 7 while 4"),
        ([say("shape_started", 4), say("row", 4, row=[])], "row is not a mapping"),
        ([say("shape_started", 4), say("row", 4)], "row is not a mapping"),
        ([say("shape_started", 4), say("row", 4, row={"gflops": 1})], "field 'gflops' holds int"),
        ([say("shape_started", 4), say("row", 4, row={"kernelId": 1.0})], "field 'kernelId' holds float"),
        ([say("shape_started", 4), say("row", 4, row={"kernelId": 2**70})], "field 'kernelId' holds int"),
        ([say("shape_started", 4), say("row", 4, row={"us": True})], "field 'us' holds bool"),
        ([say("shape_started", 4), say("shape_tuned", 4, row={})], "without a time"),
        ([say("shape_started", 4), say("shape_tuned", 4, row={"us": -1.0})], "without a time"),
        ([say("shape_started", 4), say("shape_tuned", 4, row={"us": float("nan")})], "without a time"),
        ([say("shape_started", 4), say("shape_tuned", 4, row={"us": 1.0, "errRatio": 0.06})], "0.06, over 0.05"),
        ([say("shape_started", 4), say("shape_failed", 4, reason="tired", detail="")], "reason 'tired'"),
        ([say("shape_started", 4), say("shape_failed", 4, reason="unsupported")], "reason 'unsupported'"),
        (
            [say("shape_started", 4), say("shape_tuned", 4, row={"us": 1.0}), say("shape_started", 4)],
            "4 is not an open shape",
        ),
    ],
)
def test_a_tuner_that_breaks_the_rules_is_told_so(messages: list[dict[str, Any]], says: str) -> None:
    course = MessageCheck(SPEC)
    for message in messages[:-1]:
        course.take(message, 1.0)
    with pytest.raises(ProtocolError, match=says):
        course.take(messages[-1], 1.0)


def test_numbers_that_are_none_are_left_out_of_a_row() -> None:
    raw = {"us": float("inf"), "tflops": float("nan"), "bw": 10**400, "errRatio": 0, "detail": "d" * 3000}
    assert checked_row(raw, 0.05) == {"errRatio": 0, "detail": "d" * 2000}


def test_the_error_limit_of_the_run_is_judged_here_and_counts_itself_as_right() -> None:
    assert checked_row({"us": 1.0, "errRatio": 0.05}, 0.05) == {"us": 1.0, "errRatio": 0.05}
    assert checked_row({"us": 1.0, "status": "ok", "errRatio": 0.051}, 0.05)["status"] == "wrong"


# --- text ---------------------------------------------------------------------------------------------------------


@given(st.text(), st.integers(0, 50))
def test_clean_text_is_printable_and_short(text: str, limit: int) -> None:
    for keep in ("start", "end"):
        out = clean(text, limit, keep=keep)
        assert len(out.encode()) <= limit
        assert all(c in "\n\t" or c.isprintable() or not c.isascii() for c in out)


def test_terminal_sequences_are_stripped() -> None:
    assert clean("\x1b[1;31mred\x1b[0m \x1b]0;title\x07x\x1b]8;;http://e\x1b\\link\x9b31m\a\b\0") == "red xlink"
    assert clean("50%\r100%") == "50%\n100%"
    assert clean("äöü" * 10, 5) == "äö"


def test_the_tail_of_a_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"old\n" + "ü".encode() * 3000 + b"\n\x1b[0mlast \xff line\n")
    fd = os.open(path, os.O_RDONLY)
    try:
        assert tail(fd, 0, 30).endswith("last \ufffd line")
        assert len(tail(fd, 0, 30).encode()) <= 30
        assert tail(fd, path.stat().st_size - 5, 30) == "line"
        assert tail(fd, 10**9) == ""
    finally:
        os.close(fd)


# --- evidence -----------------------------------------------------------------------------------------------------


def test_the_kernels_counters_are_found_and_compared(tmp_path: Path) -> None:
    own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    v2 = next((p for _, c, p in own if c == ""), None)
    if v2 is None:
        pytest.skip("no v2 line in /proc/self/cgroup")
    events = tmp_path / v2.lstrip("/") / "memory.events"
    events.parent.mkdir(parents=True, exist_ok=True)
    events.write_text("low 0\noom 3\noom_kill 2\n")
    before = oom_counters(os.getpid(), tmp_path)
    assert before[str(events)] == 2
    assert not oom_killed(before)
    events.write_text("low 0\noom 4\noom_kill 3\n")
    assert oom_killed(before)


def test_without_a_cgroup_the_machines_counter_is_asked(tmp_path: Path) -> None:
    assert list(oom_counters(os.getpid(), tmp_path)) == ["/proc/vmstat"]
    assert oom_counters(2**30, tmp_path).keys() == {"/proc/vmstat"}
    assert not oom_killed({"/no/such/file": 0})


# --- the child's side ---------------------------------------------------------------------------------------------


@pytest.fixture
def wire() -> Any:
    read, write = os.pipe()
    before = signal.getsignal(signal.SIGINT)
    made = Wire(write)
    yield made, read
    signal.signal(signal.SIGINT, before)
    os.close(read)
    os.close(write)


def interrupt() -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGINT)
    return {"type": "done"}


def test_sigint_ends_what_runs_and_nothing_else(wire: tuple[Wire, int]) -> None:
    os.kill(os.getpid(), signal.SIGINT)  # idle: ignored
    assert wire[0].interruptible(interrupt) == {"type": "interrupted"}
    assert wire[0].interruptible(lambda: {"type": "done"}) == {"type": "done"}


def test_sigint_does_not_tear_a_message(wire: tuple[Wire, int]) -> None:
    made, read = wire
    big = {"type": "row", "pad": "x" * 300_000}
    reader: list[bytes] = []

    def work() -> dict[str, Any]:
        def drain() -> None:  # once the pipe is full: send is in the middle of the message
            os.kill(os.getpid(), signal.SIGINT)
            while not b"".join(reader).endswith(b"\n"):
                reader.append(os.read(read, 65536))

        thread = threading.Timer(0.05, drain)
        thread.start()
        try:
            made.send(big)
        finally:
            thread.join()
        return {"type": "done"}

    assert made.interruptible(work) == {"type": "interrupted"}
    assert json.loads(b"".join(reader)) == big


# --- what tuners stand on -----------------------------------------------------------------------------------------


def test_emit_says_what_it_is_told() -> None:
    said: list[dict[str, Any]] = []
    emit = Emit(said.append)
    emit.alive()
    emit.alive()
    emit.started(4)
    emit.alive()
    emit.row(4, {"us": 1.0})
    emit.tuned(4, {"us": 1.0})
    emit.failed(7, "unsupported", "no")
    assert [m["type"] for m in said] == ["alive", "shape_started", "row", "shape_tuned", "shape_failed"]
    course = MessageCheck(SPEC)
    for message in said[1:4]:
        course.take(message, 1.0)
    with pytest.raises(ProtocolError, match="'tired' is not one of"):
        emit.failed(7, "tired", "")


@pytest.mark.parametrize("name", ["", "base", "nonesuch", "../replay", "os.path", "faults", "Replay"])
def test_an_unknown_tuner_is_not_found(name: str) -> None:
    with pytest.raises(TunerNotFoundError):
        find_tuner(name)
