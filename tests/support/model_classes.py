"""Models of tests/data/models. The weights of their classes are listed in this process, each config once: a child for
each would be slow.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import InputError
from orchestrator.families import get_family
from orchestrator.shapes.from_model import Ranks, model_shapes
from orchestrator.shapes.model_class import Listing, list_weights, without_dropped
from orchestrator.shapes.model_config import Model, read_model
from tests.paths import TEST_DATA

MODELS = TEST_DATA / "models"


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


def changed(folder: Path, name: str, **change: Any) -> Path:
    """Write the config of a model of MODELS with other values, `...` for a key that is left out; the folder."""
    raw = {**json.loads((MODELS / f"{name}.json").read_text()), **change}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not ...}))
    return folder


def read_here(config: str | Path, *, quantised: bool = True) -> Model:
    """A model by its name in MODELS, or by its config.json or the folder of that."""
    file = config if isinstance(config, Path) else MODELS / f"{config}.json"
    return read_model(file, quantised=quantised, ask=ask_here)


def keys(model: Model, family: str, tp: int) -> list[dict[str, Any]]:
    """Its shapes at M = 1 on one of `tp` ranks, by column."""
    of = get_family(family)
    return [dict(zip(of.key_names, key, strict=True)) for key in model_shapes(model, of, [1], Ranks(tp)).keys]
