"""Classes of models are made in this process, but for tests that want the child."""

from __future__ import annotations

import pytest

from tests.support.model_classes import ask_here


@pytest.fixture
def classes_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands list a model's weights without a child process."""
    monkeypatch.setattr("orchestrator.shapes.model_config.ask_class", ask_here)
