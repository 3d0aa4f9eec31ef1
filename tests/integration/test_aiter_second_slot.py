"""A GPU on which one kind of kernel faults while its canary passes: the winners are those of the healthy GPU.

Two nodes of this machine, AITER as stand-ins; ASM kernels fault on one of them.
"""

from __future__ import annotations

import csv
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.paths import RunPaths, list_runs
from tests.integration.kit import Bench
from tests.standins.aiter import Tree, make_tree

pytestmark = pytest.mark.full

SICK: dict[str, Any] = {"shapes": [{"kernels": "asm", "when": {"K": 1024}, "do": "segv"}]}
"""Not on the tiny shape that builds the modules, whose K is 512."""
SHAPES = [(m, 512, 1024) for m in (2048, 4096)]


def tune(folder: Path, tree: Tree, nodes: dict[str, dict[str, Any]], limit: str = "") -> tuple[int, str, RunPaths]:
    """Runs in one folder share what their nodes keep."""
    folder.mkdir(exist_ok=True)
    bench = Bench(folder)
    # every shape a group of its own: N differs
    bench.shapes_csv.write_text("M,N,K\n" + "".join(f"{m},{n * (i + 1)},{k}\n" for i, (m, n, k) in enumerate(SHAPES)))
    defaults = {
        "transport": "local", "engine": "process", "python": str(tree.python), "family": "a4w4_blockscale",
        "tuner": "aiter", "aiter": {"root": str(tree.root)},
    }  # fmt: skip
    made = {
        name: {"gpus": [i], "env": {"STANDIN_FAULTS": json.dumps(faults)}}
        for i, (name, faults) in enumerate(nodes.items())
    }
    bench.inventory.write_text(yaml.safe_dump({"defaults": defaults, "nodes": made}))
    more = ("--limit", limit) if limit else ()
    argv = bench.argv("tune", str(bench.shapes_csv), "-i", str(bench.inventory), *more)
    done = subprocess.run(argv, capture_output=True, text=True, env=bench.env(), check=False)
    said = done.stdout + done.stderr
    print(f"--- exit {done.returncode}\n{said[-5000:]}")
    return done.returncode, said, list_runs(bench.runs)[-1]


def winners(paths: RunPaths) -> list[tuple[str, str]]:
    """(kernel, us) of each shape, in the order of the file."""
    return [(r["kernelName"], r["us"]) for r in csv.DictReader((paths.root / "tuned.csv").read_text().splitlines())]


def test_the_winner_is_that_of_the_healthy_slot(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, "newest")
    code, _, healthy = tune(tmp_path / "healthy", tree, {"well": {}})
    assert code == 0
    best = winners(healthy)
    assert any("_ZN" in kernel for kernel, _ in best), "ASM wins somewhere, or nothing is shown here"
    code, said, both = tune(tmp_path / "both", tree, {"sick": SICK, "well": {}})
    assert code == 0, said
    assert winners(both) == best
    assert "unconfirmed" not in said
    code, said, one = tune(tmp_path / "one", tree, {"sick": SICK})
    assert code == 0, said
    assert all("_ZN" not in kernel for kernel, _ in winners(one))
    assert "unconfirmed" in said
    assert list(one.attempts.rglob("repro/*/reproduce.sh"))


def test_a_fault_that_is_gone_does_not_withhold_a_candidate_elsewhere(tmp_path: Path) -> None:
    """The blocklist is kept on the machine that both nodes are; its entries are the sick slot's alone."""
    tree = make_tree(tmp_path, "newest")
    code, said, first = tune(tmp_path / "runs", tree, {"sick": SICK, "well": {}}, "sick")
    assert code == 0, said
    assert all("_ZN" not in kernel for kernel, _ in winners(first))
    code, said, second = tune(tmp_path / "runs", tree, {"sick": {}, "well": {}}, "well")
    assert code == 0, said
    assert any("_ZN" in kernel for kernel, _ in winners(second))
    assert "unconfirmed" not in said


def test_where_every_candidate_faults_the_other_node_is_asked(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, "newest")
    everything = {"shapes": [{**SICK["shapes"][0], "kernels": "all"}]}
    code, said, both = tune(tmp_path / "both", tree, {"sick": everything, "well": {}})
    assert code == 0, said
    assert any("_ZN" in kernel for kernel, _ in winners(both))
    code, said, one = tune(tmp_path / "both", tree, {"sick": everything, "well": {}}, "sick")
    assert code == 1
    (failed, _) = csv.DictReader((one.root / "failed.csv").read_text().splitlines())
    assert failed["reason"] == "no_candidate"
    # they ran on the other node, and so the sick one's blocklist has them no more: they were tried again
    assert "10 crashed" in failed["detail"], failed
    assert "unconfirmed" in said
