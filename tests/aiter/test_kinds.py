"""Kinds of candidate that shapes should have, from AITER's real files (AITER_GIT)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.aiter.checkout import needs_checkout, take_out
from worker.aiter_tree.locate import tree_at
from worker.families import FAMILIES
from worker.tuners.aiter.findings import Kinds, expected

pytestmark = needs_checkout
FP8, INT8 = "q_dtype_w = torch.float8_e4m3fn", "q_dtype_w = torch.int8"
BF16 = ["bias = False", "scaleAB = False", "dtype = torch.bfloat16", "K % 64", "N % 64", "bpreshuffle = False,True"]
CK: Kinds = {"ck": []}
BOTH: Kinds = {"ck": [], "cktile": []}


@pytest.mark.parametrize(
    ("version", "kinds"),
    [
        (
            "newest",
            {
                "a4w4_blockscale": {"ck": [], "asm": []}, "a8w8": CK, "a8w8_blockscale": BOTH, "a16w16": {"asm": BF16},
                "a8w8_blockscale_bpreshuffle": {**BOTH, "asm": ["N % 128"]}, "batched_a8w8": CK, "batched_bf16": CK,
                "a8w8_bpreshuffle": {"ck": [FP8], "cktile": [FP8], "asm": [INT8, "N % 128"]},
                "batched_gemm_a8w8_blockscale_mxscale": {"opus": []},
            },
        ),
        (
            "v0.1.9",
            {
                "a4w4_blockscale": {"ck": [], "asm": []}, "a8w8": CK, "a8w8_blockscale": CK,
                "a8w8_blockscale_bpreshuffle": CK, "a8w8_bpreshuffle": {"ck": [FP8], "cktile": [FP8]},
                "a16w16": {"hipblaslt": []},
            },
        ),
    ],
)  # fmt: skip
def test_on_gfx950(tmp_path: Path, version: str, kinds: dict[str, Kinds]) -> None:
    take_out(version, tmp_path, "aiter/jit", "aiter/utility", "aiter/__init__.py", "csrc", "gradlib", "hsa/gfx950")
    tree = tree_at(tmp_path)
    for family, known in kinds.items():
        assert expected(tree, FAMILIES[family], "gfx950") == known, family
