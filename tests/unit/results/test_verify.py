# ruff: noqa: E501 - the lines are AITER's
"""`verify`: what AITER's lines prove, and what they do not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from orchestrator.families import get_family
from orchestrator.results.verify import VerifiedRow, VerifyReader

BEGIN = 'GEMMFLEET-VERIFY {"supported": true, "table": "/t/tuned.csv", "gfx": "gfx950", "cu_num": 256}'


def read(family: str, rows: list[dict[str, Any]], *lines: str) -> list[VerifiedRow]:
    reading = VerifyReader("a", [{k: str(v) for k, v in r.items()} for r in rows], get_family(family))
    for line in (BEGIN, *lines, 'GEMMFLEET-VERIFY {"code": 0}'):
        reading.read_line(line)
    assert (reading.answer.why, reading.answer.code) == ("", 0)
    return reading.answer.rows


A = {"M": 128, "N": 512, "K": 1024, "kernelName": "k", "us": 5.0}
HIT = "[aiter] shape is M:128, N:512, K:1024, found padded_M: 128, N:512, K:1024 is tuned on cu_num = 256 in /t/tuned.csv, kernel name is k, splitK is 0!"
OK = "(128, 512, 1024)                         |       5.10 |       OK"


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ((HIT, OK), (True, "ok", 5.1, "")),
        ((HIT, "(128, 512, 1024)     |       4.90 |       5.10 |       OK"), (True, "ok", 5.1, "")),
        ((HIT.replace("shape is M:128", "shape is M:100"),), (True, "not run", None, "")),  # it serves a smaller M
        ((HIT, OK.replace("      OK", "MISMATCH"), "keys: M=128", "reason: err_ratio=0.37"), (True, "mismatch", 5.1, "err_ratio=0.37")),
        ((HIT, "(128, 512, 1024)   |        N/A |    ERROR", "reason: boom"), (True, "error", None, "boom")),
    ],
)  # fmt: skip
def test_both_proofs_are_needed(lines: tuple[str, ...], found: tuple[bool, str, float | None, str]) -> None:
    (row,) = read("a4w4_blockscale", [A], *lines)
    assert (row.selected, row.verdict, row.us, row.why) == found
    assert row.proven == (found[1] == "ok")


@pytest.mark.parametrize(
    "hit",
    [
        "",
        HIT.replace("kernel name is k", "kernel name is another"),
        HIT.replace("/t/tuned.csv", "/opt/aiter/aiter/configs/a4w4_blockscale_tuned_gemm.csv"),
        HIT.replace("padded_M: 128", "padded_M: 256"),
        HIT.replace("is tuned on", "is not tuned on"),
    ],
)
def test_a_lookup_that_took_something_else_proves_nothing(hit: str) -> None:
    (row,) = read("a4w4_blockscale", [A], hit, OK)
    assert (row.selected, row.verdict, row.proven) == (False, "ok", False)


FP8, BF16 = "torch.float8_e4m3fn", "torch.bfloat16"
TYPED = {"dtype": BF16, "outdtype": BF16, "scaleAB": False, "bpreshuffle": False}
MOE = {
    "token": 16, "model_dim": 7168, "inter_dim": 256, "expert": 257, "topk": 9, "act_type": "ActivationType.Silu",
    "dtype": BF16, "q_dtype_a": FP8, "q_dtype_w": FP8, "q_type": "QuantType.per_1x128", "use_g1u1": 1,
    "doweight_stage1": 0, "kernelName1": "a", "kernelName2": "b", "us": 9.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "rows", "lines", "selected"),
    [
        ("a8w8_bpreshuffle", [{**A, "q_dtype_w": FP8}], [
            f"shape M:128, N:512, K:1024 q_dtype_w:{FP8}, found padded_M: 128, N:512, K:1024 is tuned, in /t/tuned.csv! libtype is ck! kernelName is k (kernelId 3)!",
            f"(128, 512, 1024, {FP8})     |       5.10 |       OK",
        ], [True]),
        ("a8w8", [{**A, "q_dtype_w": "torch.int8"}], [
            f"shape M:128, N:512, K:1024 q_dtype_w:{FP8}, found padded_M: 128, N:512, K:1024 is tuned, in /t/tuned.csv!",
        ], [False]),
        ("a16w16", [{**A, **TYPED, "bias": True}, {**A, **TYPED, "bias": False}], [
            f"shape is M:128, N:512, K:1024 dtype='{BF16}' otype='{BF16}' bias=False, scaleAB=False, bpreshuffle=False found padded_M: 128, N:512, K:1024 is tuned on cu_num = 256 in /t/tuned.csv, libtype is hipblaslt, kernel name is ",
        ], [False, True]),
        ("batched_bf16", [{**A, "B": 16}], [
            "shape is B:16, M:128, N:512, K:1024 dtype is bf16, is tuned on cu_num = 256 in /t/tuned.csv, kernel name is k, splitK is 0!",
            "(16, 128, 512, 1024)     |       5.10 |       OK",
        ], [True]),
        ("fmoe", [MOE, {**MOE, "token": 32}], [
            f"[fused_moe] using 2stage (kernelName1='a', kernelName2='b') for ('gfx950', 256, 16, 7168, 256, 257, 9, 'ActivationType.Silu', '{BF16}', '{FP8}', '{FP8}', 'QuantType.per_1x128', True, False) ",
            f"(16, 7168, 256, E=257, topk=9, ActivationType.Silu, {BF16}, {FP8}, {FP8}, QuantType.per_1x128, g1u1=1, dw_s1=0) |  9.00 | 9.50 | OK",
        ], [True, False]),
    ],
)  # fmt: skip
def test_every_family(family: str, rows: list[dict[str, Any]], lines: list[str], selected: list[bool]) -> None:
    found = read(family, rows, *lines)
    assert [r.selected for r in found] == selected
    assert [r.proven for r in found] == (selected if len(lines) == 2 else [False] * len(rows))


@given(st.text(max_size=300))
@example("[" * 40_000)
def test_no_line_makes_it_fall(text: str) -> None:
    hit = f"shape is M:128, N:512, K:1024{text} is tuned{text}"
    lines = (text, hit, f"{text}|{text}| OK", "GEMMFLEET-VERIFY " + text, f"[fused_moe] {text}")
    reading = VerifyReader("a", [{k: str(v) for k, v in A.items()}], get_family("a4w4_blockscale"))
    for line in lines:
        reading.read_line(line.replace("\n", " "))
