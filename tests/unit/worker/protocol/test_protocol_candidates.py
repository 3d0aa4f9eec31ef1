"""Candidates on the wire: specs that ask for some of them, records that say which ran and which were left out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.agent.attempt import MessageCheck
from worker.agent.records import encode
from worker.protocol import (
    MAX_RECORD_BYTES,
    MAX_VERDICTS,
    MAX_WITHHELD,
    Choice,
    ProtocolError,
    Spec,
    SpecShape,
    TableKernel,
    parse_record,
    record,
    withheld_list,
)
from worker.tuners.base import Emit

SHAPES = (SpecShape(1, {"M": 1}), SpecShape(2, {"M": 2}))
ASM, CK = ["asm", "7", ""], ["ck", "3", "0"]
VERDICT = {"family": "a4w4", "key": ["gfx950", "1"], "candidate": ASM, "slot": "gpu-1", "t": 5.0}
KERNEL = {"libtype": "ck", "number": "3", "name": "a4w4_blockscale_3", "split": "0"}
GOOD = json.loads(Spec("a", "r", 1, shapes=SHAPES).dumps())
words = st.lists(st.text(max_size=20), min_size=1, max_size=4)


def entry(*candidate: str, **more: Any) -> dict[str, Any]:
    made = {"key": ["gfx950", "1"], "candidate": list(candidate), "name": "kernelId=7", "outcome": "fault"}
    return {**made, "detail": "SIGSEGV", "t": 5.0, "slot": "gpu-1", "image": "sha", "driver": "6", **more}


def test_an_older_worker_can_read_a_spec_that_needs_none_of_it() -> None:
    assert not {"only", "refuted", "confirmed"} & set(GOOD)


@given(st.lists(words, min_size=1, max_size=4, unique_by=tuple), st.lists(words, max_size=3))
def test_a_spec_with_candidates_survives_the_way(only: list[list[str]], lost: list[list[str]]) -> None:
    refuted = [{"family": "f", "key": ["k"], "candidate": c} for c in lost]
    spec = Spec("a", "r", 1, shapes=SHAPES, only={"2": only}, refuted=refuted, confirmed=refuted)  # type: ignore[arg-type]
    again = Spec.loads(spec.dumps())
    assert again == spec
    assert again.only_of(2) == Choice(tuple(tuple(c) for c in only))
    assert again.only_of(1) is None


def test_a_spec_names_candidates_by_identity_or_as_kernels_of_a_table() -> None:
    kernel = TableKernel("ck", "3", "a4w4_blockscale_3", "0")
    spec = Spec("a", "r", 1, shapes=SHAPES, only={"1": [kernel._asdict()], "2": [ASM]})
    again = Spec.loads(spec.dumps())
    assert again == spec
    assert again.only_of(1) == Choice(kernels=(kernel,))
    assert again.only_of(2) == Choice((tuple(ASM),))


def test_a_kernel_of_a_table_is_found_by_name_and_split_an_identity_as_a_whole() -> None:
    only = Choice((("asm", "7", ""),), (TableKernel("ck", "3", "ck_a", "2"),))
    assert only.has(("asm", "7", ""), "")
    assert only.has(("ck", "99", "2"), "ck_a", "2")
    assert only.has(("ck_a",), "ck_a"), "a tuner without split-K beside the name"
    assert not only.has(("ck", "3", "0"), "ck_a", "0")
    assert not only.has(("asm", "8", ""), "asm")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"only": {"3": [KERNEL]}}, "only['3'] is no shape of the spec"),
        (
            {"only": {"1": [{**KERNEL, "more": "1"}]}},
            "only['1'] has a kernel that is not {libtype, number, name, split}",
        ),
        ({"only": {"1": [{**KERNEL, "number": 3}]}}, "a kernel of only['1'] holds more than strings"),
        ({"only": {"1": [KERNEL] * 129}}, "only['1'] is not a list of at most 128 candidates"),
        ({"only": []}, "only is list, not dict"),
        ({"only": {"3": [ASM]}}, "only['3'] is no shape of the spec"),
        ({"only": {"1": []}}, "only['1'] is empty"),
        ({"only": {"1": ASM}}, "only['1'] is not a list of 1 to 64 strings"),
        ({"only": {"1": [[]]}}, "only['1'] is not a list of 1 to 64 strings"),
        ({"only": {"1": [["a", 7]]}}, "only['1'] holds more than strings of at most 400 characters"),
        ({"only": {"1": [["a" * 401]]}}, "only['1'] holds more than strings"),
        ({"only": {"1": [[str(i)] for i in range(129)]}}, "only['1'] is not a list of at most 128 candidates"),
        ({"refuted": {}}, "refuted is dict, not list"),
        ({"refuted": [VERDICT] * (MAX_VERDICTS + 1)}, "refuted has more than 256 entries"),
        ({"refuted": [{**VERDICT, "more": 1}]}, "refuted[0]: unknown field 'more'"),
        ({"confirmed": ["x"]}, "confirmed[0] is not a mapping"),
        ({"confirmed": [{**VERDICT, "slot": 1}]}, "confirmed[0]: slot is int, not str"),
        ({"confirmed": [{**VERDICT, "t": True}]}, "confirmed[0]: t is bool, not int"),
        ({"confirmed": [{**VERDICT, "key": "M=1"}]}, "confirmed[0]: key is str, not list"),
    ],
)
def test_a_bad_spec_says_what_is_wrong(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ProtocolError) as e:
        Spec.loads(json.dumps({**GOOD, **change}).encode())
    assert says in str(e.value)


def test_a_withheld_list_is_capped_and_the_cut_is_said() -> None:
    kept, more = withheld_list([entry(str(i)) for i in range(100)] + [entry("5")])
    assert (len(kept), more) == (MAX_WITHHELD, 36)
    kept, more = withheld_list([entry(str(i)) for i in range(3)], 10)
    assert (len(kept), more) == (3, 10)


def test_a_withheld_list_always_fits_into_a_record() -> None:
    big = [entry(str(i), *["\0" * 400] * 60, detail="\0" * 9999) for i in range(64)]
    kept, more = withheld_list(big)
    assert len(kept) + more == 64
    assert kept == []
    kept, more = withheld_list([entry(str(i), *["x" * 400] * 2, detail="y" * 9999) for i in range(64)])
    assert kept
    assert len(kept) + more == 64
    made = record("shape_failed", 1.0, attempt="a", shape=1, reason="no_candidate", detail="", withheld=kept)
    assert len(encode(made)) < MAX_RECORD_BYTES
    assert parse_record(encode(made)) == made


@pytest.mark.parametrize(
    "change",
    [{"outcome": "tired"}, {"source": "hearsay"}, {"t": -1}, {"t": True}, {"slot": 0}, {"key": []}, {"detail": None}],
)
def test_a_bad_entry_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        withheld_list([entry("a", **change)])


def test_an_attempt_tells_what_it_left_out() -> None:
    said: list[dict[str, Any]] = []
    emit = Emit(said.append)
    emit.started(1)
    emit.tuned(1, {"us": 2.0}, candidate=CK, withheld=[entry(*ASM)])  # type: ignore[list-item]
    emit.started(2)
    emit.failed(2, "no_candidate", "none", withheld=[entry(*ASM), entry(*CK)])  # type: ignore[list-item]
    course = MessageCheck(Spec("a", "r", 1, shapes=SHAPES))
    _, tuned, _, failed = [course.take(json.loads(json.dumps(m)), 1.0) for m in said]
    assert tuned is not None
    assert failed is not None
    assert tuned["candidate"] == CK
    assert tuned["withheld"] == [{**entry(*ASM), "source": "attempt", "confirmed": False}]
    assert "ran" not in tuned  # it was not asked for some of them only
    assert [e["candidate"] for e in failed["withheld"]] == [ASM, CK]


def test_an_attempt_on_some_candidates_says_which_of_them_ran() -> None:
    course = MessageCheck(Spec("a", "r", 1, shapes=SHAPES, only={"1": [ASM, CK]}))
    course.take({"type": "shape_started", "shape": 1}, 1.0)
    message = {"type": "shape_tuned", "shape": 1, "row": {"us": 1.0}, "candidate": ASM, "ran": [ASM, ["other"]]}
    made = course.take(message, 1.0)
    assert made is not None
    assert made["ran"] == [ASM]
    course.take({"type": "shape_started", "shape": 2}, 1.0)
    made = course.take({"type": "shape_failed", "shape": 2, "reason": "no_candidate", "detail": ""}, 1.0)
    assert made is not None
    assert "ran" not in made


def test_which_kernels_of_a_table_ran_is_not_recorded() -> None:
    """They are in no image's words, so they complete no confirmation."""
    course = MessageCheck(Spec("a", "r", 1, shapes=SHAPES, only={"1": [KERNEL]}))
    course.take({"type": "shape_started", "shape": 1}, 1.0)
    made = course.take({"type": "shape_tuned", "shape": 1, "row": {"us": 1.0}, "candidate": CK, "ran": [CK]}, 1.0)
    assert made is not None
    assert "ran" not in made
