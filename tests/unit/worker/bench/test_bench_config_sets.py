"""Config sets on the node: laid over a copy of a tree, and the config that a shape reads there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.bench.request import config_sets
from tests.support.config_tree import text_of, tree, values, winners
from worker.aiter_tree.locate import Tree, tree_at
from worker.bench import backends as on_node
from worker.bench.tuner import PROBE, BenchTuner
from worker.protocol.bench import Options
from worker.triton_configs.resolve import CONFIGS, Resolver
from worker.tuners.base import Place
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


def read(root: Path, m: int) -> tuple[str, Any]:
    found = Resolver(root, "gfx950").config_for("a16w16", m, 512, 1024)
    return found.path.name, found.values["BLOCK_SIZE_M"]


def test_a_trees_set_replaces_all_gemm_configs_and_nothing_else(real: Tree, tmp_path: Path) -> None:
    before = text_of(real.root)
    new = tree(tmp_path / "new", {DEFAULT: {"any": values(16)}})
    made = on_node.with_configs(real, config_sets([f"a={new}"])["a"], tmp_path / "copy")
    assert read(real.root, 40) == (Path(OWN).name, 64)
    assert read(made.root, 40) == (Path(DEFAULT).name, 16)
    assert not (made.root / CONFIGS / OWN).exists()
    assert (made.root / CONFIGS / "moe" / "gfx950-MOE.json").exists()
    assert text_of(real.root) == before


def test_a_runs_winners_are_laid_into_the_trees_files(real: Tree, tmp_path: Path) -> None:
    name = "gfx950-GEMM-A16W16-N=256-K=1024.json"
    rows: list[dict[str, Any]] = [{"N": 256, "file": name}, {"file": Path(DEFAULT).name}]
    run = winners(tmp_path / "run", {name: {"M_LEQ_64": values(16)}, Path(DEFAULT).name: {"M_LEQ_64": values(8)}}, rows)
    made = on_node.with_configs(real, config_sets([f"a={run}"])["a"], tmp_path / "copy")
    resolver = Resolver(made.root, "gfx950")
    by_m = {m: resolver.config_for("a16w16", m, 256, 1024) for m in (16, 40, 300)}
    assert {m: (c.path.name, c.values["BLOCK_SIZE_M"]) for m, c in by_m.items()} == {
        16: (name, 32), 40: (name, 16), 300: (name, 128),
    }  # fmt: skip
    assert resolver.config_for("a16w16", 40, 99, 99).values["BLOCK_SIZE_M"] == 8
    assert read(made.root, 40) == (Path(OWN).name, 64)


def test_a_set_that_does_not_fit_the_tree_is_unavailable_with_the_reason(real: Tree, tmp_path: Path) -> None:
    run = winners(tmp_path / "run", {OWN.removeprefix("gemm/"): {"M_LEQ_64": values(16)}}, [{}])
    (real.root / CONFIGS / DEFAULT).unlink()
    with pytest.raises(UnavailableError, match=r"the config set .*run \(1 file, .* has no default file for gfx950"):
        on_node.with_configs(real, config_sets([f"a={run}"])["a"], tmp_path / "copy")
    outside = json.dumps({"named": "x", "files": {"../../../../../../y.json": "{}"}})
    with pytest.raises(UnavailableError, match="lies outside of the tree"):
        on_node.with_configs(real, outside, tmp_path / "copy")
    assert not (tmp_path / "y.json").exists()


def test_each_side_gets_its_variables_and_its_set_and_the_probe_tells_both(tmp_path: Path) -> None:
    switch, sets = "TRITON_SWITCH_X", {"a": "", "b": json.dumps({"named": "B", "files": {}})}
    of = [{"name": n, "variables": {switch: n}, "configs": text} for n, text in sets.items()]
    raw = {"backends": ["aiter-triton"], "sides": of}
    tuner, options = BenchTuner(), Options.parse(raw)
    tuner.configure(raw, Place(tmp_path))
    for side in options.sides:
        who = tuner._runner(side, "aiter-triton", options, "a16w16")
        assert ([s["configs"] for s in who.raw["sides"]], who.variables[switch]) == ([sets[side.name]], side.name)
        assert tuner._runner(side, PROBE, options, "").raw["sides"][0]["configs"] is None
    try:
        stacks = tuner.open()["bench"]
    finally:
        tuner.close()
    assert {n: s["configs"] for n, s in stacks.items()} == {"a": "the tree's own", "b": "B"}
    assert stacks["b"]["variables"] == {switch: "b"}
    assert stacks["b"]["switches"][switch] == "b"
