"""The tuner aiter-triton as the worker runs it, in Triton's interpreter on a stand-in tree; a bucket's one config."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import InputError
from orchestrator.families import check_tuner_options, get_tuner
from tests.standins.triton_tree import make, values
from worker.triton_configs.resolve import slower
from worker.tuners.aiter_triton.space import config_of
from worker.tuners.aiter_triton.tuner import Point, best, bucket_of, plan

HALF = {"dtype": "torch.float16", "outdtype": "torch.float16"}  # the interpreter takes bfloat16 for integers
DEFAULT = {"DEFAULT.json": {"M_LEQ_16": values(), "any": values(32, NUM_KSPLIT=2)}}
SMALL = {"max_candidates": 2, "min_samples": 1, "max_samples": 1, "compilers": 1}
OLD = "today"


def test_an_m_is_measured_with_the_others_of_its_bucket_and_with_the_bound() -> None:
    weights = {20: 3.0, 48: 10.0, 16: 1.0, 1000: 2.0}
    assert plan(weights, {m: bucket_of(m, (16, 64, 256), "any") for m in weights}) == {
        "M_LEQ_16": [Point(16, 1.0)],  # the bound is one of the workload's
        "M_LEQ_64": [Point(48, 10.0), Point(20, 3.0), Point(64, 0.0)],  # the most weighty first
        "any": [Point(1000, 2.0)],  # no bound lies beyond the last
    }


@pytest.mark.parametrize(
    ("us", "found"),
    [
        # the least weighted sum wins
        ({48: {OLD: 20.0, "a": 19.0, "b": 15.0}, 20: {OLD: 20.0, "a": 10.0, "b": 19.0}}, ("b", [])),
        # one that slows an M down is rejected, even at the bound, which has no weight
        ({48: {OLD: 20.0, "a": 10.0, "b": 18.0}, 64: {OLD: 20.0, "a": 20.7, "b": 20.5}}, ("b", ["a"])),
        ({48: {OLD: 20.0, "a": 10.0}, 64: {OLD: 2.0, "a": 3.9}}, ("a", [])),  # below 4 us the timer decides
        ({48: {OLD: 20.0, "a": 19.95, "b": 5.0}, 64: {OLD: 20.0, "a": 20.0}}, ("", [])),  # no better, not everywhere
        ({48: {"a": 30.0, "b": 20.0}}, ("b", [])),  # today's config does not run
    ],
)
def test_the_config_that_a_bucket_gets(us: dict[int, dict[str, float]], found: tuple[str, list[str]]) -> None:
    weights = {48: 10.0, 20: 1.0, 64: 0.0}
    assert best([Point(m, weights[m]) for m in us], us, dict.fromkeys(us, OLD)) == found


TIMES = st.lists(st.floats(1, 100), min_size=5, max_size=5)


@given(st.dictionaries(st.integers(1, 6), st.tuples(st.floats(0, 9), TIMES), min_size=1))
def test_no_winner_is_slower_anywhere_than_the_rule_allows(drawn: dict[int, tuple[float, list[float]]]) -> None:
    points = [Point(m, weight) for m, (weight, _) in drawn.items()]
    us = {m: dict(zip([OLD, "a", "b", "c", "d"], times, strict=True)) for m, (_, times) in drawn.items()}
    winner, harmful = best(points, us, dict.fromkeys(us, OLD))
    assert winner not in harmful
    if winner:
        assert not any(slower(us[m][OLD], us[m][winner]) for m in us)
        weight = {p.m: p.weight if any(q.weight for q in points) else 1.0 for p in points}
        assert sum(weight[m] * us[m][winner] for m in us) < sum(weight[m] * us[m][OLD] for m in us)


def run(folder: Path, ms: list[int], *, interpreted: bool = True, **options: Any) -> tuple[int, str, list[Any]]:
    """`worker run GROUP.json`: exit code, output, records."""
    node = {"run": "r", "node": "n", "tuner": "aiter-triton", "options": {**SMALL, "family": "a16w16", **options}}
    spec = {
        "attempt": "a1", "run": "r", "epoch": 1, "group": "g", "family": "a16w16", "tuner": "aiter-triton",
        "protocol": 1,
        "shapes": [{"id": i + 1, "key": {"M": m, "N": 64, "K": 128, **HALF}} for i, m in enumerate(ms)],
    }  # fmt: skip
    (folder / "node").mkdir(parents=True)
    (folder / "g.json").write_text(json.dumps(spec))
    (folder / "node" / "node.json").write_text(json.dumps({**node, "protocol": 1}))
    argv = [sys.executable, "-m", "worker", "run", str(folder / "g.json"), "--node-dir", str(folder / "node")]
    clean = {k: v for k, v in os.environ.items() if k != "GEMMFLEET_CACHE"}
    done = subprocess.run(
        argv, capture_output=True, text=True, env={**clean, "TRITON_INTERPRET": str(int(interpreted))}
    )
    records = folder / "node" / "attempts" / "a1" / "records.jsonl"
    lines = records.read_text().splitlines() if records.exists() else []
    return done.returncode, done.stdout + done.stderr, [json.loads(line) for line in lines]


def of(records: list[Any], type_: str) -> list[Any]:
    return [r for r in records if r["type"] == type_]


def test_a_group_is_tuned_by_buckets_and_its_rows_carry_the_config(tmp_path: Path) -> None:
    root = make(tmp_path / "tree", DEFAULT)
    counts = {"20x64x128xtorch.float16xtorch.float16": 9}
    code, output, records = run(tmp_path, [5, 20, 32], root=str(root), counts=counts)
    assert code == 0, output
    tuned = {r["shape"]: r["row"] for r in of(records, "shape_tuned")}
    documents = {shape: json.loads(row["triton_config"]) for shape, row in tuned.items()}
    assert {s: d["bucket"] for s, d in documents.items()} == {1: "M_LEQ_16", 2: "M_LEQ_64", 3: "M_LEQ_64"}, output
    assert documents[2]["values"] == documents[3]["values"], "a bucket has one config"
    for shape, m in ((1, 5), (2, 20), (3, 32)):
        d, row, bound = documents[shape], tuned[shape], 16 if m == 5 else 64
        assert (d["kind"], d["arch"]) == ("a16w16", "90")
        assert row["errRatio"] <= 0.05
        assert row["kernelName"].startswith("config_" if d["values"] is None else config_of(d["values"]).name)
        points = {p[0]: p for p in d["points"]}
        weights = {m: 9 if m == 20 else 1, bound: 0}
        assert {p[0]: p[1] for p in d["points"]} == weights, "each row has its own M and the bound"
        assert d["old"][points[m][5]] == DEFAULT["DEFAULT.json"]["M_LEQ_16" if m == 5 else "any"]
        assert all(p[2] > 0 for p in d["points"]), "today's config was measured too"
        assert {p[6] for p in d["points"]} == {""}, "fused operators are for the default's"
    names = [r["row"]["kernelName"] for r in of(records, "row") if r["shape"] == 2]
    assert len(names) == len(set(names)), "what is measured again for the bucket is no row"
    assert config_of(values(32, NUM_KSPLIT=2)).name in names


@pytest.mark.full
def test_a_config_for_the_default_file_is_measured_and_nothing_searched(tmp_path: Path) -> None:
    given: dict[str, Any] = {"default": {"M_LEQ_16": values(16, 16)}, "max_candidates": 9}
    code, output, records = run(tmp_path, [5, 20], root=str(make(tmp_path / "tree", DEFAULT)), **given)
    assert code == 1, output
    (tuned,), (failed,) = of(records, "shape_tuned"), of(records, "shape_failed")
    document = json.loads(tuned["row"]["triton_config"])
    assert (document["default"], document["values"]) == (True, values(16, 16))
    assert {(p[0], p[6]) for p in document["points"]} == {(5, ""), (16, "")}
    assert "in_fused_gemm_a16w16_quant_x: UnavailableError: no module aiter.ops.triton.gemm.fused" in output
    assert len(of(records, "row")) == 2
    assert "M=20 reads any of DEFAULT.json" in failed["detail"]
    own = make(tmp_path / "own_tree", {**DEFAULT, "GEMM-A16W16-N=64-K=128.json": {"any": values()}})
    code, output, records = run(tmp_path / "own", [5], root=str(own), **given)
    assert "N=64-K=128.json" in of(records, "shape_failed")[0]["detail"], output


@pytest.mark.full
def test_a_config_for_the_default_file_is_measured_in_fused_operators_and_at_a_bucket_of_one_m(tmp_path: Path) -> None:
    root = make(tmp_path / "tree", DEFAULT, fused=True)
    code, output, records = run(tmp_path, [16], root=str(root), default={"M_LEQ_16": values(16, 16)})
    assert code == 0, output
    (row,) = [r["row"] for r in of(records, "shape_tuned")]
    assert row["kernelName"] == config_of(values(16, 16)).name, "the wrapper's own"
    points = {p[6]: p for p in json.loads(row["triton_config"])["points"]}
    assert set(points) == {"", "fused_gemm_a16w16_quant_x"}
    assert all(old > 0 and new > 0 and err == 0 for _, _, old, new, err, _, _ in points.values())
    assert not [r for r in of(records, "row") if "_in_" in r["row"]["kernelName"]]


@pytest.mark.full
def test_a_wrong_config_of_today_is_replaced_and_told(tmp_path: Path) -> None:
    broken = {"DEFAULT.json": {"any": {**values(), "BLOCK_SIZE_K": 24}}}  # no power of two: it cannot run
    code, output, records = run(tmp_path, [5], root=str(make(tmp_path / "tree", broken)))
    assert code == 0, output
    (row,) = [r["row"] for r in of(records, "shape_tuned")]
    document = json.loads(row["triton_config"])
    assert document["values"] is not None
    assert {p[2] for p in document["points"]} == {-1.0}
    assert "today's does not run" in row["detail"]


def test_without_a_tree_a_default_of_the_chip_or_a_gpu_the_reason_is_told(tmp_path: Path) -> None:
    code, output, records = run(tmp_path, [5], root=str(make(tmp_path / "tree", DEFAULT, "gfx950")))
    assert code == 1, output
    (failed,) = of(records, "shape_failed")
    assert failed["reason"] == "unsupported"
    assert "no default file for 90" in failed["detail"]
    code, output, _ = run(tmp_path / "none", [5], root=str(tmp_path / "nothing"))
    assert code != 0
    assert "nothing does not exist" in output
    import torch

    if not torch.cuda.is_available():
        code, output, records = run(tmp_path / "cpu", [5], interpreted=False, root=str(tmp_path / "tree"))
        assert code != 0
        assert "needs a GPU, and torch sees none here" in output
        assert not of(records, "shape_tuned")


def test_the_package_imports_neither_torch_nor_triton_until_it_is_opened() -> None:
    code = "from worker.tuners.catalog import find_tuner; find_tuner('aiter-triton').create(); import sys; "
    code += "print('torch' in sys.modules or 'triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("tuner", "options", "words"),
    [
        ("aiter-triton", {"kind": "fused_a4w4_mul_add"}, "is no kind that is tuned"),
        ("aiter-triton", {"counts": {"1x2x3": -1}}, "not numbers of calls"),
        ("aiter-triton", {"warmup": 3}, "--warmup: for the tuner aiter only, and this is aiter-triton"),
        ("aiter-triton", {"sample": 9}, "unknown option 'sample'"),
        ("replay", {"budget_s_per_shape": 3.0}, "--budget: for the tuners aiter-triton and torch only"),
    ],
)
def test_bad_options_are_refused(tuner: str, options: dict[str, Any], words: str) -> None:
    check_tuner_options(get_tuner("aiter-triton"), {"search": "exhaustive", "budget_s_per_shape": 3.0})
    with pytest.raises(InputError, match=words):
        check_tuner_options(get_tuner(tuner), options)
