"""AITER's families as its tuners know them: scripts, tables, columns, backends of a row, cells that are safe to write.

Read from the repository ROCm/aiter at the tags from v0.1.5 (2025-08) to commit e4048607a5 (2026-08-22). What differs
from date to date (flags, whether `gfx` is a key) is read from the files of the image, not from here. Stdlib only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class AiterFamily:
    """One family.

    `scripts`: paths below a tree's root, the newest first; in a wheel they lie below `aiter_meta/`. `key_columns`:
    what the untuned CSV holds (gfx and cu_num are the tuner's to add). `result_columns`: by all names that they had
    in tuned tables. `defaults`: the options that we pass where the user says nothing. `flags`: what the script needs
    to tune this family and no other. `gfx`: the chips that it can be tuned on, empty for any. `compiler_env`:
    variables that name another compiler for its kernels.
    """

    name: str
    scripts: tuple[str, ...]
    untuned_csv: str
    tuned_csv: str
    env: str
    key_columns: tuple[str, ...]
    result_columns: tuple[str, ...]
    defaults: Mapping[str, float] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    gfx: tuple[str, ...] = ()
    compiler_env: tuple[str, ...] = ()
    m_column: str = "M"


_MNK = ("M", "N", "K")
_GEMM = ("kernelId", "splitK", "us", "kernelName", "tflops", "bw", "errRatio")
_LIB = ("libtype", *_GEMM)
_ERR = {"err_ratio": 0.05}
_BLOCKSCALE = "csrc/ck_gemm_a8w8_blockscale/gemm_a8w8_blockscale_tune.py"
_FLATMM = "FLATMM_HIP_CLANG_PATH"

# fmt: off
_ALL = (
    AiterFamily(
        "a4w4_blockscale",
        ("csrc/ck_gemm_a4w4_blockscale/gemm_a4w4_blockscale_tune.py",),
        "a4w4_blockscale_untuned_gemm.csv", "a4w4_blockscale_tuned_gemm.csv", "AITER_CONFIG_GEMM_A4W4",
        _MNK, _GEMM, _ERR, gfx=("gfx950",), compiler_env=("GEMM_A4W4_BLOCKWISE_HIP_CLANG_PATH",),
    ),
    AiterFamily(
        "a8w8",
        ("csrc/ck_gemm_a8w8/gemm_a8w8_tune.py",),
        "a8w8_untuned_gemm.csv", "a8w8_tuned_gemm.csv", "AITER_CONFIG_GEMM_A8W8",
        (*_MNK, "q_dtype_w"), _GEMM, _ERR,
    ),
    AiterFamily(
        "a8w8_blockscale",
        (_BLOCKSCALE,),
        "a8w8_blockscale_untuned_gemm.csv", "a8w8_blockscale_tuned_gemm.csv", "AITER_CONFIG_GEMM_A8W8_BLOCKSCALE",
        _MNK, _LIB, _ERR, compiler_env=(_FLATMM,),
    ),
    AiterFamily(
        "a8w8_blockscale_bpreshuffle",
        # the script of its own lasted from 2025-09-18 to 2026-03-29; since 2026-02-17 the other one has --preshuffle
        (_BLOCKSCALE, "csrc/ck_gemm_a8w8_blockscale_bpreshuffle/gemm_a8w8_blockscale_bpreshuffle_tune.py"),
        "a8w8_blockscale_bpreshuffle_untuned_gemm.csv", "a8w8_blockscale_bpreshuffle_tuned_gemm.csv",
        "AITER_CONFIG_GEMM_A8W8_BLOCKSCALE_BPRESHUFFLE",
        _MNK, _LIB, _ERR, flags=("--preshuffle",), compiler_env=(_FLATMM,),
    ),
    AiterFamily(
        "a8w8_bpreshuffle",
        ("csrc/ck_gemm_a8w8_bpreshuffle/gemm_a8w8_bpreshuffle_tune.py",),
        "a8w8_bpreshuffle_untuned_gemm.csv", "a8w8_bpreshuffle_tuned_gemm.csv", "AITER_CONFIG_GEMM_A8W8_BPRESHUFFLE",
        (*_MNK, "q_dtype_w"), _LIB, _ERR, compiler_env=(_FLATMM,),
    ),
    AiterFamily(
        "batched_a8w8",
        ("csrc/ck_batched_gemm_a8w8/batched_gemm_a8w8_tune.py",),
        "a8w8_untuned_batched_gemm.csv", "a8w8_tuned_batched_gemm.csv", "AITER_CONFIG_A8W8_BATCHED_GEMM",
        ("B", *_MNK), _GEMM, _ERR,
    ),
    AiterFamily(
        "batched_bf16",
        ("csrc/ck_batched_gemm_bf16/batched_gemm_bf16_tune.py",),
        "bf16_untuned_batched_gemm.csv", "bf16_tuned_batched_gemm.csv", "AITER_CONFIG_BF16_BATCHED_GEMM",
        ("B", *_MNK), _GEMM, _ERR,
    ),
    AiterFamily(
        "a16w16",
        # the tuner itself; csrc/gemm_a16w16/gemm_tuner.py and gradlib's are wrappers that retry 30 times and exit 0
        ("csrc/gemm_a16w16/gemm_a16w16_tune.py", "gradlib/gradlib/gemm_tuner.py"),
        "bf16_untuned_gemm.csv", "bf16_tuned_gemm.csv", "AITER_CONFIG_GEMM_BF16",
        (*_MNK, "bias", "dtype", "outdtype", "scaleAB", "bpreshuffle"),
        ("libtype", "solidx", "splitK", "us", "kernelName", "err_ratio", "tflops", "bw"), _ERR,
    ),
    AiterFamily(
        "fmoe",
        (
            "csrc/ck_gemm_moe_2stages_codegen/gemm_moe_tune.py", "hsa/fmoe_2stages/tune.py",
            "hsa/gfx950/fmoe_2stages/tune.py", "hsa/gfx942/fmoe_2stages/tune.py",
        ),
        "untuned_fmoe.csv", "tuned_fmoe.csv", "AITER_CONFIG_FMOE",
        (
            "token", "model_dim", "inter_dim", "expert", "topk", "act_type", "dtype", "q_dtype_a", "q_dtype_w",
            "q_type", "use_g1u1", "doweight_stage1",
        ),
        (
            "block_m", "ksplit", "us1", "kernelName1", "err1", "us2", "kernelName2", "err2", "us", "run_1stage",
            "xbf16", "flat", "tflops", "bw",
        ),
        {"err_ratio": 0.1}, compiler_env=("GEMM_A4W4_BLOCKWISE_HIP_CLANG_PATH",), m_column="token",
    ),
)
# fmt: on

FAMILIES: dict[str, AiterFamily] = {f.name: f for f in _ALL}


BACKENDS = ("asm", "ck", "cktile", "triton", "hipblaslt", "flydsl", "opus", "torch", "skinny")

BY_NAME: tuple[tuple[str, str], ...] = (
    (r"_ZN|f4gemm_|.*f4gemm_bf16_per1x32Fp4", "asm"),
    (r"a8w8_blockscale_cktile_|a8w8_bpreshuffle_cktile_|cktile_|.*_cktile_", "cktile"),
    (r"flydsl", "flydsl"),
    (r"opus_", "opus"),
    (r"Cijk_", "hipblaslt"),
    (r"native\Z", "torch"),
    (r"auto\Z", "triton"),
    (r"sol\d+\Z", "skinny"),
    (r"a4w4_blockscale|a8w8_|moe_ck2stages_|batched_|bf16_batched|.*rowwise", "ck"),
)
"""The beginning of a kernel's name -> backend; asked where a row has no libtype. No `|` but between alternatives."""

CK_FAMILIES = ("a8w8", "batched_a8w8", "batched_bf16")
"""Families that AITER tunes with CK kernels only."""
CK_KERNELS_A4W4 = 20
"""a4w4 numbers its CK kernels from 0, at most so many, and its ASM kernels after them."""
_BY_NAME_RE = tuple((re.compile(pattern), backend) for pattern, backend in BY_NAME)


def kernel_of_aiter(name: str) -> str:
    """The backend of AITER's whose kernels are called so, "" where none is."""
    return next((backend for pattern, backend in _BY_NAME_RE if pattern.match(name)), "")


def backend_of(family: str, row: Mapping[str, object]) -> str:
    """The backend of a tuned or profile row (cells as text or numbers), "" where nothing tells.

    `libtype` wins; then the kernel's name, by the rule of AITER's own dispatch; then, for the CK-only families, CK. In
    a4w4 tables from before 2026-05 a failed candidate may have no name: its number tells (up to 20 CK kernels, which
    are counted first).
    """
    libtype = str(row.get("libtype", "") or "").strip().lower()
    if libtype in BACKENDS:
        return libtype
    name = str(row.get("kernelName") or row.get("kernelName1") or "").strip()
    if name and name not in ("None", "Null", "nan"):
        by_name = kernel_of_aiter(name)
        if by_name:
            return by_name
    if family == "a4w4_blockscale":
        number = str(row.get("kernelId", "")).strip()
        if number.isdigit():
            return "ck" if int(number) < CK_KERNELS_A4W4 else "asm"
    return "ck" if family in CK_FAMILIES else ""


_NUMBER = re.compile(r"[0-9]{1,10}\Z")
_BOOL = ("True", "False")
_FP8 = ("torch.float8_e4m3fn", "torch.float8_e4m3fnuz")
_HALF = ("torch.bfloat16", "torch.float16")
_FP4 = "torch.float4_e2m1fn_x2"
_CELLS: dict[str, tuple[str, ...]] = {
    "bias": _BOOL, "scaleAB": _BOOL, "bpreshuffle": _BOOL,
    "dtype": (*_HALF, "torch.float32", *_FP8), "outdtype": (*_HALF, "torch.float32"),
    "q_dtype_w": ("torch.int8", *_FP8, *_HALF, "torch.int4", _FP4),
    "q_dtype_a": ("torch.int8", *_FP8, *_HALF, _FP4),
    "act_type": tuple(f"ActivationType.{v}" for v in ("No", "Silu", "Gelu", "Swiglu", "Situv2")),
    "q_type": tuple(
        f"QuantType.{v}" for v in
        ("No", "per_Tensor", "per_Token", "per_1x32", "per_1x128", "per_128x128", "per_256x128", "per_1024x128")
    ),
}  # fmt: skip


def legal_cells(family: AiterFamily, key: Mapping[str, int | str]) -> dict[str, str]:
    """The key as cells of an untuned CSV. Raises ValueError where one is not legal: AITER evaluates some as Python."""
    out: dict[str, str] = {}
    for column in family.key_columns:
        if column not in key:
            raise ValueError(f"the shape has no {column}")
        cell = str(key[column])
        legal = _CELLS.get(column)
        if legal is None:
            if not _NUMBER.match(cell):
                raise ValueError(f"{column} is {cell[:40]!r}, not a whole number")
        elif cell not in legal:
            raise ValueError(f"{column} is {cell[:40]!r}, not one of {', '.join(legal)}")
        out[column] = cell
    return out
