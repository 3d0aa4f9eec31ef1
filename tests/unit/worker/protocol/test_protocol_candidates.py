"""Candidates on the wire: specs that ask for some of them, records that say which were left out."""

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
    ProtocolError,
    Spec,
    SpecShape,
    TableKernel,
    is_wanted,
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


@given(st.lists(st.builds(TableKernel, *[st.text(max_size=20)] * 4), min_size=1), st.lists(words, max_size=3))
def test_a_spec_with_candidates_survives_the_way(only: list[TableKernel], lost: list[list[str]]) -> None:
    refuted = [{"family": "f", "key": ["k"], "candidate": c} for c in lost]
    kernels = {"2": [k._asdict() for k in only]}
    spec = Spec("a", "r", 1, shapes=SHAPES, only=kernels, refuted=refuted, confirmed=refuted)  # type: ignore[arg-type]
    again = Spec.loads(spec.dumps())
    assert again == spec
    assert again.only_of(2) == only
    assert again.only_of(1) is None


def test_a_kernel_of_a_table_is_found_by_name_and_split() -> None:
    only = [TableKernel("ck", "3", "ck_a", "2")]
    assert is_wanted(only, "ck_a", "2")
    assert is_wanted(only, "ck_a"), "a tuner without split-K beside the name"
    assert is_wanted(None, "any")
    assert not is_wanted(only, "ck_a", "0")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"only": {"3": [KERNEL]}}, "only['3'] is no shape of the spec"),
        (
            {"only": {"1": [{**KERNEL, "more": "1"}]}},
            "only['1'] has a kernel that is not {libtype, number, name, split}",
        ),
        ({"only": {"1": [{**KERNEL, "number": 3}]}}, "a kernel of only['1'] holds more than strings"),
        ({"only": []}, "only is list, not dict"),
        ({"only": {"1": []}}, "only['1'] is not a list of kernels"),
        ({"only": {"1": [{**KERNEL, "name": "a" * 401}]}}, "a kernel of only['1'] holds more than strings"),
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
    assert [e["candidate"] for e in failed["withheld"]] == [ASM, CK]
