"""The worker's parts without processes: record file, course of an attempt, text, the child's wire."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.agent.attempt import MessageCheck
from worker.agent.records import RecordFile
from worker.agent.tuner_main import Wire
from worker.protocol import MAX_RECORD_BYTES, ProtocolError, Spec, SpecShape, checked_row, record
from worker.text import clean, tail
from worker.tuners.base import Emit

SPEC = Spec("g-1", "r", 1, shapes=tuple(SpecShape(i, {"M": i}) for i in (4, 7)))


@pytest.mark.parametrize(("before", "after"), [(b"", b""), (b"{}\n", b"{}\n"), (b'{}\n{"t', b'{}\n{"t\n')])
def test_a_torn_tail_is_healed_and_nothing_else(tmp_path: Path, before: bytes, after: bytes) -> None:
    path = tmp_path / "0.jsonl"
    path.write_bytes(before)
    records = RecordFile(path)
    records.append(record("worker_stopped", 1.0, why="x"))
    with pytest.raises(ProtocolError, match="worker_stopped record of"):
        records.append(record("worker_stopped", 1.0, why="x" * MAX_RECORD_BYTES))
    records.close()
    assert path.read_bytes() == after + b'{"type":"worker_stopped","t":1.0,"why":"x"}\n'


def test_a_record_file_is_a_plain_file(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for path, says in ((tmp_path / "link", "symbolic link"), (Path("/dev/null"), "not a regular file")):
        with pytest.raises(OSError, match=says):
            RecordFile(path)
    assert not (tmp_path / "target").exists()


def say(type_: str, shape: Any, **fields: Any) -> dict[str, Any]:
    return {"type": type_, "shape": shape, **fields}


def test_a_course_knows_what_is_in_flight() -> None:
    said: list[dict[str, Any]] = []
    emit, course = Emit(said.append), MessageCheck(SPEC)
    emit.alive()
    emit.alive()
    emit.started(4)
    emit.alive()
    emit.row(4, {"us": 2, "kernelName": "k"})
    lost: Any = {"key": ["M=4"], "candidate": ["asm", "7"], "detail": "SIGSEGV\x1b[0m"}
    emit.tuned(4, {"us": 2.0}, candidate=["ck", "3"], withheld=[lost])
    emit.started(7)
    emit.failed(7, "unsupported", "\x1b[31mno\x1b[0m")
    assert said.pop(0) == {"type": "alive"}, "signs of life are thinned out"
    usual = {"name": "", "slot": "", "image": "", "driver": "", "outcome": "fault", "source": "attempt", "t": 0.0}
    more = {"candidate": ["ck", "3"], "withheld": [{**lost, **usual, "detail": "SIGSEGV", "confirmed": False}]}
    taken = [(course.take(m, 1.0), course.in_flight) for m in said]
    assert taken == [
        (record("shape_started", 1.0, attempt="g-1", shape=4), 4),
        (record("row", 1.0, attempt="g-1", shape=4, row={"us": 2, "kernelName": "k"}), 4),
        ({**record("shape_tuned", 1.0, attempt="g-1", shape=4, row={"us": 2.0}), **more}, None),
        (record("shape_started", 1.0, attempt="g-1", shape=7), 7),
        (record("shape_failed", 1.0, attempt="g-1", shape=7, reason="unsupported", detail="no"), None),
    ]


START = say("shape_started", 4)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([say("shape_started", 5)], "5 is not an open shape"),
        ([START, say("shape_started", 7)], "7 was started while 4 was in flight"),
        ([say("shape_tuned", None, row={"us": 1})], "shape_tuned of shape None while None"),
        ([START, say("row", 7, row={})], "row of shape 7 while 4"),
        ([START, say("row", 4)], "row is not a mapping"),
        ([START, say("row", 4, row={"gflops": 1})], "field 'gflops' holds int"),
        ([START, say("row", 4, row={"kernelId": 2**70})], "field 'kernelId' holds int"),
        ([START, say("shape_tuned", 4, row={"us": float("nan")})], "without a time"),
        ([START, say("shape_tuned", 4, row={"us": 1.0, "errRatio": 0.06})], "0.06, over 0.05"),
        ([START, say("shape_failed", 4, reason="tired", detail="")], "reason 'tired'"),
        ([START, say("shape_tuned", 4, row={"us": 1.0}), START], "4 is not an open shape"),
    ],
)
def test_a_tuner_that_breaks_the_rules_is_told_so(messages: list[dict[str, Any]], says: str) -> None:
    course = MessageCheck(SPEC)
    for message in messages[:-1]:
        course.take(message, 1.0)
    with pytest.raises(ProtocolError, match=says):
        course.take(messages[-1], 1.0)


def test_a_row_is_cut_to_what_can_be_kept_and_the_error_limit_is_judged_here() -> None:
    raw = {"us": float("inf"), "tflops": float("nan"), "bw": 10**400, "errRatio": 0, "detail": "d" * 3000}
    assert checked_row(raw, 0.05) == {"errRatio": 0, "detail": "d" * 2000}
    assert checked_row({"us": 1.0, "errRatio": 0.05}, 0.05) == {"us": 1.0, "errRatio": 0.05}
    assert checked_row({"us": 1.0, "status": "ok", "errRatio": 0.051}, 0.05)["status"] == "wrong"


@given(st.text(), st.integers(0, 50), st.sampled_from(["start", "end"]))
def test_clean_text_is_printable_and_short(text: str, limit: int, keep: str) -> None:
    out = clean(text, limit, keep=keep)
    assert len(out.encode()) <= limit
    assert all(c in "\n\t" or c.isprintable() or not c.isascii() for c in out)


def test_terminal_sequences_are_stripped_and_logs_cut_at_characters(tmp_path: Path) -> None:
    assert clean("\x1b[1;31mred\x1b[0m \x1b]0;title\x07x\x1b]8;;http://e\x1b\\link\x9b31m\a\b\0") == "red xlink"
    assert (clean("50%\r100%"), clean("äöü" * 10, 5)) == ("50%\n100%", "äö")
    with (tmp_path / "log").open("w+b") as f:
        f.write(b"old\n" + "ü".encode() * 3000 + b"\n\x1b[0mlast \xff line\n")
        f.flush()
        last = tail(f.fileno(), 0, 30)
        assert (last.endswith("last \ufffd line"), len(last.encode()) <= 30) == (True, True)
        assert (tail(f.fileno(), f.tell() - 5, 30), tail(f.fileno(), 10**9)) == ("line", "")


def test_sigint_ends_what_runs_and_does_not_tear_a_message() -> None:
    read, write = os.pipe()
    before = signal.getsignal(signal.SIGINT)
    wire, big, got = Wire(write), {"type": "row", "pad": "x" * 300_000}, bytearray()

    def drain() -> None:  # once the pipe is full: send is in the middle of the message
        os.kill(os.getpid(), signal.SIGINT)
        while not got.endswith(b"\n"):
            got.extend(os.read(read, 65536))

    def work() -> dict[str, Any]:
        thread = threading.Timer(0.05, drain)
        thread.start()
        try:
            wire.send(big)
        finally:
            thread.join()
        return {"type": "done"}

    try:
        os.kill(os.getpid(), signal.SIGINT)  # idle: ignored
        assert wire.interruptible(lambda: {"type": "done"}) == {"type": "done"}
        assert wire.interruptible(work) == {"type": "interrupted"}
        assert json.loads(got) == big
    finally:
        signal.signal(signal.SIGINT, before)
        os.close(read)
        os.close(write)
