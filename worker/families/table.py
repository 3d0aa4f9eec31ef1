"""The table of families.

Key columns, result columns and their order, table names and environment variables are AITER's, read from
`aiter/configs`, `aiter/jit/core.py` and the tuners from v0.1.5 (2025-08) to commit e4048607a5 (2026-08-22). AITER
passes the text columns to Python's `eval`, so only the values listed here are ever accepted or written.

`python -m worker.families` prints the table as the docs show it.
"""

from __future__ import annotations

from worker.families.model import BOOLEANS, Aiter, Column, Family, Limit, Risk

_FP8 = ("torch.float8_e4m3fn", "torch.float8_e4m3fnuz")  # gfx950 and newer; gfx942
_W8 = ("torch.int8", *_FP8)
_HALF = ("torch.bfloat16", "torch.float16")

_MNK = (Column("M"), Column("N"), Column("K"))
_BMNK = (Column("B"), *_MNK)
_LOWER = tuple(Column(c.name, aiter=c.name.lower()) for c in _BMNK)
_GEMM = ("kernelId", "splitK", "us", "kernelName", "tflops", "bw", "errRatio")
_LIBTYPE = ("libtype", *_GEMM)
# The enums of AITER's csrc/include/aiter_enum.h.
_ACT = tuple("ActivationType." + v for v in ("No", "Silu", "Gelu", "Swiglu", "Situv2"))
_BLOCKS = ("per_1x32", "per_1x128", "per_128x128", "per_256x128", "per_1024x128")
_QUANT = tuple("QuantType." + v for v in ("No", "per_Tensor", "per_Token", *_BLOCKS))
_FP4 = "torch.float4_e2m1fn_x2"

_OPS8 = "aiter.ops.gemm_op_a8w8"
_BLOCKSCALE = "csrc/ck_gemm_a8w8_blockscale/gemm_a8w8_blockscale_tune.py"
_N128 = Risk(("N",), 128)

