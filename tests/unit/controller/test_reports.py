"""Reports of nodes, as the events that the policy gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator import events as ev
from orchestrator.controller.exchange import NodeReports
from orchestrator.controller.messages import Beat, FromStream, NodeUp, Timeouts
from tests.support.policy_rig import Rig


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
    registry: Any = SimpleNamespace(drivers={"a": driver}, timeouts=Timeouts(), arrived=lambda node, session: None)
    none: Any = None
    return NodeReports("r1", 2, none, rig.policy, registry, none, none, none, none)


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
