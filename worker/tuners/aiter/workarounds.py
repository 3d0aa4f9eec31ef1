"""Workarounds for faults of some dates of AITER, each applied only where its predicate holds on the files.

A workaround changes a scratch copy, and the record holds hashes of each file before and after. It is refused if it
would do harm, or change nothing.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.aiter_tree.locate import read_text
from worker.aiter_tree.scratch import ScratchTree, digest
from worker.families import Family
from worker.tuners.aiter.findings import A4W4, PRODUCTS, Applicability, Findings, asm_list, inspect

SHIM = Path(__file__).parent / "shim"
MP_TUNER = "aiter/utility/mp_tuner.py"
_Edit = tuple[str, "bytes | str"]
"""Path, and its new content, or where it is to lead as a link."""


_TRIMMED = r"\g<indent>\g<name> = \g<name> * \g<scales>[..., : \g<name>.shape[-1]]"


class WorkaroundRefusedError(Exception):
    """A workaround that is not applied; the text says why."""


@dataclass(frozen=True, slots=True)
class FileChange:
    """One file or link of the scratch copy, its path below the root, and its hashes ("": it was not there)."""

    file: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class AppliedWorkaround:
    """A workaround in use."""

    name: str
    source: str
    changes: tuple[FileChange, ...]
    evidence: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Data for provenance."""
        return {
            "name": self.name,
            "source": self.source,
            "files": [{"file": c.file, "sha256_before": c.before, "sha256_after": c.after} for c in self.changes],
            "evidence": list(self.evidence),
        }


@dataclass(frozen=True, slots=True)
class Workaround:
    """`families`: whose runs it is for, empty for all. `act`: paths below the root with new content or link target.
    `source`: the commits of ROCm/aiter that brought and mended what it works around."""

    name: str
    families: tuple[str, ...]
    act: Callable[[Findings, ScratchTree], list[_Edit]]
    source: str
    only_odd_k: bool = False

    def predicate(self, found: Findings) -> Applicability:
        """Applicability by the files: needed, harmless or harmful."""
        return found.workarounds[self.name]


def needed(found: Findings, family: Family, keys: Iterable[Mapping[str, object]] = ()) -> list[str]:
    """The workarounds that a family's shapes need on this tree, in the order in which to apply them."""
    step = family.aiter.pads_k_to
    odd = step and any(int(str(k.get("K") or 0)) % step for k in keys)
    return [
        w.name
        for w in REGISTRY.values()
        if w.predicate(found).verdict == "needed"
        and (not w.families or family.name in w.families)
        and (odd or not w.only_odd_k)
    ]


def prepare(
    found: Findings, family: Family, keys: Iterable[Mapping[str, object]], folder: Path
) -> tuple[ScratchTree | None, tuple[AppliedWorkaround, ...]]:
    """A scratch copy with everything applied that these shapes need, (None, ()) where they need nothing.

    Raises WorkaroundRefusedError and OSError; the real tree is as it was, whatever happens.
    """
    names = needed(found, family, keys)
    if not names:
        return None, ()
    scratch = ScratchTree.make(found.tree, folder)
    return scratch, tuple(apply(name, found, scratch) for name in names)


def apply(name: str, found: Findings, scratch: ScratchTree) -> AppliedWorkaround:
    """Apply one to the scratch copy of the tree that was found. Raises WorkaroundRefusedError, and OSError."""
    workaround = REGISTRY[name]
    verdict = workaround.predicate(found)
    evidence = "; ".join(verdict.evidence)
    if verdict.verdict != "needed":
        what = "would do harm here" if verdict.verdict == "harmful" else "is not needed here"
        raise WorkaroundRefusedError(f"{name} {what}: {evidence}")
    changes: list[FileChange] = []
    for rel, new in workaround.act(found, scratch):
        before = digest(scratch.folder / rel)
        if isinstance(new, bytes):
            scratch.write(rel, new)
        else:
            scratch.link(rel, new)
        changes.append(FileChange(rel, before, digest(scratch.folder / rel)))
    if inspect(scratch.tree, found.gfx).workarounds[name].verdict == "needed":
        raise WorkaroundRefusedError(f"{name} was tried on a scratch copy and mended nothing: {evidence}")
    return AppliedWorkaround(name, workaround.source, tuple(changes), verdict.evidence)


