"""The GEMM families: key columns, limits and tables of each, in one place.

Key columns, result columns and their order, table names and environment variables are AITER's, read from
`aiter/configs`, `aiter/jit/core.py` and the tuners at commit e4048607a5 (2026-08-22). AITER passes the text
columns to Python's `eval`, so only the values listed here are ever accepted or written.

`python -m orchestrator.families` prints this table as docs/reference/families.md shows it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from orchestrator.errors import InputError

Cell = int | float | str

BOOLEANS = ("True", "False")
_FP8 = ("torch.float8_e4m3fn", "torch.float8_e4m3fnuz")  # gfx950 and newer; gfx942
_W8 = ("torch.int8", *_FP8)
_HALF = ("torch.bfloat16", "torch.float16")


@dataclass(frozen=True, slots=True)
class Column:
    """A key column.

    `int` columns hold whole numbers from 1 to 2^31-1, or one of `legal` where it names some (0 and 1 of a
    switch). `text` columns hold one of `legal`, spelled exactly so. `default` None: the column is required.
    """

    name: str
    kind: Literal["int", "text"] = "int"
    default: str | None = None
    legal: tuple[str, ...] = ()

    @property
    def required(self) -> bool:
        """Whether a shapes file must have the column."""
        return self.default is None


@dataclass(frozen=True, slots=True)
class Limit:
    """A column must be a multiple of a number, or no kernel of the family can take the shape."""

    column: str
    multiple_of: int
    why: str


@dataclass(frozen=True, slots=True)
class Family:
    """One GEMM format. `columns` are the key columns without gfx and cu_num, in AITER's order.

    `renames` maps the worker's row names to result columns that AITER calls differently in this family.
    """

    name: str
    columns: tuple[Column, ...]
    result_columns: tuple[str, ...]
    tuned_csv: str
    untuned_csv: str
    env: str
    limits: tuple[Limit, ...] = ()
    m_column: str = "M"
    err_column: str = "errRatio"
    renames: tuple[tuple[str, str], ...] = ()
    key_names: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """The names of the key columns; `Shape.key` is aligned with them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key_names", tuple(c.name for c in self.columns))

    @property
    def tuned_header(self) -> tuple[str, ...]:
        """The header of the family's tuned table."""
        return ("gfx", "cu_num", *self.key_names, *self.result_columns)

    def column(self, name: str) -> Column:
        """The key column of that name; KeyError where the family has none."""
        for c in self.columns:
            if c.name == name:
                return c
        raise KeyError(name)

    def flops(self, key: Mapping[str, int | str]) -> float:
        """Floating-point operations of one shape, as AITER counts them for its tflops column.

        GEMM: 2*M*N*K, times B where there is one. fmoe: both stages, 2*token*topk*model_dim*inter_dim for
        each weight matrix: three with use_g1u1 (gate, up, down), else two; source: `FmoeTuner.calculate` in
        AITER's gemm_moe_tune.py. The shipped tuned_fmoe.csv agrees to rounding from 16 tokens on; most of its
        rows below count 16 tokens.
        """
        if self.m_column == "token":
            one = 2.0 * int(key["token"]) * int(key["topk"]) * int(key["model_dim"]) * int(key["inter_dim"])
            return one * (3 if int(key["use_g1u1"]) else 2)
        return 2.0 * int(key["M"]) * int(key["N"]) * int(key["K"]) * int(key.get("B", 1))

    def row_to_columns(self, row: Mapping[str, object]) -> dict[str, Cell]:
        """A worker's row as the family's result columns, all of them and in order; "" for what the row lacks.

        What AITER has no column for (status, spread, samples, ...) is left out. fmoe's err1 becomes AITER's
        text in percent ("0.3%").
        """
        source = {theirs: ours for ours, theirs in self.renames}
        out: dict[str, Cell] = {}
        for name in self.result_columns:
            value = row.get(name, row.get(source.get(name, name), ""))
            if name == "err1" and isinstance(value, (int, float)):
                value = f"{value:.1%}"
            out[name] = value if isinstance(value, (int, float, str)) else str(value)
        return out


