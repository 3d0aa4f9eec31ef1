"""Carries out what the policy decides: deploys, launches, streams, records."""
