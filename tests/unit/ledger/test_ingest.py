"""Records of a node: good ones are accepted, some are kept as evidence, others are dropped and counted."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json

from orchestrator import clean
from orchestrator import events as ev
from orchestrator.ledger.ingest import Chunk, Ingest, split_lines
from orchestrator.ledger.node_log import NodeLog
from orchestrator.ledger.reader import reconcile
from orchestrator.reasons import Reason
from tests.kits.results import DEVICE, Run, blocked, ended, row, started
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
    run.journal(ev.AskCanary("n1", "0", "canary-n1-0-1"))
    reading = {"temperature_c": {"edge": 61.0, "junction": 88.5, "odd": "hot"}, "power_cap_w": 1400.0}
    events = run.says(
        record("worker_started", 0.5, info={"pid": 7, "gfx": "gfx950"}),
        record("tuner_ready", 0.6, tuner="replay", device=DEVICE, seconds=0.1),
        record("canary", 0.7, ok=True, us=3.5, detail="", attempt=None),
        record("canary", 0.7, ok=False, us=-1, detail="NaN \x1b[31mred\x1b[0m", attempt=None),
        record("canary", 0.7, ok=1, us="x", detail=None, attempt=None),
        record("canary_timed", 0.7, compute_us=110.5, memory_us=250.0, seconds=0.3, conditions=reading),
        record("canary_timed", 0.8, compute_us="fast", memory_us=float("inf"), seconds=0.3),
        started("canary-n1-0-1"), ended("canary-n1-0-1"),  # no evidence of work
        started("g0002-1"),
        record("shape_started", 1.0, attempt="g0002-1", shape=3),
        row("row", "g0002-1", 3),
        row("shape_tuned", "g0002-1", 3),
        record("shape_failed", 1.0, attempt="g0002-1", shape=3, reason="wrong_result", detail="all \n wrong"),
        ended("g0002-1"),
        record("spec_rejected", 1.0, attempt="g0002-1", detail="unknown field"),
        record("worker_stopped", 3.0, why="idle"),
    )  # fmt: skip
    assert events == [
        ev.CanaryPassed("n1", "0", 3.5), ev.CanaryFailed("n1", "0", "NaN red"),
        ev.CanaryFailed("n1", "0", "it gave no detail"),
        ev.CanaryTimed("n1", "0", 110.5, 250.0, "a GPU gfx950 256", 88.5, 1400.0),
        ev.CanaryTimed("n1", "0", -1.0, -1.0, "a GPU gfx950 256"),
        ev.AttemptStarted("g0002-1", "n1", "0"), ev.ShapeStarted("g0002-1", 3), ev.ShapeTuned("g0002-1", 3),
        ev.ShapeRefused("g0002-1", 3, Reason.WRONG_RESULT, "all   wrong"),
        ev.AttemptEnded("g0002-1", Reason.DONE, None, "", 4.0),
        ev.AttemptEnded("g0002-1", Reason.REJECTED, None, "unknown field", 0.0),
    ]  # fmt: skip
    assert (run.ledger.slot("n1", "0").info["pid"], run.ledger.slots()[0].device, run.bad()) == (7, DEVICE, 0)


def test_a_measured_m_is_kept_and_an_impossible_one_is_counted(run: Run) -> None:
    good = {
        "file": {"file": "N=1.json"}, "m": 64, "label": "", "count": 2.0,
        "times": [[{"a": 16}, 20.0, 20.0, 0.0], [{"a": 32}, 15.0, 15.5, 0.0]],
    }  # fmt: skip
    run.says(record("point_timed", 1.0, attempt="g0001-1", shape=1, point=good))
    run.says(record("point_timed", 1.0, attempt="g0001-1", shape=1, point={**good, "m": 0}))
    run.says(record("point_timed", 1.0, attempt="g0001-1", shape=1, point={"file": "\x1b[31m"}))
    assert run.bad() == 2
    assert [point.to_document() for point in run.ledger.points()] == [good]


def test_the_end_of_an_attempt_is_taken_with_what_can_be_taken_of_it(run: Run) -> None:
    spent = {"measure": 2.5, "check": -1, "": 3, "other": float("nan"), "import": True}
    (e,) = run.says(ended("g0001-1", "exploded", in_flight=99, exit="x", detail=7, seconds=-3, spent=spent))
    assert e == ev.AttemptEnded("g0001-1", Reason.ERROR, None, "ended as exploded, which is not an outcome; ", 0.0)
    report = run.ledger.report("g0001-1")
    assert (report.spent, report.exit) == ({"measure": 2.5}, None)


@pytest.mark.parametrize(
    "said",
    [
        started("g0009-1"), started("../../etc/passwd"), started("\ud800"), {**started("x"), "attempt": ["g0001-1"]},
        *(record("shape_started", 1.0, attempt="g0001-1", shape=s) for s in (3, True, "1", 10**30)),
        record("shape_tuned", 1.0, attempt="g0001-1", shape=1, row="fast"),
        record("row", 1.0, attempt="g0001-1", shape=1, row=[]),
        record("shape_failed", 1.0, attempt="g0001-1", shape=1, reason="kills_nodes", detail=""),
        record("shape_failed", 1.0, attempt="g0001-1", shape=1, reason=["no_candidate"], detail=""),
        *({**row("shape_tuned", "g0001-1", 1), **odd} for odd in (
            {"withheld": "all"}, {"withheld": [{"candidate": ["asm", "7"]}]}, {"withheld": [blocked([])]},
            {"withheld": [blocked(["asm", "7"], outcome="tired")]}, {"withheld_more": -1})),
        b"{", b'"text"', b'{"type":"row","t":1}', b'{"type":"rm -rf","t":1}', b"[" * 50_000, b"\xff\xfe", b"1" * 5000,
        b"x" * (MAX_RECORD_BYTES + 1),
    ],
    ids=lambda v: (v[:20] if isinstance(v, bytes) else json.dumps(v)[:70].encode()).decode("ascii", "replace"),
)  # fmt: skip
def test_what_cannot_be_is_dropped_and_counted(run: Run, said: bytes | dict[str, Any]) -> None:
    assert (run.says(said), run.bad(), list(run.ledger.profile_rows())) == ([], 1, [])
    assert run.says(row("shape_tuned", "g0001-1", 1)) == [ev.ShapeTuned("g0001-1", 1)], "and reading goes on"


def test_a_node_speaks_only_for_its_own_attempts(run: Run) -> None:
    assert run.says(row("shape_tuned", "g0001-1", 1), node="n2") == []
    assert run.ledger.counts().tuned == 0
    bad = run.ledger.query("SELECT bad, last_bad FROM offsets WHERE node='n2'")
    assert bad == [(1, "shape_tuned: attempt g0001-1 was not sent to this node")]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"us": 0}, "time is 0"), ({"us": float("nan")}, "time is nan"), ({"us": float("inf")}, "time is inf"),
        ({"us": "5.0"}, "time is 5.0"), ({"us": True}, "time is True"), ({"us": None}, "time is missing"),
        ({"errRatio": 1.01}, "errRatio is 1.01, not a share"), ({"errRatio": None}, "errRatio is missing"),
        ({"status": "wrong"}, "status is wrong"), ({"kernelName": ""}, "names no kernel"),
        ({"kernelName": 5}, "not a name"), ({"kernelName": "k" * 1001}, "not a name"),
        ({"kernelName": "k\x1b[2J"}, "not plain text"), ({"kernelName": "=cmd|' /C calc'!A0"}, "not plain text"),
    ],
)  # fmt: skip
def test_a_winner_that_is_none_is_kept_as_a_row_and_settles_nothing(run: Run, fields: dict[str, Any], why: str) -> None:
    assert run.says(row("shape_tuned", "g0001-1", 1, **fields)) == []
    (kept,) = run.ledger.profile_rows()
    assert (kept.winner, why in str(kept.note), run.bad(), run.ledger.counts().tuned) == (False, True, 1, 0)
    assert run.says(row("shape_tuned", "g0001-1", 1)) == [ev.ShapeTuned("g0001-1", 1)]


def test_a_winner_of_an_unnamed_device_settles_nothing(run: Run) -> None:
    for i, device in enumerate(({}, {"gfx": "gfx950", "cu_num": 0}, {"gfx": "a,b", "cu_num": 1}), 3):
        run.send(f"g0002-{i}")
        run.says({**started(f"g0002-{i}"), "device": device}, row("shape_tuned", f"g0002-{i}", 3))
        assert run.ledger.counts().tuned == 0
    run.says(record("tuner_ready", 0.6, tuner="replay", device=DEVICE, seconds=0.1))
    run.send("g0002-2")
    run.says({**started("g0002-2"), "device": {}}, row("shape_tuned", "g0002-2", 3))
    assert run.ledger.counts().tuned == 1, "the slot's own device stands in"


def test_hostile_text_is_cleaned_and_capped(run: Run) -> None:
    nasty = "a\x1b]0;title\x07b\x9b31mc\u202ed\x00e\ud800f\r\ng" + "x" * 9000
    odd = {"kernelId": 10**30, "samples": 1.5, "tflops": 1e400, "block_m": 32, "us": float("inf")}
    run.says(row("row", "g0001-1", 1, kernelName=nasty, detail=nasty, **odd))
    (kept,) = run.ledger.profile_rows()
    assert kept.kernel_name.startswith("abcdef  gx")
    assert len(kept.row["detail"]) <= clean.MAX_TEXT
    assert not {"kernelId", "samples", "tflops"} & kept.row.keys()
    assert (kept.us, kept.row["block_m"]) == (-1.0, 32)
    deep: Any = "bottom"
    for _ in range(50):
        deep = {"in": deep}
    raw = {"a": 1, "b": [True, None, "x\x00y"], "deep": deep, "n": float("nan"), "big": 2**70}
    assert clean.document(raw | {"long": ["z" * 1500] * 100}) == {"a": 1}
    assert clean.document(raw)["b"] == [True, None, "xy"]


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
    endless = b"x" * (MAX_RECORD_BYTES + 1)
    assert split_lines(b"a\n" + endless) == ([b"a", endless], len(endless) + 2), "one without an end is a bad one"


def test_a_new_controller_reads_the_torn_line_again(run: Run) -> None:
    data = json.dumps(row("shape_tuned", "g0001-1", 1)).encode() + b"\n"
    for part in (data[:30], data):  # the second: from the ledger's offset, by a controller that knows nothing
        run.ingest = Ingest(run.ledger, run.state)
        with run.ledger.transaction():
            events, consumed = run.ingest.feed("n1", "0", part)
    assert (events, consumed, run.bad()) == ([ev.ShapeTuned("g0001-1", 1)], len(data), 0)


@pytest.mark.parametrize("streamed", [0, 30, 400])
def test_a_file_that_an_ended_lease_left_completes_what_was_streamed(run: Run, streamed: int) -> None:
    """The stream ends before or within a line, and its last chunk comes late."""
    data = b"".join(json.dumps(x).encode() + b"\n" for x in (row("shape_tuned", "g0001-1", 1), ended("g0001-1")))
    start = run.ledger.offsets("n1")["E", "0"]
    events: list[ev.Event] = []
    for chunk in (
        Chunk("E", "0", start, data[:streamed]),
        Chunk("E", "0", 0, b"." * start + data),
        Chunk("E", "0", start + streamed, data[streamed:]),
    ):
        with run.ledger.transaction():
            events += run.ingest.feed_chunk("n1", chunk)
    assert [type(event) for event in events] == [ev.ShapeTuned, ev.AttemptEnded]
    assert (run.bad(), run.ledger.offsets("n1")["E", "0"]) == (0, start + len(data))


def test_a_log_that_an_ended_lease_left_completes_what_was_streamed(run: Run, tmp_path: Path) -> None:
    chunks = [Chunk("L", "0", 0, b"one\ntw"), Chunk("L", "0", 0, b"one\ntwo\n"), Chunk("L", "0", 6, b"o\n")]
    log = NodeLog(run.ledger, "n1", tmp_path)
    for chunk in chunks:
        with run.ledger.transaction():
            log.add(chunk)
    assert (tmp_path / "n1.log").read_text() == "[0] one\n[0] two\n"
    assert run.ledger.offsets("n1")["L", "0"] == 8


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
IDS = st.sampled_from([1, 2, 3, 4])
ATTEMPTS = st.sampled_from(["g0001-1", "g0001-2", "g0002-1", "g0002-2", "g0007-1"])
SAID = st.one_of(
    st.builds(row, st.sampled_from(["shape_tuned", "row"]), ATTEMPTS, IDS, us=st.sampled_from([5.0, -1.0, math.nan])),
    st.builds(started, ATTEMPTS),
    st.builds(partial(record, "shape_started", 1.0), attempt=ATTEMPTS, shape=IDS),
    st.builds(ended, ATTEMPTS, st.sampled_from(["done", "fault", "hang", "nonsense"]), in_flight=IDS),
    st.sampled_from(sorted(RECORDS)).flatmap(
        lambda name: st.builds(partial(record, name, 1.0), **dict.fromkeys(RECORDS[name], JSON | IDS | ATTEMPTS))
    ),
)
"""Records that a worker might send, right or wrong in any of their fields."""


@drawn(60)
@given(st.lists(st.tuples(st.sampled_from(["n1", "n2"]), SAID), max_size=25))
def test_whatever_workers_say_the_books_add_up(words: list[tuple[str, dict[str, Any]]]) -> None:
    with tempfile.TemporaryDirectory() as folder, Run(Path(folder)) as run:
        for attempt in ("g0001-1", "g0002-1", "g0001-2", "g0002-2"):
            run.send(attempt, node=f"n{attempt[-1]}")
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
    run.send("g0001-2")
    events = run.says(ended("g0002-1"), started("g0001-2"))
    assert [type(e) for e in events] == [ev.AttemptEnded, ev.AttemptStarted], "an end that was read is not made up"
