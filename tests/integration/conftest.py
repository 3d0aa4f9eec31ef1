"""A fresh bench a test; its processes are gone afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.kit import Bench


@pytest.fixture
def make_bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(slots: int = 2) -> Bench:
        made.append(Bench(tmp_path, slots))
        return made[-1]

    yield make
    for b in made:
        b.close()


@pytest.fixture
def bench(make_bench: Callable[..., Bench]) -> Bench:
    return make_bench()
