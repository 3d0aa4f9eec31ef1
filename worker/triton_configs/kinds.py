"""Table of config files: their name at AITER, who reads them, and under which name a shape is looked up.

Read from the `_get_config` functions and `get_gemm_config` calls below `aiter/ops/triton` at e4048607a5 (2026-08-22).
"""

from __future__ import annotations

from dataclasses import dataclass

STANDARD_BOUNDS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""`STANDARD_M_BOUNDS` of utils/gemm_config_utils.py since 2025-12; a tree's own are read by `resolve.Loader`."""
REQUIRED = (
    "BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages", "waves_per_eu",
    "matrix_instr_nonkdim", "cache_modifier", "NUM_KSPLIT",
)  # fmt: skip
"""Keys of every bucket, by configs/CLAUDE.md."""
GLUON_KEYS = frozenset({"NUM_BUFFERS", "kernel_type"})
"""Keys by which a bucket is known to be read by a Gluon kernel, which has keys of its own."""

_NO_SPLIT = tuple(k for k in REQUIRED if k != "NUM_KSPLIT")
_PRESHUFFLED_BOUNDS = (4, 8, 16, 31, *STANDARD_BOUNDS[4:])
_BATCHED_FP4_BOUNDS = (4, 8, 16, 32, 64, 128, 256, 320, *STANDARD_BOUNDS[8:])
_FEED_FORWARD_BOUNDS = (4, 8, 64, 4096)


@dataclass(frozen=True, slots=True)
class Caller:
    """A second reader of the same files. `only`: chips on which it reads them, empty for any; `but`: chips on which it
    does not; `when`: the rest of its condition, in words."""

    module: str
    function: str
    only: tuple[str, ...] = ()
    but: tuple[str, ...] = ()
    when: str = ""

    def reads_on(self, arch: str) -> bool:
        """True where it reads these files on that chip."""
        return arch not in self.but and (not self.only or arch in self.only)


@dataclass(frozen=True, slots=True)
class ConfigKind:
    """One kind of config file and the public wrapper that reads it.

    `name`: ours, unique. `family`: the family of tuned tables that computes the same, "" for none. `config`: AITER's
    name, the stem of the files. `module`, `function`: the wrapper. `bounds`: the M bounds that its caller searches, ()
    for the standard ones (`Resolver.bounds` reads a tree's own). `batch_in_name`: files `-B=..-N=..-K=..` are looked
    for first. `packed_k`: W holds two values a byte and the wrapper takes K/2 from it; the lookup doubles it, so that
    names have the logical K all the same. `backend`: what the caller asks for, None for the first of triton and gluon
    that is there. `required`: keys that the wrapper or its kernel reads from every bucket. `custom_suffix`: specialised
    files are not named by N and K. `shuffled_w`: W is in shuffled order. `block_k`: the one BLOCK_SIZE_K that the
    wrapper accepts (a scale's block), 0 for any. `scales_by_32`: scales of X are shuffled from M = 32 on, so that the
    wrapper asserts BLOCK_SIZE_M <= 16 below and >= 32 from there. `callers`: other readers.
    """

    name: str
    config: str
    module: str
    function: str
    family: str = ""
    bounds: tuple[int, ...] = ()
    batch_in_name: bool = False
    packed_k: bool = False
    backend: str | None = None
    required: tuple[str, ...] = REQUIRED
    custom_suffix: bool = False
    shuffled_w: bool = False
    block_k: int = 0
    scales_by_32: bool = False
    callers: tuple[Caller, ...] = ()

    @property
    def batched(self) -> bool:
        """True where a shape has a B, whether or not files are named by it."""
        return self.config.startswith("BATCHED_")


_BASIC = "aiter.ops.triton.gemm.basic."
_BATCHED = "aiter.ops.triton.gemm.batched."
_FUSED = "aiter.ops.triton.gemm.fused."
_FF = "aiter.ops.triton.gemm.feed_forward."
_PER_GROUP = "batched_gemm_a8w8_a_per_token_group_prequant_w_per_batched_tensor_quant"

