"""The kinds of AITER's Triton config files: what their files are called, who reads them, and what they must hold.

`KINDS` is the table; a new kind of file is a new line of it. `resolve.py` finds the config of a shape of a kind, and
`worker/tuners/aiter_triton` tunes those of the kinds that it can call.
Read from the `_get_config` functions and `get_gemm_config` calls below `aiter/ops/triton` at e4048607a5 (2026-08-22).
`loader_calls.py` reads the calls of a tree.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

STANDARD_BOUNDS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""`STANDARD_M_BOUNDS` of utils/gemm_config_utils.py since 2025-12; `resolve.ConfigLoader` reads a tree's own."""
REQUIRED = (
    "BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages", "waves_per_eu",
    "matrix_instr_nonkdim", "cache_modifier", "NUM_KSPLIT",
)  # fmt: skip
"""Keys of every bucket, by configs/CLAUDE.md."""
AMD_ONLY = frozenset({"waves_per_eu", "matrix_instr_nonkdim", "kpack"})
"""Compiler options that Triton's other backends refuse."""
FILLED_IN: dict[str, int | None] = {"NUM_KSPLIT": 1, "cache_modifier": None}
"""Values that `add_default_gemm_config_params` of the loader takes for a missing key."""
GLUON_KEYS = frozenset({"NUM_BUFFERS", "kernel_type"})
"""Keys by which a bucket is known to be read by a Gluon kernel, which has keys of its own."""


@dataclass(frozen=True, slots=True)
class Caller:
    """A second reader of a kind's files. We know more about it than `loader_calls.find_readers` finds."""

    module: str
    function: str
    chips: str = ".*"
    """Pattern of the chips on which it reads these files."""
    arguments: tuple[tuple[str, Any], ...] | None = None
    """Arguments beside the wrapper's with which it computes the same product. None: its operands are others, and we do
    not call it."""

    @property
    def is_callable(self) -> bool:
        """True if we can call it."""
        return self.arguments is not None

    def reads_on(self, arch: str) -> bool:
        """True if it reads these files on that chip."""
        return re.fullmatch(self.chips, arch) is not None


@dataclass(frozen=True, slots=True)
class ConfigKind:
    """One kind of config file, and the public wrapper of AITER that reads it."""

    name: str
    """Our name, unique."""
    config: str
    """AITER's name, with which the names of the files begin: `GEMM-A16W16`."""
    module: str
    """The module of the wrapper."""
    function: str
    """The wrapper."""
    family: str = ""
    """The family of tuned tables that computes the same; "" for none."""
    bounds: tuple[int, ...] = ()
    """The bounds of M that the wrapper searches; () for the standard ones. `Resolver.bounds` reads a tree's own."""
    batch_in_name: bool = False
    """Files named `-B=..-N=..-K=..` are looked for first."""
    packed_k: bool = False
    """W holds two values a byte, and the wrapper takes K/2 from it. The look-up doubles it, so that files are named by
    the logical K all the same."""
    backend: str | None = None
    """The backend whose files the wrapper asks for; None for triton's, or gluon's if those do not exist."""
    required: tuple[str, ...] = REQUIRED
    """Keys that every bucket must have. The kernel has no parameter for other keys of REQUIRED."""
    custom_suffix: bool = False
    """Specialised files are not named by N and K."""
    shuffled_w: bool = False
    """W is in shuffled order."""
    block_k: int = 0
    """The one BLOCK_SIZE_K that the wrapper accepts (the block of a scale); 0 for any."""
    scales_by_32: bool = False
    """The scales of X are shuffled from M = 32 on: the wrapper asserts BLOCK_SIZE_M <= 16 below and >= 32 above."""
    quantises_x: bool = False
    """X comes in 16 bits, and its blocks are quantised between load and product."""
    parameters: tuple[str, ...] = ()
    """Keys of AMD_ONLY that the kernel itself has as parameters, so that files of every chip hold them."""
    callers: tuple[Caller, ...] = ()
    """Other readers of the files."""

    def required_on(self, arch: str) -> tuple[str, ...]:
        """Keys that every bucket of a chip must have."""
        return tuple(key for key in self.required if self.may_hold(key, arch))

    def may_hold(self, key: str, arch: str) -> bool:
        """True for a key that files of a chip may hold."""
        return arch.startswith("gfx") or key not in AMD_ONLY or key in self.parameters

    @property
    def batched(self) -> bool:
        """True if a shape has a B, whether or not files are named by it."""
        return self.config.startswith("BATCHED_")


