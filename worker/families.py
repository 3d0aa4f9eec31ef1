"""The table of GEMM families: columns, limits, formats, AITER's files and names. Also finds the backend of a row.

Key columns, result columns and their order, table names and environment variables are AITER's, read from
`aiter/configs`, `aiter/jit/core.py` and the tuners from v0.1.5 (2025-08) to commit e4048607a5 (2026-08-22). AITER
passes the text columns to Python's `eval`, so only the values listed here are ever accepted or written.

To add a family, add an entry to `_ALL`. The controller and the worker read it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Cell = int | float | str
Format = Literal["", "row16", "row8", "block8", "mx4"]
"""The operands' format (worker/bench/case.py describes them); "" if only AITER computes the family."""

_NUMBER = re.compile(r"[0-9]{1,10}\Z")
BOOLEANS = ("True", "False")
NULLS = frozenset(("", "Null", "null", "NULL", "NaN", "nan", "None"))
"""Cells that mean "no value"."""


@dataclass(frozen=True, slots=True)
class Column:
    """A key column."""

    name: str
    kind: Literal["int", "text"] = "int"
    """`int`: whole numbers from 1 to 2^31-1, or one of `legal` if that is given (0 and 1 for a switch). `text`: one of
    `legal`, in exactly this spelling."""
    default: str | None = None
    """None: the column is required."""
    legal: tuple[str, ...] = ()
    aiter: str = ""
    """The column's name in AITER's tables, if it differs."""

    @property
    def required(self) -> bool:
        """Return whether a shapes file must have the column."""
        return self.default is None


@dataclass(frozen=True, slots=True)
class Limit:
    """A column must be a multiple of a number. Otherwise no kernel of the family can take the shape."""

    column: str
    multiple_of: int
    why: str


@dataclass(frozen=True, slots=True)
class Risk:
    """If a column is not a multiple of a number, AITER's kernels may fault. Such shapes are not refused.

    17 of the rows that AITER ships have an N that is not a multiple of 128, and the K layout depends on the image.
    """

    columns: tuple[str, ...]
    multiple_of: int

    def of(self, key: Mapping[str, int | str]) -> str:
        """The risk in words, "" if the shape is aligned."""
        if all(int(key[c]) % self.multiple_of == 0 for c in self.columns):
            return ""
        return f"{' or '.join(self.columns)} is not a multiple of {self.multiple_of}"


@dataclass(frozen=True, slots=True)
class Aiter:
    """AITER's handling of a family. Facts that differ by version (flags, gfx as a key) are read from its files."""

    scripts: tuple[str, ...] = ()
    """Tuners below a tree's root, the newest first; in a wheel they are below `aiter_meta/`."""
    err_ratio: float = 0.05
    """The largest share of wrong elements of a winner."""
    flags: tuple[str, ...] = ()
    """Extra flags that the script needs for this family."""
    gfx: tuple[str, ...] = ()
    """Chips that it can be tuned on, empty for any."""
    only_backend: str = ""
    """The backend of all kernels, if rows have no libtype."""
    ck_kernels: int = 0
    """Candidates are numbered from 0, with at most this many CK kernels before the ASM kernels."""
    pads_k_to: int = 0
    """Scales are padded to a K that is a multiple of this, 0 if they are not padded. Older images lay padded scales out
    wrongly."""
    always_has_candidates: bool = False
    """Every shape has a kernel. In other families a shape without a kernel ends its whole batch (an assertion, since
    2025-12-30), so each shape has its own process."""
    hand_written: bool = False
    """AITER ships rows without a time."""
    model_last: bool = False
    """Model tables are mostly called `<table>_<model>.csv`."""
    exact_m: bool = False
    """The lookup does not round M up."""
    operator: tuple[str, str] = ("", "")
    """(module, name) of the function that looks a shape up in the tuned table."""
    triton_ops: tuple[str, ...] = ()
    """Wrappers of its Triton kernels, the newest first."""
    gluon_op: str = ""
    """The wrapper of its Gluon kernel."""


