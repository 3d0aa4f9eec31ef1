"""The tuner triton as the worker runs it: in Triton's interpreter on the CPU, and without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import InputError
from orchestrator.tuners import check_tuner_options, get_tuner

KEYS = [{"M": 5, "N": 32, "K": 64}, {"M": 20, "N": 32, "K": 64}]
SMALL = {"max_candidates": 2, "min_samples": 1, "max_samples": 1, "compilers": 1}


def run(folder: Path, family: str, keys: list[dict[str, int]], env: dict[str, str]) -> tuple[int, str, list[Any]]:
    """`worker run GROUP.json`: exit code, output, records."""
    spec = {
        "attempt": "a1", "run": "r", "epoch": 1, "group": "g", "family": family, "tuner": "triton", "options": SMALL,
        "shapes": [{"id": i + 1, "key": key} for i, key in enumerate(keys)], "protocol": 1,
    }  # fmt: skip
    (folder / "g.json").write_text(json.dumps(spec))
    argv = [sys.executable, "-m", "worker", "run", str(folder / "g.json"), "--node-dir", str(folder / "node")]
    clean = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "GEMMFLEET_CACHE")}
    done = subprocess.run(argv, capture_output=True, text=True, env={**clean, **env})
    records = folder / "node" / "attempts" / "a1" / "records.jsonl"
    lines = records.read_text().splitlines() if records.exists() else []
    return done.returncode, done.stdout + done.stderr, [json.loads(line) for line in lines]


def test_a_group_is_tuned_from_end_to_end_in_the_interpreter(tmp_path: Path) -> None:
    code, output, records = run(tmp_path, "a16w16", KEYS, {"TRITON_INTERPRET": "1"})
    assert code == 0, output
    tuned = [r for r in records if r["type"] == "shape_tuned"]
    assert [r["shape"] for r in tuned] == [1, 2]
    for r in tuned:
        assert r["row"]["libtype"] == "triton"
        assert r["row"]["kernelName"].startswith("triton_")
        assert r["row"]["errRatio"] <= 0.05
    (ready,) = [r for r in records if r["type"] == "tuner_ready"] or [{"device": {"interpreter": ""}}]
    assert "interpreter" in ready["device"]
    (winners,) = (tmp_path / "node" / "cache" / "triton").glob("*/winners.jsonl")
    assert len(winners.read_text().splitlines()) == 2


def test_without_a_gpu_the_tuner_says_that_it_needs_one(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    code, output, records = run(tmp_path, "a16w16", KEYS, {})
    assert code != 0
    assert "the tuner triton needs a GPU" in output
    assert not [r for r in records if r["type"] == "shape_tuned"]


def test_the_package_imports_neither_torch_nor_triton_until_it_is_opened() -> None:
    code = (
        "import sys; from worker.tuners.catalog import find_tuner; find_tuner('triton').create(); "
        "print('torch' in sys.modules or 'triton' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("tuner", "options", "words"),
    [
        ("torch", {"search": "fast"}, "--search: for the tuners aiter-triton and triton only, and this is torch"),
        ("replay", {"budget_s_per_shape": 3.0}, "--budget: for the tuners aiter-triton, torch and triton only"),
        ("triton", {"search": "quick"}, "neither fast nor exhaustive"),
        ("triton", {"warmup": 3}, "--warmup: for the tuner aiter only, and this is triton"),
    ],
)
def test_options_for_another_tuner_are_refused(tuner: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        check_tuner_options(get_tuner(tuner), options)


def test_good_options_pass() -> None:
    check_tuner_options(get_tuner("triton"), {"search": "exhaustive", "budget_s_per_shape": 3.0})
    check_tuner_options(get_tuner("torch"), {"budget_s_per_shape": 3.0})