_NO_SPLIT = REQUIRED[:-1]
_SHUFFLED_BOUNDS = (4, 8, 16, 31, *STANDARD_BOUNDS[4:])
_BATCHED_BOUNDS = (4, 8, 16, 32, 64, 128, 256, 320, *STANDARD_BOUNDS[8:])
_PREQUANT = "batched_gemm_a8w8_a_per_token_group_prequant_w_per_batched_tensor_quant"


def _kind(name: str, config: str, where: str, *callers: Caller, function: str = "", **rest: object) -> ConfigKind:
    """A kind whose wrapper is in the module `where` below aiter.ops.triton. `function`: "" if it is called as the
    module is."""
    function = function or where.rpartition(".")[2]
    return ConfigKind(name, config, f"aiter.ops.triton.{where}", function, callers=callers, **rest)  # type: ignore[arg-type]


def _fused(module: str, function: str = "", **rest: object) -> Caller:
    """A reader among the fused GEMMs; `function` as in `_kind`."""
    return Caller(f"aiter.ops.triton.gemm.fused.{module}", function or module, **rest)  # type: ignore[arg-type]


# a * b + Y of the fused multiply-add; on gfx950 only this type reads the shared files of blockscale.
_MUL_ADD = (("a", 1.0), ("b", 0.0), ("fuse_type", 1))