@dataclass(frozen=True, slots=True)
class Family:
    """One GEMM format with its tables."""

    name: str
    columns: tuple[Column, ...]
    """The key columns without those of the chip, in AITER's order."""
    result_columns: tuple[str, ...]
    """The other columns of its tuned table, in AITER's order."""
    tuned_csv: str
    untuned_csv: str
    """The table's name, and that of the list of shapes, below AITER's aiter/configs."""
    env: str
    """The variable that names another table to AITER."""
    aiter: Aiter = Aiter()
    format: Format = ""
    own_tuners: tuple[str, ...] = ()
    """Our own tuners that have candidates for it."""
    risks: tuple[Risk, ...] = ()
    limits: tuple[Limit, ...] = ()
    m_column: str = "M"
    err_column: str = "errRatio"
    renames: tuple[tuple[str, str], ...] = ()
    """(name in a worker's row, name of the result column), where they differ."""
    chip_columns: tuple[str, ...] = ("gfx", "cu_num")
    """The columns that name the chip in its tables."""
    late_columns: tuple[str, ...] = ()
    """Result columns that only today's AITER writes; shipped tables may lack them."""
    key_names: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """The names of the key columns. `Shape.key` has the same order."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key_names", tuple(c.name for c in self.columns))

    @property
    def tuned_header(self) -> tuple[str, ...]:
        """The columns of the family's tuned table, in our names."""
        return (*self.chip_columns, *self.key_names, *self.result_columns)

    @property
    def aiter_header(self) -> tuple[str, ...]:
        """The header of the family's tuned table as AITER writes it."""
        return self.to_aiter(self.tuned_header)

    def to_aiter(self, names: Iterable[str]) -> tuple[str, ...]:
        """Translate column names into those of AITER's tables. Unknown names do not change."""
        theirs = {column.name: column.aiter for column in self.columns if column.aiter}
        return tuple(theirs.get(name, name) for name in names)

    def from_aiter(self, names: Iterable[str]) -> tuple[str, ...]:
        """Translate column names of AITER's tables into ours. Unknown names do not change."""
        ours = {column.aiter: column.name for column in self.columns if column.aiter}
        return tuple(ours.get(name, name) for name in names)

    def named_key(self, key: Iterable[int | str]) -> dict[str, int | str]:
        """A shape's key by column name, as `{"M": 16, "N": 512, "K": 128}`."""
        return dict(zip(self.key_names, key, strict=True))

    def chip(self, gfx: str, cu_num: int) -> tuple[str, int]:
        """A chip as in the keys of the family's rows: cu_num is 0 if its tables do not have that column."""
        return gfx, cu_num if "cu_num" in self.chip_columns else 0

    @property
    def two_stages(self) -> bool:
        """Return whether a row times two kernels, one after the other (a mixture of experts)."""
        return self.m_column == "token"

    def flops(self, key: Mapping[str, int | str]) -> float:
        """Floating-point operations of one shape, as AITER counts them for its tflops column.

        GEMM: 2*M*N*K, times B if there is a B. fmoe: both stages, 2*token*topk*model_dim*inter_dim for
        each weight matrix: three with use_g1u1 (gate, up, down), else two; source: `FmoeTuner.calculate` in
        AITER's gemm_moe_tune.py. The shipped tuned_fmoe.csv agrees to rounding from 16 tokens on; most of its
        rows below count 16 tokens.
        """
        if self.two_stages:
            per_matrix = 2.0 * int(key["token"]) * int(key["topk"]) * int(key["model_dim"]) * int(key["inter_dim"])
            return per_matrix * (3 if int(key["use_g1u1"]) else 2)
        return 2.0 * int(key["M"]) * int(key["N"]) * int(key["K"]) * int(key.get("B", 1))

    def row_to_columns(self, row: Mapping[str, object]) -> dict[str, Cell]:
        """A worker's row as the family's result columns, in order; "" for values that the row lacks.

        Values without a column in AITER's tables (status, spread, samples, ...) are left out. fmoe's err1 becomes
        AITER's text in percent ("0.3%").
        """
        our_names = {theirs: ours for ours, theirs in self.renames}
        cells: dict[str, Cell] = {}
        for name in self.result_columns:
            value = row.get(name, row.get(our_names.get(name, name), ""))
            if name == "err1" and isinstance(value, (int, float)):
                value = f"{value:.1%}"
            cells[name] = value if isinstance(value, (int, float, str)) else str(value)
        return cells


def legal_cells(family: Family, key: Mapping[str, int | str]) -> dict[str, str]:
    """The key as cells of an untuned CSV. Raises ValueError for an illegal cell, as AITER evaluates some as Python."""
    cells: dict[str, str] = {}
    for column in family.columns:
        if column.name not in key:
            raise ValueError(f"the shape has no {column.name}")
        cell = str(key[column.name])
        if column.kind == "int" and not _NUMBER.match(cell):
            raise ValueError(f"{column.name} is {cell[:40]!r}, not a whole number")
        if column.legal and cell not in column.legal:
            raise ValueError(f"{column.name} is {cell[:40]!r}, not one of {', '.join(column.legal)}")
        cells[column.name] = cell
    return cells


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
        # As the tuner declares them; shipped tables may end with `_tag`.
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
        late_columns=("xbf16", "flat"), m_column="token", err_column="err1",
        renames=(("kernelName", "kernelName1"), ("splitK", "ksplit"), ("errRatio", "err1")),
    ),
)
# fmt: on

