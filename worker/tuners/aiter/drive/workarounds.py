"""Workarounds for faults of some dates of AITER, each applied only where its predicate holds on the files.

Every workaround works on a scratch copy, records the hashes of what it changed before and after, and can be undone.
One that would do harm is refused, and so is one that would change nothing.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from worker.aiter_tree.reading import TreeReader, read_text
from worker.aiter_tree.scratch import ScratchTree, digest
from worker.families import Family
from worker.tuners.aiter.inspect.a4w4 import A4W4, PRODUCTS, list_of, products
from worker.tuners.aiter.inspect.findings import Applicability, Findings, inspect
from worker.tuners.aiter.inspect.script import read_script

SHIM = Path(__file__).parent / "shim"
MP_TUNER = "aiter/utility/mp_tuner.py"
_Edit = tuple[str, "bytes | str"]
"""Path, and its new content, or where it is to lead as a link."""


class WorkaroundRefusedError(Exception):
    """A workaround that is not applied; the text says why."""


@dataclass(frozen=True, slots=True)
class FileChange:
    """One file or link of the scratch copy, its path below the root, and its hashes ("": it was not there).

    `previous`: what the copy had there of its own.
    """

    file: str
    before: str
    after: str
    previous: bytes | None = field(default=None, repr=False)


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
    what: str
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
    workaround = REGISTRY.get(name)
    if workaround is None:
        raise WorkaroundRefusedError(f"there is no workaround {name} (there are {', '.join(REGISTRY)})")
    if scratch.real.root != found.tree.root:
        raise WorkaroundRefusedError(f"{name}: the scratch copy is of {scratch.real.root}, not of {found.tree.root}")
    verdict = workaround.predicate(found)
    evidence = tuple(str(e) for e in verdict.evidence)
    if verdict.verdict != "needed":
        what = "would do harm here" if verdict.verdict == "harmful" else "is not needed here"
        raise WorkaroundRefusedError(f"{name} {what}: {'; '.join(evidence)}")
    changes: list[FileChange] = []
    for rel, new in workaround.act(found, scratch):
        before, previous = digest(scratch.folder / rel), scratch.own(rel)
        if isinstance(new, bytes):
            scratch.write(rel, new)
        else:
            scratch.link(rel, new)
        changes.append(FileChange(rel, before, digest(scratch.folder / rel), previous))
    applied = AppliedWorkaround(name, workaround.source, tuple(changes), evidence)
    if inspect(scratch.tree, found.gfx).workarounds[name].verdict == "needed":
        undo(applied, scratch)
        raise WorkaroundRefusedError(f"{name} was tried on a scratch copy and mended nothing: {'; '.join(evidence)}")
    return applied


def undo(applied: AppliedWorkaround, scratch: ScratchTree) -> None:
    """Make the scratch copy what it was. Raises WorkaroundRefusedError where the files are no longer as they were."""
    for change in applied.changes:
        if digest(scratch.folder / change.file) != change.after:
            raise WorkaroundRefusedError(f"{applied.name}: {change.file} has been changed since; nothing is undone")
    for change in applied.changes:
        scratch.restore(change.file, change.previous)
        if digest(scratch.folder / change.file) != change.before:
            raise WorkaroundRefusedError(f"{applied.name}: the real {change.file} is not what it was")


def _link_lists(found: Findings, scratch: ScratchTree) -> list[_Edit]:
    """Every folder of hsa/<gfx> also where get_asm_dir() looks: each family has its lists in one of them."""
    real = scratch.real.meta / "hsa"
    below = (scratch.tree.meta / "hsa").relative_to(scratch.folder)
    names = sorted(p.name for p in (real / found.gfx).iterdir())
    return [((below / n).as_posix(), f"{found.gfx}/{n}") for n in names if not os.path.lexists(real / n)]


def _case_of_list(found: Findings, scratch: ScratchTree) -> list[_Edit]:
    """The list's own names of its columns in the script."""
    script = read_script(TreeReader(found.tree.root), found.tree, found.tree.scripts[A4W4])
    places = [found.tree.meta / where.format(gfx=found.gfx) / list_of(script) for where in (found.asm_dir, "hsa/{gfx}")]
    header = read_text(next(p for p in places if p.is_file())).split("\n", 1)[0].split(",")
    theirs = {c.strip().lower(): c.strip() for c in header if c.strip().lower() in ("tile_m", "tile_n")}

    def edit(text: str) -> str:
        for plain, name in theirs.items():
            text = re.sub(rf"""(?i)(['"]){plain}(['"])""", rf"\g<1>{name}\g<2>", text)
        return text

    return [_edited(scratch, edit)]


def _trim_scales(found: Findings, scratch: ScratchTree) -> list[_Edit]:
    """Scales no wider than their operand in the reference. Operands stay whole: only padding goes."""

    def edit(text: str) -> str:
        lines = text.split("\n")
        for number in products(text):
            m = PRODUCTS.match(lines[number - 1])
            assert m is not None
            name, scales = m["name"], m["scales"]
            lines[number - 1] = f"{m['indent']}{name} = {name} * {scales}[..., : {name}.shape[-1]]"
        return "\n".join(lines)

    return [_edited(scratch, edit)]


def _edited(scratch: ScratchTree, edit: Callable[[str], str]) -> _Edit:
    """The a4w4 script of the copy, as it is now, edited."""
    path = scratch.tree.scripts[A4W4]
    text = edit(read_text(path))
    ast.parse(text)  # nothing that does not parse is ever run
    return path.relative_to(scratch.folder).as_posix(), text.encode()


_ALL = (
    Workaround(
        "asm_dir_symlink",
        "links the folders of hsa/<gfx> into hsa/, where get_asm_dir() looks for lists of assembly kernels",
        (),
        _link_lists,
        "ROCm/aiter ce08b75719 (2026-01-13) to cfb9de7325 (2026-01-16): aiter/jit/core.py",
    ),
    Workaround(
        "tile_column_case",
        "reads the tile columns as the list of assembly kernels spells them",
        (A4W4,),
        _case_of_list,
        "ROCm/aiter 9b01b0d818 (2025-11-22) to 0e38ec8038 (2025-12-19): the a4w4 script",
    ),
    Workaround(
        "k_trim",
        "trims padded scales to the operand's width in the reference, for K that is no multiple of 256",
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
