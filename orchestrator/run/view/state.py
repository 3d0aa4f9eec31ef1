"""The state of a run as it is, not as its controller last left it."""

from __future__ import annotations

GOING = ("planned", "preparing", "running")


def state_now(kept: str, *, driven: bool) -> str:
    """`kept`: what the ledger says; `driven`: a living controller holds the run's lock."""
    if kept in ("preparing", "running") and not driven:
        return "interrupted"  # its controller died without a word
    return kept
