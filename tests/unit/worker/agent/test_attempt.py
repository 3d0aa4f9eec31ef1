"""Messages of a tuner as the agent takes them: by the rules, with rows that can be kept and clean text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.agent.attempt import MessageCheck
from worker.protocol import ProtocolError, Spec, SpecShape, checked_row
from worker.text import clean

SPEC = Spec("g-1", "r", 1, shapes=tuple(SpecShape(i, {"M": i}) for i in (4, 7)))


def say(type_: str, shape: Any, **fields: Any) -> dict[str, Any]:
    return {"type": type_, "shape": shape, **fields}


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
        ([START, say("point_timed", 5, point={})], "5, which the attempt does not have"),
        ([START, say("point_timed", 4, point=[1])], "4, which the attempt does not have"),
    ],
)
def test_a_tuner_that_breaks_the_rules_is_told_so(messages: list[dict[str, Any]], says: str) -> None:
    course = MessageCheck(SPEC)
    for message in messages[:-1]:
        course.take(message, 1.0)
    with pytest.raises(ProtocolError, match=says):
        course.take(messages[-1], 1.0)


def test_a_measured_m_may_follow_the_end_of_the_shape_in_whose_name_it_is() -> None:
    course = MessageCheck(SPEC)
    for message in (START, say("shape_tuned", 4, row={"us": 1.0})):
        course.take(message, 1.0)
    made = course.take(say("point_timed", 4, point={"m": 8}), 2.0)
    assert made == {"type": "point_timed", "t": 2.0, "attempt": "g-1", "shape": 4, "point": {"m": 8}}


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
