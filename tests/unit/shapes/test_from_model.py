"""`shapes from-model`: published models give the shapes that are known of them, and sums that their cards state.

tests/data/models holds the values that matter of the config.json files that the makers publish on Hugging Face:
meta-llama/Meta-Llama-3-8B, Meta-Llama-3-70B, Llama-3.1-405B; Qwen/Qwen3-235B-A22B; deepseek-ai/DeepSeek-V3;
openai/gpt-oss-120b. "AITER ships" means the untuned lists in aiter/configs/model_configs at e4048607a5 (2026-08-22).
`cases` are configs that a reading of fixed keys got wrong, without what no class reads; the sizes expected of them are
those of vLLM 0.33's modelling code for the number of ranks. benchmarks/results/models.md has more models.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import InputError
from orchestrator.families import get_family
from orchestrator.shapes.from_model import ModelShapes, Ranks, model_shapes
from orchestrator.shapes.model_config import Model
from orchestrator.shapes.reader import read_shapes
from orchestrator.shapes.serving import rank_layers
from tests.kits.fleet import command
from tests.support.marks import WITH_TRANSFORMERS
from tests.support.model_classes import MODELS, changed, keys, read_here

pytestmark = [pytest.mark.usefixtures("classes_here"), WITH_TRANSFORMERS]


def shapes(config: str | Path, family: str, tp: int = 1, *, as_16_bits: bool = False, **kw: Any) -> ModelShapes:
    """The shapes of a model by its name here, or of a config.json; more words are those of Ranks and model_shapes."""
    ranks = Ranks(tp, **{name: kw.pop(name) for name in ("ep", "fuse_shared") if name in kw})
    model = read_here(config, quantised=not as_16_bits)
    return model_shapes(model, get_family(family), kw.pop("ms", [1]), ranks, **kw)


def gemms(name: str | Path, tp: int, family: str = "a8w8", **kw: Any) -> set[tuple[int, int]]:
    """(N, K) of a model's GEMMs, as if it had 16 bits."""
    at = get_family(family).key_names.index("N")
    return {(int(k[at]), int(k[at + 1])) for k in shapes(name, family, tp, **{"as_16_bits": True, **kw}).keys}


# fmt: off
KNOWN = [
    # model, tp, {(N, K)}: without lm_head and router, which stay unquantised
    # AITER ships these for llama70B at tp 8
    ("llama-3-70b", 8, {(1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584)}),
    # and these for llama405B at tp 8
    ("llama-3.1-405b", 8, {(2304, 16384), (16384, 2048), (13312, 16384), (16384, 6656)}),
    # AITER ships these at tp 8; with 8 ranks and 4 key-value heads each rank has a copy of one
    ("qwen3-235b-a22b", 8, {(1280, 4096), (4096, 1024)}),
    # AITER ships 2112x7168, 3072x1536, 4096x512, 7168x2048 and 512x7168 at tp 8
    ("deepseek-v3", 8, {
        (1536, 7168), (576, 7168), (2112, 7168), (3072, 1536), (4096, 512), (7168, 2048),  # attention
        (4608, 7168), (7168, 2304),  # the three dense layers
        (512, 7168), (7168, 256),  # the shared expert
    }),
    # AITER ships these at tp 8
    ("gpt-oss-120b", 8, {(640, 2880), (2880, 512)}),
]
# fmt: on


@pytest.mark.parametrize(("name", "tp", "known"), KNOWN, ids=lambda v: str(v) if isinstance(v, (str, int)) else "")
def test_published_models(name: str, tp: int, known: set[tuple[int, int]]) -> None:
    assert gemms(name, tp) == known


