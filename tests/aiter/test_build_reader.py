"""AITER's own tables held to the very trees that they lie in: nearly every row loads or needs a rebuild.

Every exception is one of AITER's, and is listed here with what was read of it.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from orchestrator.tables.check import Build
from orchestrator.tables.kinds import kind_of
from orchestrator.tables.locate import shipped_tables
from orchestrator.tables.tuned import read_table
from tests.aiter.checkout import needs_checkout, take_out
from worker.families import FAMILIES

PARTS = (
    "aiter/configs", "aiter/jit", "aiter/ops", "aiter/tuned_gemm.py", "aiter/fused_moe.py", "csrc",
    ":(glob)hsa/**/*.csv",
)  # fmt: skip

EXCEPTIONS: dict[str, dict[tuple[str, str], int]] = {
    # 5 numbers where the tree's own expression reads at most 4 (aiter/ops/gemm_op_a8w8.py): AITER runs a default CK
    # kernel instead, without a word
    "e4048607a5": {("a8w8_bpreshuffle", "no FlyDSL kernel of the tree is called flydsl_bpreshuflle_"): 185},
    # of a form that was left
    "v0.1.14": {("a8w8_blockscale", "lists no kernel a8w8_blockscale_cktile_"): 1},
    "v0.1.9": {},
}
ROWS = {"e4048607a5": 53_522, "v0.1.14": 25_117, "v0.1.9": 6_265}
"""All rows with a whole key; v0.1.9's a8w8 has no q_dtype_w yet."""


@needs_checkout
@pytest.mark.parametrize("version", EXCEPTIONS)
def test_shipped_tables_load_in_their_own_tree(version: str, tmp_path: Path) -> None:
    take_out(version, tmp_path, *PARTS)
    build = Build(tmp_path)
    bad: Counter[tuple[str, str]] = Counter()
    rows = 0
    for family in FAMILIES.values():
        own = build.configs / family.tuned_csv
        for path in (own, *shipped_tables(build.configs / "model_configs", family)):
            if not path.is_file():
                continue
            shipped = read_table(path, family, lenient=True)
            for row in shipped.rows:
                rows += 1
                cells = shipped.cells(row)
                assert kind_of(cells) != "own", cells
                answer = build.answer(family, row.key, cells)
                if answer.standing not in ("loads", "rebuild"):
                    bad[family.name, answer.why] += 1
    assert not build.problems
    known: Counter[tuple[str, str]] = Counter()
    for (family_name, why), n in bad.items():
        match = [k for k in EXCEPTIONS[version] if k[0] == family_name and k[1] in why]
        assert match, (family_name, why, n)
        known[match[0]] += n
    assert known == EXCEPTIONS[version]
    assert rows == ROWS[version]
    key = ("gfx950", 256, 1, 64, 64)
    for name in ("torch_lut256_t2", "a4w4_blockscale_256x64x128x128_none", "_ZN5aiter3noE"):
        answer = build.answer(FAMILIES["a4w4_blockscale"], key, {"kernelName": name, "kernelId": "0"})
        assert answer.standing == "cannot"
