"""Planted faults of fmoe, whose candidates are stages by name, and the keys that its lookup is called with."""

from __future__ import annotations

from typing import Any

FLOAT8 = {"q_dtype_a": "torch.float8_e4m3fn", "q_dtype_w": "torch.float8_e4m3fn", "q_type": "QuantType.per_Token"}
FLOAT4 = {
    "q_dtype_a": "torch.float4_e2m1fn_x2", "q_dtype_w": "torch.float4_e2m1fn_x2", "q_type": "QuantType.per_1x32",
}  # fmt: skip
SIZES = {"model_dim": 512, "inter_dim": 256, "expert": 8, "topk": 2}
PAIRS = 48
"""Tokens of the shape in 4 bits, all of whose kernels are right: both stages are CK's, and no kernel does both."""

_FIRST, _BOTH, _SECOND = "stage1", "asm_1stage", "stage2"
_CK = "moe_ck2stages_gemm2_256x{}_1x4_TypeCast_{}_Nswizzle0_Quant2_MulRoutedWeight1_F8_F8_B16"
HURT = {
    "segv": (_FIRST, "_ZN5aiter48fmoe_stage1_bf16_pertokenFp8_g1u1_32x128_3tg_pf2E"),
    "memory_fault": (_BOTH, "_ZN5aiter45fmoe_bf16_pertokenFp8_g1u1_vs_silu_1tg_32x256E"),
    "hang": (_SECOND, _CK.format("64x128x256", "v1")),
    "off": (_SECOND, _CK.format("128x128x128", "v3")),
    "wrong": (_BOTH, "_ZN5aiter48fmoe_bf16_pertokenFp8_g1u1_vs_silu_1tg_ps_32x256E"),
    "unsupported": (_FIRST, "_ZN5aiter48fmoe_stage1_bf16_pertokenFp8_g1u1_32x256_2tg_pf2E"),
    "partial": (_SECOND, _CK.format("32x128x256", "v1")),
}
"""Fault -> the candidate that has it: (stage, kernel). One right kernel that does both stages is left, and one of
stage 2."""


def shapes(tokens: tuple[int, ...]) -> list[dict[str, Any]]:
    """A row for each, and one in 4 bits."""
    return [{"token": t, **SIZES, **FLOAT8} for t in tokens] + [{"token": PAIRS, **SIZES, **FLOAT4}]
