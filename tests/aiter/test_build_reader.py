"""AITER's own tables held to the very trees that they lie in: nearly every row loads or needs a rebuild."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from orchestrator.tables.aiter_build import Build
from orchestrator.tables.table import read_table
from orchestrator.tables.table_names import shipped_tables
from tests.aiter.checkout import needs_checkout, take_out
from worker.families import FAMILIES

PARTS = (
    "aiter/configs", "aiter/jit", "aiter/ops", "aiter/tuned_gemm.py", "aiter/fused_moe.py", "csrc",
    ":(glob)hsa/**/*.csv",
)  # fmt: skip
SHIPPED: dict[str, tuple[int, dict[tuple[str, str], int]]] = {
    # 5 numbers where the tree's own expression reads at most 4 (aiter/ops/gemm_op_a8w8.py): AITER runs a default CK
    # kernel instead, without a message
    "e4048607a5": (53_522, {("a8w8_bpreshuffle", "no FlyDSL kernel of the tree is called flydsl_bpreshuflle_"): 185}),
    # of a form that was left
    "v0.1.14": (25_117, {("a8w8_blockscale", "lists no kernel a8w8_blockscale_cktile_"): 1}),
    "v0.1.9": (6_265, {}),
}
"""All rows with a whole key, and the exceptions. Each exception is a fault of AITER."""


@needs_checkout
@pytest.mark.parametrize("version", SHIPPED)
def test_shipped_tables_load_in_their_own_tree(version: str, tmp_path: Path) -> None:
    take_out(version, tmp_path, *PARTS)
    build = Build(tmp_path)
    rows, exceptions = SHIPPED[version]
    bad: Counter[tuple[str, str]] = Counter()
    for family in FAMILIES.values():
        files = (build.configs / family.tuned_csv, *shipped_tables(build.configs / "model_configs", family))
        for path in (f for f in files if f.is_file()):
            if (version, path.name) == ("v0.1.9", "a8w8_tuned_gemm.csv"):  # it has no q_dtype_w yet
                continue
            shipped = read_table(path, family, lenient=True)
            rows -= len(shipped.rows)
            answers = (build.availability_of(family, r.key, shipped.cells(r)) for r in shipped.rows)
            bad.update((family.name, a.why) for a in answers if a.standing not in ("loads", "rebuild"))
    assert (rows, build.problems) == (0, ())
    known: Counter[tuple[str, str]] = Counter()
    for (name, why), n in bad.items():
        match = [k for k in exceptions if k[0] == name and k[1] in why]
        assert match, (name, why, n)
        known[match[0]] += n
    assert known == exceptions
    key = ("gfx950", 256, 1, 64, 64)
    for name in ("a4w4_blockscale_256x64x128x128_none", "_ZN5aiter3noE"):
        answer = build.availability_of(FAMILIES["a4w4_blockscale"], key, {"kernelName": name, "kernelId": "0"})
        assert answer.standing == "cannot"
