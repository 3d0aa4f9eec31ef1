"""Engines: how workers are started, listed and stopped on a node (interface and registry: orchestrator/engines.py)."""
