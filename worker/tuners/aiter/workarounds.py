"""Workarounds for faults of AITER: how each is recognised in a tree, and what it changes in a scratch copy."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from worker.aiter_tree.locate import TreeFiles
from worker.aiter_tree.scratch_tree import ScratchTree

A4W4 = "a4w4_blockscale"
LIST = "f4gemm/f4gemm_bf16_per1x32Fp4.csv"
"""The a4w4 script's list of ASM kernels, below get_asm_dir()."""
_PRODUCTS = re.compile(r"^(?P<indent>[ \t]*)(?P<name>[xw]_f32) = (?P=name) \* (?P<scales>[xw]_scales_f32)[ \t]*$", re.M)
"""The lines of the a4w4 script's run_torch() where an operand meets its scales."""
_TRIMMED = r"\g<indent>\g<name> = \g<name> * \g<scales>[..., : \g<name>.shape[-1]]"
_TILES = re.compile(r"""["'](tile_[mMnN])["']""")
Edit = tuple[str, "bytes | str"]
"""Path below the root, and its new content, or where it is to lead as a link."""


class WorkaroundRefusedError(Exception):
    """A workaround that is not applied; the text says why."""


@dataclass(frozen=True, slots=True)
class Applicability:
    """Verdict on a workaround (`needed`, `harmless` if it would change nothing, or `harmful`) and its evidence: texts
    of the form `file:line: what stands there`."""

    verdict: str
    evidence: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Workaround:
    """`predicate`: whether a tree's files need it for a chip; `fix`: what it changes in the scratch copy. `source`: the
    commits of ROCm/aiter that brought and mended the fault. `families`: whose runs it is for, empty for all.
    `only_odd_k`: only for shapes whose K has to be padded."""

    name: str
    predicate: Callable[[TreeFiles, str], Applicability]
    fix: Callable[[TreeFiles, str, ScratchTree], list[Edit]]
    source: str
    families: tuple[str, ...] = ()
    only_odd_k: bool = False


def asm_dir(files: TreeFiles) -> str:
    """Result of get_asm_dir(), below the tree's meta folder: `hsa/{gfx}` or `hsa`; "" if it is unknown."""
    core = files.text(files.tree.package / "jit" / "core.py")
    body = re.search(r"^def get_asm_dir\(\)[^\n]*\n(?:[ \t][^\n]*\n)*?[ \t]+return ([^\n]+)", core, re.M)
    value = body[1].strip() if body else ""
    if re.fullmatch(r"\w+", value):
        assignment = re.search(rf"^[ \t]*{value}\s*=\s*([^\n]+)", core, re.M)
        value = assignment[1] if assignment else ""
    if "gfx" in value:
        return "hsa/{gfx}"
    return "hsa" if "hsa" in value else ""


def _is_list_missed(files: TreeFiles, gfx: str) -> Applicability:
    """Each family has its lists in one of the chip's folders."""
    searched = asm_dir(files)
    searched_folder = files.tree.meta / searched.format(gfx=gfx)
    evidence = files.at(files.tree.package / "jit" / "core.py", r"AITER_ASM_DIR\s*=|def get_asm_dir")
    folders = [path for path in sorted((files.tree.meta / "hsa" / gfx).glob("*/")) if path.is_dir()]
    missed = [path for path in folders if not (searched_folder / path.name).exists()]
    if not searched or not missed:
        where = searched or "a folder that is unknown"
        return Applicability("harmless", (*evidence, f"get_asm_dir() leads to {where}"))
    looks = f"{files.name(searched_folder / missed[0].name)}: is where AITER looks"
    lies = f"{files.name(missed[0])}: is where it lies"
    return Applicability("needed", (*evidence, looks, lies))


def _link_lists(files: TreeFiles, gfx: str, scratch: ScratchTree) -> list[Edit]:
    """Every folder of hsa/<gfx> also where get_asm_dir() looks."""
    real = files.tree.meta / "hsa"
    below = (scratch.tree.meta / "hsa").relative_to(scratch.folder)
    names = sorted(p.name for p in (real / gfx).iterdir())
    return [((below / n).as_posix(), f"{gfx}/{n}") for n in names if not os.path.lexists(real / n)]


