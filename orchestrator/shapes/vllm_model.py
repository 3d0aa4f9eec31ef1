"""The shapes of one rank of a model whose Triton config files vLLM looks up: block-FP8 linear and fused experts.

The rules are vLLM 0.33's: `layers/linear.py` and the classes of `models/` for the sizes of a rank, `fp8.py` and
`quant_utils.py` (`is_layer_skipped`) for the layers that stay unquantised, `fused_moe/config.py`, `oracle/fp8.py` and
`expert_map_manager.py` for the experts. With expert parallelism each rank has whole experts, and the first ranks have
one more where the number of ranks does not divide them. vLLM pads the experts' width for other kernels than Triton's
only. For Triton it makes the blocks of the scales smaller where a block does not divide a rank's width; no family has
such blocks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from orchestrator.errors import InputError
from orchestrator.families import get_family
from orchestrator.shapes.from_model import ModelConfig, ModelShapes, expert_columns, layers, model_shapes

LINEAR, EXPERTS, BLOCK = "a8w8_blockscale", "fmoe", 128
# our layer -> the modules of a checkpoint that vLLM has in it
_FULL = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "o": ("self_attn.o_proj",),
    "q_kv_a": ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"), "kv_a": ("self_attn.kv_a_proj_with_mqa",),
    "q": ("self_attn.q_proj",), "q_b": ("self_attn.q_b_proj",), "kv_b": ("self_attn.kv_b_proj",),
    "index_q": ("self_attn.indexer.wq_b",),
}  # fmt: skip
_LINEAR = {"in_qkvz": ("linear_attn.in_proj_qkvz", "linear_attn.in_proj_qkv"), "gdn_o": ("linear_attn.out_proj",)}
_DENSE = {"gate_up": ("mlp.gate_proj", "mlp.up_proj"), "up": ("mlp.up_proj",), "down": ("mlp.down_proj",)}
_SPARSE = {
    "shared_gate_up": ("mlp.shared_experts.gate_proj", "mlp.shared_expert.gate_proj"),
    "shared_up": ("mlp.shared_experts.up_proj", "mlp.shared_expert.up_proj"),
    "shared_down": ("mlp.shared_experts.down_proj", "mlp.shared_expert.down_proj"),
    EXPERTS: ("mlp.experts", "block_sparse_moe.experts"),
}
_ROWS = ("o", "down", "shared_down", "gdn_o")  # layers that split K
_WHOLE = ("q_kv_a", "kv_a", "index_q")  # layers that every rank has in full
# model types that were compared with vLLM's own classes
COMPARED = frozenset((
    "deepseek_v3", "deepseek_v32", "glm4_moe", "glm_moe_dsa", "kimi_k2", "llama", "minimax_m2", "mixtral", "qwen3",
    "qwen3_moe", "qwen3_next",
))  # fmt: skip


def vllm_shapes(
    model: ModelConfig, ms: Sequence[int], *, tp: int, ep: int, fuse_shared: bool, columns: Mapping[str, str]
) -> tuple[dict[str, ModelShapes], list[str]]:
    """(the shapes of a rank by family, sentences about them). `columns`: values for key columns of fmoe. Raises
    InputError where vLLM would not load the model so, or looks up no config file for it."""
    quant, moe, notes, found = _quant(model.quant), model.moe, list[str](), dict[str, ModelShapes]()
    quantised, blocks = _quantised(model) if quant else set(), "weight_block_size" in quant
    of = {x.name: x for x in layers(model, tp) if x.name in quantised and blocks}
    wrong = [
        name for name, x in of.items()
        if name not in _WHOLE and (x.k if name in _ROWS else x.n) % (2 * BLOCK if name.endswith("gate_up") else BLOCK)
    ]  # fmt: skip
    if wrong and tp > 1:
        raise InputError(f"vLLM refuses --tp {tp}: blocks of {BLOCK} do not divide a rank's {', '.join(wrong)}")
    if of:
        found[LINEAR] = model_shapes(model, get_family(LINEAR), ms, tp=tp, only=list(of))
    width = (moe.inter if ep > 1 else moe.inter // tp) if moe else 0
    if width % BLOCK and blocks and EXPERTS in quantised:
        block = math.gcd(BLOCK, width, model.hidden)
        if block < 32:
            raise InputError(f"vLLM refuses --tp {tp}: experts {width} wide on a rank would need blocks below 32")
        notes.append(
            f"left out the experts, {width} wide on a rank: there vLLM makes the scales' blocks {block} x {block}, and"
            f" only {BLOCK} x {BLOCK} can be tuned"
        )
    elif moe:
        each = [
            model_shapes(
                replace(model, quant=quant if EXPERTS in quantised else {}, moe=replace(moe, experts=n * ep)),
                get_family(EXPERTS), ms, tp=tp, ep=ep, fuse_shared=fuse_shared, columns=columns,
            )
            for n in sorted({-(-moe.experts // ep), moe.experts // ep}, reverse=True)
        ]  # fmt: skip
        found[EXPERTS] = ModelShapes(
            [key for one in each for key in one.keys], [size for one in each for size in one.layers], each[0].notes
        )
    if not found:
        raise InputError(["vLLM looks up no config file of block FP8 or of fused experts for this model", *notes])
    new = f"model type {model.model_type}: not compared with vLLM's own class, so compare with a log"
    return found, notes if model.model_type in COMPARED else [*notes, new]


def expert_sizes(model: ModelConfig) -> dict[str, str]:
    """The columns of fmoe that the name of a config file lacks. Raises InputError for a model without experts."""
    if model.moe is None:
        raise InputError(f"--model: model type {model.model_type} has no experts, whose sizes it is for: leave it out")
    sizes = {"model_dim": model.hidden, "topk": model.moe.topk, **expert_columns(model)}
    return {name: str(v) for name, v in sizes.items() if not name.startswith("q_")}


def _quant(quant: Mapping[str, Any]) -> dict[str, Any]:
    """The quantisation in the form of quant_method fp8, {} for none. Raises InputError for one that is not tuned."""
    weights = [group["weights"] for group in (quant.get("config_groups") or {}).values()]
    fp8 = quant.get("quant_method") == "fp8" or {(w["type"], w["num_bits"]) for w in weights} == {("float", 8)}
    block = weights[0].get("block_structure") if weights else quant.get("weight_block_size")
    if quant and not (fp8 and block in (None, [BLOCK, BLOCK])):
        raise InputError(
            f"the model is quantised with {quant.get('quant_method')}: only vLLM's config files for bf16 experts can be"
            f" tuned, and those for fp8 with blocks of {BLOCK} x {BLOCK} or without"
        )
    return {"quant_method": "fp8", **({"weight_block_size": block} if block else {})} if quant else {}


def _quantised(model: ModelConfig) -> set[str]:
    """Our names of the layers that are quantised in one decoder layer at least."""
    raw, out = model.raw, set[str]()
    lists = [model.quant.get(name) or () for name in ("ignored_layers", "modules_to_not_convert", "ignore")]
    # a module's whole name, or a pattern for it; one expert stands for all
    names = [re.sub(r"\.experts\..*", ".experts", str(name)) for listed in lists for name in listed]
    names = [re.sub(r"^(model\.|language_model\.)+", "model.", name) for name in names]
    ignored = re.compile("|".join(n[3:] if n.startswith("re:") else re.escape(n) + r"\Z" for n in (*names, "-")))
    for i in range(raw.get("num_hidden_layers") or 1):
        sparse = (
            model.moe and i >= (raw.get("first_k_dense_replace") or 0) and i not in (raw.get("mlp_only_layers") or ())
        )
        sparse = sparse and not (i + 1) % (raw.get("decoder_sparse_step") or 1)
        linear = model.gdn and (i + 1) % (raw.get("full_attention_interval") or 4)
        parts = {**(_LINEAR if linear else _FULL), **(_SPARSE if sparse else _DENSE)}
        out |= {name for name, of in parts.items() if not any(ignored.match(f"model.layers.{i}.{m}") for m in of)}
    return out - {"kv_a"} if model.mla and model.mla.q_lora_rank else out
