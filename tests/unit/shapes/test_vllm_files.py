"""`shapes from-model --engine vllm` against vLLM's own classes, on thirteen published models.

tests/data/models/engines holds what matters of the makers' config.json files, as github.com/ai-dynamo/aiconfigurator
keeps them (`model_configs` at 095f58a51c; Qwen3-Next at 1b7cfb10a6, GLM-4.7 at a0ba9ec6d1): without the keys of
training and decoding, and without norms in the lists of modules that stay unquantised. GLM-4.7 is without its
quantisation there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import InputError
from orchestrator.families import get_family
from orchestrator.shapes.from_model import ModelShapes, Ranks
from orchestrator.shapes.model_config import Model, read_model
from orchestrator.shapes.reader import read_shapes
from orchestrator.shapes.vllm_files import sglang_shapes, vllm_shapes
from tests.kits.fleet import Done, command
from tests.paths import ROOT, TEST_DATA
from tests.support.engines import tree
from tests.support.marks import WITH_TRANSFORMERS
from tests.support.model_classes import ask_here
from worker.triton_configs.m_ranges import USUAL_KEYS

pytestmark = [pytest.mark.usefixtures("classes_here"), WITH_TRANSFORMERS]
MODELS = TEST_DATA / "models" / "engines"
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
# keys that a published config leaves to its class in transformers
DEFAULTS: dict[str, dict[str, Any]] = {
    "glm4_moe": {
        "hidden_act": "silu", "attention_bias": False, "use_qk_norm": False, "norm_topk_prob": True, "n_group": 1,
        "topk_group": 1, "rms_norm_eps": 1e-5,
    },
    "llama": {"rms_norm_eps": 1e-5},
    "deepseek_v3": {"rms_norm_eps": 1e-6, "max_position_embeddings": 163840, "norm_topk_prob": True},
}  # fmt: skip
SPREAD = [(1, 1), (3, 1), (4, 1), (8, 1), (16, 1), (8, 8), (2, 8), (1, 6)]


def raw(name: str) -> dict[str, Any]:
    found = json.loads((TEST_DATA / "models" / f"{name}.json").read_text())
    return {**DEFAULTS.get(found["model_type"], {}), **found}


def layer_names(config: dict[str, Any], *modules: str, of: range | None = None) -> list[str]:
    return [f"model.layers.{i}.{m}" for i in of or range(config["num_hidden_layers"]) for m in modules]


def variants() -> dict[str, dict[str, Any]]:
    """Models as published; as if they were in block FP8; with some layers left as they are."""
    out = {file.stem: raw(f"engines/{file.stem}") for file in sorted(MODELS.glob("*.json"))}
    out |= {name: raw(name) for name in ("deepseek-v3", "llama-3.1-405b")}
    assert len(out) == 13
    for name, config in [(n, c) for n, c in out.items() if "quantization_config" not in c]:
        left = layer_names(config, "mlp.gate", "linear_attn.in_proj_ba")
        out[f"{name} as fp8"] = {**config, "quantization_config": {**FP8, "modules_to_not_convert": left}}
    v3 = raw("engines/kimi-k2")
    for name, left in {
        "dense layer left": layer_names(v3, "mlp.gate_proj", "mlp.up_proj", of=range(1)),
        "experts left": layer_names(v3, "mlp.experts.0.gate_proj"),
        "some o left": layer_names(v3, "self_attn.o_proj", of=range(3)),
        "q_kv_a left": layer_names(v3, "self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
        "shared left": layer_names(v3, "mlp.shared_experts.down_proj"),
        "a part of a name": ["self_attn", "gate_proj"],
    }.items():
        out[f"kimi-k2, {name}"] = {**v3, "quantization_config": {**FP8, "modules_to_not_convert": left}}
    return out


VARIANTS = variants()
COMPARED = {
    "deepseek_v3", "deepseek_v32", "glm4_moe", "glm_moe_dsa", "kimi_k2", "llama", "minimax_m2", "mixtral", "qwen3",
    "qwen3_moe", "qwen3_next",
}  # fmt: skip
Engine = dict[tuple[str, int, int], list[dict[str, Any]]]
CASES = [(name, tp, ep) for name in VARIANTS for tp, ep in SPREAD]


def model(config: dict[str, Any], folder: Path) -> Model:
    (folder / "config.json").write_text(json.dumps(config))
    return read_model(folder, ask=ask_here)


def ours(config: dict[str, Any], folder: Path, tp: int, ep: int) -> tuple[dict[str, ModelShapes], list[str]]:
    return vllm_shapes(model(config, folder), [7], Ranks(tp, ep), {})


@pytest.fixture(scope="module")
def engine() -> Engine:
    """The sizes that vLLM's classes give to three decoder layers of each case."""
    asked = [
        ((name, tp, ep), {"raw": VARIANTS[name], "tp": tp, "ep": ep, "at": at})
        for name, tp, ep in CASES
        for at in (0, 3, VARIANTS[name]["num_hidden_layers"] - 1)
    ]
    argv = [sys.executable, "-m", "tests.support.vllm_layers", str(tree("vllm"))]
    cases = json.dumps([case for _, case in asked])
    done = subprocess.run(argv, cwd=ROOT, input=cases, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    out: Engine = {}
    for (key, _), answer in zip(asked, json.loads(done.stdout), strict=True):
        out.setdefault(key, []).append(answer)
    return out


@pytest.mark.parametrize(("name", "tp", "ep"), CASES)
def test_sizes_are_those_of_vllms_own_classes(engine: Engine, tmp_path: Path, name: str, tp: int, ep: int) -> None:
    theirs = engine[name, tp, ep]
    refused = [layer["refused"] for layer in theirs if "refused" in layer]
    if refused or not any(layer["linear"] or layer["experts"] for layer in theirs):
        with pytest.raises(InputError, match=r"refuses|divide|no config file"):
            ours(VARIANTS[name], tmp_path, tp, ep)
        return
    found, notes = ours(VARIANTS[name], tmp_path, tp, ep)
    linear = {(k[1], k[2]) for k in found["a8w8_blockscale"].keys} if "a8w8_blockscale" in found else set()
    assert linear == {tuple(size) for layer in theirs for size in layer["linear"]}
    columns = get_family("fmoe").key_names
    experts = [dict(zip(columns, k, strict=True)) for k in found["fmoe"].keys] if "fmoe" in found else []
    kinds = {None: "QuantType.No", (128, 128): "QuantType.per_1x128"}
    expected = {
        (e["e"], e["n"], e["hidden"], kinds.get(tuple(e["block"]) if e["block"] else None))
        for layer in theirs for e in layer["experts"]
    }  # fmt: skip
    finer = {e for e in expected if e[3] is None}
    assert bool(finer) == any(note.startswith("left out the experts") for note in notes)
    got = {(e["expert"], e["inter_dim"], e["model_dim"], e["q_type"]) for e in experts}
    assert got == expected - finer


def test_the_cases_cover_what_vllm_decides(engine: Engine) -> None:
    answers = [layer for case in engine.values() for layer in case]
    blocks = {str(e["block"]) for layer in answers for e in layer.get("experts", ())}
    assert blocks == {"None", "[128, 128]", "[64, 64]", "[32, 32]"}
    assert {config["model_type"] for config in VARIANTS.values()} == COMPARED
    refused = [layer["refused"] for layer in answers if "refused" in layer]
    assert {text.partition(":")[0] for text in refused} == {"ValueError", "AssertionError"}  # blocks; heads
    assert len(answers) - len(refused) > 400


@pytest.mark.parametrize(
    ("change", "tp", "ep", "told"),
    [
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, 1, 1, "quantised with awq"),
        ({"quantization_config": {**FP8, "weight_block_size": [64, 64]}}, 1, 1, "fp8 in blocks of"),
        ({}, 3, 1, "does not divide"),
    ],
)
def test_what_does_not_fit(tmp_path: Path, change: dict[str, Any], tp: int, ep: int, told: str) -> None:
    with pytest.raises(InputError, match=told):
        ours({**raw("engines/qwen3-30b-a3b-fp8"), **change}, tmp_path, tp, ep)


