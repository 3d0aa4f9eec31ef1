"""Our Triton kernels give the right answer for any M, N, K: in Triton's interpreter, against a float32 reference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.paths import ROOT
from tests.support.triton_interpreted import CASES, SHORT

pytest.importorskip("triton")
pytestmark = [pytest.mark.xdist_group("triton_kernels"), pytest.mark.full]


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    """Results by case. One process for all: importing torch and triton takes longer than most cases."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.triton_interpreted"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {row["case"]: row for row in rows}


@pytest.mark.parametrize("case", CASES)
def test_every_element_is_right_twice(results: dict[str, dict[str, Any]], case: str) -> None:
    row = results[case]
    assert row["wrong"][:2] == [0.0, 0.0]
    assert 0.2 < row["size"] < 3  # neither all zeros nor beyond the tolerance's scale
    assert row["counters"] == 0  # the next call finds the workspace as this one did


def test_a_tile_that_is_not_computed_is_seen(results: dict[str, dict[str, Any]]) -> None:
    seen = {case: results[case]["wrong"][2] for case in SHORT}
    assert min(seen.values()) > 0, seen
