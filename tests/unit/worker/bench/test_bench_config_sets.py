"""Config sets on the node: laid over a copy of a tree, and the config that a shape reads there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.bench.request import config_sets
from tests.support.config_tree import tree, values, winners
from worker.aiter_tree.locate import Tree, tree_at
from worker.bench import backends as on_node
from worker.triton_configs.resolve import CONFIGS, Resolver
from worker.tuners.common.problem import UnavailableError

DEFAULT = "gemm/gfx950-GEMM-A16W16.json"
OWN = "gemm/gfx950-GEMM-A16W16-N=512-K=1024.json"
BUCKETS = {"M_LEQ_64": values(32), "any": values(128)}


@pytest.fixture
def real(tmp_path: Path) -> Tree:
    """A tree with a file of one shape, and configs of other kernels."""
    root = tree(tmp_path / "tree", {DEFAULT: BUCKETS, OWN: {"any": values(64)}, "moe/gfx950-MOE.json": {"a": 1}})
    (root / "aiter" / "jit").mkdir(parents=True)
    (root / "aiter" / "jit" / "core.py").touch()
    return tree_at(root)


def test_a_runs_winners_are_laid_into_the_trees_files(real: Tree, tmp_path: Path) -> None:
    name = "gfx950-GEMM-A16W16-N=256-K=1024.json"
    won = {name: {"M_LEQ_64": values(16)}, Path(DEFAULT).name: {"M_LEQ_64": values(8)}}
    run = winners(tmp_path / "run", won, [{"N": 256, "file": name}, {"file": Path(DEFAULT).name}])
    made = on_node.with_configs(real, config_sets([f"a={run}"])["a"], tmp_path / "copy")
    resolver = Resolver(made.root, "gfx950")
    found = [
        resolver.config_for("a16w16", m, n, 1024) for m, n in ((16, 256), (40, 256), (300, 256), (40, 99), (40, 512))
    ]
    assert [(c.path.name, c.values["BLOCK_SIZE_M"]) for c in found] == [
        (name, 32), (name, 16), (name, 128), (Path(DEFAULT).name, 8), (Path(OWN).name, 64),
    ]  # fmt: skip


def test_a_set_that_does_not_fit_the_tree_is_unavailable_with_the_reason(real: Tree, tmp_path: Path) -> None:
    run = winners(tmp_path / "run", {OWN.removeprefix("gemm/"): {"M_LEQ_64": values(16)}}, [{}])
    (real.root / CONFIGS / DEFAULT).unlink()
    with pytest.raises(UnavailableError, match=r"the config set .*run \(1 file, .* has no default file for gfx950"):
        on_node.with_configs(real, config_sets([f"a={run}"])["a"], tmp_path / "copy")
    outside = json.dumps({"named": "x", "files": {"../../../../../../y.json": "{}"}})
    with pytest.raises(UnavailableError, match="lies outside of the tree"):
        on_node.with_configs(real, outside, tmp_path / "copy")
    assert not (tmp_path / "y.json").exists()
