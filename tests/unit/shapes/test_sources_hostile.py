"""Malformed configs: one line that names the fault, no traceback, no list that could be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import InputError
from orchestrator.families import get_family
from orchestrator.shapes.from_model import Ranks, model_shapes
from orchestrator.shapes.model_config import read_model
from tests.paths import TEST_DATA
from tests.support.model_classes import ask_here

MODELS = TEST_DATA / "models"
BILLION = 10**9
SIZES: list[dict[str, Any]] = [
    {"num_hidden_layers": BILLION}, {"num_hidden_layers": -3}, {"num_hidden_layers": 0}, {"num_hidden_layers": 2.5},
    {"num_hidden_layers": True}, {"num_hidden_layers": None}, {"num_hidden_layers": [4]}, {"num_experts": BILLION},
    {"num_experts": -1}, {"num_experts": "128"}, {"num_experts": {}}, {"head_dim": BILLION}, {"head_dim": -128},
    {"head_dim": 0}, {"head_dim": "128"}, {"head_dim": 10**30}, {"num_attention_heads": 0}, {"num_attention_heads": -8},
    {"num_attention_heads": BILLION}, {"num_attention_heads": "64"}, {"num_key_value_heads": 0},
    {"num_key_value_heads": 7}, {"num_key_value_heads": -4}, {"hidden_size": 0}, {"hidden_size": -4096},
    {"hidden_size": 2**31}, {"hidden_size": 4096.0}, {"hidden_size": None}, {"hidden_size": "4096"},
    {"vocab_size": 0}, {"vocab_size": -1}, {"vocab_size": 10**12}, {"vocab_size": "many"},
    {"moe_intermediate_size": 0}, {"moe_intermediate_size": -1536}, {"moe_intermediate_size": [1, 2]},
    {"num_experts_per_tok": 0}, {"num_experts_per_tok": 129}, {"num_experts_per_tok": "8"}, {"mlp_only_layers": 3},
    {"hidden_act": "os.system"}, {"hidden_act": 3}, {"torch_dtype": "float7"}, {"torch_dtype": ["bfloat16"]},
    {"rope_theta": "x"}, {"decoder_sparse_step": 0}, {"decoder_sparse_step": "1"},
    {"model_type": None, "architectures": None}, {"model_type": "../../etc", "architectures": None},
    {"model_type": ["qwen3_moe"], "architectures": [["x"]]}, {"model_type": "bert"}, {"model_type": "t5"},
    {"quantization_config": {"quant_method": "awq"}}, {"quantization_config": {"quant_method": ["fp8"]}},
    {"quantization_config": "fp8"}, {"quantization_config": {"quant_method": "fp8", "weight_block_size": "128"}},
    {"quantization_config": {"quant_method": "fp8", "ignored_layers": ["re:("]}},
    {"quantization_config": {"quant_method": "fp8", "ignored_layers": 7}},
    {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
    {"quantization_config": {"quant_method": "quark", "global_quant_config": None}},
    {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": [1]}},
]  # fmt: skip
TEXTS = [
    "",
    "{",
    "[]",
    "null",
    "{" * 10_000,
    '{"a":' * 10_000 + "1" + "}" * 10_000,
    '{"hidden_size": 1' + "0" * 5000 + "}",
]
HARMLESS: list[dict[str, Any]] = [
    {"attn_implementation": "kernels-community/flash-attn"}, {"_attn_implementation": "someone/kernel"},
    {"auto_map": {"AutoConfig": "someone/code--config.X"}}, {"_experts_implementation": "someone/kernel"},
    {"experts_implementation": "someone/kernel"}, {"_name_or_path": "/etc/passwd"}, {"trust_remote_code": True},
]  # fmt: skip


def config(change: dict[str, Any], folder: Path) -> Path:
    raw = {**json.loads((MODELS / "engines" / "qwen3-235b-a22b-fp8.json").read_text()), **change}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def lists(folder: Path) -> list[Any]:
    model = read_model(folder, ask=ask_here)
    return [model_shapes(model, get_family(f), [1], Ranks()).keys for f in ("a8w8_blockscale", "fmoe")]


@pytest.mark.parametrize("change", SIZES, ids=str)
def test_a_config_that_no_server_loads_is_one_error(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(InputError) as e:
        lists(config(change, tmp_path))
    assert len(str(e.value)) < 800
    assert len(str(e.value).splitlines()) <= 4


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_what_is_no_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=r"config\.json"):
        lists(tmp_path)


@pytest.mark.parametrize("change", HARMLESS, ids=str)
def test_keys_that_would_load_code_change_nothing(tmp_path: Path, change: dict[str, Any]) -> None:
    assert lists(config(change, tmp_path)) == lists(config({}, tmp_path))