def _list_header(files: TreeFiles, gfx: str) -> tuple[Path | None, list[str]]:
    """The a4w4 script's list of ASM kernels, and its columns."""
    for folder in (asm_dir(files) or "hsa", "hsa/{gfx}"):
        path = files.tree.meta / folder.format(gfx=gfx) / LIST
        if path.is_file():
            first_line = files.text(path).split("\n", 1)[0]
            return path, [column.strip() for column in first_line.split(",")]
    return None, []


def _is_case_mixed(files: TreeFiles, gfx: str) -> Applicability:
    """Never the list is given the script's names: a C++ struct is made of the list's header, so whoever renames it (the
    older guides' fix) breaks the production kernel too."""
    script = files.tree.scripts.get(A4W4)
    if script is None:
        return Applicability("harmless", ("no a4w4 script here, so there is nothing to agree on",))
    path, columns = _list_header(files, gfx)
    if path is None:
        return Applicability("harmless", (f"no {LIST} for {gfx} here, so there is nothing to agree on",))
    header = set(columns)
    names = set(_TILES.findall(files.text(script)))
    evidence = (*files.at(path, r"\A"), *files.at(script, _TILES.pattern))
    if names and not names <= header and {n.lower() for n in names} <= {c.lower() for c in header}:
        return Applicability("needed", evidence)
    if names and names <= header and header & {"tile_M", "tile_N"}:
        struct = files.at(files.tree.meta / "csrc" / "py_itfs_cu" / "asm_gemm_a4w4.cu", r"\btile_M\b")
        return Applicability("harmful", (*evidence, *struct))
    return Applicability("harmless", evidence)


def _case_of_list(files: TreeFiles, gfx: str, scratch: ScratchTree) -> list[Edit]:
    """The list's own names of its columns in the script."""
    theirs = {c.lower(): c for c in _list_header(files, gfx)[1]}
    return _edited(scratch, lambda text: _TILES.sub(lambda m: m[0].replace(m[1], theirs[m[1].lower()]), text))


def _is_reference_padded(files: TreeFiles, gfx: str) -> Applicability:
    """The reference of the a4w4 script multiplies padded scales by operands that are as wide as K (the quantiser trims
    them by itself since ROCm/aiter e6af9a487d)."""
    script, quantiser = files.tree.scripts.get(A4W4), files.tree.package / "utility" / "fp4_utils.py"
    ours = files.at(script, _PRODUCTS.pattern) if script else []
    trimmed = files.at(quantiser, r":\s*scaleN_valid\s*\]")
    if trimmed or not ours or not files.text(quantiser):
        return Applicability("harmless", (*trimmed, *ours))
    return Applicability("needed", (*files.at(quantiser, r"scaleN\s*=\s*.*\*\s*8\b"), *ours))


def _trim_scales(files: TreeFiles, gfx: str, scratch: ScratchTree) -> list[Edit]:
    """Scales no wider than their operand in the reference. Operands stay whole: only padding goes."""
    return _edited(scratch, lambda text: _PRODUCTS.sub(_TRIMMED, text))


def _edited(scratch: ScratchTree, edit: Callable[[str], str]) -> list[Edit]:
    """The a4w4 script of the copy, as it is now, edited."""
    path = scratch.tree.scripts[A4W4]
    text = edit(TreeFiles(scratch.tree).text(path))
    ast.parse(text)  # nothing that does not parse is ever run
    return [(path.relative_to(scratch.folder).as_posix(), text.encode())]


WORKAROUNDS: dict[str, Workaround] = {
    w.name: w
    for w in (
        Workaround(
            "asm_dir_symlink", _is_list_missed, _link_lists,
            "ROCm/aiter ce08b75719 (2026-01-13) to cfb9de7325 (2026-01-16): aiter/jit/core.py",
        ),
        Workaround(
            "tile_column_case", _is_case_mixed, _case_of_list,
            "ROCm/aiter 9b01b0d818 (2025-11-22) to 0e38ec8038 (2025-12-19): the a4w4 script", (A4W4,),
        ),
        Workaround(
            "k_trim", _is_reference_padded, _trim_scales,
            "ROCm/aiter until e6af9a487d (2026-03-18): aiter/utility/fp4_utils.py", (A4W4,), only_odd_k=True,
        ),
    )
}  # fmt: skip
"""In the order in which they are applied."""
