"""Workarounds for faults of AITER: how each is recognised in a tree, and what it changes in a scratch copy.

findings.py asks each `predicate`; session.py asks `needed_workarounds` for those of a family's shapes, and applies them
to a scratch copy with `apply_workarounds`. The real tree is never changed. Versions alone do not tell: the runbook's
image mixes a tuner script and a package of different dates, so every predicate reads files. To add a workaround, write
its two functions and an entry of WORKAROUNDS, and a case of tests/unit/worker/aiter/test_workarounds.py.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worker.aiter_tree.locate import TreeFiles
from worker.aiter_tree.scratch_tree import ScratchTree, digest
from worker.families import Family

if TYPE_CHECKING:
    from worker.tuners.aiter.findings import Findings

A4W4 = "a4w4_blockscale"
LIST = "f4gemm/f4gemm_bf16_per1x32Fp4.csv"
"""The a4w4 script's list of ASM kernels, below get_asm_dir()."""
_PRODUCTS = re.compile(r"^(?P<indent>[ \t]*)(?P<name>[xw]_f32) = (?P=name) \* (?P<scales>[xw]_scales_f32)[ \t]*$", re.M)
"""The lines of the a4w4 script's run_torch() where an operand meets its scales."""
_TRIMMED = r"\g<indent>\g<name> = \g<name> * \g<scales>[..., : \g<name>.shape[-1]]"
_TILES = re.compile(r"""["'](tile_[mMnN])["']""")
Edit = tuple[str, "bytes | str"]
"""Path below the root, and its new content, or where it is to lead as a link."""
Applied = Mapping[str, Any]
"""Record of a workaround in use: {name, source, evidence, files: [{file, sha256_before, sha256_after}]}; "" for the
hash of a file that is not there."""


class WorkaroundRefusedError(Exception):
    """A workaround that is not applied; the text says why."""


@dataclass(frozen=True, slots=True)
class Applicability:
    """Verdict on a workaround for one tree."""

    verdict: str
    """`needed`, `harmless` if it would change nothing, or `harmful`."""
    evidence: tuple[str, ...]
    """Texts of the form `file:line: what stands there`."""


@dataclass(frozen=True, slots=True)
class Workaround:
    """A fault of AITER with its remedy."""

    name: str
    predicate: Callable[[TreeFiles, str], Applicability]
    """(files, gfx) -> whether the tree needs it for a chip."""
    fix: Callable[[TreeFiles, str, ScratchTree], list[Edit]]
    """(files, gfx, scratch copy) -> what it changes in the copy."""
    source: str
    """The commits of ROCm/aiter that brought and mended the fault."""
    families: tuple[str, ...] = ()
    """The families whose runs it is for; empty for all."""
    only_padded_k: bool = False
    """Only for shapes whose K has to be padded (Family.aiter.pads_k_to)."""


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
    """The script says tile_m and the list's header tile_M. We change the script, never the list: a C++ struct is made
    of the list's header, so renaming there (the older guides' fix) breaks the production kernel too."""
    script = files.tree.scripts.get(A4W4)
    if script is None:
        return Applicability("harmless", ("no a4w4 script here, so there is nothing to agree on",))
    path, columns = _list_header(files, gfx)
    if path is None:
        return Applicability("harmless", (f"no {LIST} for {gfx} here, so there is nothing to agree on",))
    header = set(columns)
    names = set(_TILES.findall(files.text(script)))
    evidence = (*files.at(path, r"\A"), *files.at(script, _TILES.pattern))
    if not names:
        return Applicability("harmless", evidence)
    if names <= header:
        if not header & {"tile_M", "tile_N"}:
            return Applicability("harmless", evidence)
        struct = files.at(files.tree.meta / "csrc" / "py_itfs_cu" / "asm_gemm_a4w4.cu", r"\btile_M\b")
        return Applicability("harmful", (*evidence, *struct))
    differs_in_case = {name.lower() for name in names} <= {column.lower() for column in header}
    return Applicability("needed" if differs_in_case else "harmless", evidence)


