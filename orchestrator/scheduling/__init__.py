"""Pure scheduling policy: events in, decisions out (docs/explanation/scheduling.md)."""

from orchestrator.scheduling.model import PolicySettings
from orchestrator.scheduling.policy import Outstanding, Policy, Progress

__all__ = ["Outstanding", "Policy", "PolicySettings", "Progress"]