def test_llm_compressors_forms_and_models_without_files(tmp_path: Path) -> None:
    def weights(**more: Any) -> dict[str, Any]:
        activations = {"num_bits": 8, "type": "float", "dynamic": True}
        group = {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", **more},
            "input_activations": activations,
        }
        return {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": group},
            "ignore": ["re:.*self_attn.*"],
        }

    config = raw("engines/qwen3-30b-a3b-fp8")
    block = {**config, "quantization_config": weights(strategy="block", block_structure=[128, 128])}
    found, _ = ours(block, tmp_path, 1, 1)
    assert list(found) == ["fmoe"]  # all of attention is left as it is
    found, _ = ours({**config, "quantization_config": weights(strategy="channel")}, tmp_path, 1, 1)
    assert "QuantType.per_Tensor" in found["fmoe"].keys[0]
    with pytest.raises(InputError, match="no config file"):
        ours({**raw("engines/qwen3-32b-fp8"), "quantization_config": weights(strategy="channel")}, tmp_path, 1, 1)
    with pytest.raises(InputError, match="quantised with compressed-tensors"):
        ours({**config, "quantization_config": weights(strategy="group", num_bits=4)}, tmp_path, 1, 1)


def test_a_model_within_another_and_one_without_a_class(tmp_path: Path) -> None:
    config = raw("engines/kimi-k2")
    left = [f"language_model.{n}" for n in layer_names(config, "self_attn.o_proj")]
    quant = {**FP8, "modules_to_not_convert": [*left, "vision_tower.blocks.0.wqkv"]}
    config.pop("quantization_config")
    outer: dict[str, Any] = {
        "model_type": "kimi_k25",
        "quantization_config": quant,
        "text_config": {**config, "model_type": "deepseek_v3"},
    }
    names = dict(ours(outer, tmp_path, 8, 1)[0]["a8w8_blockscale"].layers)
    assert "o" not in names
    assert names["q_kv_a"] == "N 2112, K 7168, 61 times"
    outer["text_config"] |= {"model_type": "kimi_new", "architectures": None}
    outer["model_type"] = "kimi_newer"
    with pytest.raises(InputError, match="none for model type kimi_new; a newer transformers may"):
        ours(outer, tmp_path, 8, 1)


