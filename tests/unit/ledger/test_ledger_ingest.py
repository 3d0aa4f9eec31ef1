"""Records of a node as data: what is taken, what is kept as evidence, what is dropped and counted."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json

from orchestrator import clean
from orchestrator import events as ev
from orchestrator.ledger import Ingest, split_lines
from orchestrator.ledger.reader import reconcile
from orchestrator.reasons import Reason
from tests.support.ledger_kit import DEVICE, Run, ended, row, started
from tests.support.marks import drawn
from worker.protocol import MAX_RECORD_BYTES, RECORDS, ProtocolError, parse_record, record


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with Run(tmp_path) as r:
        r.send("g0001-1")
        r.says(started("g0001-1"))
        yield r


def test_an_attempt_in_full(run: Run) -> None:
    run.says(ended("g0001-1"))
    run.send("g0002-1")
    events = run.says(
        record("worker_started", 0.5, info={"pid": 7, "gfx": "gfx950"}),
        record("tuner_ready", 0.6, tuner="replay", device=DEVICE, seconds=0.1),
        record("canary", 0.7, ok=True, us=3.5, detail="", attempt=None),
        started("g0002-1"),
        record("shape_started", 1.0, attempt="g0002-1", shape=3),
        row("row", "g0002-1", 3),
        row("shape_tuned", "g0002-1", 3),
        ended("g0002-1"),
        record("worker_stopped", 3.0, why="idle"),
    )
    assert events == [
        ev.CanaryPassed("n1", "0", 3.5), ev.AttemptStarted("g0002-1", "n1", "0"), ev.ShapeStarted("g0002-1", 3),
        ev.ShapeTuned("g0002-1", 3), ev.AttemptEnded("g0002-1", Reason.DONE, None, "", 4.0),
    ]  # fmt: skip
    assert run.ledger.slot("n1", "0").info["pid"] == 7
    assert run.ledger.slots()[0].device == DEVICE
    assert run.bad() == 0


def test_verdicts_rejections_and_failed_canaries(run: Run) -> None:
    run.send("g0002-1")
    assert run.says(
        record("canary", 0.7, ok=False, us=-1, detail="NaN \x1b[31mred\x1b[0m", attempt=None),
        record("canary", 0.7, ok=1, us="x", detail=None, attempt=None),
        record("shape_failed", 1.0, attempt="g0001-1", shape=1, reason="wrong_result", detail="all \n wrong"),
        record("spec_rejected", 1.0, attempt="g0002-1", detail="unknown field"),
    ) == [
        ev.CanaryFailed("n1", "0", "NaN red"),
        ev.CanaryFailed("n1", "0", "it gave no detail"),
        ev.ShapeRefused("g0001-1", 1, Reason.WRONG_RESULT, "all   wrong"),
        ev.AttemptEnded("g0002-1", Reason.REJECTED, None, "unknown field", 0.0),
    ]
    assert run.bad() == 0


def test_the_end_of_an_attempt_is_taken_with_what_can_be_taken_of_it(run: Run) -> None:
    spent = {"measure": 2.5, "check": -1, "": 3, "other": float("nan"), "import": True}
    (e,) = run.says(ended("g0001-1", "exploded", in_flight=99, exit="x", detail=7, seconds=-3, spent=spent))
    assert isinstance(e, ev.AttemptEnded)
    assert (e.outcome, e.in_flight, e.seconds) == (Reason.ERROR, None, 0.0)
    assert "exploded" in e.detail
    report = run.ledger.report("g0001-1")
    assert report.spent == {"measure": 2.5}
    assert report.exit is None


def test_records_of_a_canary_attempt_are_no_evidence_of_work(run: Run) -> None:
    run.journal(ev.AskCanary("n1", "0", "canary-n1-0-1"))
    assert run.says(started("canary-n1-0-1"), ended("canary-n1-0-1")) == []
    assert run.bad() == 0


@pytest.mark.parametrize(
    "said",
    [
        started("g0009-1"),
        started("../../etc/passwd"),
        started("\ud800"),
        {**started("x"), "attempt": 5},
        {**started("x"), "attempt": ["g0001-1"]},
        record("shape_started", 1.0, attempt="g0001-1", shape=3),
        record("shape_started", 1.0, attempt="g0001-1", shape=True),
        record("shape_started", 1.0, attempt="g0001-1", shape="1"),
        record("shape_started", 1.0, attempt="g0001-1", shape=10**30),
        record("shape_tuned", 1.0, attempt="g0001-1", shape=1, row="fast"),
        record("row", 1.0, attempt="g0001-1", shape=1, row=[]),
        record("shape_failed", 1.0, attempt="g0001-1", shape=1, reason="kills_nodes", detail=""),
        record("shape_failed", 1.0, attempt="g0001-1", shape=1, reason=["no_candidate"], detail=""),
        b"{",
        b'"text"',
        b'{"type":"row","t":1}',
        b'{"type":"rm -rf","t":1}',
        b"[" * 50_000,
        b"\xff\xfe",
        b"x" * (MAX_RECORD_BYTES + 1),
        b"1" * 5000,
    ],
    ids=lambda v: (v[:20] if isinstance(v, bytes) else json.dumps(v)[:70].encode()).decode("ascii", "replace"),
)
def test_what_cannot_be_is_dropped_and_counted(run: Run, said: bytes | dict[str, Any]) -> None:
    assert run.says(said) == []
    assert run.bad() == 1
    assert not list(run.ledger.profile_rows())
    assert run.says(row("shape_tuned", "g0001-1", 1)) == [ev.ShapeTuned("g0001-1", 1)], "and reading goes on"


def test_a_node_speaks_only_for_its_own_attempts(run: Run) -> None:
    assert run.says(row("shape_tuned", "g0001-1", 1), node="n2") == []
    assert run.ledger.counts().tuned == 0
    bad = run.ledger.query("SELECT bad, last_bad FROM offsets WHERE node='n2'")
    assert bad == [(1, "shape_tuned: attempt g0001-1 was not sent to this node")]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"us": 0}, "time is 0"),
        ({"us": -1}, "time is -1"),
        ({"us": float("nan")}, "time is nan"),
        ({"us": float("inf")}, "time is inf"),
        ({"us": "5.0"}, "time is 5.0"),
        ({"us": True}, "time is True"),
        ({"us": None}, "time is missing"),
        ({"errRatio": 1.01}, "errRatio is 1.01, no share"),
        ({"errRatio": float("nan")}, "errRatio is nan"),
        ({"errRatio": -0.1}, "errRatio is -0.1"),
        ({"errRatio": None}, "errRatio is missing"),
        ({"status": "wrong"}, "status is wrong"),
        ({"kernelName": ""}, "names no kernel"),
        ({"kernelName": None}, "names no kernel"),
        ({"kernelName": 5}, "no name"),
        ({"kernelName": "k" * 1001}, "no name"),
        ({"kernelName": "k\x1b[2J"}, "no plain text"),
        ({"kernelName": "k\nx"}, "no plain text"),
        ({"kernelName": "=cmd|' /C calc'!A0"}, "no plain text"),
    ],
)
def test_a_winner_that_is_none_is_kept_as_a_row_and_settles_nothing(run: Run, fields: dict[str, Any], why: str) -> None:
    assert run.says(row("shape_tuned", "g0001-1", 1, **fields)) == []
    (kept,) = run.ledger.profile_rows()
    assert not kept.winner
    assert kept.note is not None
    assert why in kept.note
    assert run.bad() == 1
    assert run.ledger.counts().tuned == 0
    assert run.says(row("shape_tuned", "g0001-1", 1)) == [ev.ShapeTuned("g0001-1", 1)]


@pytest.mark.parametrize(
    "device", [{}, {"gfx": "", "cu_num": 256}, {"gfx": "gfx950", "cu_num": 0}, {"gfx": "a,b", "cu_num": 1}]
)
def test_a_winner_of_an_unnamed_device_settles_nothing(run: Run, device: dict[str, Any]) -> None:
    run.send("g0002-1")
    run.says({**started("g0002-1"), "device": device}, row("shape_tuned", "g0002-1", 3))
    assert run.ledger.counts().tuned == 0
    run.says(record("tuner_ready", 0.6, tuner="replay", device=DEVICE, seconds=0.1))
    run.send("g0002-2")
    run.says({**started("g0002-2"), "device": {}}, row("shape_tuned", "g0002-2", 3))
    assert run.ledger.counts().tuned == 1, "the slot's own device stands in"


def test_hostile_text_is_cleaned_and_capped(run: Run) -> None:
    nasty = "a\x1b]0;title\x07b\x9b31mc\u202ed\x00e\ud800f\r\ng" + "x" * 9000
    run.says(row("row", "g0001-1", 1, kernelName=nasty, detail=nasty, kernelId=10**30, samples=1.5, tflops=1e400))
    (kept,) = run.ledger.profile_rows()
    assert kept.kernel_name.startswith("abcdef  gx")
    assert len(kept.row["detail"]) <= clean.MAX_TEXT
    assert not {"kernelId", "samples", "tflops"} & kept.row.keys()


@given(st.text(), st.integers(min_value=3, max_value=50))
def test_clean_text_is_printable_short_and_stays_the_same(text: str, limit: int) -> None:
    once = clean.text(text, limit)
    assert once.isprintable()
    assert len(once) <= limit
    assert clean.text(once, limit) == once


def test_a_document_is_clean_json_of_a_bounded_size() -> None:
    deep: Any = "bottom"
    for _ in range(50):
        deep = {"in": deep}
    raw = {
        "a": 1, "b": [True, None, "x\x00y"], "deep": deep, "long": ["z" * 1500] * 100, "n": float("nan"), "big": 2**70,
    }  # fmt: skip
    out = clean.document(raw)
    assert out == {"a": 1}
    assert clean.document({"b": raw["b"], "deep": deep})["b"] == [True, None, "xy"]
    assert clean.document([1]) == {}


def _read(line: bytes, decode: Callable[[bytes], Any] | None) -> str:
    try:
        return repr(parse_record(line, decode))  # nan is not equal to itself
    except ProtocolError as e:
        return f"refused: {e}"


_SAID = json.dumps(record("row", 1.5, attempt="g-1", shape=1, row={"us": -0.5e-7, "k": "é\n\U0001f600", "n": None}))


@given(
    st.sampled_from([_SAID, json.dumps(json.loads(_SAID), ensure_ascii=False)]),
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 2), st.sampled_from(b'0.eE+-"\\{}[],: \n\0\xc3\xedufN'))),
)
def test_the_fast_decoder_reads_as_json_does_however_a_line_is_damaged(
    text: str, damage: list[tuple[int, int, int]]
) -> None:
    line = bytearray(text.encode())
    for at, removed, put in damage:
        line[at : at + removed] = bytes([put])
    assert _read(bytes(line), from_json) == _read(bytes(line), None)


@pytest.mark.parametrize(
    "value",
    [
        '"\\ud800"', '"\\udc00\\ud800"', "[" * 300 + "]" * 300, "[" * 10_000, "1" * 4000, "1" * 5000, "-" + "1" * 5000,
        "NaN", "-Infinity", "1e999", "-0", "0.1234567890123456789", '1,"x":2,"x":3', '"\t"', '"\x7f"', "nan", "'x'",
    ],
    ids=lambda v: v[:20].encode("unicode_escape").decode(),
)  # fmt: skip
def test_the_fast_decoder_takes_and_refuses_what_json_does(value: str) -> None:
    line = f'{{"type":"worker_stopped","t":1,"why":"","x":{value}}}'.encode()
    assert _read(line, from_json) == _read(line, None)


def test_torn_lines_wait_and_bad_ones_in_the_middle_are_skipped(run: Run) -> None:
    lines = [row("shape_tuned", "g0001-1", 1), b'{"type":"row","t', b"", ended("g0001-1")]
    data = b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines)
    start = run.ledger.offsets("n1")["E", "0"]
    seen: list[ev.Event] = []
    for at in range(0, len(data), 7):
        with run.ledger.transaction():
            events, _ = run.ingest.feed("n1", "0", data[at : at + 7])
            for e in events:
                run.ledger.journal(e, 5.0)
        seen += events
        whole = data.rfind(b"\n", 0, at + 7) + 1
        assert run.ledger.offsets("n1")["E", "0"] == start + whole
    assert [type(e) for e in seen] == [ev.ShapeTuned, ev.AttemptEnded]
    assert run.bad() == 1


def test_a_new_controller_reads_the_torn_line_again(run: Run) -> None:
    data = json.dumps(row("shape_tuned", "g0001-1", 1)).encode() + b"\n"
    for part in (data[:30], data):  # the second: from the ledger's offset, by a controller that knows nothing
        run.ingest = Ingest(run.ledger, run.state)
        with run.ledger.transaction():
            events, consumed = run.ingest.feed("n1", "0", part)
    assert (events, consumed, run.bad()) == ([ev.ShapeTuned("g0001-1", 1)], len(data), 0)


@given(st.lists(st.binary(max_size=20).filter(lambda b: b"\n" not in b)), st.binary(max_size=20))
def test_split_lines_gives_back_every_whole_line(lines: list[bytes], tail: bytes) -> None:
    tail = tail.replace(b"\n", b"")
    whole = b"".join(x + b"\n" for x in lines)
    assert split_lines(whole + tail) == (lines, len(whole))


def test_an_endless_line_is_given_out_as_a_bad_one() -> None:
    endless = b"x" * (MAX_RECORD_BYTES + 1)
    assert split_lines(b"a\n" + endless) == ([b"a", endless], len(endless) + 2)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
IDS = st.sampled_from([1, 2, 3, 4])
ATTEMPTS = st.sampled_from(["g0001-1", "g0001-2", "g0002-1", "g0002-2", "g0007-1"])


@st.composite
def said(draw: st.DrawFn) -> dict[str, Any]:
    """A record that a worker might send, right or wrong in any of its fields."""
    kind = draw(st.sampled_from(["shape_tuned", "row", "shape_started", "attempt_started", "attempt_ended", "any"]))
    attempt = draw(ATTEMPTS)
    if kind in ("shape_tuned", "row"):
        return row(kind, attempt, draw(IDS), us=draw(st.sampled_from([5.0, 7.0, -1.0, float("nan")])))
    if kind == "shape_started":
        return record(kind, 1.0, attempt=attempt, shape=draw(IDS))
    if kind == "attempt_started":
        return started(attempt)
    if kind == "attempt_ended":
        return ended(attempt, draw(st.sampled_from(["done", "fault", "hang", "nonsense"])), in_flight=draw(IDS))
    name = draw(st.sampled_from(sorted(RECORDS)))
    return record(name, 1.0, **{f: draw(st.one_of(JSON, IDS, ATTEMPTS)) for f in RECORDS[name]})


@drawn(60)
@given(st.lists(st.tuples(st.sampled_from(["n1", "n2"]), said()), max_size=25))
def test_whatever_workers_say_the_books_add_up(words: list[tuple[str, dict[str, Any]]]) -> None:
    with tempfile.TemporaryDirectory() as folder, Run(Path(folder)) as run:
        for attempt in ("g0001-1", "g0002-1"):
            run.send(attempt, node="n1")
        for attempt in ("g0001-2", "g0002-2"):
            run.send(attempt, node="n2")
        first: dict[int, tuple[str, float]] = {}
        for node, words_ in words:
            for e in run.says(words_, node=node):
                if isinstance(e, ev.ShapeTuned):
                    first.setdefault(e.shape, (e.attempt, words_["row"]["us"]))
        assert {w.shape: (w.attempt, w.us) for w in run.ledger.winners()} == first
        assert run.ledger.counts().tuned == len(first)
        assert reconcile(run.ledger) == []


def test_a_lost_end_is_made_up_for_by_the_next_start(run: Run) -> None:
    """The record of the end was torn: the slot's next attempt shows that the earlier one is over."""
    run.send("g0002-1")
    assert run.says(started("g0002-1")) == [
        ev.AttemptEnded("g0001-1", Reason.DONE, None, "its end was not read; the slot went on to g0002-1", 0.0),
        ev.AttemptStarted("g0002-1", "n1", "0"),
    ]
    assert list(run.state.open) == ["g0002-1"]


