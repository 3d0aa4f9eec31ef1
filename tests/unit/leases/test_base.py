"""Ends of leases that count as a lost node."""

from __future__ import annotations

from orchestrator.leases.base import EndCause


def test_what_a_scheduler_takes_back_is_no_loss_and_what_breaks_is_one() -> None:
    assert {c.value for c in EndCause if c.is_loss} == {"node_failure", "out_of_memory", "failed", "unknown"}