FAMILIES: dict[str, Family] = {f.name: f for f in _ALL}
DEFAULT_FAMILY = "a16w16"
TINY_SIZES = {
    "B": 2,
    "M": 64,
    "N": 512,
    "K": 512,
    "token": 16,
    "model_dim": 1024,
    "inter_dim": 512,
    "expert": 8,
    "topk": 2,
}
"""Sizes, by column, of the smallest shape that the kernels of every date of AITER take."""


def computed_by(tuner: str) -> tuple[str, ...]:
    """The names of the families that one of our own tuners has candidates for."""
    return tuple(f.name for f in FAMILIES.values() if tuner in f.own_tuners)


BACKENDS = ("asm", "ck", "cktile", "triton", "hipblaslt", "flydsl", "opus", "torch", "skinny")

BATCHED = tuple(f"aiter-bmm-{name}" for name in ("bf16", "a8w8", "a8w8-prequant", "afp4wfp4", "a16wfp4"))
"""The backends of a bench that are AITER's batched Triton GEMMs."""
BENCHED = ("torch", "aiter", "aiter-triton", "aiter-gluon", *BATCHED)
"""Backends of a bench: torch, AITER's dispatch, its Triton and its Gluon kernels."""

BY_NAME: tuple[tuple[str, str], ...] = (
    (r"_ZN|f4gemm_|.*f4gemm_bf16_per1x32Fp4", "asm"),
    (r"a8w8_blockscale_cktile_|a8w8_bpreshuffle_cktile_|cktile_|.*_cktile_", "cktile"),
    (r"flydsl", "flydsl"),
    (r"opus_", "opus"),
    (r"Cijk_", "hipblaslt"),
    (r"native\Z", "torch"),
    (r"auto\Z|triton\Z|gluon\Z", "triton"),
    (r"sol\d+\Z", "skinny"),
    (r"a4w4_blockscale|a8w8_|moe_ck2stages_|batched_|bf16_batched|.*rowwise", "ck"),
)
"""Start of a kernel's name -> backend, for rows without a libtype. `|` only separates alternatives."""

TORCH = "torch_"
TRITON = "triton_"
"""The tuner triton was removed in 0.3; its rows still exist."""
CONFIG = "config_"
ENGINE = "vllm_"
SGLANG = "sglang_"
SYNTHETIC = "synthetic_"
_TUNERS = {
    TORCH: "torch",
    TRITON: "triton",
    CONFIG: "aiter-triton",
    ENGINE: "vllm",
    SGLANG: "sglang",
    SYNTHETIC: "replay",
}
"""Beginnings of the kernels' names of our tuners. AITER has none of these, and its tables must never get one."""

_BY_NAME_RE = tuple((re.compile(pattern), backend) for pattern, backend in BY_NAME)


def kernel_of_aiter(name: str) -> str:
    """The AITER backend whose kernels have names like this, or ""."""
    for pattern, backend in _BY_NAME_RE:
        if pattern.match(name):
            return backend
    return ""


def tuner_of(kernel: str) -> str:
    """Our own tuner whose kernels have names like this, or ""."""
    for beginning, tuner in _TUNERS.items():
        if kernel.startswith(beginning):
            return tuner
    return ""


def backend_of(family: str, row: Mapping[str, object]) -> str:
    """The backend of a tuned or profile row (cells as text or numbers), "" if it is unknown.

    It comes from `libtype`, or else from the kernel's name, or else it is the family's only backend. In a4w4 tables
    from before 2026-05 a failed candidate may have no name. There its number decides (CK kernels have the lowest).
    """
    libtype = str(row.get("libtype", "") or "").strip().lower()
    if libtype in BACKENDS:
        return libtype
    name = str(row.get("kernelName") or row.get("kernelName1") or "").strip()
    if name and name not in ("None", "Null", "nan"):
        by_name = kernel_of_aiter(name)
        if by_name:
            return by_name
    if family not in FAMILIES:
        return ""
    aiter = FAMILIES[family].aiter
    number = str(row.get("kernelId", "")).strip()
    if aiter.ck_kernels and number.isdigit():
        return "ck" if int(number) < aiter.ck_kernels else "asm"
    return aiter.only_backend
