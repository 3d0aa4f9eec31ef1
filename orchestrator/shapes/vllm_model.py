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
from itertools import chain
from typing import Any

from orchestrator.errors import InputError
from orchestrator.families import get_family
from orchestrator.shapes.from_model import ModelConfig, ModelShapes, layers, model_shapes

LINEAR, EXPERTS = "a8w8_blockscale", "fmoe"
BLOCK = 128
# our layer -> the modules of a checkpoint that vLLM has in it
_MLA_Q = ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa")
_FULL = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "o": ("self_attn.o_proj",),
    "q_kv_a": _MLA_Q, "kv_a": _MLA_Q[1:], "q": ("self_attn.q_proj",), "q_b": ("self_attn.q_b_proj",),
    "kv_b": ("self_attn.kv_b_proj",), "index_q": ("self_attn.indexer.wq_b",),
}  # fmt: skip
_LINEAR = {"in_qkvz": ("linear_attn.in_proj_qkvz", "linear_attn.in_proj_qkv"), "gdn_o": ("linear_attn.out_proj",)}
_DENSE = {"gate_up": ("mlp.gate_proj", "mlp.up_proj"), "up": ("mlp.up_proj",), "down": ("mlp.down_proj",)}
_SPARSE = {
    f"shared_{name}": tuple(m.replace("mlp", f"mlp.{one}") for m in of for one in ("shared_experts", "shared_expert"))
    for name, of in _DENSE.items()
}  # fmt: skip
_SPARSE[EXPERTS] = ("mlp.experts", "block_sparse_moe.experts")
_ROWS = ("o", "down", "shared_down", "gdn_o")  # layers that split K
_WHOLE = ("q_kv_a", "kv_a", "index_q")  # layers that every rank has in full
# model types that were compared with vLLM's own classes
COMPARED = frozenset((
    "deepseek_v3", "deepseek_v32", "glm4_moe", "kimi_k2", "llama", "minimax_m2", "mixtral", "qwen3", "qwen3_moe",
    "qwen3_next",
))  # fmt: skip


def vllm_shapes(
    model: ModelConfig, ms: Sequence[int], *, tp: int, ep: int, fuse_shared: bool, columns: Mapping[str, str]
) -> tuple[dict[str, ModelShapes], list[str]]:
    """(the shapes of a rank by family, sentences about them). `columns`: values for key columns of fmoe. Raises
    InputError where vLLM would not load the model so, or looks up no config file for it."""
    quant, notes, found = _quant(model.quant), list[str](), dict[str, ModelShapes]()
    quantised = _quantised(model) if quant else set()
    if "q_kv_a" in (of := {x.name: x for x in layers(model, tp) if x.name in quantised}):
        del of["kv_a"]
    if of and len(quant) > 1:
        unit = {name: 2 * BLOCK if name.endswith("gate_up") else BLOCK for name in of}
        wrong = [n for n, x in of.items() if n not in _WHOLE and (x.k if n in _ROWS else x.n) % unit[n]]
        if wrong and tp > 1:
            raise InputError(f"vLLM refuses --tp {tp}: blocks of {BLOCK} do not divide a rank's {', '.join(wrong)}")
        found[LINEAR] = model_shapes(model, get_family(LINEAR), ms, tp=tp, only=list(of))
    if moe := model.moe:
        model = replace(model, quant=quant if EXPERTS in quantised else {})
        width = moe.inter if ep > 1 else moe.inter // tp
        if width % BLOCK and len(model.quant) > 1:
            block = math.gcd(BLOCK, width, model.hidden)
            notes.append(
                f"left out the experts, {width} wide on a rank: there vLLM makes the scales' blocks {block} x {block} (and"
                f" refuses less than 32), and gemmfleet tunes {BLOCK} x {BLOCK}"
            )
        else:
            each = [
                model_shapes(
                    replace(model, moe=replace(moe, experts=n * ep)), get_family(EXPERTS), ms,
                    tp=tp, ep=ep, fuse_shared=fuse_shared, columns=columns,
                )
                for n in sorted({-(-moe.experts // ep), moe.experts // ep}, reverse=True)
            ]  # fmt: skip
            keys, names = [k for x in each for k in x.keys], [y for x in each for y in x.layers]
            found[EXPERTS] = ModelShapes(keys, names, each[0].notes)
    if not found:
        raise InputError(["vLLM looks up no config file of block FP8 or of fused experts for this model", *notes])
    known = model.model_type in COMPARED
    return found, notes + [f"model type {model.model_type}: not compared with vLLM's own class, so check a log"] * (not known)


def _quant(quant: Mapping[str, Any]) -> dict[str, Any]:
    """The quantisation in the form of quant_method fp8, {} for none. Raises InputError for one that is not tuned."""
    method, block = quant.get("quant_method"), quant.get("weight_block_size")
    weights = [g["weights"] for g in (quant.get("config_groups") or {}).values()]
    if weights and all((w.get("type"), w.get("num_bits")) == ("float", 8) for w in weights):
        method, block = "fp8", weights[0].get("block_structure")
    if method not in (None, "fp8") or block not in (None, [BLOCK, BLOCK]):
        raise InputError(
            f"the model is quantised with {method}, blocks {block}: gemmfleet tunes vLLM's configs for bf16 experts, and for"
            f" fp8 with blocks of {BLOCK} x {BLOCK} or without"
        )
    return {k: v for k, v in (("quant_method", method), ("weight_block_size", block)) if v}


def _quantised(model: ModelConfig) -> set[str]:
    """Our names of the layers that are quantised in one decoder layer at least."""
    raw, out = model.raw, set[str]()
    lists = [model.quant.get(name) or [] for name in ("ignored_layers", "modules_to_not_convert", "ignore")]
    ignored = [re.sub(r"^(model\.|language_model\.)+", "", str(entry)) for entry in chain(*lists)]
    exact, patterns = set(ignored), [re.compile(e[3:]) for e in ignored if e.startswith("re:")]
    exact |= {e.partition("experts.")[0] + "experts" for e in exact if ".experts." in e}
    for i in range(raw.get("num_hidden_layers") or 1):
        dense = i < (raw.get("first_k_dense_replace") or 0) or (i + 1) % (raw.get("decoder_sparse_step") or 1)
        dense = dense or i in (raw.get("mlp_only_layers") or ()) or not model.moe
        linear = model.gdn and (i + 1) % (raw.get("full_attention_interval") or 4)
        for name, modules in {**(_LINEAR if linear else _FULL), **(_DENSE if dense else _SPARSE)}.items():
            paths = [f"layers.{i}.{module}" for module in modules]
            if not any(p in exact or any(r.match(f"model.{p}") for r in patterns) for p in paths):
                out.add(name)
    return out
