"""Marks of tests and parameters."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

SOAK = bool(os.environ.get("SOAK"))
PLANS = 500 if SOAK else 100
"""Drawn plans on which the laws of the policy are held; the more in `make soak`."""

WITH_TORCH = pytest.mark.xdist_group("torch")
WITH_ENGINE = pytest.mark.xdist_group("engine")
WITH_TRANSFORMERS = pytest.mark.xdist_group("transformers")
"""Tests that import these into pytest's own process. It takes seconds, so they share one process."""


def full_but(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """The cases of a test whose cases are alike: those `kept` run always, the others with FULL=1."""
    return [c if c in kept else _full(c) for c in cases]


def _full(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.full)


def drawn(examples: int, *, fixed: bool = False, **more: Any) -> settings:
    """Settings of a test with drawn cases: `examples` of them, and fifty times more in `make soak`. `fixed`: the same
    cases each time, except in `make soak`."""
    return settings(max_examples=examples * (50 if SOAK else 1), deadline=None, derandomize=fixed and not SOAK, **more)
