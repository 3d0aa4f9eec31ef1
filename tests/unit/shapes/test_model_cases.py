"""`shapes from-model` on public configs that a reading of fixed keys got wrong, and the sums of published models.

tests/data/models/cases: configs as their makers publish them, without what no class reads (some put together from
their published values). The expected sizes are those of vLLM 0.33's modelling code for the number of ranks, and of the
untuned lists in aiter/configs/model_configs; benchmarks/results/models.md has more models.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.errors import InputError
from orchestrator.families import get_family
from orchestrator.shapes.from_model import Ranks, model_shapes
from orchestrator.shapes.model_class import ask_class
from orchestrator.shapes.model_config import Model, read_model
from orchestrator.shapes.serving import rank_layers
from tests.paths import TEST_DATA
from tests.support.model_classes import ask_here

MODELS = TEST_DATA / "models"
CASES = MODELS / "cases"
QUANTISATIONS = json.loads((CASES / "quantisation.json").read_text())
FP8, FP4 = "torch.float8_e4m3fn", "torch.float4_e2m1fn_x2"
Sizes = set[tuple[int, ...]]


def read(name: str | Path, *, quantised: bool = True) -> Model:
    file = name if isinstance(name, Path) else MODELS / f"{name}.json"
    return read_model(file, quantised=quantised, ask=ask_here)


def keys(model: Model, family: str, tp: int) -> list[dict[str, Any]]:
    of = get_family(family)
    return [dict(zip(of.key_names, key, strict=True)) for key in model_shapes(model, of, [1], Ranks(tp)).keys]


# fmt: off
GEMMS: list[tuple[str, str, int, Sizes]] = [
    # fused_wqa_wkv, wq_b, wo_b, the indexer's wq_b, shared experts; compressors, the indexer's, router, lm_head
    ("cases/deepseek-v4", "a8w8_blockscale", 8, {
        (1536, 4096), (4096, 1024), (8192, 1024), (512, 4096), (4096, 256)}),
    ("cases/deepseek-v4", "a16w16", 8, {
        (2048, 4096), (1024, 4096), (512, 4096), (64, 4096), (256, 4096), (16160, 4096)}),
    # attention, shared expert, dense layers, router, lm_head
    ("cases/llama4-maverick", "a16w16", 4, {
        (1792, 5120), (5120, 1280), (4096, 5120), (5120, 2048), (8192, 5120), (5120, 4096), (128, 5120),
        (50512, 5120)}),
    # one dense layer; shared experts of 2 x 1536
    ("cases/ernie45-21b", "a16w16", 4, {
        (896, 2560), (2560, 640), (6144, 2560), (2560, 3072), (64, 2560), (1536, 2560), (2560, 768), (25856, 2560)}),
    # Mamba-2: 2 x 8192 inner, one group copied, 128 heads
    ("cases/granite4-small", "a16w16", 4, {
        (72, 4096), (768, 4096), (4096, 384), (4384, 4096), (4096, 2048), (1536, 4096), (4096, 1024),
        (25088, 4096)}),
    ("cases/hunyuan-a13b", "a16w16", 4, {
        (1536, 4096), (4096, 1024), (64, 4096), (1536, 4096), (4096, 768), (32048, 4096)}),
    ("cases/gemma3-27b", "a16w16", 4, {
        (2048, 5376), (5376, 1024), (10752, 5376), (5376, 5376), (65552, 5376)}),
    # the indexer's wk and weights_proj in one (AITER's glm5_bf16_untuned_gemm.csv), router, lm_head
    ("engines/glm-5-fp8", "a16w16", 8, {(160, 6144), (256, 6144), (19360, 6144)}),
]
EXPERTS = [
    ("cases/deepseek-v4", 8, (4096, 256, 256, 6, FP8, FP4, "QuantType.per_1x32", 0)),
    ("cases/llama4-maverick", 4, (5120, 2048, 128, 1, "torch.bfloat16", "torch.bfloat16", "QuantType.No", 1)),
    ("cases/ernie45-21b", 4, (2560, 384, 64, 6, "torch.bfloat16", "torch.bfloat16", "QuantType.No", 0)),
    ("cases/granite4-small", 4, (4096, 192, 72, 10, "torch.bfloat16", "torch.bfloat16", "QuantType.No", 0)),
    ("cases/hunyuan-a13b", 4, (4096, 768, 64, 8, "torch.bfloat16", "torch.bfloat16", "QuantType.No", 0)),
]
# fmt: on


@pytest.mark.parametrize(("name", "family", "tp", "expected"), GEMMS)
def test_gemms_of_public_configs(name: str, family: str, tp: int, expected: Sizes) -> None:
    assert {(key["N"], key["K"]) for key in keys(read(name), family, tp)} == expected


@pytest.mark.parametrize(("name", "tp", "expected"), EXPERTS)
def test_experts_of_public_configs(name: str, tp: int, expected: tuple[Any, ...]) -> None:
    [key] = keys(read(name), "fmoe", tp)
    columns = ("model_dim", "inter_dim", "expert", "topk", "q_dtype_a", "q_dtype_w", "q_type", "doweight_stage1")
    assert tuple(key[column] for column in columns) == expected


def test_a_grouped_linear_layer_is_a_batched_gemm() -> None:
    [key] = keys(read("cases/deepseek-v4"), "batched_gemm_a8w8_blockscale_mxscale", 4)
    assert (key["B"], key["N"], key["K"]) == (2, 1024, 4096)  # wo_a: 8 groups


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
        read(f"cases/{name}")


def with_quantisation(folder: Path, config: Any, name: str = "deepseek-v3") -> Path:
    raw = json.loads((MODELS / f"{name}.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "quantization_config": config}))
    return folder


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
    [key] = keys(read(with_quantisation(tmp_path, QUANTISATIONS[case])), "fmoe", 8)
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
    folder = with_quantisation(tmp_path, config)
    with pytest.raises(InputError, match=rf"{told}.*--set quantization=none"):
        read(folder)
    assert keys(read(folder, quantised=False), "fmoe", 8)[0]["q_type"] == "QuantType.No"


def test_the_quantisation_beside_the_config_counts(tmp_path: Path) -> None:
    folder = with_quantisation(tmp_path, None)
    (folder / "hf_quant_config.json").write_text(json.dumps(QUANTISATIONS["nvfp4"]))
    with pytest.raises(InputError, match="modelopt NVFP4"):
        read(folder)


def test_only_the_kv_cache_is_quantised(tmp_path: Path) -> None:
    config = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    assert keys(read(with_quantisation(tmp_path, config)), "fmoe", 8)[0]["q_type"] == "QuantType.No"


def active_elements(model: Model) -> int:
    """Sum of count x N x K on one rank: each weight once, experts by top-k."""
    layers = [layer for layer in rank_layers(model.placed, 1) if not layer.gemm.is_apart]
    dense = sum(layer.count * max(layer.b, 1) * layer.n * layer.k for layer in layers)
    shapes = model_shapes(model, get_family("fmoe"), [1], Ranks()) if model.placed.experts else None
    names = get_family("fmoe").key_names
    for key, count in (shapes.calls if shapes else {}).items():
        value = dict(zip(names, key, strict=True))
        parts = 3 if value["use_g1u1"] else 2
        dense += count * int(value["topk"]) * parts * int(value["model_dim"]) * int(value["inter_dim"])
    return dense


def placed_elements(model: Model) -> int:
    """The same, from the parameters of the class that are placed."""
    total = 0
    unknown = {weight.path for weight in model.placed.unknown}
    for weight in model.placed.listing.weights:
        is_other = weight.path in unknown or "Embedding" in weight.kind or weight.path.endswith("bias")
        if is_other or "conv" in weight.kind.lower():
            continue
        elements = math.prod(weight.shape)
        total += elements * model.topk // weight.shape[0] if ".experts." in weight.path else elements
    return total


SUMMED = (
    "cases/deepseek-v4", "cases/llama4-maverick", "cases/granite4-small", "cases/ernie45-21b", "deepseek-v3",
    "gpt-oss-120b", "llama-3.1-405b", "engines/qwen3-next-80b", "engines/glm-5-fp8", "engines/mixtral-8x7b",
    "engines/minimax-m2.5",
)  # fmt: skip


@pytest.mark.parametrize("name", SUMMED)
def test_each_placed_weight_is_counted_once(name: str) -> None:
    model = read(name, quantised=False)
    assert active_elements(model) == placed_elements(model)


@pytest.mark.parametrize(
    ("name", "billions", "with_embeddings"),
    [
        ("gpt-oss-120b", "5.13", False),
        ("engines/mixtral-8x7b", "12.9", True),
        ("qwen3-235b-a22b", "22", True),
        ("engines/kimi-k2", "32", False),
        ("cases/llama4-maverick", "17", True),
        ("deepseek-v3", "37", False),
    ],
)
def test_active_parameters_are_those_of_the_models_card(name: str, billions: str, with_embeddings: bool) -> None:
    model = read(name, quantised=False)
    weights = [weight for weight in model.placed.listing.weights if "Embedding" in weight.kind]
    embeddings = sum(math.prod(weight.shape) for weight in weights) if with_embeddings else 0
    digits = len(billions.partition(".")[2])
    assert f"{(active_elements(model) + embeddings) / 1e9:.{digits}f}" == billions


def test_counts_are_those_of_a_forward_pass() -> None:
    model = read("deepseek-v3", quantised=False)
    counts = {layer.name: layer.count for layer in rank_layers(model.placed, 8)}
    assert (counts["o"], counts["gate_up"], counts["router"], counts["lm_head"]) == (61, 3, 58, 1)


def test_the_class_runs_in_a_child(tmp_path: Path) -> None:
    """Its answer is the same as here, it is kept from code that a config names, and its error is one line."""
    raw = json.loads((CASES / "granite4-small.json").read_text())
    raw["auto_map"] = {"AutoConfig": "someone/code--config.X"}
    assert ask_class(raw) == ask_here(raw)
    broken = tmp_path / "config.json"
    broken.write_text(json.dumps({**raw, "num_attention_heads": 0}))
    done = CliRunner().invoke(app, ["shapes", "from-model", str(broken), "--m", "1"])
    assert isinstance(done.exception, InputError)
    assert len(str(done.exception).splitlines()) == 1
    assert done.stdout == ""


def test_without_the_packages_the_command_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install '\.\[models\]'.*download\.pytorch\.org/whl/cpu"):
        ask_class({})
    assert os.environ.get("HF_HUB_OFFLINE") is None  # only the child is told
