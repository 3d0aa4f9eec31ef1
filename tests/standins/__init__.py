"""Stand-ins for what the tests cannot have: AITER, GPUs, kubelets, and a tuner with faults."""

from __future__ import annotations

from pathlib import Path

FAULTY = Path(__file__).resolve().parent / "faulty"
"""Folder with the installed package of the tests' tuner `faulty`: for PYTHONPATH."""
