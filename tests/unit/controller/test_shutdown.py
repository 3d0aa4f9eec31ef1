"""The end of nodes: their workers are stopped, and one that does not answer is reported."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.controller.node_registry import NodeRegistry
from orchestrator.controller.shutdown import Shutdown, StoppedNode
from orchestrator.controller.timeouts import StopLimits, Timeouts


class HangingNode:
    """A driver (controller/node_driver.py) whose node does not answer until its calls are cut off."""

    node = "a"

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.is_cut_off = False
        self.workers = SimpleNamespace(start_no_more=lambda: True, settle=lambda seconds: self.may_answer.wait())

    def hang_up(self) -> None:
        self.is_cut_off = True

    def start(self) -> None: ...
    def close(self, until: float) -> None: ...


@pytest.mark.parametrize("lease_has_ended", [False, True])
def test_a_node_that_hangs_is_cut_off_and_reported_although_it_is_gone_meanwhile(lease_has_ended: bool) -> None:
    hanging: Any = HangingNode()
    registry = NodeRegistry(Timeouts())
    registry.start(hanging)
    shutdown = Shutdown(StopLimits(60.0, 60.0, 60.0), tidy=True)
    shutdown.begin(hanging, is_up=True)
    if lease_has_ended:
        registry.remove("a")
    try:
        assert shutdown.close() == {"a": StoppedNode(0, "it does not answer")}
        assert hanging.is_cut_off
    finally:
        hanging.may_answer.set()  # or its thread never ends
