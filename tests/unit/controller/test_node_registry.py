"""The registry of a run's nodes: their phases, and when one is given up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.controller import node_registry
from orchestrator.controller.node_registry import NodeRegistry
from orchestrator.controller.timeouts import Timeouts


class Clock:
    """The registry's clock, which only a test moves."""

    now = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(node_registry, "time", SimpleNamespace(time=lambda: clock.now))
    return clock


@pytest.fixture
def registry(clock: Clock) -> NodeRegistry:
    """A registry with one node `a` that is expected."""
    return expecting("a")


def expecting(*nodes: str) -> NodeRegistry:
    """A registry that has started these nodes."""
    registry = NodeRegistry(Timeouts(starting=60.0, never_up=20.0, lost=90.0))
    for node in nodes:
        driver: Any = SimpleNamespace(node=node, start=lambda: None)
        registry.start(driver)
    return registry


def test_a_node_that_is_up_keeps_its_session_until_there_is_trouble(registry: NodeRegistry) -> None:
    assert (registry.coming, registry.session_of("a"), registry.was_up("a")) == ({"a"}, None, False)
    registry.record_up("a", 7)
    assert (registry.coming, registry.reached, registry.session_of("a")) == (set(), {"a"}, 7)
    assert registry.record_trouble("a", "the stream ended")
    assert not registry.record_trouble("a", "no route to host"), "only the first report is the first"
    assert (registry.troubled, registry.session_of("a"), registry.was_up("a")) == ({"a"}, None, True)
    assert registry.details() == ["  a: no route to host"]


@pytest.mark.parametrize(("doing", "is_lost"), [("share", False), ("wait", True), ("skip", True)])
def test_a_node_that_works_is_not_given_up_for_what_others_do_there(
    registry: NodeRegistry, clock: Clock, doing: str, is_lost: bool
) -> None:
    """Its workers go on if the node is shared. If we wait or leave it out, its work is lost at once, and no time-out
    runs."""
    registry.record_up("a", 1)
    assert registry.record_occupied("a", doing, "GPU 3 is held by process 12") is is_lost
    clock.now += 100_000.0
    assert list(registry.give_up()) == []
    assert (registry.session_of("a"), registry.trouble_of("a") == "") == (1, doing == "share")


def test_a_node_that_is_shared_before_it_is_up_still_has_to_come_up(registry: NodeRegistry, clock: Clock) -> None:
    registry.record_occupied("a", "share", "process 12")
    clock.now += 61.0
    assert list(registry.give_up()) == [("a", "occupied: process 12")]
    assert registry.is_hopeless
    registry.record_up("a", 1)
    assert not registry.is_hopeless, "a lost node is still tried"


def test_nodes_are_given_up_when_their_time_has_run_out(clock: Clock) -> None:
    """A node that says nothing has longer than one that fails, and an image that is pulled costs no patience."""
    registry = expecting("quiet", "broken", "pulls", "was up")
    registry.record_trouble("broken", "no image")
    registry.record_up("was up", 1)
    registry.record_trouble("was up", "the stream ended")
    given_up = []
    for _ in range(20):
        clock.now += 10
        registry.record_progress("pulls", "pulling: 1 of 20 GB")
        given_up += [(node, clock.now - 1000) for node, _ in registry.give_up()]
    assert given_up == [("broken", 30), ("quiet", 70), ("was up", 100)]
    assert (registry.is_hopeless, registry.coming) == (False, {"pulls"})
