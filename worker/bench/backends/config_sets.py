"""Config sets of a bench: a scratch copy of AITER with the set's configs, and the config that a shape reads there.

A set is a JSON text (made by orchestrator/bench/config_sets.py; "" is the tree as it is) with `named`, the words for
people, and either `files`, by their path below AITER's configs, which replace all config files of GEMMs; or `winners`
of a run ({kind, gfx, shape: [B, N, K] or null for the default file, buckets}), laid into the tree as a merge would.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worker.aiter_tree.locate import Tree
from worker.aiter_tree.scratch import ScratchTree
from worker.bench.case import Case
from worker.triton_configs.kinds import BY_NAME, KINDS
from worker.triton_configs.layout import lay_out
from worker.triton_configs.resolve import CONFIGS, GEMMS, Resolver, spelled
from worker.tuners.common.calls import find_function
from worker.tuners.common.problem import UnavailableError

ARCH = [("aiter.ops.triton.utils._triton.arch_info", "get_arch")]


def applied(tree: Tree, text: str, folder: Path) -> Tree:
    """A scratch copy of the tree in `folder` that has the set's configs. Raises UnavailableError."""
    made = json.loads(text)
    try:
        if "winners" in made:
            return ScratchTree.with_files(tree, folder, _merged(tree.root, made["winners"]))
        replaced = [str(p.relative_to(tree.root)) for where in GEMMS for p in (tree.root / CONFIGS).glob(where)]
        files = {str(CONFIGS / rel): text for rel, text in made["files"].items()}
        return ScratchTree.with_files(tree, folder, files, replaced)
    except (OSError, ValueError) as e:  # ResolveError and ConfigFileError among them
        raise UnavailableError(f"the config set {made['named']} does not fit {tree.root}: {e}") from e


def config_read(root: Path, op: str, case: Case) -> str:
    """`FILE BUCKET VALUES` of the config that a wrapper reads for a case: the file below AITER's configs, the values in
    a word. "" where it cannot be told. AITER must have been imported."""
    try:
        kind = next(k for k in KINDS if k.function == op)
        arch = str(find_function(ARCH)[0]())
        found = Resolver(root, arch).config_for(kind, case.m, case.n, case.k, case.b or None)
    except (StopIteration, UnavailableError, OSError, ValueError):
        return ""
    return f"{found.path.relative_to(root / CONFIGS)} {found.bucket} {spelled(found.values)}"


def _merged(root: Path, winners: list[Mapping[str, Any]]) -> dict[str, str]:
    """Texts of the files that a merge of the winners would write, by their path in the tree."""
    out = {}
    for w in winners:
        shape = tuple(w["shape"]) if w["shape"] else None
        made = lay_out(Resolver(root, w["gfx"]), BY_NAME[w["kind"]], shape, w["buckets"])
        out[str(made.target.relative_to(root))] = made.text
    return out
