"""One fork server for all tests of a process, a fresh fleet for each."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.kit import Fleet
from tests.paths import ROOT


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("fleet") / "server"
    argv = [sys.executable, "-m", "tests.fleet.server", str(place)]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as p:
        assert p.stdin is not None
        assert p.stdout is not None
        assert p.stdout.readline() == b"ready\n"
        yield place
        p.stdin.close()


@pytest.fixture
def make_fleet(tmp_path: Path, server: Path) -> Iterator[Callable[..., Fleet]]:
    """Makes the fleet of a test; `nodes`: number of slots by name."""
    made: list[Fleet] = []

    def make(**more: Any) -> Fleet:
        made.append(Fleet(tmp_path, server, **more))
        return made[-1]

    yield make
    for fleet in made:
        fleet.close()


@pytest.fixture
def fleet(make_fleet: Callable[..., Fleet]) -> Fleet:
    """Three nodes h1 to h3 of one slot each."""
    return make_fleet()
