"""Workarounds for faults of some dates of AITER: a table of predicate and fix.

A workaround is applied only if its predicate holds on the files of that tree. It changes a scratch copy, and the record
holds hashes of each file before and after. It is refused if it would do harm, or change nothing.
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
from worker.aiter_tree.scratch import ScratchTree, digest
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


Applied = Mapping[str, Any]
"""Record of a workaround in use: `name`, `source`, `evidence`, `files` with hashes before and after ("": no file)."""


def needed(found: Findings, family: Family, keys: Iterable[Mapping[str, object]] = ()) -> list[str]:
    """The workarounds that a family's shapes need on this tree, in the order in which to apply them."""
    step = family.aiter.pads_k_to
    odd = step and any(int(str(k.get("K") or 0)) % step for k in keys)
    return [
        w.name
        for w in WORKAROUNDS.values()
        if found.workarounds[w.name].verdict == "needed"
        and (not w.families or family.name in w.families)
        and (odd or not w.only_odd_k)
    ]


def prepare(
    found: Findings, family: Family, keys: Iterable[Mapping[str, object]], folder: Path
) -> tuple[ScratchTree | None, tuple[Applied, ...]]:
    """A scratch copy with everything applied that these shapes need, (None, ()) if they need nothing.

    Raises WorkaroundRefusedError and OSError; the real tree is as it was, whatever happens.
    """
    names = needed(found, family, keys)
    if not names:
        return None, ()
    scratch = ScratchTree.make(found.tree, folder)
    return scratch, tuple(apply(name, found, scratch) for name in names)


def apply(name: str, found: Findings, scratch: ScratchTree) -> Applied:
    """Apply one to the scratch copy of the tree that was found. Raises WorkaroundRefusedError, and OSError."""
    workaround, verdict = WORKAROUNDS[name], found.workarounds[name]
    evidence = "; ".join(verdict.evidence)
    if verdict.verdict != "needed":
        what = "would do harm here" if verdict.verdict == "harmful" else "is not needed here"
        raise WorkaroundRefusedError(f"{name} {what}: {evidence}")
    files = []
    for rel, new in workaround.fix(TreeFiles(found.tree), found.gfx, scratch):
        before = digest(scratch.folder / rel)
        scratch.write(rel, new) if isinstance(new, bytes) else scratch.link(rel, new)
        files.append({"file": rel, "sha256_before": before, "sha256_after": digest(scratch.folder / rel)})
    if workaround.predicate(TreeFiles(scratch.tree), found.gfx).verdict == "needed":
        raise WorkaroundRefusedError(f"{name} was tried on a scratch copy and mended nothing: {evidence}")
    return {"name": name, "source": workaround.source, "files": files, "evidence": list(verdict.evidence)}


# --- lists of ASM kernels where get_asm_dir() looks -----------------------------------------------------------------


def asm_dir(files: TreeFiles) -> str:
    """Result of get_asm_dir(), below the tree's meta folder: `hsa/{gfx}` or `hsa`; "" if it is unknown."""
    core = files.text(files.tree.package / "jit" / "core.py")
    body = re.search(r"^def get_asm_dir\(\)[^\n]*\n(?:[ \t][^\n]*\n)*?[ \t]+return ([^\n]+)", core, re.M)
    value = body[1].strip() if body else ""
    if re.fullmatch(r"\w+", value):
        given = re.search(rf"^[ \t]*{value}\s*=\s*([^\n]+)", core, re.M)
        value = given[1] if given else ""
    return "hsa/{gfx}" if "gfx" in value else "hsa" if "hsa" in value else ""


def _is_list_missed(files: TreeFiles, gfx: str) -> Applicability:
    """Each family has its lists in one of the chip's folders."""
    where, meta = asm_dir(files), files.tree.meta
    seen = files.at(files.tree.package / "jit" / "core.py", r"AITER_ASM_DIR\s*=|def get_asm_dir")
    there = meta / where.format(gfx=gfx)
    missed = [p for p in sorted((meta / "hsa" / gfx).glob("*/")) if p.is_dir() and not (there / p.name).exists()]
    if not where or not missed:
        return Applicability("harmless", (*seen, f"get_asm_dir() leads to {where or 'a folder that is unknown'}"))
    lies = f"{files.name(missed[0])}: is where it lies"
    return Applicability("needed", (*seen, f"{files.name(there / missed[0].name)}: is where AITER looks", lies))


def _link_lists(files: TreeFiles, gfx: str, scratch: ScratchTree) -> list[Edit]:
    """Every folder of hsa/<gfx> also where get_asm_dir() looks."""
    real = files.tree.meta / "hsa"
    below = (scratch.tree.meta / "hsa").relative_to(scratch.folder)
    names = sorted(p.name for p in (real / gfx).iterdir())
    return [((below / n).as_posix(), f"{gfx}/{n}") for n in names if not os.path.lexists(real / n)]


# --- names of the list's columns in the a4w4 script -----------------------------------------------------------------


def _list_header(files: TreeFiles, gfx: str) -> tuple[Path | None, list[str]]:
    """The a4w4 script's list of ASM kernels, and its columns."""
    places = (files.tree.meta / (w or "hsa").format(gfx=gfx) / LIST for w in (asm_dir(files), "hsa/{gfx}"))
    path = next((p for p in places if p.is_file()), None)
    return path, [c.strip() for c in files.text(path).split("\n", 1)[0].split(",")] if path else []


def _is_case_mixed(files: TreeFiles, gfx: str) -> Applicability:
    """Never the list is given the script's names: a C++ struct is made of the list's header, so whoever renames it (the
    older guides' fix) breaks the production kernel too."""
    (path, columns), script = _list_header(files, gfx), files.tree.scripts.get(A4W4)
    if script is None or path is None:
        what = "no a4w4 script" if script is None else f"no {LIST} for {gfx}"
        return Applicability("harmless", (f"{what} here, so there is nothing to agree on",))
    header, names = set(columns), set(_TILES.findall(files.text(script)))
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


# --- scales of a K that is no multiple of 256 -----------------------------------------------------------------------


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