# fmt: off
KINDS: tuple[ConfigKind, ...] = (
    _kind("a16w16", "GEMM-A16W16", "gemm.basic.gemm_a16w16", _fused("fused_gemm_a16w16_quant_x", arguments=()),
          family="a16w16"),
    _kind("a8w8", "GEMM-A8W8", "gemm.basic.gemm_a8w8",
          Caller("aiter.ops.triton.gluon.gemm_a8w8", "gluon.gemm_a8w8", "gfx950"), family="a8w8"),
    _kind("a8w8_blockscale", "GEMM-A8W8_BLOCKSCALE", "gemm.basic.gemm_a8w8_blockscale",
          _fused("fused_gemm_a8w8_blockscale_mul_add", arguments=_MUL_ADD), family="a8w8_blockscale", backend="triton",
          block_k=128),
    _kind("a8w8_blockscale_bpreshuffle", "GEMM-A8W8_BLOCKSCALE_PRESHUFFLED", "gemm.basic.gemm_a8w8_blockscale",
          function="gemm_a8w8_blockscale_preshuffle", family="a8w8_blockscale_bpreshuffle", backend="triton",
          shuffled_w=True, block_k=128),
    _kind("a4w4", "GEMM-AFP4WFP4", "gemm.basic.gemm_afp4wfp4",
          Caller("aiter.ops.triton.gemm.basic.gemm_afp4wfp4", "gemm_afp4wfp4_preshuffled_scales"),
          Caller("aiter.ops.triton.gluon.gemm_afp4wfp4", "gluon.gemm_afp4wfp4", "gfx950|gfx1250"),
          _fused("fused_gemm_afp4wfp4_mul_add", chips="(?!gfx950).*", arguments=_MUL_ADD),
          family="a4w4_blockscale", packed_k=True),
    _kind("a4w4_preshuffle", "GEMM-AFP4WFP4_PRESHUFFLED", "gemm.basic.gemm_afp4wfp4",
          _fused("fused_gemm_afp4wfp4_mul_add", "fused_gemm_afp4wfp4_preshuffle_add_mul",
                 arguments=(*_MUL_ADD, ("use_aot", False))),
          function="gemm_afp4wfp4_preshuffle", bounds=_SHUFFLED_BOUNDS, packed_k=True, shuffled_w=True,
          scales_by_32=True),
    _kind("batched_bf16", "BATCHED_GEMM-A16W16", "gemm.batched.batched_gemm_bf16", family="batched_bf16",
          batch_in_name=True, parameters=("waves_per_eu",)),
    _kind("batched_a8w8", "BATCHED_GEMM-A8W8", "gemm.batched.batched_gemm_a8w8", family="batched_a8w8",
          required=_NO_SPLIT[:-1]),
    _kind("batched_a4w4", "BATCHED_GEMM-AFP4WFP4", "gemm.batched.batched_gemm_afp4wfp4", bounds=_BATCHED_BOUNDS,
          packed_k=True),
    _kind("batched_a16w4", "BATCHED_GEMM-A16WFP4", "gemm.batched.batched_gemm_a16wfp4", packed_k=True,
          quantises_x=True),
    _kind("batched_a8w8_prequant", "BATCHED_GEMM-A8W8-A_PER_TOKEN_GROUP_PREQUANT_W_PER_BATCHED_TENSOR_QUANT",
          f"gemm.batched.{_PREQUANT}", required=tuple(k for k in _NO_SPLIT if k != "BLOCK_SIZE_K"), quantises_x=True),
    # The rest: linted and resolved, not tuned.
    _kind("a16w16_atomic", "GEMM-A16W16-ATOMIC", "gemm.basic.gemm_a16w16_atomic"),
    _kind("a16w16_gated", "GEMM-A16W16-gated", "gemm.basic.gemm_a16w16_gated", bounds=(64, 128, 256, 512, 2048),
          required=_NO_SPLIT),
    _kind("a16w8_blockscale", "GEMM-A16W8_BLOCKSCALE", "gemm.basic.gemm_a16w8_blockscale"),
    _kind("a16w8_blockscale_preshuffle", "GEMM-A16W8_BLOCKSCALE_PRESHUFFLED", "gemm.basic.gemm_a16w8_blockscale",
          function="gemm_a16w8_blockscale_preshuffle", shuffled_w=True, block_k=128),
    _kind("a16w4", "GEMM-A16WFP4", "gemm.basic.gemm_a16wfp4", packed_k=True),
    _kind("a16w4_preshuffle", "GEMM-A16WFP4_PRESHUFFLED", "gemm.basic.gemm_a16wfp4",
          function="gemm_a16wfp4_preshuffle", packed_k=True, shuffled_w=True),
    _kind("a8w8_per_token", "GEMM-A8W8_PER_TOKEN_SCALE", "gemm.basic.gemm_a8w8_per_token_scale"),
    _kind("a8w4", "GEMM-A8WFP4", "gemm.basic.gemm_a8wfp4"),
    _kind("afp8wfp8", "GEMM-AFP8WFP8", "gemm.basic.gemm_afp8wfp8"),
    _kind("afp8wfp8_preshuffle", "GEMM-AFP8WFP8_PRESHUFFLED", "gemm.basic.gemm_afp8wfp8",
          function="gemm_afp8wfp8_preshuffle", shuffled_w=True),
    _kind("ff_a16w16", "FF-A16W16-fused", "gemm.feed_forward.ff_a16w16_fused_gated",
          bounds=(4, 8, 64, 4096), required=_NO_SPLIT),
    _kind("fused_a8w8_blockscale_a16w16", "FUSED-GEMM-A8W8_BLOCKSCALE-A16W16",
          "gemm.fused.fused_gemm_a8w8_blockscale_a16w16", custom_suffix=True),
    _kind("fused_a8w8_blockscale_mul_add", "FUSED-GEMM-A8W8_BLOCKSCALE-MUL_ADD",
          "gemm.fused.fused_gemm_a8w8_blockscale_mul_add"),
    _kind("fused_a4w4_a16w16", "FUSED-GEMM-AFP4WFP4-A16W16", "gemm.fused.fused_gemm_afp4wfp4_a16w16",
          custom_suffix=True),
    _kind("fused_a4w4_preshuffle_a16w16", "FUSED-GEMM-AFP4WFP4_PRESHUFFLED-A16W16",
          "gemm.fused.fused_gemm_afp4wfp4_a16w16", custom_suffix=True),
    _kind("fused_a4w4_mul_add", "FUSED-GEMM-AFP4WFP4-MUL_ADD", "gemm.fused.fused_gemm_afp4wfp4_mul_add", packed_k=True),
)
# fmt: on

BY_NAME = {k.name: k for k in KINDS}
BY_CONFIG = {k.config: k for k in KINDS}
BY_FAMILY = {k.family: k for k in KINDS if k.family}


def kinds_of(family: str) -> tuple[ConfigKind, ...]:
    """The kinds of a family of tuned tables, or the one kind of that name; () for none."""
    return tuple(k for k in KINDS if family in (k.family, k.name))
