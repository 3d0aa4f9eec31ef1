"""Small trees of AITER's layout with lists of kernels, of our own making, for the build reader."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from worker.families import FAMILIES, Family

CK = "a4w4_blockscale_256x64_v3"
CK2 = "a4w4_blockscale_256x96_v3"
ASM = "_ZN5aiter42f4gemm_bf16_per1x32Fp4_BpreShuffle_128x128E"

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
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name, data in (built or {}).items():
        (root / "aiter" / "jit" / f"{name}.so").write_bytes(data)
    return root


A4W4 = FAMILIES["a4w4_blockscale"]
BLOCKSCALE = FAMILIES["a8w8_blockscale"]
TILE = "a8w8_blockscale_cktile_192"
"""A kernel of the list of `aiterbuild.tree`."""
CHECK = """
import csv, glob, os, unittest

CONFIGS = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "aiter", "configs")


class Test(unittest.TestCase):
    def test_tables(self):
        keys = set()
        for path in sorted(glob.glob(CONFIGS + "/**/*tuned_gemm*.csv", recursive=True)):
            with open(path, newline="") as f:
                for row in csv.DictReader(f) if "untuned" not in path else ():
                    self.assertGreater(float(row["us"]), 0)
                    key = (row["gfx"], row["cu_num"], row["M"], row["N"], row["K"], "libtype" in row)
                    self.assertNotIn(key, keys)
                    keys.add(key)
"""
SKIPPED = """
import unittest


@unittest.skip("aiter.jit.core not importable: No module named 'torch'")
class Test(unittest.TestCase):
    def test_merge(self):
        pass
"""


def line(of: Family, **cells: Any) -> str:
    """A row of a tuned table. Cells that are not given get plain defaults."""
    plain = {"gfx": "gfx950", "cu_num": 256, "N": 64, "K": 128, "us": 10.0, "splitK": 0, of.err_column: 0.0}
    full = {**{c.name: c.default or 64 for c in of.columns}, **plain, **cells}
    us = float(full["us"])
    full.setdefault(
        "tflops", round(of.flops({k: v for k, v in full.items() if k in of.key_names}) / us / 1e6, 6) if us > 0 else 0
    )
    return ",".join(str(full.get(n, 0)) for n in of.tuned_header)


def text(of: Family, *lines: str) -> str:
    """A tuned table."""
    return "\n".join((",".join(of.aiter_header), *lines)) + "\n"


def untuned(of: Family, *lines: str) -> str:
    """A list of shapes."""
    return "\n".join((",".join(of.key_names), *lines)) + "\n"


def checkout(folder: Path, files: Mapping[str, str] | None = None, *, guard: str = CHECK) -> Path:
    """A repository whose branch main holds a tree, the families' tables and lists (empty but for `files`, which are
    named below aiter/configs), and checks named as AITER's are."""
    tree(folder, core=CORE)
    configs = {
        A4W4.tuned_csv: text(A4W4), A4W4.untuned_csv: untuned(A4W4),
        BLOCKSCALE.tuned_csv: text(BLOCKSCALE), BLOCKSCALE.untuned_csv: untuned(BLOCKSCALE), **(files or {}),
    }  # fmt: skip
    checks = {"test_csv_validation.py": CHECK, "test_config_shape_collision.py": guard, "__init__.py": ""}
    for name, content in (
        *((f"aiter/configs/{n}", t) for n, t in configs.items()),
        *((f"op_tests/tuning_tests/{n}", t) for n, t in checks.items()),
        (".gitattributes", "*.csv text eol=lf\n"),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    git(folder, "init", "-q", "-b", "main")
    git(folder, "config", "user.name", "A Person")
    git(folder, "config", "user.email", "a@person")
    commit(folder, "base")
    return folder


def commit(folder: Path, message: str, files: Mapping[str, str] | None = None) -> str:
    """Commit everything, with these files (named below the checkout) changed; the commit."""
    for name, content in (files or {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    git(folder, "add", "-A", "-f")
    git(folder, "commit", "-q", "-m", message)
    return git(folder, "rev-parse", "HEAD").strip()


def git(folder: Path, *words: str) -> str:
    """Output of git in a repository, whatever this machine's own configuration is."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | {"GIT_CONFIG_GLOBAL": os.devnull}
    argv: Sequence[str] = ["git", "-C", str(folder), *words]
    return subprocess.run(argv, check=True, capture_output=True, text=True, env=env).stdout


def show(folder: Path, ref: str, name: str) -> str:
    """A file at a ref."""
    return git(folder, "show", f"{ref}:{name}")