_MNK = (Column("M"), Column("N"), Column("K"))
_BMNK = (Column("B"), *_MNK)
_GEMM = ("kernelId", "splitK", "us", "kernelName", "tflops", "bw", "errRatio")
_LIBTYPE = ("libtype", *_GEMM)
# The enums of AITER's csrc/include/aiter_enum.h.
_ACT = tuple("ActivationType." + v for v in ("No", "Silu", "Gelu", "Swiglu", "Situv2"))
_BLOCKS = ("per_1x32", "per_1x128", "per_128x128", "per_256x128", "per_1024x128")
_QUANT = tuple("QuantType." + v for v in ("No", "per_Tensor", "per_Token", *_BLOCKS))
_FP4 = "torch.float4_e2m1fn_x2"

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
        err_column="err_ratio", renames=(("kernelId", "solidx"), ("errRatio", "err_ratio")),
    ),
    Family(
        "a8w8",
        # int8 runs on every chip and is what the shipped table began with; fp8 has another name on each chip.
        columns=(*_MNK, Column("q_dtype_w", "text", "torch.int8", _W8)), result_columns=_GEMM,
        tuned_csv="a8w8_tuned_gemm.csv", untuned_csv="a8w8_untuned_gemm.csv", env="AITER_CONFIG_GEMM_A8W8",
    ),
    Family(
        "a8w8_bpreshuffle",
        # ck and cktile take fp8 only, int8 leaves eight asm kernels. fp8 is e4m3fn on gfx950.
        columns=(*_MNK, Column("q_dtype_w", "text", "torch.float8_e4m3fn", _W8)), result_columns=_LIBTYPE,
        tuned_csv="a8w8_bpreshuffle_tuned_gemm.csv", untuned_csv="a8w8_bpreshuffle_untuned_gemm.csv",
        env="AITER_CONFIG_GEMM_A8W8_BPRESHUFFLE",
    ),
    Family(
        "a8w8_blockscale",
        columns=_MNK, result_columns=_LIBTYPE,
        tuned_csv="a8w8_blockscale_tuned_gemm.csv", untuned_csv="a8w8_blockscale_untuned_gemm.csv",
        env="AITER_CONFIG_GEMM_A8W8_BLOCKSCALE",
    ),
    Family(
        "a8w8_blockscale_bpreshuffle",
        columns=_MNK, result_columns=_LIBTYPE,
        tuned_csv="a8w8_blockscale_bpreshuffle_tuned_gemm.csv",
        untuned_csv="a8w8_blockscale_bpreshuffle_untuned_gemm.csv",
        env="AITER_CONFIG_GEMM_A8W8_BLOCKSCALE_BPRESHUFFLE",
    ),
    Family(
        "a4w4_blockscale",
        columns=_MNK, result_columns=_GEMM,
        tuned_csv="a4w4_blockscale_tuned_gemm.csv", untuned_csv="a4w4_blockscale_untuned_gemm.csv",
        env="AITER_CONFIG_GEMM_A4W4",
        # Other alignments (N, or K % 256 on older images) are risks that depend on the image, not refusals.
        limits=(Limit("K", 32, "one MXFP4 scale covers 32 elements along K"),),
    ),
    Family(
        "batched_a8w8",
        # As shipped; a fresh AITER run of the batched tuners writes errRatio,tflops,bw: read by name.
        columns=_BMNK, result_columns=_GEMM,
        tuned_csv="a8w8_tuned_batched_gemm.csv", untuned_csv="a8w8_untuned_batched_gemm.csv",
        env="AITER_CONFIG_A8W8_BATCHED_GEMM",
    ),
    Family(
        "batched_bf16",
        columns=_BMNK, result_columns=_GEMM,
        tuned_csv="bf16_tuned_batched_gemm.csv", untuned_csv="bf16_untuned_batched_gemm.csv",
        env="AITER_CONFIG_BF16_BATCHED_GEMM",
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
        m_column="token", err_column="err1",
        renames=(("kernelName", "kernelName1"), ("splitK", "ksplit"), ("errRatio", "err1")),
    ),
)
# fmt: on

FAMILIES: dict[str, Family] = {f.name: f for f in _ALL}
DEFAULT_FAMILY = "a16w16"


def get_family(name: str) -> Family:
    """The family of that name. Raises InputError with the nearest name where there is none."""
    if name in FAMILIES:
        return FAMILIES[name]
    near = [f for f in FAMILIES if name and f.startswith(name.lower())]
    near = near or difflib.get_close_matches(name.lower(), FAMILIES, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise InputError(f"unknown family {name[:40]!r}{hint} (families: {', '.join(FAMILIES)})")


def as_markdown() -> str:
    """The table of docs/reference/families.md."""
    lines = [
        "| family | key columns | limits | result columns | table | environment variable |",
        "|---|---|---|---|---|---|",
    ]
    for f in FAMILIES.values():
        keys = ", ".join(f"`{c.name}`" if c.required else f"`{c.name}` = {c.default}" for c in f.columns)
        limits = ", ".join(f"{x.column} % {x.multiple_of} == 0 ({x.why})" for x in f.limits)
        results = ",".join(f.result_columns)
        lines.append(f"| `{f.name}` | {keys} | {limits} | `{results}` | `{f.tuned_csv}` | `{f.env}` |")
    lines += ["", "| family | column | legal values |", "|---|---|---|"]
    for f in FAMILIES.values():
        lines += [f"| `{f.name}` | `{c.name}` | {', '.join(f'`{v}`' for v in c.legal)} |" for c in f.columns if c.legal]
    return "\n".join(lines)


if __name__ == "__main__":
    print(as_markdown())
