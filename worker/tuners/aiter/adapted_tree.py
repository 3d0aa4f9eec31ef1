"""Adapts a scratch copy of an AITER tree to a run: applies the workarounds that its shapes need.

A workaround is applied only if its predicate holds for the files of that tree. The record has hashes of each file
before and after. If it changes nothing, it is refused. The real tree is never changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from worker.aiter_tree.locate import TreeFiles
from worker.aiter_tree.scratch_tree import ScratchTree, digest
from worker.families import Family
from worker.tuners.aiter.findings import Findings
from worker.tuners.aiter.workarounds import WORKAROUNDS, WorkaroundRefusedError

Applied = Mapping[str, Any]
"""Record of a workaround in use: `name`, `source`, `evidence`, `files` with hashes before and after ("": no file)."""


def needed(found: Findings, family: Family, keys: Iterable[Mapping[str, object]] = ()) -> list[str]:
    """The workarounds that a family's shapes need on this tree, in the order in which to apply them."""
    step = family.aiter.pads_k_to
    is_k_padded = bool(step) and any(int(str(key.get("K") or 0)) % step for key in keys)
    names = []
    for workaround in WORKAROUNDS.values():
        is_for_family = not workaround.families or family.name in workaround.families
        is_for_shapes = is_k_padded or not workaround.only_odd_k
        if found.workarounds[workaround.name].verdict == "needed" and is_for_family and is_for_shapes:
            names.append(workaround.name)
    return names


def prepare(found: Findings, names: Iterable[str], folder: Path) -> tuple[ScratchTree, tuple[Applied, ...]]:
    """A scratch copy in `folder` with these workarounds, which are needed on this tree.

    Raises WorkaroundRefusedError and OSError; the real tree is as it was, whatever happens.
    """
    scratch = ScratchTree.make(found.tree, folder)
    return scratch, tuple(_apply(name, found, scratch) for name in names)


def _apply(name: str, found: Findings, scratch: ScratchTree) -> Applied:
    workaround = WORKAROUNDS[name]
    evidence = found.workarounds[name].evidence
    files = []
    for path, new in workaround.fix(TreeFiles(found.tree), found.gfx, scratch):
        before = digest(scratch.folder / path)
        if isinstance(new, bytes):
            scratch.write(path, new)
        else:
            scratch.link(path, new)
        files.append({"file": path, "sha256_before": before, "sha256_after": digest(scratch.folder / path)})
    if workaround.predicate(TreeFiles(scratch.tree), found.gfx).verdict == "needed":
        raise WorkaroundRefusedError(f"{name} was tried on a scratch copy and mended nothing: {'; '.join(evidence)}")
    return {"name": name, "source": workaround.source, "files": files, "evidence": list(evidence)}
