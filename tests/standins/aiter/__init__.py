"""The fake AITER: trees of its layout that act as AITER does, without a GPU and without a kernel of AITER's.

What a test needs of it is a part of its own, and parts may be laid into one tree:

- `make_tree(folder, date)`, here: the tuner scripts of two AITERs (the runbook's, the newest), as an image has them;
- `operators`: the functions that `bench` and `verify` call, at two dates;
- `triton_gemm`: one Triton GEMM with the loader of its config files; `config_files`: such files alone;
- `kernel_lists`: the lists of what a build contains; `checkout`: the same in a git repository with tables and checks.

What it does was written from what the real files at that commit do (layout, options, lines and where they go, columns,
faults), none of it copied. Times follow from the shape alone. Which shapes fault, and how, is said in `faults.json` in
the tree's root (see parts/device.py.j2).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from tests.standins.aiter.layout import TREES, Date, Script, scripts

_PARTS = Path(__file__).parent / "parts"
_ASM_TILES = ((256, 256), (128, 512), (192, 256), (64, 128), (32, 1024))
_BF16 = "torch.bfloat16"
_UNTUNED = {
    "a16w16": ("M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle", f"128,128,128,False,{_BF16},{_BF16},False,False"),
    "fmoe": (
        "token,model_dim,inter_dim,expert,topk,act_type,dtype,q_dtype_a,q_dtype_w,q_type,use_g1u1,doweight_stage1",
        f"16,128,128,8,2,ActivationType.Silu,{_BF16},{_BF16},{_BF16},QuantType.No,1,0",
    ),
}
"""Header and row of the untuned tables that come with a tree, where they are not M,N,K."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A tree on disk. `site` holds what a real image has beside AITER (torch, triton, a rocminfo)."""

    date: Date
    root: Path
    site: Path

    @property
    def python(self) -> Path:
        """This Python with the site on its path, as the image's own would have it."""
        return self.site / "bin/python3"


def make_tree(folder: Path, date: str, faults: Mapping[str, Any] | None = None) -> Tree:
    """Write the tree of a date (a name of TREES) to `folder/aiter`, with `folder/site` beside it.

    `faults` is the content of faults.json. Raises KeyError for a date there is none of.
    """
    d = TREES[date]
    root, site = folder / "aiter", folder / "site"
    jinja = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_PARTS), undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    found = scripts(d)

    def put(path: str, part: str, f: Script | None = None, base: Path = root) -> Path:
        to = base / path
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text(jinja.get_template(part).render(d=d, f=f, families=found))
        return to

    put("aiter/__init__.py", "init.py.j2")
    put("aiter/_device.py", "device.py.j2")
    put("aiter/_kernels.py", "kernels.py.j2")
    put("aiter/_table.py", "table.py.j2")
    put("aiter/jit/core.py", "core.py.j2")
    put("aiter/jit/utils/chip_info.py", "chip_info.py.j2")
    put("aiter/jit/utils/file_baton.py", "file_baton.py.j2")
    put("aiter/utility/fp4_utils.py", "fp4_utils.py.j2")
    put("aiter/utility/mp_tuner.py", "mp_tuner.py.j2")
    put("aiter/utility/base_tuner.py", "base_tuner.py.j2")
    for package in ("aiter/jit", "aiter/jit/utils", "aiter/utility"):
        (root / package / "__init__.py").touch()
    for f in found:
        put(f.path, f.part or "script.py.j2", f)
        _tables(root, f)
    if d.new:  # what the youngest script imports of the tests
        (root / "op_tests").mkdir()
        (root / "op_tests/test_opus_a8w8_bmm.py").write_text("GROUP = 128\n")
    _asm_list(root)
    put("torch/__init__.py", "torch.py.j2", base=site)
    put("triton/__init__.py", "triton.py.j2", base=site)
    put("bin/rocminfo", "rocminfo.j2", base=site).chmod(0o755)
    python = site / "bin/python3"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}{site}" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (root / "faults.json").write_text(json.dumps(dict(faults or {}), indent=1))
    return Tree(d, root, site)


def change(path: Path, *texts: tuple[str, str]) -> None:
    """Change a file of a tree: each text to a new one. Raises AssertionError where it has not got it."""
    text = path.read_text()
    for old, new in texts:
        assert old in text, f"{path} has no {old!r}"
        text = text.replace(old, new)
    path.write_text(text)


def _tables(root: Path, f: Script) -> None:
    if f.part:  # AITER ships neither
        return
    configs = root / "aiter/configs"
    configs.mkdir(parents=True, exist_ok=True)
    header, row = _UNTUNED.get(f.name, ("M,N,K", "128,128,128"))
    if "q_dtype_w" in f.key and f.name != "fmoe":
        header, row = "M,N,K,q_dtype_w", "128,128,128,torch.float8_e4m3fn"
    (configs / f.untuned).write_text(f"{header}\n{row}\n")
    (configs / f.tuned).write_text(",".join(f.key + f.result) + "\n")


def _asm_list(root: Path) -> None:
    lines = ["tile_M,tile_N,splitK,bpreshuffle,knl_name,co_name"]
    for at, (m, n) in enumerate(_ASM_TILES):
        for shuffled in (0, 1):
            stem = f"f4gemm_bf16_per1x32Fp4_{'' if shuffled else 'no'}BpreShuffle_{m}x{n}"
            lines.append(f"{m},{n},{int(at < 2) * shuffled},{shuffled},_ZN5aiter{len(stem)}{stem}E,{stem}.co")
    table = root / "hsa/gfx950/f4gemm/f4gemm_bf16_per1x32Fp4.csv"
    table.parent.mkdir(parents=True)
    table.write_text("\n".join(lines) + "\n")
