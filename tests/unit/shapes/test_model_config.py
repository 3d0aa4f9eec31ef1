"""Reading a model's config.json: faults, formats of weights, and what no server would load.

A malformed config is one line that names the fault: no traceback, and no list that could be wrong.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import InputError
from orchestrator.families import get_family
from orchestrator.shapes.from_model import Ranks, model_shapes
from orchestrator.shapes.model_class import ask_class
from tests.kits.fleet import command
from tests.support.marks import WITH_TRANSFORMERS
from tests.support.model_classes import MODELS, ask_here, changed, keys, read_here

pytestmark = WITH_TRANSFORMERS
CASES = MODELS / "cases"
QUANTISATIONS = json.loads((CASES / "quantisation.json").read_text())
QWEN, V3 = "engines/qwen3-235b-a22b-fp8", "deepseek-v3"
FP8, FP4 = "torch.float8_e4m3fn", "torch.float4_e2m1fn_x2"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"hidden_size": ...}, "needs hidden_size"),
        ({"hidden_size": None}, "Field 'hidden_size' expected int, got NoneType"),
        ({"hidden_size": "4096"}, "Field 'hidden_size' expected int, got str"),
        ({"hidden_act": "situ"}, "does not know 'situ', which the config has as hidden_act"),
        ({"rope_parameters": {"rope_type": "foo", "rope_theta": 1.0}}, "'foo', which the config has as rope_type"),
        ({"num_attention_heads": 33}, "not a multiple of the number of attention heads (33)"),
        ({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 9}, "9 is more than the 4 experts"),
    ],
    ids=range(7),
)
def test_faults_of_a_config(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=r"config\.json") as e:
        read_here(changed(tmp_path, "llama-3-8b", **change))
    assert told in str(e.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is no JSON"),
        ("{", "is no JSON"),
        ("[]", "no JSON object"),
        ("[1]", "no JSON object"),
        ("null", "no JSON object"),
        ("{" * 10_000, "is no JSON"),
        ("[" * 100_000, "of too many levels"),
        ("9" * 100_000, "a number of thousands of digits"),
        ('{"a":' * 10_000 + "1" + "}" * 10_000, "of too many levels"),
        ('{"hidden_size": 1' + "0" * 5000 + "}", "a number of thousands of digits"),
    ],
    ids=range(10),
)
def test_what_is_no_config(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=r"config\.json") as e:
        read_here(tmp_path)
    assert told in str(e.value)


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
HARMLESS: list[dict[str, Any]] = [
    {"attn_implementation": "kernels-community/flash-attn"}, {"_attn_implementation": "someone/kernel"},
    {"auto_map": {"AutoConfig": "someone/code--config.X"}}, {"_experts_implementation": "someone/kernel"},
    {"experts_implementation": "someone/kernel"}, {"_name_or_path": "/etc/passwd"}, {"trust_remote_code": True},
]  # fmt: skip


def lists(folder: Path) -> list[Any]:
    model = read_here(folder)
    return [model_shapes(model, get_family(f), [1], Ranks()).keys for f in ("a8w8_blockscale", "fmoe")]


@pytest.mark.parametrize("change", SIZES, ids=str)
def test_a_config_that_no_server_loads_is_one_error(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(InputError) as e:
        lists(changed(tmp_path, QWEN, **change))
    assert len(str(e.value)) < 800
    assert len(str(e.value).splitlines()) <= 4


@pytest.mark.parametrize("change", HARMLESS, ids=str)
def test_keys_that_would_load_code_change_nothing(tmp_path: Path, change: dict[str, Any]) -> None:
    assert lists(changed(tmp_path, QWEN, **change)) == lists(changed(tmp_path, QWEN))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("step3-321b", "none for model type step3_text"),
        ("ling-lite", "none for model type bailing_moe"),
        ("minimax-m3", "none for model type minimax_m3"),
        ("internvl-llm-config", "needs num_hidden_layers"),
    ],
)
def test_a_type_without_a_class_is_refused(name: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        read_here(f"cases/{name}")


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("quark-mxfp4", (FP4, FP4, "per_1x32")),  # AITER's dsv3_fp4_untuned_fmoe.csv
        ("ct-fp8-channel", (FP8, FP8, "per_Token")),
        ("ct-fp8-block", (FP8, FP8, "per_1x128")),
        ("ct-int4", ("torch.bfloat16", "torch.int4", "per_1x32")),  # AITER's kimik2_i4_untuned_fmoe.csv
        ("inline-flag", (FP8, FP8, "per_1x128")),
    ],
)
def test_experts_are_stored_as_the_config_says(tmp_path: Path, case: str, expected: tuple[str, str, str]) -> None:
    [key] = keys(read_here(changed(tmp_path, V3, quantization_config=QUANTISATIONS[case])), "fmoe", 8)
    assert (key["q_dtype_a"], key["q_dtype_w"], key["q_type"].removeprefix("QuantType.")) == expected


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (QUANTISATIONS["fp8-64x64"], "fp8 in blocks of"), (QUANTISATIONS["preset"], "preset FP8_DYNAMIC"),
        (QUANTISATIONS["no-weights"], "has no format of weights"),
        (QUANTISATIONS["weights-null"], "has no format of weights"), (QUANTISATIONS["nvfp4"], "modelopt NVFP4"),
        ({"quant_method": "awq", "bits": 4}, "awq"), ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "compressed-tensors"}, "without groups"), ({"bits": 4}, "an unnamed method"),
    ],
)  # fmt: skip
def test_a_quantisation_without_a_family_is_an_error(tmp_path: Path, config: Any, told: str) -> None:
    folder = changed(tmp_path, V3, quantization_config=config)
    with pytest.raises(InputError, match=rf"{told}.*--set quantization=none"):
        read_here(folder)
    assert keys(read_here(folder, quantised=False), "fmoe", 8)[0]["q_type"] == "QuantType.No"


def test_the_quantisation_beside_the_config_counts(tmp_path: Path) -> None:
    folder = changed(tmp_path, V3, quantization_config=None)
    (folder / "hf_quant_config.json").write_text(json.dumps(QUANTISATIONS["nvfp4"]))
    with pytest.raises(InputError, match="modelopt NVFP4"):
        read_here(folder)


def test_only_the_kv_cache_is_quantised(tmp_path: Path) -> None:
    config = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    assert keys(read_here(changed(tmp_path, V3, quantization_config=config)), "fmoe", 8)[0]["q_type"] == "QuantType.No"


def test_the_class_runs_in_a_child(tmp_path: Path) -> None:
    """Its answer is the same as here, it is kept from code that a config names, and its error is one line."""
    raw = json.loads((CASES / "granite4-small.json").read_text())
    raw["auto_map"] = {"AutoConfig": "someone/code--config.X"}
    assert ask_class(raw) == ask_here(raw)
    broken = tmp_path / "config.json"
    broken.write_text(json.dumps({**raw, "num_attention_heads": 0}))
    done = command("shapes", "from-model", broken, "--m", "1").failed_with(2)
    assert (done.out, len(done.err.splitlines())) == ("", 1)


def test_without_the_packages_the_command_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install '\.\[models\]'.*download\.pytorch\.org/whl/cpu"):
        ask_class({})
    assert os.environ.get("HF_HUB_OFFLINE") is None  # only the child is told
