"""The lists of kernels in the fake AITER's sources, which the build reader reads, and the marks of a build."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.files import write_files

CK = "a4w4_blockscale_256x64_v3"
CK2 = "a4w4_blockscale_256x96_v3"
ASM = "_ZN5aiter42f4gemm_bf16_per1x32Fp4_BpreShuffle_128x128E"
TILE = "a8w8_blockscale_cktile_192"
"""Kernels of the lists."""

A4W4_LIST = """
import os
from dataclasses import dataclass, field

this_dir = os.path.dirname(os.path.abspath(__file__))

@dataclass
class kernelInstance:
    BLOCK: int
    TILE: int
    VERSION: int = 3
    more: list = field(default_factory=lambda: [1])

    @property
    def name(self) -> str:
        \"\"\"The name.\"\"\"
        return ("_").join(["a4w4_blockscale", ("x").join(str(x) for x in [self.BLOCK, self.TILE]), f"v{self.VERSION}"])

kernels_list = {
    0: kernelInstance(256, 64),
    1: kernelInstance(256, 96,),
}
default_kernels_dict = {-1: kernelInstance(1, 1)}
kernels_by_name = {v.name: v for v in kernels_list.values()}
"""
CKTILE_LIST = """
from copy import copy
from dataclasses import dataclass
from chip_info import get_gfx

@dataclass
class Tile:
    M: int
    PerCu: int
    @property
    def name(self):
        parts = ["a8w8_blockscale_cktile", str(self.M)]
        if self.PerCu > 1:
            parts.append(f"p{self.PerCu}")
        return "_".join(parts)

def expand(base, most=2):
    out = dict(base)
    following = max(base.keys()) + 1
    for k in base.values():
        for per_cu in range(1, most + 1):
            if per_cu != k.PerCu:
                other = copy(k)
                other.PerCu = per_cu
                out[following] = other
                following += 1
    return out

if get_gfx().startswith("gfx95"):
    candidate_kernels_cktile_dict = expand({0: Tile(192, 1)})
else:
    candidate_kernels_cktile_dict = expand({0: Tile(64, 1)})
"""
OPERATORS = """
import re
def gemm_a8w8_blockscale(config):
    libtype = config["libtype"]
    if libtype == "ck":
        return 1
    elif libtype == "cktile":
        return 2
def gemm_a8w8_bpreshuffle(config):
    libtype = config["libtype"]
    if libtype in ("ck", "flydsl"):
        return re.match(r"flydsl_bpre_(\\d+)x(\\d+)$", config["kernelName"])
"""
STRICT = "def build_tune_dict():\n    bad_rows = []\n"
CHIP_INFO = "aiter/jit/utils/chip_info.py"
CORE = """
def merged(keys, frame):
    folder = "model_configs"
    keys.append("cu_num")
    keys.append("gfx")
    tagged = "_tag" in frame
    raise RuntimeError("Found duplicate shape entries")
"""
"""The marks by which the merge at AITER's start is told, as of v0.1.13; OLD_CORE: as of v0.1.9."""
OLD_CORE = """
def merged(keys, frame):
    folder = "model_configs"
    assert frame, "Column mismatch"
    keys.append("cu_num")
"""
CHIPS = 'GFX_MAP = {5: "gfx942", 8: "gfx950"}\n'


def tree(
    root: Path, *, by_name: bool = True, strict: bool = True, built: Mapping[str, bytes] | None = None,
    asm: Sequence[str] = (ASM,), gfx: str = "gfx950", core: str = "import os\n",
) -> Path:  # fmt: skip
    """A checkout. `strict`: its code is not made for a kernel that the list lacks; `built`: modules by name; `core`:
    what it says of the merge at its start."""
    files = {
        "aiter/jit/core.py": core,
        "aiter/jit/utils/build_targets.py": CHIPS,
        CHIP_INFO: STRICT if strict else "",
        "aiter/ops/gemm_op_a8w8.py": OPERATORS,
        "csrc/ck_gemm_a4w4_blockscale/gemm_a4w4_blockscale_common.py": A4W4_LIST,
        "csrc/ck_gemm_a4w4_blockscale/gen_instances.py": "build(kernels_by_name=1)" if by_name else "build()",
        "csrc/ck_gemm_a4w4_blockscale/gemm.cu": '"is not present in the compiled registry"' if by_name else "",
        "csrc/ck_gemm_a8w8_blockscale/gemm_a8w8_blockscale_cktile_instance.py": CKTILE_LIST,
        "csrc/ck_gemm_a8w8_blockscale/gen_instances_cktile.py": "build(kernels_by_name=1)",
        f"hsa/{gfx}/f4gemm/f4gemm_bf16_per1x32Fp4.csv": "tile_M,knl_name,co_name\n"
        + "".join(f"128,{n},{n}.co\n" for n in asm),
    }
    modules = {f"aiter/jit/{name}.so": data for name, data in (built or {}).items()}
    return write_files(root, {**files, **modules})