def test_an_end_that_was_read_is_not_made_up_again(run: Run) -> None:
    run.send("g0002-1")
    events = run.says(ended("g0001-1"), started("g0002-1"))
    assert [type(e).__name__ for e in events] == ["AttemptEnded", "AttemptStarted"]


def test_a_timed_canary_is_an_event_with_what_is_known_of_the_slot(run: Run) -> None:
    reading = {
        "temperature_c": {"edge": 61.0, "junction": 88.5, "odd": "hot"},
        "power_cap_w": 1400.0,
        "source": "sysfs",
    }
    events = run.says(
        record("tuner_ready", 0.6, tuner="replay", device=DEVICE, seconds=0.1),
        record("canary_timed", 0.7, compute_us=110.5, memory_us=250.0, seconds=0.3, conditions=reading),
        record("canary_timed", 0.8, compute_us="fast", memory_us=float("inf"), seconds=0.3),
    )
    assert events == [
        ev.CanaryTimed("n1", "0", 110.5, 250.0, "a GPU gfx950 256", 88.5, 1400.0),
        ev.CanaryTimed("n1", "0", -1.0, -1.0, "a GPU gfx950 256"),
    ]
    assert [r for _, r in run.ledger.journal_records() if isinstance(r, ev.CanaryTimed)] == events
    assert run.bad() == 0
