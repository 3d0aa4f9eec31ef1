"""Decides what runs where: pure policy (events in, decisions out) and the simulator that drives it."""

from orchestrator.scheduling.policy import Outstanding, Policy, Progress
from orchestrator.scheduling.settings import PolicySettings

__all__ = ["Outstanding", "Policy", "PolicySettings", "Progress"]