def _case_of_list(files: TreeFiles, gfx: str, scratch: ScratchTree) -> list[Edit]:
    """The list's own names of its columns in the script."""
    _, columns = _list_header(files, gfx)
    by_lower_case = {column.lower(): column for column in columns}

    def rename(match: re.Match[str]) -> str:
        return match[0].replace(match[1], by_lower_case[match[1].lower()])

    return _edited(scratch, lambda text: _TILES.sub(rename, text))


def _is_reference_padded(files: TreeFiles, gfx: str) -> Applicability:
    """The reference of the a4w4 script multiplies padded scales by operands that are as wide as K (the quantiser trims
    them by itself since ROCm/aiter e6af9a487d)."""
    script = files.tree.scripts.get(A4W4)
    products = files.at(script, _PRODUCTS.pattern) if script else []
    quantiser = files.tree.package / "utility" / "fp4_utils.py"
    trimmed = files.at(quantiser, r":\s*scaleN_valid\s*\]")
    if trimmed or not products or not files.text(quantiser):
        return Applicability("harmless", (*trimmed, *products))
    padded = files.at(quantiser, r"scaleN\s*=\s*.*\*\s*8\b")
    return Applicability("needed", (*padded, *products))


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
    "asm_dir_symlink": Workaround(
        "asm_dir_symlink",
        _is_list_missed,
        _link_lists,
        source="ROCm/aiter ce08b75719 (2026-01-13) to cfb9de7325 (2026-01-16): aiter/jit/core.py",
    ),
    "tile_column_case": Workaround(
        "tile_column_case",
        _is_case_mixed,
        _case_of_list,
        source="ROCm/aiter 9b01b0d818 (2025-11-22) to 0e38ec8038 (2025-12-19): the a4w4 script",
        families=(A4W4,),
    ),
    "k_trim": Workaround(
        "k_trim",
        _is_reference_padded,
        _trim_scales,
        source="ROCm/aiter until e6af9a487d (2026-03-18): aiter/utility/fp4_utils.py",
        families=(A4W4,),
        only_padded_k=True,
    ),
}
"""In the order in which they are applied."""


def needed_workarounds(findings: Findings, family: Family, keys: Iterable[Mapping[str, object]] = ()) -> list[str]:
    """The workarounds that a family's shapes need on a tree, in the order in which to apply them."""
    step = family.aiter.pads_k_to
    is_k_padded = bool(step) and any(int(str(key.get("K") or 0)) % step for key in keys)
    names = []
    for workaround in WORKAROUNDS.values():
        is_for_family = not workaround.families or family.name in workaround.families
        is_for_shapes = is_k_padded or not workaround.only_padded_k
        if findings.workarounds[workaround.name].verdict == "needed" and is_for_family and is_for_shapes:
            names.append(workaround.name)
    return names


def apply_workarounds(
    findings: Findings, names: Iterable[str], folder: Path
) -> tuple[ScratchTree, tuple[Applied, ...]]:
    """Make a scratch copy of the tree of the findings in `folder` with these workarounds, which are needed on it.

    Raises OSError, and WorkaroundRefusedError if one changes nothing.
    """
    tree = findings.tree
    gfx = findings.gfx
    scratch = ScratchTree.make(tree, folder)
    applied = []
    for name in names:
        workaround = WORKAROUNDS[name]
        evidence = findings.workarounds[name].evidence
        files = [_edit(scratch, path, new) for path, new in workaround.fix(TreeFiles(tree), gfx, scratch)]
        if workaround.predicate(TreeFiles(scratch.tree), gfx).verdict == "needed":
            raise WorkaroundRefusedError(
                f"{name} was tried on a scratch copy and mended nothing: {'; '.join(evidence)}"
            )
        applied.append({"name": name, "source": workaround.source, "files": files, "evidence": list(evidence)})
    return scratch, tuple(applied)


def _edit(scratch: ScratchTree, path: str, new: bytes | str) -> dict[str, str]:
    """Write or link one file of the copy; the hashes of it before and after."""
    before = digest(scratch.folder / path)
    if isinstance(new, bytes):
        scratch.write(path, new)
    else:
        scratch.link(path, new)
    return {"file": path, "sha256_before": before, "sha256_after": digest(scratch.folder / path)}
