"""Dispatch of the policy's decisions: deploys, launches, streams, records."""
