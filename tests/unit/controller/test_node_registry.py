"""Nodes that are given up, and when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.controller import node_registry as module
from orchestrator.controller.messages import Timeouts
from orchestrator.controller.node_registry import NodeRegistry


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: clock.now))
    return clock


def registry_of(*nodes: str) -> NodeRegistry:
    registry = NodeRegistry(Timeouts(starting=60.0, never_up=20.0, lost=90.0))
    for node in nodes:
        driver: Any = SimpleNamespace(node=node, start=lambda: None)
        registry.start(driver)
    return registry


def test_a_node_that_says_nothing_has_longer_than_one_that_fails(clock: SimpleNamespace) -> None:
    registry = registry_of("quiet", "broken")
    registry.in_trouble("broken", "no image")
    clock.now += 21
    assert list(registry.give_up()) == [("broken", "no image")]
    assert (registry.hopeless, registry.coming) == (False, {"quiet"})
    clock.now += 40
    assert list(registry.give_up()) == [("quiet", "not up yet")]
    assert registry.hopeless


def test_an_image_that_takes_minutes_to_pull_costs_no_patience(clock: SimpleNamespace) -> None:
    registry = registry_of("a")
    for _ in range(60):
        clock.now += 10
        registry.goes_on("a", "pulling: 1 of 20 GB")
        assert list(registry.give_up()) == []
    clock.now += 61
    assert list(registry.give_up()) == [("a", "pulling: 1 of 20 GB")]


def test_a_node_that_was_up_has_the_patience_of_a_lost_one(clock: SimpleNamespace) -> None:
    registry = registry_of("a")
    registry.arrived("a", 1)
    registry.in_trouble("a", "the stream ended")
    given_up = []
    for seconds in (89, 2, 1000):
        clock.now += seconds
        given_up.append(list(registry.give_up()))
    assert given_up == [[], [("a", "the stream ended")], []], "once"
    registry.arrived("a", 2)
    assert not registry.hopeless
