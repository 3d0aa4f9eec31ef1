"""Weights of a model's class, listed in this process, each config once: a child for each would be slow.

model = read_model(folder, ask=ask_here)
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from orchestrator.errors import InputError
from orchestrator.shapes.model_class import Listing, list_weights, without_dropped


def ask_here(raw: dict[str, Any]) -> Listing:
    """Like `ask_class`, without a child."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    return _listing(json.dumps(without_dropped(raw), sort_keys=True))


@cache
def _listing(text: str) -> Listing:
    try:
        return list_weights(json.loads(text))
    except Exception as e:
        raise InputError(f"the class: {type(e).__name__}: {' '.join(str(e).split())[:300]}") from e