def test_unquantised_gemms_types_and_bias_follow_the_model() -> None:
    more = gemms("deepseek-v3", 8, "a16w16") - gemms("deepseek-v3", 8)
    assert more == {(16160, 7168), (256, 7168)}  # lm_head and router, as AITER ships for dsv3_bf16
    assert gemms("deepseek-v3", 8, "a16w16", as_16_bits=False) == more
    assert gemms("deepseek-v3", 8, "a8w8_blockscale", as_16_bits=False) == gemms("deepseek-v3", 8)
    assert gemms("deepseek-v3", 8, "a8w8", only=["lm_head"]) == {(16160, 7168)}
    of = get_family("a16w16")
    found = shapes("gpt-oss-120b", "a16w16", 8, ms=[7])
    rows = {(k[1], k[2]): dict(zip(of.key_names, k, strict=True)) for k in found.keys}
    biased = {nk: r["bias"] for nk, r in rows.items()}  # attention, the router, lm_head
    assert biased == {(640, 2880): "True", (2880, 512): "True", (128, 2880): "True", (25136, 2880): "False"}
    assert {(r["M"], r["dtype"], r["outdtype"]) for r in rows.values()} == {(7, "torch.bfloat16", "torch.bfloat16")}
    absorbed = shapes("deepseek-v3", "batched_bf16", 8, ms=[4])
    assert absorbed.calls == {(16, 4, 512, 128): 61, (16, 4, 128, 512): 61}


def test_experts() -> None:
    def row(name: str, **kw: Any) -> str:
        return ",".join(map(str, shapes(name, "fmoe", **kw).keys[0]))

    fp8 = "torch.float8_e4m3fn"
    # as AITER ships: a8w8_blockscale_untuned_fmoe_ds_v3.csv
    assert row("deepseek-v3", tp=8, fuse_shared=True) == (
        f"1,7168,256,257,9,ActivationType.Silu,torch.bfloat16,{fp8},{fp8},QuantType.per_1x128,1,0"
    )
    assert row("deepseek-v3", tp=8).startswith("1,7168,256,256,8,")
    # as AITER ships: a8w8_blockscale_untuned_fmoe_qwen3_235b.csv, experts over 8 ranks
    quant = {"q_dtype_a": fp8, "q_dtype_w": fp8, "q_type": "QuantType.per_1x128"}
    assert row("qwen3-235b-a22b", tp=8, ep=8, columns=quant) == (
        f"1,4096,1536,16,8,ActivationType.Silu,torch.bfloat16,{fp8},{fp8},QuantType.per_1x128,1,0"
    )
    assert row("qwen3-235b-a22b", tp=4).startswith("1,4096,384,128,8,ActivationType.Silu,torch.bfloat16,torch.bfloat16")
    # gptoss_a16w4_untuned_fmoe.csv but for the padding to 3072, of which a note tells
    assert row("gpt-oss-120b") == (
        "1,2880,2880,128,4,ActivationType.Swiglu,torch.bfloat16,torch.bfloat16,torch.float4_e2m1fn_x2,QuantType.per_1x32,1,0"
    )
    assert any("256" in note for note in shapes("gpt-oss-120b", "fmoe").notes)


def test_direct_q_and_language_model_within_another(tmp_path: Path) -> None:
    inner = json.loads((MODELS / "deepseek-v3.json").read_text()) | {"q_lora_rank": None}  # as in DeepSeek-V2-Lite
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "some_vl", "text_config": inner}))
    names = dict(shapes(tmp_path, "a8w8", 8, as_16_bits=True).layers)  # the folder will do
    assert names["q"] == "N 3072, K 7168, 61 times"
    assert not names.keys() & {"q_a", "q_b", "q_kv_a"}


@pytest.mark.parametrize(
    ("name", "change", "family", "tp", "told"),
    [
        ("llama-3-70b", {}, "a8w8", 3, "64 attention heads"),
        ("llama-3-70b", {"intermediate_size": 96}, "a8w8", 64, "does not divide the width 96 of mlp.gate_proj"),
        (
            "llama-3-70b",
            {"hidden_size": 6144, "num_attention_heads": 48, "num_key_value_heads": 12},
            "a8w8",
            8,
            "neither",
        ),
        ("llama-3-8b", {}, "batched_bf16", 1, "has no batched GEMMs"),
        ("llama-3-8b", {}, "fmoe", 1, "has no experts"),
        ("deepseek-v3", {}, "batched_gemm_a8w8_blockscale_mxscale", 1, "take its shapes from a log"),
    ],
)
def test_what_does_not_fit(tmp_path: Path, name: str, change: dict[str, Any], family: str, tp: int, told: str) -> None:
    with pytest.raises(InputError, match=told):
        shapes(changed(tmp_path, name, **change), family, tp, as_16_bits=True)


