"""The wire contract: accepted data survives a round trip, and all other data raises ProtocolError."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.protocol import (
    MAX_RECORD_BYTES,
    MAX_SPEC_BYTES,
    MAX_VERDICTS,
    RECORDS,
    InboxName,
    NodeConfig,
    ProtocolError,
    Spec,
    SpecShape,
    TableKernel,
    parse_record,
    record,
)

GOOD = {"attempt": "g0001-1", "run": "r", "epoch": 1, "protocol": 1, "shapes": [{"id": 1, "key": {"M": 1}}]}
ASM, CK = ["asm", "7", ""], ["ck", "3", "0"]
VERDICT = {"family": "a4w4", "key": ["gfx950", "1"], "candidate": ASM, "slot": "gpu-1", "t": 5.0}
KERNEL = {"libtype": "ck", "number": "3", "name": "a4w4_blockscale_3", "split": "0"}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def test_a_spec_survives_the_way() -> None:
    shapes = (SpecShape(4, {"M": 1, "dtype": "torch.bfloat16"}), SpecShape(7, {"M": 2}))
    verdicts: Any = [VERDICT]
    spec = Spec(
        "g-1", "r\u20ac", 2**40, "group", "g", "a4w4", "aiter", shapes, 1.5, 1, 0.1, {"batch": [1]},
        only={"4": [KERNEL]}, refuted=verdicts, confirmed=verdicts,
    )  # fmt: skip
    assert b"\n" not in spec.dumps()
    assert Spec.loads(spec.dumps()) == spec
    assert (spec.only_of(4), spec.only_of(7)) == ([TableKernel(**KERNEL)], None)


@given(st.sampled_from(sorted(Spec.__slots__)), json_values, st.binary(max_size=200))
def test_a_spec_with_one_odd_field_loads_or_is_a_protocol_error(name: str, value: Any, noise: bytes) -> None:
    for load in (Spec.loads, NodeConfig.loads, parse_record):
        for none in (noise, json.dumps(value).encode()):
            with pytest.raises(ProtocolError):
                load(none)
    data = json.dumps({**GOOD, name: value}).encode()
    try:
        spec = Spec.loads(data)
    except ProtocolError:
        return
    assert json.loads(spec.dumps())[name] == json.loads(json.dumps(value))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"epoch": True}, "epoch is bool, not int"),
        ({"protocol": 2}, "protocol 2, this worker speaks 1"),
        ({"attempt": "../../etc"}, "attempt is not a plain name"),
        ({"kind": "shell"}, "kind 'shell' is neither group nor canary"),
        ({"shapes": []}, "a group without shapes"),
        ({"watchdog_s": float("inf")}, "watchdog_s must be positive"),
        ({"command": "rm", "group": 1}, "unknown field 'command'; group is int, not str"),
        ({"shapes": [{"id": 1, "key": {"M": 1.5}}]}, "shapes[0].key holds more than numbers and text"),
        ({"shapes": [{"id": 1, "key": {}}, {"id": 1, "key": {}}]}, "shapes[1] repeats id 1"),
        ({"only": {"3": [KERNEL]}}, "only['3'] is not a shape of the spec"),
        ({"only": {"1": [{**KERNEL, "name": "a" * 401}]}}, "a kernel of only['1'] holds more than strings"),
        ({"refuted": [VERDICT] * (MAX_VERDICTS + 1)}, "refuted has more than 256 entries"),
        ({"confirmed": [{**VERDICT, "slot": 1}]}, "confirmed[0]: slot is int, not str"),
    ],
)
def test_a_bad_spec_says_what_is_wrong(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ProtocolError) as e:
        Spec.loads(json.dumps({**GOOD, **change}).encode())
    assert says in str(e.value)
    with pytest.raises(ProtocolError, match="is larger than"):
        Spec.loads(b" " * (MAX_SPEC_BYTES + 1))


def test_inbox_names_survive_sort_by_number_and_say_who_may_claim() -> None:
    names = [InboxName(i, slot, "g-1") for i, slot in ((1, "any"), (20, "0"), (300, "17"), (99999999, "9999"))]
    assert [InboxName.parse(text) for text in sorted(map(str, reversed(names)))] == names
    assert [n.claimable_by("17") for n in names] == [True, False, True, False]
    for other in ("1.any.g-1.json", "00000001.any.g-1.json.tmp", "00000001.any.../g.json", "००००００01.any.g.json"):
        assert InboxName.parse(other) is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"slots": {"gpu0": {}}}, "slot 'gpu0' is not a number of up to four digits"),
        ({"slots": {"0": {"A=B": "1"}}}, "slots['0'] is not a mapping of environment variables"),
        ({"idle_exit_s": -1}, "idle_exit_s must be 0 to"),
        ({"options": []}, "options is list, not dict"),
    ],
)
def test_a_node_config_survives_and_a_bad_one_says_what_is_wrong(change: dict[str, Any], says: str) -> None:
    config = NodeConfig("r", "n", "replay", {"x": [1]}, {"0": {"HIP_VISIBLE_DEVICES": "3"}, "1": {}}, 5, 6.5)
    assert NodeConfig.loads(config.dumps()) == config
    with pytest.raises(ProtocolError) as e:
        NodeConfig.loads(json.dumps({**json.loads(config.dumps()), **change}).encode())
    assert says in str(e.value)


def test_every_record_type_survives_with_its_fields_and_no_others() -> None:
    for type_, fields in RECORDS.items():
        made = record(type_, 12.3456789, **dict.fromkeys(fields, 1))
        assert parse_record(json.dumps(made).encode()) == made
        assert made["t"] == 12.345679
    begun = record("attempt_started", 1.0, attempt="a", group="g", device={}, conditions={"x": 1})
    assert begun["conditions"] == {"x": 1}
    for more in ({}, {"shape": 1, "conditions": {}}):
        with pytest.raises(ProtocolError, match="shape_started takes"):
            record("shape_started", 1.0, attempt="a", **more)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"type":"canary","t":1}', "canary without ok, us, detail, attempt"),
        (b'{"type":"nonsense","t":1}', "without a known type"),
        (b'{"type":"worker_stopped","why":"","t":NaN}', "without a time"),
        (b"[]", "not a JSON object"),
        (b" " * (MAX_RECORD_BYTES + 1), "record of"),
    ],
)
def test_a_bad_record_is_refused(line: bytes, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        parse_record(line)
