"""The operators of the fake AITER at two dates: their places and parameters are as they were then.

Their products are computed by torch, slowly and correctly. None of AITER's code is in it.

`old` is as in 2025-12 (22122345c0): flat Triton modules, gemm_a4w4 with an output handed in, no Gluon FP4 kernel; and
gemm_afp4wfp4 takes its arguments in the order of 2025-05. `new` is as in 2026-08 (e4048607a5): modules in gemm/basic
and gemm/batched, Gluon with its configuration.

What goes wrong is said in the environment: STANDIN_FAULT holds `OP:WHAT` with WHAT one of segv, hang, wrong, raise,
import.
"""

from __future__ import annotations

from pathlib import Path

from tests.standins.aiter.layout import make_packages
from tests.support.files import write_files

_CORE = """
import json, os, signal, sys, time
import torch
from worker.tuners.common.operands import unpack_codes

def fault(op):
    name, _, what = os.environ.get("STANDIN_FAULT", "").partition(":")
    if name != op:
        return ""
    if what == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "hang":
        time.sleep(1e6)
    if what == "raise":
        raise RuntimeError("HIP error: invalid configuration argument")
    return what

def wide(x, scale, flat=False):
    if scale is None:
        return x.float()
    if scale.dtype is torch.uint8:
        return unpack_codes(x.view(torch.uint8), scale, torch.float32)
    if x.shape[-1] > 1 and scale.shape[-1] not in (1, x.shape[0] if flat else -1):
        rows = -(-x.shape[0] // scale.shape[0])
        rows = 1 if rows == 1 else 128
        each = scale.repeat_interleave(128, 1)[:, : x.shape[1]]
        return x.float() * (each.repeat_interleave(128, 0)[: x.shape[0]] if rows == 128 else each)
    return x.float() * scale.reshape(-1, 1)

def multiply(op, x, w, xs, ws, dtype, out=None, bias=None):
    what = fault(op)
    made = wide(x, xs) @ wide(w, ws, True).t()
    if bias is not None:
        made = made + bias.float()
    if what == "wrong":
        made[: made.shape[0] // 2 + 1] += 1
    made = made.to(dtype)
    return made if out is None else out.copy_(made)
"""

_TRITON = {
    "gemm_a16w16": "(x, w, bias=None, dtype=torch.bfloat16, y=None, config=None): x, w, None, None, dtype, y, bias",
    "gemm_a8w8": "(x, w, x_scale, w_scale, bias=None, dtype=torch.bfloat16, y=None): x, w, x_scale, w_scale, dtype, y",
    "gemm_a8w8_blockscale": "(x, w, x_scale, w_scale, dtype=torch.bfloat16, y=None): x, w, x_scale, w_scale, dtype, y",
    "gemm_afp4wfp4": "(x, w, x_scales, w_scales, dtype=torch.bfloat16, y=None): x, w, x_scales, w_scales, dtype, y",
}
_PRESHUFFLED = """
def gemm_a8w8_blockscale_preshuffle(x, w, x_scale, w_scale, dtype=torch.bfloat16, y=None, config=None):
    w = w.reshape(w.shape[0] * 16, w.shape[1] // 16)
    x_scale = x_scale.view(x_scale.shape[1], x_scale.shape[0]).t()
    return multiply("gemm_a8w8_blockscale_preshuffle", x, w, x_scale, w_scale, dtype, y)
"""
_OLD_FP4 = "(x, w, y, x_scales, w_scales): x, w, x_scales, w_scales, y.dtype, y"

_BATCHED = {
    "batched_gemm_bf16": ("(XQ, WQ, bias=None, dtype=torch.bfloat16, splitK=None, YQ=None)", "XQ", "WQ", "", "", "YQ"),
    "batched_gemm_a8w8": (
        "(XQ, WQ, x_scale, w_scale, bias=None, dtype=torch.bfloat16, YQ=None)", "XQ", "WQ", "x_scale", "w_scale", "YQ",
    ),
    "batched_gemm_a8w8_a_per_token_group_prequant_w_per_batched_tensor_quant": (
        "(X, WQ, w_scale, group_size=128, bias=None, dtype=torch.bfloat16, YQ=None)", "X", "WQ", "", "w_scale", "YQ",
    ),
    "batched_gemm_afp4wfp4": (
        "(x, w, x_scales, w_scales, dtype=torch.bfloat16, y=None)", "x", "w", "x_scales", "w_scales", "y",
    ),
    "batched_gemm_a16wfp4": ("(x, w, w_scales, dtype=torch.bfloat16, y=None)", "x", "w", "", "w_scales", "y"),
}  # fmt: skip

_GLUON = """
import torch
from aiter._core import fault, multiply
if fault("gluon") == "import":
    raise ImportError("cannot import name 'gluon' from 'triton.experimental'")
def gemm_afp4wfp4(x, w, x_scales, w_scales, dtype=torch.bfloat16, y=None, config=None):
    return multiply("gluon", x, w, x_scales, w_scales, dtype, y)
"""