# fmt: off
KINDS: tuple[ConfigKind, ...] = (
    ConfigKind(
        "a16w16", "GEMM-A16W16", _BASIC + "gemm_a16w16", "gemm_a16w16", family="a16w16",
        callers=(Caller(_FUSED + "fused_gemm_a16w16_quant_x", "fused_gemm_a16w16_quant_x"),),
    ),
    ConfigKind(
        "a8w8", "GEMM-A8W8", _BASIC + "gemm_a8w8", "gemm_a8w8", family="a8w8",
        callers=(Caller("aiter.ops.triton.gluon.gemm_a8w8", "gemm_a8w8", but=("gfx950",), when="no Gluon default"),),
    ),
    ConfigKind(
        "a8w8_blockscale", "GEMM-A8W8_BLOCKSCALE", _BASIC + "gemm_a8w8_blockscale", "gemm_a8w8_blockscale",
        family="a8w8_blockscale", backend="triton", block_k=128,
        callers=(
            Caller(_FUSED + "fused_gemm_a8w8_blockscale_mul_add", "fused_gemm_a8w8_blockscale_mul_add",
                   when="on gfx950 only with fuse_type=1"),
            Caller(_FUSED + "fused_gemm_a8w8_blockscale_split_cat", "fused_gemm_a8w8_blockscale_split_cat"),
        ),
    ),
    ConfigKind(
        "a8w8_blockscale_bpreshuffle", "GEMM-A8W8_BLOCKSCALE_PRESHUFFLED", _BASIC + "gemm_a8w8_blockscale",
        "gemm_a8w8_blockscale_preshuffle", family="a8w8_blockscale_bpreshuffle", backend="triton",
        shuffled_w=True, block_k=128,
        callers=(
            Caller(_FUSED + "fused_gemm_a8w8_blockscale_split_cat", "fused_gemm_a8w8_blockscale_preshuffle_split_cat"),
        ),
    ),
    ConfigKind(
        "a4w4", "GEMM-AFP4WFP4", _BASIC + "gemm_afp4wfp4", "gemm_afp4wfp4", family="a4w4_blockscale", packed_k=True,
        callers=(
            Caller(_BASIC + "gemm_afp4wfp4", "gemm_afp4wfp4_preshuffled_scales"),
            Caller(_FUSED + "fused_gemm_afp4wfp4_mul_add", "fused_gemm_afp4wfp4_mul_add", but=("gfx950",)),
            Caller(_FUSED + "fused_gemm_afp4wfp4_split_cat", "fused_gemm_afp4wfp4_split_cat"),
        ),
    ),
    ConfigKind(
        "a4w4_preshuffle", "GEMM-AFP4WFP4_PRESHUFFLED", _BASIC + "gemm_afp4wfp4", "gemm_afp4wfp4_preshuffle",
        bounds=_PRESHUFFLED_BOUNDS, packed_k=True, shuffled_w=True, scales_by_32=True,
        callers=(
            Caller(_FUSED + "fused_gemm_afp4wfp4_mul_add", "fused_gemm_afp4wfp4_preshuffle_add_mul"),
            Caller(_FUSED + "fused_gemm_afp4wfp4_split_cat", "fused_gemm_afp4wfp4_preshuffle_split_cat"),
        ),
    ),
    ConfigKind(
        "batched_bf16", "BATCHED_GEMM-A16W16", _BATCHED + "batched_gemm_bf16", "batched_gemm_bf16",
        family="batched_bf16", batch_in_name=True,
    ),
    ConfigKind(
        "batched_a8w8", "BATCHED_GEMM-A8W8", _BATCHED + "batched_gemm_a8w8", "batched_gemm_a8w8",
        family="batched_a8w8", required=_NO_SPLIT,
    ),
    ConfigKind(
        "batched_a4w4", "BATCHED_GEMM-AFP4WFP4", _BATCHED + "batched_gemm_afp4wfp4", "batched_gemm_afp4wfp4",
        bounds=_BATCHED_FP4_BOUNDS, packed_k=True,
    ),
    ConfigKind(
        "batched_a16w4", "BATCHED_GEMM-A16WFP4", _BATCHED + "batched_gemm_a16wfp4", "batched_gemm_a16wfp4",
        packed_k=True,
    ),
    ConfigKind(
        "batched_a8w8_prequant", "BATCHED_GEMM-A8W8-A_PER_TOKEN_GROUP_PREQUANT_W_PER_BATCHED_TENSOR_QUANT",
        _BATCHED + _PER_GROUP, _PER_GROUP, required=tuple(k for k in _NO_SPLIT if k != "BLOCK_SIZE_K"),
    ),
    # The rest: linted and resolved, not tuned.
    ConfigKind("a16w16_atomic", "GEMM-A16W16-ATOMIC", _BASIC + "gemm_a16w16_atomic", "gemm_a16w16_atomic"),
    ConfigKind(
        "a16w16_gated", "GEMM-A16W16-gated", _BASIC + "gemm_a16w16_gated", "gemm_a16w16_gated",
        bounds=(64, 128, 256, 512, 2048), required=_NO_SPLIT,
    ),
    ConfigKind("a16w8_blockscale", "GEMM-A16W8_BLOCKSCALE", _BASIC + "gemm_a16w8_blockscale", "gemm_a16w8_blockscale"),
    ConfigKind(
        "a16w8_blockscale_preshuffle", "GEMM-A16W8_BLOCKSCALE_PRESHUFFLED", _BASIC + "gemm_a16w8_blockscale",
        "gemm_a16w8_blockscale_preshuffle", shuffled_w=True, block_k=128,
    ),
    ConfigKind("a16w4", "GEMM-A16WFP4", _BASIC + "gemm_a16wfp4", "gemm_a16wfp4", packed_k=True),
    ConfigKind(
        "a16w4_preshuffle", "GEMM-A16WFP4_PRESHUFFLED", _BASIC + "gemm_a16wfp4", "gemm_a16wfp4_preshuffle",
        packed_k=True, shuffled_w=True,
    ),
    ConfigKind(
        "a8w8_per_token", "GEMM-A8W8_PER_TOKEN_SCALE", _BASIC + "gemm_a8w8_per_token_scale",
        "gemm_a8w8_per_token_scale",
    ),
    ConfigKind("a8w4", "GEMM-A8WFP4", _BASIC + "gemm_a8wfp4", "gemm_a8wfp4"),
    ConfigKind("afp8wfp8", "GEMM-AFP8WFP8", _BASIC + "gemm_afp8wfp8", "gemm_afp8wfp8"),
    ConfigKind(
        "afp8wfp8_preshuffle", "GEMM-AFP8WFP8_PRESHUFFLED", _BASIC + "gemm_afp8wfp8", "gemm_afp8wfp8_preshuffle",
        shuffled_w=True,
    ),
    ConfigKind(
        "ff_a16w16", "FF-A16W16-fused", _FF + "ff_a16w16_fused_gated", "ff_a16w16_fused_gated",
        bounds=_FEED_FORWARD_BOUNDS, required=_NO_SPLIT,
        callers=(Caller(_FF + "ff_a16w16_fused_ungated", "ff_a16w16_fused_ungated"),),
    ),
    ConfigKind(
        "fused_a8w8_blockscale_a16w16", "FUSED-GEMM-A8W8_BLOCKSCALE-A16W16",
        _FUSED + "fused_gemm_a8w8_blockscale_a16w16", "fused_gemm_a8w8_blockscale_a16w16", custom_suffix=True,
    ),
    ConfigKind(
        "fused_a8w8_blockscale_mul_add", "FUSED-GEMM-A8W8_BLOCKSCALE-MUL_ADD",
        _FUSED + "fused_gemm_a8w8_blockscale_mul_add", "fused_gemm_a8w8_blockscale_mul_add",
    ),
    ConfigKind(
        "fused_a4w4_a16w16", "FUSED-GEMM-AFP4WFP4-A16W16", _FUSED + "fused_gemm_afp4wfp4_a16w16",
        "fused_gemm_afp4wfp4_a16w16", custom_suffix=True,
    ),
    ConfigKind(
        "fused_a4w4_preshuffle_a16w16", "FUSED-GEMM-AFP4WFP4_PRESHUFFLED-A16W16",
        _FUSED + "fused_gemm_afp4wfp4_a16w16", "fused_gemm_afp4wfp4_a16w16", custom_suffix=True,
    ),
    ConfigKind(
        "fused_a4w4_mul_add", "FUSED-GEMM-AFP4WFP4-MUL_ADD", _FUSED + "fused_gemm_afp4wfp4_mul_add",
        "fused_gemm_afp4wfp4_mul_add", packed_k=True,
    ),
)
# fmt: on

BY_NAME = {k.name: k for k in KINDS}
BY_CONFIG = {k.config: k for k in KINDS}


def kinds_of(family: str) -> tuple[ConfigKind, ...]:
    """The kinds of a family of tuned tables, or the one kind of that name; () for none."""
    return tuple(k for k in KINDS if family in (k.family, k.name))
