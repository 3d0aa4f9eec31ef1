"""Small trees of AITER's layout, of our own making, for the probe and the workarounds."""

from __future__ import annotations

from pathlib import Path

LIST = "hsa/gfx950/f4gemm/f4gemm_bf16_per1x32Fp4.csv"
SCRIPT = "csrc/ck_gemm_a4w4_blockscale/gemm_a4w4_blockscale_tune.py"

CORE = """
import os
AITER_META_DIR = "somewhere"
AITER_ASM_DIR = f"{AITER_META_DIR}/hsa/"
def get_asm_dir():
    return os.path.join(AITER_ASM_DIR, get_gfx())
"""
PLAIN_CORE = CORE.replace("os.path.join(AITER_ASM_DIR, get_gfx())", "AITER_ASM_DIR")
BASE = """
import sys
class TunerCommon:
    ARG_DEFAULTS = {"batch": 100, "timeout": 1800}
    def _setup_common_arguments(self):
        defaults = self.get_arg_defaults()
        self.parser.add_argument("-i", "--untune_file", default="")
        self.parser.add_argument("-o2", "--profile_file", default="")
        self.parser.add_argument("--sort", type=str2bool, default=defaults.get("sort", False))
        self.parser.add_argument("--batch", type=int, default=defaults["batch"])
        self.parser.add_argument("--timeout", type=int, default=defaults["timeout"])
        self.parser.add_argument("--all", action="store_true")
    def tune_summary(self, status):
        sys.exit(1)
class GemmCommonTuner(TunerCommon):
    ARG_DEFAULTS = {**TunerCommon.ARG_DEFAULTS, "sort": True}
    def __init__(self, name, key=["gfx", "cu_num", "M", "N", "K"], resultList=["us"]):
        pass
    def post_process(self, rets, args, topk=-1):
        if args.profile_file != "":
            frame = self.result_to_df(rets)
            if exists(args.profile_file):
                frame = concat([read_csv(args.profile_file), frame])
            frame.to_csv(args.profile_file)
        for key, times in rets:
            effective = min(topk, len(times))
"""
POOL = """
def mp_tuner(tasks, in_datas, mp_num=0, fast_mode=False, shape_grouped=False, timeout=None):
    if mp_num == 1 and fast_mode == 0:
        shape_grouped = True
    pool = mp.Pool(processes=mp_num, initializer=begin, initargs=())
    print("Pool restarted. Continuing")
"""
QUANTISER = """
def dynamic_mxfp4_quant(x, shuffle=False):
    scaleN = triton.cdiv(scaleN_valid, 8) * 8
    offs = (
        first
        + bs_offs_0 * 2 * 16 * scaleN_pad
    )
    if not shuffle:
        out = out[:M, :scaleN_valid].contiguous()
    return out
"""
A4W4 = """
from aiter.jit.core import get_asm_dir
from aiter.utility.base_tuner import GemmCommonTuner
def run_torch(x_f32, w_f32, x_scales_f32, w_scales_f32):
    x_f32 = x_f32 * x_scales_f32
    w_f32 = w_f32 * w_scales_f32
    return x_f32 @ w_f32
class GemmA4W4Tuner(GemmCommonTuner):
    ARG_DEFAULTS = {**GemmCommonTuner.ARG_DEFAULTS, "tune_file": "t.csv"}
    def _setup_specific_arguments(self):
        self.parser.add_argument("--blockPerCu", nargs="+", type=int, default=[1, 2])
    def get_asm_kernels(self, file):
        return read(file).groupby(["tile_M", "tile_N"])
    def tune(self, untunedf, tunedf, args):
        path = f"{get_asm_dir()}/f4gemm/f4gemm_bf16_per1x32Fp4.csv"
        tile_m, tile_n = first(self.get_asm_kernels(path))
        return mp_tuner([], [], args.mp, timeout=args.timeout)
if __name__ == "__main__":
    tuner = GemmA4W4Tuner("a4w4", description="x")
    tuner.run(tuner.parse_args())
"""
TABLE = "tile_M,tile_N,splitK,bpreshuffle,knl_name,co_name\n256,256,0,1,_ZN1kE,k.co\n"


def make(root: Path, **changes: str | None) -> Path:
    """A tree as of today; `changes` by name (core, base, pool, quantiser, script, table): other texts, None for no
    file."""
    files = {
        "aiter/__init__.py": "",
        "aiter/jit/core.py": changes.get("core", CORE),
        "aiter/utility/base_tuner.py": changes.get("base", BASE),
        "aiter/utility/mp_tuner.py": changes.get("pool", POOL),
        "aiter/utility/fp4_utils.py": changes.get("quantiser", QUANTISER),
        SCRIPT: changes.get("script", A4W4),
        LIST: changes.get("table", TABLE),
    }
    for rel, text in files.items():
        if text is not None:
            path = root / rel
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return root
