"""The one state of a run, and the policy that decides by it (docs/explanation/scheduling.md)."""

from orchestrator.policy.policy import Policy
from orchestrator.policy.settings import PolicySettings

__all__ = ["Policy", "PolicySettings"]
