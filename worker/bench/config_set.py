"""Config sets of a bench (`--configs NAME=WHERE`): laid into a copy of AITER's tree, and which config was read.

orchestrator/bench/request.py makes a set's text on the controller; a side carries it (worker/protocol/bench.py, Side).
The text is JSON in one of two forms. `named` describes the set to people:

    {"named": "...", "files": {"gemm/gfx950-GEMM-A16W16.json": "TEXT", ...}}
    {"named": "...", "winners": [{"kind": "a16w16", "gfx": "gfx950", "shape": [0, 256, 1024], "buckets": {...}}, ...]}

`files` replace all config files of GEMMs; their paths are those below AITER's configs. `winners` of a run are laid into
the tree's files as a merge would; `shape` is [B, N, K], or null for a kind's default file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from worker.aiter_tree.locate import Tree
from worker.aiter_tree.scratch_tree import ScratchTree
from worker.triton_configs.config_file import spell_values
from worker.triton_configs.kinds import BY_NAME, KINDS
from worker.triton_configs.resolve import CONFIGS, GEMMS, Resolver
from worker.triton_configs.tree_files import plan_file
from worker.tuners.common.calls import find_function
from worker.tuners.common.case import Case
from worker.tuners.common.problem import UnavailableError


def set_name(text: str) -> str:
    """The name of a set before people; "" is the set of the tree as it is."""
    return str(json.loads(text)["named"]) if text else "the tree's own"


def tree_with_configs(tree: Tree, text: str, folder: Path) -> Tree:
    """Make a scratch copy of the tree in `folder` that has a config set. Raises UnavailableError if it does not fit."""
    config_set = json.loads(text)
    replaced: list[str] = []
    try:
        if "winners" in config_set:
            files = _files_of_winners(tree, config_set["winners"])
        else:
            files = {str(CONFIGS / path): file_text for path, file_text in config_set["files"].items()}
            for pattern in GEMMS:
                replaced += [str(path.relative_to(tree.root)) for path in (tree.root / CONFIGS).glob(pattern)]
        return ScratchTree.with_files(tree, folder, files, replaced)
    except (OSError, ValueError) as e:  # ResolveError and ConfigFileError among them
        raise UnavailableError(f"the config set {config_set['named']} does not fit {tree.root}: {e}") from e


def _files_of_winners(tree: Tree, winners: list[dict[str, Any]]) -> dict[str, str]:
    """Texts of the tree's files with the winners in them, by path below the tree."""
    files = {}
    for winner in winners:
        shape = tuple(winner["shape"]) if winner["shape"] else None
        resolver = Resolver(tree.root, winner["gfx"])
        file = plan_file(resolver, BY_NAME[winner["kind"]], shape, winner["buckets"]).file
        files[str(file.target.relative_to(tree.root))] = file.text
    return files


def config_read(root: Path, function_name: str, case: Case) -> str:
    """`FILE BUCKET VALUES` of the config that a wrapper of AITER's reads for a case; "" if it cannot be told.

    FILE is the path below AITER's configs. AITER must have been imported.
    """
    kind = next((kind for kind in KINDS if kind.function == function_name), None)
    if kind is None:
        return ""
    try:
        arch, _ = find_function([("aiter.ops.triton.utils._triton.arch_info", "get_arch")])
        config = Resolver(root, str(arch())).config_for(kind, case.m, case.n, case.k, case.b or None)
    except (UnavailableError, OSError, ValueError):
        return ""
    return f"{config.path.relative_to(root / CONFIGS)} {config.bucket} {spell_values(config.values)}"