def from_model(*args: object) -> Done:
    return command("shapes", "from-model", MODELS / "qwen3-235b-a22b-fp8.json", *args)


def test_the_command_writes_a_list_for_each_family(tmp_path: Path) -> None:
    out = tmp_path / "shapes.csv"
    done = from_model("--engine", "vllm", "--tp", "4", "-o", out).ok()
    linear = read_shapes(tmp_path / "shapes-a8w8_blockscale.csv", get_family("a8w8_blockscale")).shapes
    assert [s.key for s in linear[: len(USUAL_KEYS)]] == [(m, 2304, 4096) for m in USUAL_KEYS]
    fmoe = read_shapes(tmp_path / "shapes-fmoe.csv", get_family("fmoe")).shapes
    assert [s.key[:5] for s in fmoe] == [(m, 4096, 384, 128, 8) for m in USUAL_KEYS]
    assert "model_dim 4096, inter_dim 384, 128 experts, top 8" in done.out
    assert f"written: {tmp_path}/shapes-a8w8_blockscale.csv, {tmp_path}/shapes-fmoe.csv" in done.out
    document = from_model("--engine", "vllm", "--tp", "4", "-o", out, "--force", "--json").json()
    assert [x["family"] for x in document["families"]] == ["a8w8_blockscale", "fmoe"]


def test_one_family_and_what_the_command_refuses(tmp_path: Path) -> None:
    transformers = version("transformers")
    one = from_model("--engine", "vllm", "--tp", "8", "--m", "1,9", "--family", "a8w8_blockscale")
    assert one.out == "M,N,K,count,transformers\n" + "".join(
        f"{shape},94,{transformers}\n" for shape in ("1,1280,4096", "9,1280,4096", "1,4096,1024", "9,4096,1024")
    )
    assert "64 x 64" in one.err
    from_model("--engine", "vllm", "--tp", "4").failed_with(2, "name one with --family")
    from_model("--engine", "vllm", "--tp", "8", "--family", "fmoe").failed_with(2, "no shape of family fmoe")
    from_model("--family", "a8w8_blockscale").failed_with(2, "--m")
    layers = from_model("--engine", "vllm", "--tp", "8", "--layers", "qkv")
    assert layers.failed_with(2, "--layers: not with --engine").out == ""


def test_sglang_looks_up_the_same_experts_and_its_linear_layers_are_left_out(tmp_path: Path) -> None:
    deepseek = model(raw("deepseek-v3"), tmp_path)
    theirs, _ = vllm_shapes(deepseek, [7], Ranks(8), {})
    found, notes = sglang_shapes(deepseek, [7], Ranks(8), {})
    assert list(found) == ["fmoe"]
    assert found["fmoe"].calls == theirs["fmoe"].calls
    assert notes == ["not known: whether SGLang runs shared experts as routed ones; if its log says so, --fuse-shared"]
    with pytest.raises(InputError, match="SGLang refuses --tp 32: blocks of 128 do not divide experts 64 wide"):
        sglang_shapes(deepseek, [7], Ranks(32), {})
    with pytest.raises(InputError, match="are of fused experts, and this model has none"):
        sglang_shapes(model(raw("llama-3.1-405b"), tmp_path), [7], Ranks(8), {})