def test_k_that_no_kernel_can_take_is_left_out_with_a_word(tmp_path: Path) -> None:
    found = shapes(changed(tmp_path, "llama-3-8b", intermediate_size=14336 + 16), "a4w4_blockscale")
    assert all(int(k[2]) % 32 == 0 for k in found.keys)
    assert any(n.startswith("left out down: K is not a multiple of 32") for n in found.notes)


FP8, FP4 = "torch.float8_e4m3fn", "torch.float4_e2m1fn_x2"
Sizes = set[tuple[int, ...]]
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
    assert {(key["N"], key["K"]) for key in keys(read_here(name), family, tp)} == expected


@pytest.mark.parametrize(("name", "tp", "expected"), EXPERTS)
def test_experts_of_public_configs(name: str, tp: int, expected: tuple[Any, ...]) -> None:
    [key] = keys(read_here(name), "fmoe", tp)
    columns = ("model_dim", "inter_dim", "expert", "topk", "q_dtype_a", "q_dtype_w", "q_type", "doweight_stage1")
    assert tuple(key[column] for column in columns) == expected


def test_a_grouped_linear_layer_is_a_batched_gemm() -> None:
    [key] = keys(read_here("cases/deepseek-v4"), "batched_gemm_a8w8_blockscale_mxscale", 4)
    assert (key["B"], key["N"], key["K"]) == (2, 1024, 4096)  # wo_a: 8 groups


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
    model = read_here(name, quantised=False)
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
    model = read_here(name, quantised=False)
    weights = [weight for weight in model.placed.listing.weights if "Embedding" in weight.kind]
    embeddings = sum(math.prod(weight.shape) for weight in weights) if with_embeddings else 0
    digits = len(billions.partition(".")[2])
    assert f"{(active_elements(model) + embeddings) / 1e9:.{digits}f}" == billions


def test_counts_are_those_of_a_forward_pass() -> None:
    model = read_here("deepseek-v3", quantised=False)
    counts = {layer.name: layer.count for layer in rank_layers(model.placed, 8)}
    assert (counts["o"], counts["gate_up"], counts["router"], counts["lm_head"]) == (61, 3, 58, 1)


@pytest.mark.parametrize(("family", "padded"), [("a8w8_blockscale", 3), ("fmoe", 1), ("batched_bf16", 1)])
def test_the_command_writes_what_tune_reads(tmp_path: Path, family: str, padded: int) -> None:
    """`padded`: shapes that become one point of the grid."""
    out = tmp_path / "out.csv"
    model = MODELS / "deepseek-v3.json"
    args = ["shapes", "from-model", model, "--tp", "8", "--m", "1,5,16", "--family", family, "-o", out]
    result = command(*args).ok()
    listed = read_shapes(out, get_family(family))
    assert f"{len(listed.shapes)} shapes of family {family} for one rank of 8" in result.out
    command(*args).failed_with(2, "is there already")
    found = command(*args, "--force", "--pad-m", "--json").json()
    assert padded * len(read_shapes(out, get_family(family)).shapes) == padded * found["shapes"] == len(listed.shapes)


def test_the_command_on_standard_output_and_bad_words(tmp_path: Path) -> None:
    base = ["shapes", "from-model", MODELS / "llama-3-8b.json", "--m", "1"]
    good = command(*base, "--family", "a8w8", "--layers", "o", "--set", "q_dtype_w=torch.int8")
    assert good.out.splitlines()[0] == "M,N,K,q_dtype_w,count,transformers"
    assert good.out.splitlines()[1].startswith("1,4096,4096,torch.int8,32,5.")
    assert "1 shape of family a8w8" in good.err
    for more, told in (
        (["--set", "x=1"], "cannot be set"),
        (["--set", "bias"], "write COLUMN=VALUE"),
        (["--layers", "okv"], "did you mean"),
        (["--json"], "needs -o"),
        (["--m", "1,,2"], "--m"),
        (["--family", "a4"], "did you mean a4w4_blockscale"),
    ):
        command(*base, *more).failed_with(2, told)
