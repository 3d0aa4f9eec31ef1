"""Parts of a bench: the rule of repeated runs, traces of rocprofv3, and a run's winners as a config set."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from orchestrator.bench.request import config_sets
from tests.paths import TEST_DATA
from tests.support.config_tree import tree, values, winners
from worker.aiter_tree.locate import tree_at
from worker.bench.backends import with_configs
from worker.bench.runner import Refused, per_call_us
from worker.protocol.bench import Rule, mean_of_runs, rounds, wants_more
from worker.triton_configs.resolve import Resolver

GEMM, REDUCE = "_gemm_afp4wfp4_kernel_BLOCK_SIZE_M_256.kd", "_gemm_afp4wfp4_reduce_kernel.kd"


@pytest.mark.parametrize(
    ("runs", "rule", "us", "status", "more"),
    [
        ([100.0, 104.0, 102.0], Rule(), 102.0, "ok", False),
        ([97.4, 100.0, 102.6], Rule(), 100.0, "unstable", True),
        ([100.0, 130.0, 101.0, 150.0, 102.0], Rule(), 101.0, "ok", False),  # the three that agree best
        ([100.0, 100.0], Rule(), 100.0, "short", True),
        ([7.0], Rule(1, 0), 7.0, "ok", False),
    ],
)
def test_runs_that_agree_are_their_mean(runs: list[float], rule: Rule, us: float, status: str, more: bool) -> None:
    found = mean_of_runs(runs, rule)
    assert (round(found.us, 6), found.status, found.taken) == (us, status, len(runs))
    assert wants_more(runs, rule) is more


def test_rounds_are_drawn_anew_and_only_who_does_not_agree_runs_again_with_its_partner() -> None:
    steady, loose = [1.0] * 5, [1.0, 2.0, 3.0, 4.0, 5.0]
    times = {"g:torch": steady, "t:torch": loose, "g:other": steady, "t:other": steady}
    taken: dict[str, list[float]] = {name: [] for name in times}
    orders = []
    for order in rounds(taken, {name: name[2:] for name in times}, Rule(), random.Random(0)):
        orders.append(tuple(order))
        for name in order:
            taken[name].append(times[name][len(taken[name])])
    assert [sorted(o) for o in orders] == [sorted(times)] * 3 + [["g:torch", "t:torch"]] * 2
    assert len(set(orders[:3])) > 1


def trace(folder: Path, text: str = "") -> Path:
    """A trace written by hand in the documented format with made-up times; none is from a run of ours."""
    (folder / "host" / "17").mkdir(parents=True)
    path = folder / "host" / "17" / "one_kernel_trace.csv"
    shutil.copy(TEST_DATA / "bench" / path.name, path)
    if text:
        path.write_text('"Kernel_Name","Start_Timestamp","End_Timestamp"\n' + text)
    return folder


def test_a_trace_leaves_the_warm_up_out_and_kernels_are_selected_by_name(tmp_path: Path) -> None:
    folder = trace(tmp_path)
    assert per_call_us(folder, "", 1, 2) == ((10 + 12 + 2 + 4) / 2, f"{GEMM} + {REDUCE}")
    assert per_call_us(folder, "reduce", 1, 2) == (3.0, REDUCE)
    fills = trace(tmp_path / "fills", "k,0,5\nk,5,10\n__amd_rocclr_fill,0,800\n__amd_rocclr_fill,800,1600\n")
    assert per_call_us(fills, "", 1, 1) == (0.005, "k"), "the runtime's own kernels count only if asked for"
    assert per_call_us(fills, "__amd_rocclr", 1, 1)[0] == pytest.approx(0.8)
    for pattern, warmup, says in (
        ("flash", 1, "no kernel matching 'flash' ran .* there were: .*_gemm_afp4wfp4_kernel"),
        ("", 3, "whole number of times in each of 5 calls"),
    ):
        with pytest.raises(Refused, match=says):
            per_call_us(folder, pattern, warmup, 2)


def test_a_runs_winners_are_laid_into_the_trees_files(tmp_path: Path) -> None:
    default, name = "gfx950-GEMM-A16W16.json", "gfx950-GEMM-A16W16-N=256-K=1024.json"
    root = tree(tmp_path / "tree", {f"gemm/{default}": {"M_LEQ_64": values(32), "any": values(128)}})
    (root / "aiter/jit").mkdir(parents=True)
    (root / "aiter/jit/core.py").touch()
    won = {name: {"M_LEQ_64": values(16)}, default: {"M_LEQ_64": values(8)}}
    run = winners(tmp_path / "run", won, [{"N": 256, "file": name}, {"file": default}])
    made = with_configs(tree_at(root), config_sets([f"a={run}"])["a"], tmp_path / "copy")
    resolver = Resolver(made.root, "gfx950")
    found = [resolver.config_for("a16w16", m, n, 1024) for m, n in ((16, 256), (40, 256), (300, 256), (40, 99))]
    assert [(c.path.name, c.values["BLOCK_SIZE_M"]) for c in found] == [
        (name, 32), (name, 16), (name, 128), (default, 8),
    ]  # fmt: skip