# fmt: off
_ALL = (
    Family(
        "a16w16",
        columns=(
            *_MNK,
            Column("bias", "text", "False", BOOLEANS),
            Column("dtype", "text", "torch.bfloat16", (*_HALF, "torch.float32", *_FP8)),
            Column("outdtype", "text", "torch.bfloat16", (*_HALF, "torch.float32")),
            Column("scaleAB", "text", "False", BOOLEANS),
            Column("bpreshuffle", "text", "False", BOOLEANS),
        ),
        result_columns=("libtype", "solidx", "splitK", "us", "kernelName", "err_ratio", "tflops", "bw"),
        tuned_csv="bf16_tuned_gemm.csv", untuned_csv="bf16_untuned_gemm.csv", env="AITER_CONFIG_GEMM_BF16",
        aiter=Aiter(
            # the tuner itself; csrc/gemm_a16w16/gemm_tuner.py and gradlib's are wrappers that retry 30 times and exit 0
            ("csrc/gemm_a16w16/gemm_a16w16_tune.py", "gradlib/gradlib/gemm_tuner.py"),
            hand_written=True, operator=("aiter.tuned_gemm", "tgemm.mm"), triton_ops=("gemm_a16w16",),
        ),
        format="row16", own_tuners=("torch",), risks=(Risk(("N", "K"), 64),),
        err_column="err_ratio", renames=(("kernelId", "solidx"), ("errRatio", "err_ratio")),
    ),
    Family(
        "a8w8",
        # int8 runs on every chip and is what the shipped table began with; fp8 has another name on each chip.
        columns=(*_MNK, Column("q_dtype_w", "text", "torch.int8", _W8)), result_columns=_GEMM,
        tuned_csv="a8w8_tuned_gemm.csv", untuned_csv="a8w8_untuned_gemm.csv", env="AITER_CONFIG_GEMM_A8W8",
        aiter=Aiter(
            ("csrc/ck_gemm_a8w8/gemm_a8w8_tune.py",), only_backend="ck", always_has_candidates=True, model_last=True,
            operator=(_OPS8, "gemm_a8w8"), triton_ops=("gemm_a8w8",), gluon_op="gemm_a8w8",
        ),
        format="row8", own_tuners=("torch",), risks=(_N128,),
    ),
    Family(
        "a8w8_bpreshuffle",
        # ck and cktile take fp8 only, int8 leaves eight asm kernels. fp8 is e4m3fn on gfx950.
        columns=(*_MNK, Column("q_dtype_w", "text", "torch.float8_e4m3fn", _W8)), result_columns=_LIBTYPE,
        tuned_csv="a8w8_bpreshuffle_tuned_gemm.csv", untuned_csv="a8w8_bpreshuffle_untuned_gemm.csv",
        env="AITER_CONFIG_GEMM_A8W8_BPRESHUFFLE",
        aiter=Aiter(
            ("csrc/ck_gemm_a8w8_bpreshuffle/gemm_a8w8_bpreshuffle_tune.py",),
            hand_written=True, model_last=True, operator=(_OPS8, "gemm_a8w8_bpreshuffle"), triton_ops=("gemm_a8w8",),
        ),
        format="row8", risks=(_N128,),
    ),
    Family(
        "a8w8_blockscale",
        columns=_MNK, result_columns=_LIBTYPE,
        tuned_csv="a8w8_blockscale_tuned_gemm.csv", untuned_csv="a8w8_blockscale_untuned_gemm.csv",
        env="AITER_CONFIG_GEMM_A8W8_BLOCKSCALE",
        aiter=Aiter(
            (_BLOCKSCALE,), model_last=True, operator=(_OPS8, "gemm_a8w8_blockscale"),
            triton_ops=("gemm_a8w8_blockscale",), gluon_op="gemm_a8w8_blockscale",
        ),
        format="block8", risks=(_N128,),
    ),
    Family(
        "a8w8_blockscale_bpreshuffle",
        columns=_MNK, result_columns=_LIBTYPE,
        tuned_csv="a8w8_blockscale_bpreshuffle_tuned_gemm.csv",
        untuned_csv="a8w8_blockscale_bpreshuffle_untuned_gemm.csv",
        env="AITER_CONFIG_GEMM_A8W8_BLOCKSCALE_BPRESHUFFLE",
        aiter=Aiter(
            # a script of its own from 2025-09-18 to 2026-03-29; the other one has --preshuffle since 2026-02-17
            (_BLOCKSCALE, "csrc/ck_gemm_a8w8_blockscale_bpreshuffle/gemm_a8w8_blockscale_bpreshuffle_tune.py"),
            flags=("--preshuffle",), model_last=True,
            operator=(_OPS8, "gemm_a8w8_blockscale_bpreshuffle"),
            triton_ops=("gemm_a8w8_blockscale_preshuffle", "gemm_a8w8_blockscale"),
        ),
        format="block8", risks=(_N128,),
    ),
    Family(
        "a4w4_blockscale",
        columns=_MNK, result_columns=_GEMM,
        tuned_csv="a4w4_blockscale_tuned_gemm.csv", untuned_csv="a4w4_blockscale_untuned_gemm.csv",
        env="AITER_CONFIG_GEMM_A4W4",
        aiter=Aiter(
            ("csrc/ck_gemm_a4w4_blockscale/gemm_a4w4_blockscale_tune.py",), gfx=("gfx950",),
            ck_kernels=20, pads_k_to=256, always_has_candidates=True,
            operator=("aiter.ops.gemm_op_a4w4", "gemm_a4w4"), triton_ops=("gemm_afp4wfp4",), gluon_op="gemm_afp4wfp4",
        ),
        format="mx4", own_tuners=("torch",), risks=(Risk(("K",), 256), _N128),
        # Other alignments (N, or K % 256 on older images) are risks that depend on the image, not refusals.
        limits=(Limit("K", 32, "one MXFP4 scale covers 32 elements along K"),),
    ),
    Family(
        "batched_a8w8",
        # As shipped; a fresh AITER run of the batched tuners writes errRatio,tflops,bw: read by name.
        columns=_BMNK, result_columns=_GEMM,
        tuned_csv="a8w8_tuned_batched_gemm.csv", untuned_csv="a8w8_untuned_batched_gemm.csv",
        env="AITER_CONFIG_A8W8_BATCHED_GEMM",
        aiter=Aiter(
            ("csrc/ck_batched_gemm_a8w8/batched_gemm_a8w8_tune.py",), only_backend="ck", always_has_candidates=True,
            exact_m=True, operator=("aiter.ops.batched_gemm_op_a8w8", "batched_gemm_a8w8_CK"),
            triton_ops=("batched_gemm_a8w8",),
        ),
        format="row8", risks=(_N128,),
    ),
    Family(
        "batched_bf16",
        columns=_BMNK, result_columns=_GEMM,
        tuned_csv="bf16_tuned_batched_gemm.csv", untuned_csv="bf16_untuned_batched_gemm.csv",
        env="AITER_CONFIG_BF16_BATCHED_GEMM",
        aiter=Aiter(
            ("csrc/ck_batched_gemm_bf16/batched_gemm_bf16_tune.py",), only_backend="ck", always_has_candidates=True,
            exact_m=True, operator=("aiter.ops.batched_gemm_op_bf16", "batched_gemm_bf16_CK"),
            triton_ops=("batched_gemm_bf16",),
        ),
        format="row16", risks=(_N128,),
    ),
    Family(
        # fp8 with e8m0 scales, of DeepSeek-V4's grouped output projection; since b5c5912cb2 (2026-08-12)
        "batched_gemm_a8w8_blockscale_mxscale",
        columns=_LOWER, result_columns=_LIBTYPE, chip_columns=("gfx",),
        # its rows ship in model_configs alone; the list's name is the one that AITER derives from the table's
        tuned_csv="batched_gemm_a8w8_blockscale_mxscale_tuned.csv",
        untuned_csv="batched_gemm_a8w8_blockscale_mxscale_untuned.csv",
        env="AITER_CONFIG_BATCHED_GEMM_A8W8_BLOCKSCALE_MXSCALE",
        aiter=Aiter(
            ("csrc/opus_gemm/opus_bmm_mxscale_tune.py",), err_ratio=0.02, gfx=("gfx950",), only_backend="opus",
            always_has_candidates=True,
        ),
        limits=(
            Limit("N", 128, "one E8M0 scale of W covers 128 x 128 elements"),
            Limit("K", 128, "one E8M0 scale covers 128 elements along K"),
        ),
    ),
    Family(
        "fmoe",
        columns=(
            Column("token"), Column("model_dim"), Column("inter_dim"), Column("expert"), Column("topk"),
            Column("act_type", "text", "ActivationType.Silu", _ACT),
            Column("dtype", "text", "torch.bfloat16", _HALF),
            Column("q_dtype_a", "text", "torch.float8_e4m3fn", (*_HALF, *_W8, _FP4)),
            Column("q_dtype_w", "text", "torch.float8_e4m3fn", (*_HALF, *_W8, "torch.int4", _FP4)),
            Column("q_type", "text", "QuantType.per_Token", _QUANT),
            Column("use_g1u1", "int", "1", ("0", "1")),
            Column("doweight_stage1", "int", "0", ("0", "1")),
        ),
        # As the tuner declares them; shipped tables may lack xbf16 and flat and may end with `_tag`.
        result_columns=(
            "block_m", "ksplit", "us1", "kernelName1", "err1", "us2", "kernelName2", "err2", "us",
            "run_1stage", "xbf16", "flat", "tflops", "bw",
        ),
        tuned_csv="tuned_fmoe.csv", untuned_csv="untuned_fmoe.csv", env="AITER_CONFIG_FMOE",
        aiter=Aiter(
            (
                "csrc/ck_gemm_moe_2stages_codegen/gemm_moe_tune.py", "hsa/fmoe_2stages/tune.py",
                "hsa/gfx950/fmoe_2stages/tune.py", "hsa/gfx942/fmoe_2stages/tune.py",
            ),
            # its measure is a cosine distance
            err_ratio=0.1, hand_written=True,
        ),
        m_column="token", err_column="err1",
        renames=(("kernelName", "kernelName1"), ("splitK", "ksplit"), ("errRatio", "err1")),
    ),
)
# fmt: on

FAMILIES: dict[str, Family] = {f.name: f for f in _ALL}
DEFAULT_FAMILY = "a16w16"


def fp8_cell(gfx: str) -> str:
    """fp8 of a chip as a cell of a text column."""
    return _FP8[1] if gfx.startswith("gfx94") else _FP8[0]


def computed_by(tuner: str) -> tuple[str, ...]:
    """The names of the families that one of our own tuners has candidates for."""
    return tuple(f.name for f in FAMILIES.values() if tuner in f.own_tuners)
