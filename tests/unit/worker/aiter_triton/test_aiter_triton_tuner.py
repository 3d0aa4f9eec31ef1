"""The tuner aiter-triton as the worker runs it: in Triton's interpreter on a stand-in tree, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import InputError
from orchestrator.families import check_tuner_options, get_tuner
from tests.standins.triton_tree import make, values
from worker.tuners.aiter_triton.space import config_of

HALF = {"dtype": "torch.float16", "outdtype": "torch.float16"}  # the interpreter takes bfloat16 for integers
DEFAULT = {"DEFAULT.json": {"M_LEQ_16": values(), "any": values(32, NUM_KSPLIT=2)}}
SMALL = {"max_candidates": 2, "min_samples": 1, "max_samples": 1, "compilers": 1, "hints": False}


def run(folder: Path, ms: list[int], *, interpreted: bool = True, **options: Any) -> tuple[int, str, list[Any]]:
    """`worker run GROUP.json`: exit code, output, records."""
    node = {"run": "r", "node": "n", "tuner": "aiter-triton", "options": {**SMALL, "family": "a16w16", **options}}
    spec = {
        "attempt": "a1", "run": "r", "epoch": 1, "group": "g", "family": "a16w16", "tuner": "aiter-triton",
        "protocol": 1,
        "shapes": [{"id": i + 1, "key": {"M": m, "N": 64, "K": 128, **HALF}} for i, m in enumerate(ms)],
    }  # fmt: skip
    (folder / "g.json").write_text(json.dumps(spec))
    (folder / "node").mkdir()
    (folder / "node" / "node.json").write_text(json.dumps({**node, "protocol": 1}))
    argv = [sys.executable, "-m", "worker", "run", str(folder / "g.json"), "--node-dir", str(folder / "node")]
    clean = {k: v for k, v in os.environ.items() if k != "GEMMFLEET_CACHE"}
    done = subprocess.run(
        argv, capture_output=True, text=True, env={**clean, "TRITON_INTERPRET": str(int(interpreted))}
    )
    records = folder / "node" / "attempts" / "a1" / "records.jsonl"
    lines = records.read_text().splitlines() if records.exists() else []
    return done.returncode, done.stdout + done.stderr, [json.loads(line) for line in lines]


def test_a_group_is_tuned_by_buckets_and_its_rows_carry_the_config(tmp_path: Path) -> None:
    root = make(tmp_path / "tree", DEFAULT)
    counts = {"20x64x128xtorch.float16xtorch.float16": 9}
    code, output, records = run(tmp_path, [5, 20, 32], root=str(root), counts=counts)
    assert code == 0, output
    (winners,) = (tmp_path / "node" / "cache" / "triton").glob("*/winners.jsonl")
    assert len(winners.read_text().splitlines()) == 3
    tuned = {r["shape"]: r["row"] for r in records if r["type"] == "shape_tuned"}
    assert sorted(tuned) == [1, 2, 3], output
    documents = {shape: json.loads(row["triton_config"]) for shape, row in tuned.items()}
    assert [documents[s]["bucket"] for s in (1, 2, 3)] == ["M_LEQ_16", "M_LEQ_64", "M_LEQ_64"]
    assert documents[2]["values"] == documents[3]["values"], "a bucket has one config"
    assert all(p[6] == "" for d in documents.values() for p in d["points"]), "fused operators are for the default's"
    for shape, m in ((1, 5), (2, 20), (3, 32)):
        d, row = documents[shape], tuned[shape]
        assert (d["kind"], d["arch"]) == ("a16w16", "90")
        assert row["kernelName"].startswith("config_")
        assert row["errRatio"] <= 0.05
        if d["values"] is not None:
            assert row["kernelName"] == config_of(d["values"]).name
        points = {p[0]: p for p in d["points"]}
        bound = 16 if m == 5 else 64
        assert set(points) == {m, bound}, "each row has its own M and the bound"
        assert points[m][1] == (9 if m == 20 else 1)
        assert points[bound][1] == 0
        assert d["old"][points[m][5]] == DEFAULT["DEFAULT.json"]["M_LEQ_16" if m == 5 else "any"]
        assert all(p[2] > 0 for p in d["points"]), "today's config was measured too"
    names = [r["row"]["kernelName"] for r in records if r["type"] == "row" and r["shape"] == 2]
    assert len(names) == len(set(names)), "what is measured again for the bucket is no row"
    assert config_of(values(32, NUM_KSPLIT=2)).name in names


@pytest.mark.full
def test_a_config_for_the_default_file_is_measured_and_nothing_searched(tmp_path: Path) -> None:
    configs = {**DEFAULT, "GEMM-A16W16-N=64-K=128.json": {"any": values()}}
    given: dict[str, Any] = {"default": {"M_LEQ_16": values(16, 16)}, "max_candidates": 9}
    code, output, records = run(tmp_path, [5, 20], root=str(make(tmp_path / "tree", DEFAULT)), **given)
    assert code == 1, output
    (row,) = [r["row"] for r in records if r["type"] == "shape_tuned"]
    document = json.loads(row["triton_config"])
    assert (document["default"], document["values"]) == (True, values(16, 16))
    assert {(p[0], p[6]) for p in document["points"]} == {(5, ""), (16, "")}
    assert "in_fused_gemm_a16w16_quant_x: UnavailableError: no module aiter.ops.triton.gemm.fused" in output
    assert len([r for r in records if r["type"] == "row"]) == 2
    (failed,) = [r for r in records if r["type"] == "shape_failed"]
    assert "M=20 reads any of DEFAULT.json" in failed["detail"]
    (tmp_path / "own").mkdir()
    code, output, records = run(tmp_path / "own", [5], root=str(make(tmp_path / "own_tree", configs)), **given)
    assert "N=64-K=128.json" in next(r for r in records if r["type"] == "shape_failed")["detail"], output


@pytest.mark.full
def test_a_config_for_the_default_file_is_measured_in_fused_operators_and_at_a_bucket_of_one_m(tmp_path: Path) -> None:
    root = make(tmp_path / "tree", DEFAULT, fused=True)
    code, output, records = run(tmp_path, [16], root=str(root), default={"M_LEQ_16": values(16, 16)})
    assert code == 0, output
    (row,) = [r["row"] for r in records if r["type"] == "shape_tuned"]
    assert row["kernelName"] == config_of(values(16, 16)).name, "the wrapper's own"
    points = {p[6]: p for p in json.loads(row["triton_config"])["points"]}
    assert set(points) == {"", "fused_gemm_a16w16_quant_x"}
    assert all(old > 0 and new > 0 and err == 0 for _, _, old, new, err, _, _ in points.values())
    assert not [r for r in records if r["type"] == "row" and "_in_" in r["row"]["kernelName"]]


@pytest.mark.full
def test_a_wrong_config_of_today_is_replaced_and_told(tmp_path: Path) -> None:
    broken = {"DEFAULT.json": {"any": {**values(), "BLOCK_SIZE_K": 24}}}  # no power of two: it cannot run
    code, output, records = run(tmp_path, [5], root=str(make(tmp_path / "tree", broken)))
    assert code == 0, output
    (tuned,) = [r["row"] for r in records if r["type"] == "shape_tuned"]
    document = json.loads(tuned["triton_config"])
    assert document["values"] is not None
    assert {p[2] for p in document["points"]} == {-1.0}
    assert "today's does not run" in tuned["detail"]


def test_a_tree_without_a_default_of_the_chip_is_no_candidate(tmp_path: Path) -> None:
    code, output, records = run(tmp_path, [5], root=str(make(tmp_path / "tree", DEFAULT, "gfx950")))
    assert code == 1, output
    (failed,) = [r for r in records if r["type"] == "shape_failed"]
    assert failed["reason"] == "unsupported"
    assert "no default file for 90" in failed["detail"]


def test_without_a_tree_the_reason_is_told(tmp_path: Path) -> None:
    code, output, _ = run(tmp_path, [5], root=str(tmp_path / "nothing"))
    assert code != 0
    assert "nothing does not exist" in output


def test_without_a_gpu_the_tuner_says_that_it_needs_one(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    code, output, records = run(tmp_path, [5], interpreted=False, root=str(make(tmp_path / "tree", DEFAULT)))
    assert code != 0
    assert "needs a GPU, and torch sees none here" in output
    assert not [r for r in records if r["type"] == "shape_tuned"]


def test_the_package_imports_neither_torch_nor_triton_until_it_is_opened() -> None:
    code = (
        "import sys; from worker.tuners.catalog import find_tuner; find_tuner('aiter-triton').create(); "
        "print('torch' in sys.modules or 'triton' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("tuner", "options", "words"),
    [
        ("aiter-triton", {"kind": "fused_a4w4_mul_add"}, "is no kind that is tuned"),
        ("aiter-triton", {"counts": {"1x2x3": -1}}, "not numbers of calls"),
        ("aiter-triton", {"warmup": 3}, "--warmup: for the tuner aiter only, and this is aiter-triton"),
        ("aiter-triton", {"sample": -1}, "not a whole number"),
        ("aiter-triton", {"search": "quick"}, "neither fast nor exhaustive"),
        ("aiter-triton", {"order": "order.json"}, "unknown option 'order'"),
        ("torch", {"search": "fast"}, "--search: for the tuner aiter-triton only, and this is torch"),
        ("replay", {"budget_s_per_shape": 3.0}, "--budget: for the tuners aiter-triton and torch only"),
    ],
)
def test_bad_options_are_refused(tuner: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        check_tuner_options(get_tuner(tuner), options)


def test_good_options_pass() -> None:
    check_tuner_options(get_tuner("aiter-triton"), {"search": "exhaustive", "budget_s_per_shape": 3.0, "sample": 9})
    check_tuner_options(get_tuner("torch"), {"budget_s_per_shape": 3.0})


@pytest.mark.parametrize("name", ["triton", "own-triton"])
def test_the_tuner_of_our_own_kernels_is_unknown(name: str) -> None:
    with pytest.raises(InputError, match=f"unknown tuner '{name}'; there are: aiter, aiter-triton"):
        get_tuner(name)