_DISPATCH_NEW = """
import os
import torch
from aiter._core import multiply
def gemm_a4w4(A, B, A_scale, B_scale, bias=None, dtype=torch.bfloat16, alpha=1.0, beta=0.0, bpreshuffle=True):
    print("table in force:", os.environ.get("AITER_CONFIG_GEMM_A4W4", "the image's own"), flush=True)
    return multiply("gemm_a4w4", A, B, A_scale, B_scale, dtype)
"""
_DISPATCH_OLD = """
import csv, os
import torch
from aiter._core import multiply
def lookup(M, N, K):
    path = os.environ.get("AITER_CONFIG_GEMM_A4W4", "")
    if not path or os.environ.get("AITER_LOG_TUNED_CONFIG", "0") == "0":
        return
    with open(path, newline="") as f:
        for row in csv.DictReader(f):
            if [int(row[c]) for c in ("cu_num", "M", "N", "K")] == [256, M, N, K]:
                print(f"[aiter] shape is M:{M}, N:{N}, K:{K}, found padded_M: {M}, N:{N}, K:{K} is tuned on"
                      f" cu_num = 256 in {path}, kernel name is {row['kernelName']}, splitK is {row['splitK']}!")
def gemm_a4w4(A, B, A_scale, B_scale, out, bias=None, alpha=1.0, beta=0.0, bpreshuffle=True):
    lookup(A.shape[0], B.shape[0], 2 * A.shape[1])
    assert out.shape[0] % 32 == 0, "Dim0 of gemm_a4w4_asm output needs to be padded to multiples of 32!"
    out[: A.shape[0]] = multiply("gemm_a4w4", A, B, A_scale, B_scale, out.dtype)
    return out
"""
_TUNED = """
from aiter._core import multiply
class TunedGemm:
    def mm(self, inp, weights, bias=None, otype=None, scale_a=None, scale_b=None, scale_c=None):
        return multiply("tgemm", inp, weights, None, None, otype or inp.dtype, None, bias)
tgemm = TunedGemm()
"""
_SHUFFLE = "def shuffle_weight(x, layout=(16, 16)):\n    assert x.shape[0] % layout[0] == 0\n    return x.clone()\n"
_FP4 = "def e8m0_shuffle(scale):\n    return scale.clone()\n"


def make_operators(root: Path, date: str) -> Path:
    """Write the package of a date to `root`/aiter, which is also a tree that our probe knows; returns `root`."""
    new = date == "new"
    triton = "ops/triton/gemm/basic" if new else "ops/triton"
    batched = "ops/triton/gemm/batched" if new else "ops/triton"
    files = {
        "_core.py": _CORE, "jit/core.py": "", "ops/gemm_op_a4w4.py": _DISPATCH_NEW if new else _DISPATCH_OLD,
        "tuned_gemm.py": _TUNED, "ops/shuffle.py": _SHUFFLE, "utility/fp4_utils.py": _FP4,
    }  # fmt: skip
    for op, form in _TRITON.items():
        form = _OLD_FP4 if not new and op == "gemm_afp4wfp4" else form
        files[f"{triton}/{op}.py"] = _module(op, form)
    for op, parts in _BATCHED.items():
        name = op if new or op != "batched_gemm_a16wfp4" else "batched_gemm_afp4wfp4_pre_quant"
        files[f"{batched}/{name}.py"] = _batched(name, *parts)
    if new:
        files[f"{triton}/gemm_a8w8_blockscale.py"] += _PRESHUFFLED
        files["ops/triton/gluon/gemm_afp4wfp4.py"] = _GLUON
        files["ops/triton/configs/gfx950/gluon/gemm/gemm_afp4wfp4/DEFAULT.json"] = "{}"
    write_files(root / "aiter", files)
    make_packages(root / "aiter")
    return root


def flat_gluon(folder: Path) -> Path:
    """The two files that the runbook copies beside an image without Gluon."""
    return write_files(folder, {"gluon_gemm_afp4wfp4.py": _GLUON, "gfx950-GEMM-AFP4WFP4.json": "{}"})


def _module(op: str, form: str) -> str:
    head, _, passed = form.partition("): ")
    return f"import torch\nfrom aiter._core import multiply\ndef {op}{head}):\n    return multiply({op!r}, {passed})\n"


def _batched(op: str, head: str, x: str, w: str, xs: str, ws: str, out: str) -> str:
    one = f"{xs}[i]" if xs else "None"
    other = "None"
    if ws:  # [B, 1, N] float32, one number for all, or e8m0 bytes by row
        rows = f"{ws}[i].reshape(-1, 1) if {ws}.dtype is torch.float32 else {ws}[i]"
        other = f"({ws} if {ws}.dim() == 1 else {rows})"
    return (
        f"import torch\nfrom aiter._core import multiply\ndef {op}{head}:\n"
        f"    for i in range({x}.shape[0]):\n"
        f"        {out}[i] = multiply({op!r}, {x}[i], {w}[i], {one}, {other}, {out}.dtype)\n"
        f"    return {out}\n"
    )
