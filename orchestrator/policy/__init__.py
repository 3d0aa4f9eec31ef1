"""What happened in a run, and what is to be done next: one state (docs/explanation/scheduling.md)."""

from orchestrator.policy.policy import Policy, Progress
from orchestrator.policy.settings import PolicySettings

__all__ = ["Policy", "PolicySettings", "Progress"]
