"""Families as AITER has them: backends of rows, cells that are safe to write, shapes that run alone."""

from __future__ import annotations

import pytest

from worker.families import FAMILIES, backend_of, legal_cells
from worker.tuners.aiter.spec import risk
from worker.tuners.aiter.tuner import tiny_key
from worker.tuners.catalog import find_tuner


def test_every_cell_that_a_shapes_file_may_hold_may_be_written() -> None:
    for family in FAMILIES.values():
        key = tiny_key(family, "gfx950")
        for column in family.columns:
            for legal in column.legal or ("64",):
                assert legal_cells(family, {**key, column.name: legal})[column.name] == legal


@pytest.mark.parametrize("evil", ["__import__('os').system('true')", "torch.int8 ", "torch.int9", "", "1\n2"])
def test_nothing_else_reaches_a_file_that_aiter_evaluates(evil: str) -> None:
    key = tiny_key(FAMILIES["a8w8"], "gfx950")
    with pytest.raises(ValueError, match="q_dtype_w is"):
        legal_cells(FAMILIES["a8w8"], {**key, "q_dtype_w": evil})
    with pytest.raises(ValueError, match="M is"):
        legal_cells(FAMILIES["a8w8"], {**key, "M": evil})
    with pytest.raises(ValueError, match="has no K"):
        legal_cells(FAMILIES["a8w8"], {"M": 1, "N": 1, "q_dtype_w": "torch.int8"})


@pytest.mark.parametrize(
    ("family", "row", "backend"),
    [
        ("a4w4_blockscale", {"kernelName": "_ZN5aiter42f4gemm_bf16_per1x32Fp4_BpreShuffle_192x256E"}, "asm"),
        ("a4w4_blockscale", {"kernelName": "a4w4_blockscale_256x128x128x128"}, "ck"),
        ("a4w4_blockscale", {"kernelName": "None", "kernelId": "7"}, "ck"),
        ("a4w4_blockscale", {"kernelName": "Null", "kernelId": "23"}, "asm"),
        ("a8w8_blockscale", {"libtype": "cktile", "kernelName": "a8w8_blockscale_cktile_3"}, "cktile"),
        ("a8w8_blockscale", {"libtype": "triton", "kernelName": "x"}, "triton"),
        ("a8w8_blockscale", {"kernelName": "a8w8_blockscale_1x128x128_256"}, "ck"),
        ("a8w8_bpreshuffle", {"kernelName": "flydsl_bpreshuflle_64x"}, "flydsl"),
        ("a8w8", {"kernelName": ""}, "ck"),
        ("a16w16", {"kernelName": "Cijk_Alik_Bljk_BBS"}, "hipblaslt"),
        ("a16w16", {"kernelName": "native"}, "torch"),
        ("a16w16", {"kernelName": "sol2"}, "skinny"),
        ("a16w16", {"kernelName": "opus_gemm_a"}, "opus"),
        ("fmoe", {"kernelName1": "moe_ck2stages_gemm1"}, "ck"),
        ("fmoe", {"kernelName": "_ZN5aiter12fmoe_bf16E"}, "asm"),
        ("a16w16", {"kernelName": "what is this"}, ""),
    ],
)
def test_the_backend_of_a_row(family: str, row: dict[str, str], backend: str) -> None:
    assert backend_of(family, row) == backend


def test_shapes_that_run_alone() -> None:
    assert risk("a4w4_blockscale", {"M": 1, "N": 512, "K": 29568}) == "K is no multiple of 256"
    assert "N is no multiple of 128" in risk("a4w4_blockscale", {"M": 1, "N": 576, "K": 7168})
    assert not risk("a4w4_blockscale", {"M": 1, "N": 512, "K": 7168})
    assert find_tuner("torch").risk is None
    assert "64 GiB" in risk("a8w8", {"M": 65536, "N": 131072, "K": 131072})
