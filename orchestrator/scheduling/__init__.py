"""Pure scheduling policy: events in, decisions out (docs/explanation/scheduling.md)."""

from orchestrator.scheduling.model import PolicySettings
from orchestrator.scheduling.policy import Policy, Progress

__all__ = ["Policy", "PolicySettings", "Progress"]
