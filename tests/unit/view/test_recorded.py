"""The documents of thirty recorded runs with faults are those that people saw when the runs were recorded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import recorded


def differences(was: Any, now: Any, at: str = "") -> Iterator[str]:
    """Each place in which two documents differ, with both values."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in {**was, **now}:
            yield from differences(was.get(key), now.get(key), f"{at}/{key}")
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for i, (a, b) in enumerate(zip(was, now, strict=True)):
            yield from differences(a, b, f"{at}/{i}")
    elif isinstance(was, str) and isinstance(now, str) and "\n" in was:
        yield from differences(was.splitlines(), now.splitlines(), at)
    elif was != now:
        yield f"{at}: {was!r} -> {now!r}"


@pytest.mark.parametrize("name", recorded.names())
def test_the_documents_are_as_recorded(name: str, tmp_path: Path) -> None:
    recording = recorded.read(name)
    paths = recorded.replayed(recording, tmp_path)
    found = list(differences(recording["documents"], recorded.documents(paths, recording["asked"])))
    assert not found, "\n".join(found[:40])


def test_there_are_thirty() -> None:
    assert len(recorded.names()) == 30
