"""Nodes that are given up, and when."""

from __future__ import annotations

from typing import cast

import pytest

from orchestrator.controller import node_registry as module
from orchestrator.controller.messages import Timeouts
from orchestrator.controller.node import NodeDriver
from orchestrator.controller.node_registry import NodeRegistry


class Driver:
    def __init__(self, node: str) -> None:
        self.node = node

    def start(self) -> None: ...


class Clock:
    now = 1000.0

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def roll_of(*nodes: str) -> NodeRegistry:
    roll = NodeRegistry(Timeouts(starting=60.0, never_up=20.0, lost=90.0))
    for node in nodes:
        roll.start(cast(NodeDriver, Driver(node)))
    return roll


def test_a_node_that_says_nothing_has_longer_than_one_that_fails(clock: Clock) -> None:
    roll = roll_of("quiet", "broken")
    roll.in_trouble("broken", "no image")
    clock.now += 21
    assert list(roll.give_up()) == [("broken", "no image")]
    assert not roll.hopeless
    assert roll.coming == {"quiet"}
    clock.now += 40
    assert list(roll.give_up()) == [("quiet", "not up yet")]
    assert roll.hopeless


def test_an_image_that_takes_minutes_to_pull_costs_no_patience(clock: Clock) -> None:
    roll = roll_of("a")
    for _ in range(60):
        clock.now += 10
        roll.goes_on("a", "pulling: 1 of 20 GB")
        assert list(roll.give_up()) == []
    clock.now += 61
    assert list(roll.give_up()) == [("a", "pulling: 1 of 20 GB")]


def test_a_node_that_was_up_has_the_patience_of_a_lost_one(clock: Clock) -> None:
    roll = roll_of("a")
    roll.arrived("a", 1)
    roll.in_trouble("a", "the stream ended")
    clock.now += 89
    assert list(roll.give_up()) == []
    clock.now += 2
    assert list(roll.give_up()) == [("a", "the stream ended")]
    assert list(roll.give_up()) == []  # once
    roll.arrived("a", 2)
    assert not roll.hopeless
