"""The loop: frames and reports of nodes, the events that the policy gets of them, and turns without time."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator import events as ev
from orchestrator.controller import loop
from orchestrator.controller.deployed_node import DeployedNode
from orchestrator.controller.drive import drive
from orchestrator.controller.messages import MAX_CHUNK, Beat, FromStream, Message, NodeTakenOver, NodeUp, read_frames
from orchestrator.controller.node_driver import NodeDriver
from orchestrator.controller.node_reports import NodeReports
from orchestrator.controller.prepare import prepare
from orchestrator.controller.request import RunRequest
from orchestrator.controller.timeouts import Timeouts
from orchestrator.ledger.reader import LedgerReader, reconcile
from orchestrator.transport.local import LocalTransport
from tests.kits.results import BadNotes
from tests.support.policy_rig import Rig
from tests.waiting import wait_until
from worker.protocol import ProtocolError


@pytest.fixture
def rig() -> Rig:
    """A node `a` of two slots that has work."""
    rig = Rig()
    rig.node("a", slots=2)
    rig.singles(1, 2, 3, 4, 5, 6, cost_s=20.0)
    rig.start(1)
    return rig


def reports_of(rig: Rig) -> NodeReports:
    driver = SimpleNamespace(slots=("0", "1"))
    registry: Any = SimpleNamespace(
        drivers={"a": driver},
        has=lambda node: node == "a",
        has_failed=lambda node: False,
        record_up=lambda node, session: None,
    )
    context: Any = SimpleNamespace(policy=rig.policy, epoch=2, timeouts=Timeouts())
    none: Any = None
    return NodeReports(context, registry, none, none, none)


def test_only_what_a_node_does_not_have_is_sent_again(rig: Rig) -> None:
    """A new controller: the node has what runs and what was claimed unheard of, and the rest never arrived."""
    sent = [a.id for a in rig.policy.outstanding()]
    assert len(sent) > 2
    events = reports_of(rig).events_of(NodeUp("a", 1, frozenset(sent[:2])))
    assert events == [*(ev.AttemptTaken(a, True) for a in sent[2:]), ev.NodeJoined("a", ("0", "1"))]


def test_an_attempt_that_two_beats_in_a_row_lack_has_ended(rig: Rig) -> None:
    reports, sent = reports_of(rig), [a.id for a in rig.policy.outstanding()]

    def ended(*lacks: str) -> list[str]:
        held = frozenset(sent) - set(lacks)
        events = reports.events_of(FromStream("a", Beat(1.0, 2, {}, "", held)))
        return [e.attempt for e in events if isinstance(e, ev.AttemptEnded)]

    assert [ended(sent[0]), ended(), ended(sent[0], sent[1]), ended(sent[1])] == [[], [], [], [sent[1]]]


@pytest.mark.parametrize(
    "garbage",
    [b"hello\n", b"E 0 0\n", b"E a 0 1\nx", b"E 0 -1 1\nx", f"E 0 0 {MAX_CHUNK + 1}\n".encode(), b"x" * 200,
     b"B 2\n[]", b"B 4\nnull", b'B 13\n{"t":1,"e":2}',
     b'B 32\n{"t":1,"epoch":1e999,"slots":{}}', b"B 40000\n" + b"[" * 40000],
)  # fmt: skip
def test_what_is_no_frame_is_an_error(garbage: bytes) -> None:
    with pytest.raises(ProtocolError):
        list(read_frames(io.BytesIO(garbage).read))


def test_an_epoch_of_thousands_of_digits_is_a_younger_controller_too(tmp_path: Path) -> None:
    (tmp_path / "epoch").write_text("9" * 5000)
    said: list[Message] = []
    none: Any = None
    deployed = DeployedNode(str(tmp_path), {}, (), ("0",), env={}, epoch=2, offsets={}, launch=False)
    driver = NodeDriver(LocalTransport("a"), none, deployed, none, said.append, Timeouts())
    driver.start()
    wait_until(lambda: bool(said), "it is told")
    driver.leave()
    assert said == [NodeTakenOver("a", 10**18 - 1)]


def test_turns_that_have_no_time_leave_their_messages_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "TURN_S", -1.0)  # one message a turn
    inventory, shapes = tmp_path / "i.yaml", tmp_path / "s.csv"
    nodes = "nodes: {n1: {gpus: [0, 1]}, n2: {gpus: [2, 3]}}\n"
    inventory.write_text(f"defaults: {{tuner: replay, workdir: {tmp_path / 'nodes'}}}\n{nodes}")
    shapes.write_text("M,N,K\n" + "".join(f"{m},{n},512\n" for m in (16, 32) for n in range(64, 64 * 13, 64)))
    request = RunRequest(shapes, tmp_path / "runs", inventory, "a16w16", options={"seconds_per_shape": 0.0})
    paths = prepare(request).create()
    assert drive(paths, BadNotes(), handle_signals=False) == "finished"
    with LedgerReader.open_readonly(paths.ledger) as ledger:
        assert (ledger.counts().tuned, reconcile(ledger)) == (24, [])
        assert ledger.query("SELECT * FROM offsets WHERE bad > 0") == []
