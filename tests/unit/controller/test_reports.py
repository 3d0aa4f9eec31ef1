"""Reports of nodes, as the events that the policy gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from orchestrator import events as ev
from orchestrator.controller.exchange import NodeReports
from orchestrator.controller.messages import NodeUp
from tests.support.policy_rig import Rig


class Registry:
    """The one node, `a`."""

    drivers = {"a": SimpleNamespace(slots=("0", "1"))}  # noqa: RUF012

    def arrived(self, node: str, session: int) -> None:
        """Nothing to do."""


def test_only_what_a_node_does_not_have_is_sent_again() -> None:
    rig = Rig()
    rig.node("a", slots=2)
    rig.singles(1, 2, 3, 4, 5, 6, cost_s=20.0)
    rig.start(1)
    sent = [a.id for a in rig.policy.outstanding()]
    assert len(sent) > 2
    # a new controller: the node has what runs and what was claimed unheard of, and the rest never arrived
    held = frozenset(sent[:2])
    none = cast(Any, None)
    reports = NodeReports("r1", 2, none, rig.policy, cast(Any, Registry()), none, none, none, none)
    events = reports.events_of(NodeUp("a", 1, held))
    assert events == [*(ev.AttemptTaken(a, True) for a in sent[2:]), ev.NodeJoined("a", ("0", "1"))]
