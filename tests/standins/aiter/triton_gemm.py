"""A Triton GEMM of ours in the fake AITER: a wrapper with `config=`, its loader, config files.

The loader does what `worker.triton_configs.resolve` says of AITER's: folders first, a specialised file replaces the
default, M_LEQ_x by the bounds, then any. The wrapper completes a config as AITER's callers do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.standins.aiter.layout import make_packages
from tests.support.files import write_files

LOADER = """
import json
from pathlib import Path

AITER_TRITON_CONFIGS_PATH = Path(__file__).absolute().parent.parent / "configs"  # links are not followed
STANDARD_M_BOUNDS = (16, 64, 256)


def _dtype_dir(name):
    return name.lower().replace("-", "_")


def get_gemm_config(config_name, M, N=None, K=None, bounds=None, specialized_filename=None, backend=None, B=None):
    from aiter.ops.triton.utils._triton.arch_info import get_arch

    folder = AITER_TRITON_CONFIGS_PATH / str(get_arch()) / "triton" / "gemm" / _dtype_dir(config_name)
    special = folder / f"{config_name}-N={N}-K={K}.json"
    own = special.exists()
    buckets = json.loads((special if own else folder / "DEFAULT.json").read_text())
    limits = bounds or STANDARD_M_BOUNDS
    for limit in limits:
        if M <= limit and f"M_LEQ_{limit}" in buckets:
            return dict(buckets[f"M_LEQ_{limit}"]), own
    return dict(buckets["any"]), False


def compute_splitk_params(config, K):
    step = config["BLOCK_SIZE_K"]
    while config["NUM_KSPLIT"] > 1 and K // config["NUM_KSPLIT"] < step:
        config["NUM_KSPLIT"] //= 2
    part = -(-K // config["NUM_KSPLIT"])
    config["SPLITK_BLOCK_SIZE"] = -(-part // step) * step
    return config
"""
ARCH = """
import triton

_ARCH = triton.runtime.driver.active.get_current_target().arch


def get_arch():
    return _ARCH
"""
KERNEL = """
import triton
import triton.language as tl

from aiter.ops.triton.utils.gemm_config_utils import compute_splitk_params, get_gemm_config


@triton.jit
def stand_in_gemm(
    x_ptr, w_ptr, out_ptr, M, N, K,
    BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_K: tl.constexpr, GROUP_SIZE_M: tl.constexpr,
    NUM_KSPLIT: tl.constexpr, SPLITK_BLOCK_SIZE: tl.constexpr, cache_modifier: tl.constexpr,
):
    pid = tl.program_id(0)
    part = pid % NUM_KSPLIT
    tile = pid // NUM_KSPLIT
    columns = tl.cdiv(N, BLOCK_SIZE_N)
    rows_at = tile // columns * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
    columns_at = tile % columns * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    total = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
    for start in range(0, SPLITK_BLOCK_SIZE, BLOCK_SIZE_K):
        k = part * SPLITK_BLOCK_SIZE + start + tl.arange(0, BLOCK_SIZE_K)
        x_mask = (rows_at[:, None] < M) & (k[None, :] < K)
        w_mask = (columns_at[None, :] < N) & (k[:, None] < K)
        x = tl.load(x_ptr + rows_at[:, None] * K + k[None, :], mask=x_mask, other=0.0)
        w = tl.load(w_ptr + columns_at[None, :] * K + k[:, None], mask=w_mask, other=0.0, cache_modifier=cache_modifier)
        total = tl.dot(x, w, acc=total)
    out = out_ptr + part * M * N + rows_at[:, None] * N + columns_at[None, :]
    tl.store(out, total.to(out_ptr.type.element_ty), mask=(rows_at[:, None] < M) & (columns_at[None, :] < N))


def _get_config(M, N, K):
    config, is_tuned = get_gemm_config("GEMM-A16W16", M, N, K)
    return compute_splitk_params(config, K), is_tuned
"""
WRAPPER = """
import torch
import triton

from aiter.ops.triton._triton_kernels.gemm.basic.gemm_a16w16 import _get_config, stand_in_gemm


def gemm_a16w16(x, w, bias=None, dtype=torch.bfloat16, y=None, config=None):
    M, K = x.shape
    N, _ = w.shape
    if config is None:
        config, _ = _get_config(M, N, K)
    if y is None:
        y = torch.empty((M, N), dtype=dtype, device=x.device)
    parts = config["NUM_KSPLIT"]
    out = y if parts == 1 else torch.empty((parts, M, N), dtype=torch.float32, device=x.device)
    grid = (parts * triton.cdiv(M, config["BLOCK_SIZE_M"]) * triton.cdiv(N, config["BLOCK_SIZE_N"]),)
    stand_in_gemm[grid](x, w, out, M, N, K, **config)
    if parts > 1:
        y.copy_(out.sum(0))
    return y
"""
FUSED = """
import torch

from aiter.ops.triton._triton_kernels.gemm.basic.gemm_a16w16 import _get_config
from aiter.ops.triton.gemm.basic.gemm_a16w16 import gemm_a16w16


def fused_gemm_a16w16_quant_x(x, w, bias=None, dtype=torch.bfloat16, y=None, x_quant=None, x_scales=None, config=None):
    if config is None:
        config, _ = _get_config(*x.shape, w.shape[0])
    return gemm_a16w16(x, w, bias, dtype, y, config), x, x_scales
"""
BELOW = "aiter/ops/triton"
FUSED_FILES = {f"{BELOW}/gemm/fused/fused_gemm_a16w16_quant_x.py": FUSED}
FILES = {
    "aiter/jit/core.py": "",
    f"{BELOW}/utils/_triton/arch_info.py": ARCH,
    f"{BELOW}/utils/gemm_config_utils.py": LOADER,
    f"{BELOW}/gemm/basic/gemm_a16w16.py": WRAPPER,
    f"{BELOW}/_triton_kernels/gemm/basic/gemm_a16w16.py": KERNEL,
}


def values(m: int = 16, n: int = 32, k: int = 32, *, amd: bool = False, **more: Any) -> dict[str, Any]:
    """A bucket; with `amd` it has the keys of AMD's chips too."""
    of_amd = {"waves_per_eu": 2, "matrix_instr_nonkdim": 16} if amd else {}
    return {
        "BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": k, "GROUP_SIZE_M": 1, "num_warps": 4, "num_stages": 2,
        **of_amd, "cache_modifier": None, "NUM_KSPLIT": 1, **more,
    }  # fmt: skip


def make(root: Path, configs: Mapping[str, Mapping[str, Any]], arch: str = "90", *, fused: bool = False) -> Path:
    """The tree, with config files of GEMM-A16W16 for a chip by their name (`DEFAULT.json`); `fused`: with an operator
    beside the wrapper that reads them."""
    write_files(root, {**FILES, **(FUSED_FILES if fused else {})})
    make_packages(root / "aiter")
    folder = root / BELOW / "configs" / arch / "triton" / "gemm" / "gemm_a16w16"
    write_files(folder, {name: json.dumps(buckets, indent=2) + "\n" for name, buckets in configs.items()})
    return root
