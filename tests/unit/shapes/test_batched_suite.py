"""The suite of AITER's batched Triton GEMMs: every file is read by its family, every shape fits its kernel."""

from __future__ import annotations

import re

import pytest

from orchestrator.families import get_family
from orchestrator.shapes.reader import read_shapes
from tests.paths import ROOT
from worker.bench.case import parse
from worker.families import BATCHED

FOLDER = ROOT / "examples" / "batched"


@pytest.mark.parametrize("family", ["batched_bf16", "batched_a8w8"])
def test_every_kernel_has_its_shapes(family: str) -> None:
    page = (ROOT / "examples" / "README.md").read_text()
    assert sorted(p.stem for p in FOLDER.iterdir()) == sorted(b.removeprefix("aiter-bmm-") for b in BATCHED)
    total = 0
    for backend in BATCHED:
        name = f"{backend.removeprefix('aiter-bmm-')}.csv"
        found = read_shapes(FOLDER / name, get_family(family))
        assert not found.notes
        for shape in found.shapes:
            assert parse(family, shape.key_dict(get_family(family)), backend).b > 1
        row = re.search(rf"^\| `{re.escape(name)}` \| (\d+) \|", page, re.M)
        assert row, name
        assert int(row[1]) == len(found.shapes)
        total += len(found.shapes)
    assert f"| {total} shapes of AITER's five batched Triton GEMMs" in page
    assert 55 <= total <= 65
