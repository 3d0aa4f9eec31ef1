"""The wire contract: what is accepted survives the way there and back, anything else is a ProtocolError."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.protocol import (
    MAX_RECORD_BYTES,
    MAX_SPEC_BYTES,
    RECORDS,
    InboxName,
    NodeConfig,
    ProtocolError,
    Spec,
    SpecShape,
    parse_record,
    record,
)

GOOD = {"attempt": "g0001-1", "run": "r", "epoch": 1, "protocol": 1, "shapes": [{"id": 1, "key": {"M": 1}}]}

plain_names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,20}", fullmatch=True)
keys = st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=8), max_size=4)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
specs = st.builds(
    Spec,
    attempt=plain_names,
    run=st.text(max_size=200),
    epoch=st.integers(0, 2**40),
    group=st.text(max_size=200),
    shapes=st.lists(st.builds(SpecShape, st.integers(), keys), min_size=1, max_size=5, unique_by=lambda s: s.id).map(
        tuple
    ),
    watchdog_s=st.floats(0.001, 1e6),
    grace_s=st.integers(1, 100),
    err_ratio=st.floats(0, 1),
)


@given(specs)
def test_a_spec_survives_the_way(spec: Spec) -> None:
    data = spec.dumps()
    assert b"\n" not in data
    assert Spec.loads(data) == spec


@given(st.binary(max_size=200) | json_values.map(lambda v: json.dumps(v).encode()))
def test_what_is_no_spec_is_a_protocol_error(data: bytes) -> None:
    for load in (Spec.loads, NodeConfig.loads, parse_record):
        with pytest.raises(ProtocolError):
            load(data)


@given(st.sampled_from(sorted({*GOOD, "kind", "group", "watchdog_s", "grace_s", "err_ratio", "options"})), json_values)
def test_a_spec_with_one_odd_field_loads_or_is_a_protocol_error(name: str, value: Any) -> None:
    data = json.dumps({**GOOD, name: value}).encode()
    try:
        spec = Spec.loads(data)
    except ProtocolError:
        return
    assert json.loads(spec.dumps())[name] == json.loads(json.dumps(value))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"epoch": None}, "epoch is NoneType, not int"),
        ({"epoch": True}, "epoch is bool, not int"),
        ({"epoch": -1}, "epoch is negative"),
        ({"protocol": 2}, "protocol 2, this worker speaks 1"),
        ({"attempt": "../../etc"}, "attempt is not a plain name"),
        ({"attempt": "a\n"}, "attempt is not a plain name"),
        ({"kind": "shell"}, "kind 'shell' is neither group nor canary"),
        ({"shapes": []}, "a group without shapes"),
        ({"watchdog_s": 0}, "watchdog_s must be positive"),
        ({"grace_s": float("nan")}, "grace_s must be positive"),
        ({"watchdog_s": float("inf")}, "watchdog_s must be positive"),
        ({"err_ratio": 1.5}, "err_ratio must be between 0 and 1"),
        ({"group": "g" * 201}, "group is longer than 200 characters"),
        ({"command": "rm"}, "unknown field 'command'"),
        ({"shapes": [{"id": 1, "key": {"M": 1.5}}]}, "shapes[0].key holds more than numbers and text"),
        ({"shapes": [{"id": 1, "key": {"M": True}}]}, "shapes[0].key holds more than numbers and text"),
        ({"shapes": [{"id": "1", "key": {}}]}, "shapes[0] is not {id, key}"),
        ({"shapes": [{"id": 1, "key": {}}, {"id": 1, "key": {}}]}, "shapes[1] repeats id 1"),
        ({"shapes": [0] * 30}, "and 10 more"),
    ],
)
def test_a_bad_spec_says_what_is_wrong(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ProtocolError) as e:
        Spec.loads(json.dumps({**GOOD, **change}).encode())
    assert says in str(e.value)


def test_all_faults_of_a_spec_are_named_at_once() -> None:
    with pytest.raises(ProtocolError, match="missing field 'run'; missing field 'epoch'; group is int") as e:
        Spec.loads(b'{"attempt":"a","protocol":1}'.replace(b'"a"', b'"a","group":1'))
    assert "group is int, not str" in str(e.value)


def test_an_oversized_spec_is_not_parsed() -> None:
    with pytest.raises(ProtocolError, match="is larger than"):
        Spec.loads(b" " * (MAX_SPEC_BYTES + 1))


@given(st.integers(0, 99999999), st.sampled_from(["any", "0", "17", "9999"]), plain_names)
def test_inbox_names_survive_and_sort_by_number(seq: int, slot: str, attempt: str) -> None:
    name = InboxName(seq, slot, attempt)
    assert InboxName.parse(str(name)) == name
    assert (str(name) < str(InboxName(50_000_000, "any", "a"))) == (seq < 50_000_000) or seq == 50_000_000


@pytest.mark.parametrize(
    "text",
    [
        "", "a", "1.any.g-1.json", "00000001.any.g-1.json.tmp", "00000001.any.g-1.json\n", "00000001..g.json",
        "00000001.x.g.json", "00000001.any.../g.json", "00000001.12345.g.json", "００００００01.any.g.json",
    ],
)  # fmt: skip
def test_other_names_are_no_specs(text: str) -> None:
    assert InboxName.parse(text) is None


def test_who_may_claim() -> None:
    assert InboxName(1, "any", "a").claimable_by("3")
    assert InboxName(1, "3", "a").claimable_by("3")
    assert not InboxName(1, "33", "a").claimable_by("3")


def test_a_node_config_survives_and_has_defaults() -> None:
    config = NodeConfig("r", "n", "replay", {"x": [1]}, {"0": {"HIP_VISIBLE_DEVICES": "3"}, "1": {}}, 5, 6.5)
    assert NodeConfig.loads(config.dumps()) == config
    plain = NodeConfig.loads(b'{"run":"r","node":"n","tuner":"t","protocol":1}')
    assert plain == NodeConfig("r", "n", "t")
    assert list(plain.slots) == ["0"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"slots": {"gpu0": {}}}, "slot 'gpu0' is not a number of up to four digits"),
        ({"slots": {"0": {"A": 1}}}, "slots['0'] is not a mapping of environment variables"),
        ({"slots": {"0": {"A=B": "1"}}}, "slots['0'] is not a mapping of environment variables"),
        ({"slots": {"0": {"A": "a\0b"}}}, "slots['0'] is not a mapping of environment variables"),
        ({"slots": {"0": []}}, "slots['0'] is not a mapping of environment variables"),
        ({"idle_exit_s": -1}, "idle_exit_s must be 0 to"),
        ({"start_timeout_s": 0}, "start_timeout_s must be positive"),
        ({"canary_timeout_s": float("nan")}, "canary_timeout_s must be positive"),
        ({"options": []}, "options is list, not dict"),
        ({"tuners": "x"}, "unknown field 'tuners'"),
    ],
)
def test_a_bad_node_config_says_what_is_wrong(change: dict[str, Any], says: str) -> None:
    good = {"run": "r", "node": "n", "tuner": "t", "protocol": 1}
    with pytest.raises(ProtocolError) as e:
        NodeConfig.loads(json.dumps({**good, **change}).encode())
    assert says in str(e.value)


def test_every_record_type_survives() -> None:
    for type_, fields in RECORDS.items():
        made = record(type_, 12.3456789, **dict.fromkeys(fields, 1))
        assert parse_record(json.dumps(made).encode()) == made
        assert made["t"] == 12.345679


def test_a_record_takes_its_fields_and_no_others() -> None:
    with pytest.raises(ProtocolError, match="shape_started takes"):
        record("shape_started", 1.0, attempt="a")
    with pytest.raises(ProtocolError, match="shape_started takes"):
        record("shape_started", 1.0, attempt="a", shape=1, extra=1)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"type":"canary","t":1}', "canary without ok, us, detail, attempt"),
        (b'{"type":["row"],"t":1}', "without a known type"),
        (b'{"type":"nonsense","t":1}', "without a known type"),
        (b'{"type":"worker_stopped","why":""}', "without a time"),
        (b'{"type":"worker_stopped","why":"","t":NaN}', "without a time"),
        (b'{"type":"worker_st', "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[]", "not a JSON object"),
        (b" " * (MAX_RECORD_BYTES + 1), "record of"),
    ],
)
def test_a_bad_record_is_refused(line: bytes, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        parse_record(line)