def _link_lists(found: Findings, scratch: ScratchTree) -> list[_Edit]:
    """Every folder of hsa/<gfx> also where get_asm_dir() looks: each family has its lists in one of them."""
    real = scratch.real.meta / "hsa"
    below = (scratch.tree.meta / "hsa").relative_to(scratch.folder)
    names = sorted(p.name for p in (real / found.gfx).iterdir())
    return [((below / n).as_posix(), f"{found.gfx}/{n}") for n in names if not os.path.lexists(real / n)]


def _case_of_list(found: Findings, scratch: ScratchTree) -> list[_Edit]:
    """The list's own names of its columns in the script."""
    path = asm_list(found.tree, found.asm_dir, found.gfx)
    header = read_text(path).split("\n", 1)[0].split(",") if path else []
    theirs = {c.strip().lower(): c.strip() for c in header if c.strip().lower() in ("tile_m", "tile_n")}

    def edit(text: str) -> str:
        for plain, name in theirs.items():
            text = re.sub(rf"""(?i)(['"]){plain}(['"])""", rf"\g<1>{name}\g<2>", text)
        return text

    return [_edited(scratch, edit)]


def _trim_scales(found: Findings, scratch: ScratchTree) -> list[_Edit]:
    """Scales no wider than their operand in the reference. Operands stay whole: only padding goes."""
    return [_edited(scratch, lambda text: PRODUCTS.sub(_TRIMMED, text))]


def _edited(scratch: ScratchTree, edit: Callable[[str], str]) -> _Edit:
    """The a4w4 script of the copy, as it is now, edited."""
    path = scratch.tree.scripts[A4W4]
    text = edit(read_text(path))
    ast.parse(text)  # nothing that does not parse is ever run
    return path.relative_to(scratch.folder).as_posix(), text.encode()


_ALL = (
    Workaround(
        "asm_dir_symlink",
        (),
        _link_lists,
        "ROCm/aiter ce08b75719 (2026-01-13) to cfb9de7325 (2026-01-16): aiter/jit/core.py",
    ),
    Workaround(
        "tile_column_case",
        (A4W4,),
        _case_of_list,
        "ROCm/aiter 9b01b0d818 (2025-11-22) to 0e38ec8038 (2025-12-19): the a4w4 script",
    ),
    Workaround(
        "k_trim",
        (A4W4,),
        _trim_scales,
        "ROCm/aiter until e6af9a487d (2026-03-18): aiter/utility/fp4_utils.py",
        only_odd_k=True,
    ),
)

REGISTRY: dict[str, Workaround] = {w.name: w for w in _ALL}


@dataclass(frozen=True, slots=True)
class ShimFit:
    """Fit of the shim to a tree's mp_tuner.py; `why` not. Hashes are sha256."""

    fits: bool
    why: str
    target_sha256: str = ""
    shim_sha256: str = ""

    def as_json(self) -> dict[str, str]:
        """Data for provenance."""
        return {
            "name": "candidate_journal", "target": MP_TUNER, "sha256": self.target_sha256,
            "shim_sha256": self.shim_sha256, "state": "used" if self.fits else f"not used: {self.why}",
        }  # fmt: skip


def shim_fit(package: Path) -> ShimFit:
    """Read `package`/utility/mp_tuner.py (`package`: the folder `aiter`). Needs no import and no GPU."""
    path = package / "utility" / "mp_tuner.py"
    try:
        source = path.read_bytes()
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError) as e:
        return ShimFit(False, f"{MP_TUNER} cannot be read: {e}")
    defs = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    target = hashlib.sha256(source).hexdigest()
    shim = hashlib.sha256((SHIM / "sitecustomize.py").read_bytes()).hexdigest()
    worker, group = defs.get("worker"), defs.get("work_group")
    if worker is None or group is None:
        return ShimFit(False, "it has no functions worker and work_group", target, shim)
    names = [a.arg for a in worker.args.args]
    if "info" not in names:
        return ShimFit(False, "its function worker takes no info", target, shim)
    calls = [n for n in ast.walk(group) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "worker"]
    if not calls:
        return ShimFit(False, "its function work_group does not call worker", target, shim)
    returns = [n.value for n in ast.walk(worker) if isinstance(n, ast.Return)]
    if not returns or not all(isinstance(r, ast.Tuple) and len(r.elts) == 3 for r in returns):
        return ShimFit(False, "its function worker does not return (info, us, error)", target, shim)
    return ShimFit(True, "", target, shim)
