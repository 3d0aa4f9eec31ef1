"""Marks of parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def full_but(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """The cases of a test whose cases are alike: those `kept` run always, the others with FULL=1."""
    return [c if c in kept else _full(c) for c in cases]


def _full(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.full)
