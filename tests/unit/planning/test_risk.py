"""Shapes on which kernels of AITER may fault: noted by `--plan`, `shapes check` and in generated lists."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.families import get_family
from orchestrator.planning.plan import risk_notes

FP4 = get_family("a4w4_blockscale")
N576 = "2 shapes (1x576x7168, 16x576x7168): N is no multiple of 128"
K29568 = "1 shape (1x8192x29568): K is no multiple of 256"
WHY = "kernels may fault there, so the tuner aiter runs"
LIST = "M,N,K\n1,576,7168\n16,576,7168\n1,8192,29568\n1,8192,8192\n"


def test_a_sentence_a_class_with_its_first_shapes() -> None:
    keys = [(m, 576, 7168) for m in (1, 2, 3, 4)] + [(1, 8192, 29568), (1, 8192, 8192)]
    assert risk_notes(FP4, keys) == [
        f"4 shapes (1x576x7168, 2x576x7168, 3x576x7168, ...): N is no multiple of 128: {WHY} each alone",
        f"{K29568}: {WHY} it alone",
    ]
    assert risk_notes(FP4, keys, "torch") == []


@pytest.fixture
def shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "s.csv"
    path.write_text(LIST)
    return path


def run(*args: str) -> str:
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    return result.output


def test_shapes_check_says_it(shapes: Path) -> None:
    out = run("shapes", "check", str(shapes), "--family", FP4.name)
    assert N576 in out
    assert K29568 in out
    notes = json.loads(run("shapes", "check", str(shapes), "--family", FP4.name, "--json"))["notes"]
    assert sum(WHY in n for n in notes) == 2


def test_a_plan_with_the_tuner_aiter_says_it(shapes: Path) -> None:
    inventory = shapes.with_name("inv.yaml")
    inventory.write_text("nodes: {n1: {transport: local, gpus: 0, gfx: gfx950, cu_num: 256}}\n")
    plan = ("tune", str(shapes), "-i", str(inventory), "--family", FP4.name, "--plan")
    out = run(*plan, "--tuner", "aiter")
    assert f"note: {N576}" in out
    assert f"note: {K29568}" in out
    assert WHY not in run(*plan, "--tuner", "torch")


def test_lists_from_a_log_and_a_model_say_it(tmp_path: Path) -> None:
    log = tmp_path / "s.log"
    log.write_text(
        "[aiter] shape is M:1, N:576, K:7168, not found tuned config in"
        " /tmp/aiter_configs/a4w4_blockscale_tuned_gemm.csv, will use default config!\n"
    )
    out = run("shapes", "from-log", str(log), "--family", FP4.name, "-o", str(tmp_path / "o.csv"))
    assert "1 shape (1x576x7168): N is no multiple of 128" in out
    config = tmp_path / "config.json"
    model = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 8192, "intermediate_size": 29568,
        "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 80, "vocab_size": 152064,
    }  # fmt: skip
    config.write_text(json.dumps(model))
    out = run("shapes", "from-model", str(config), "--m", "1", "--family", FP4.name, "-o", str(tmp_path / "m.csv"))
    assert "1 shape (1x8192x29568): K is no multiple of 256" in out
