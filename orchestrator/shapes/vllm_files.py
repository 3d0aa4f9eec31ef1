"""The shapes of one rank whose Triton config files vLLM or SGLang looks up: block-FP8 linear layers, fused experts.

The rules are vLLM 0.33's: `fp8.py` and `layers/linear.py` for whole blocks; `fused_moe/config.py`, `oracle/fp8.py` and
`expert_map_manager.py` for experts. vLLM pads the experts' width for other kernels than Triton's only. For Triton it
makes the blocks of the scales smaller where a block does not divide a rank's width; no family has such blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from orchestrator.errors import InputError
from orchestrator.families import get_family
from orchestrator.shapes.from_model import ModelShapes, Ranks, expert_columns, model_shapes
from orchestrator.shapes.model_config import Model
from orchestrator.shapes.quantisation import BLOCK, FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR
from orchestrator.shapes.serving import Experts, rank_layers

WITH_FILES = (None, FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR)
"""Schemes of experts whose config files gemmfleet tunes; None: 16 bits."""
ONLY_TUNED = "only files for bf16 and fp8 experts can be tuned"
LINEAR = "a8w8_blockscale"
EXPERTS = "fmoe"


def vllm_shapes(
    model: Model, ms: Sequence[int], ranks: Ranks, columns: Mapping[str, str]
) -> tuple[dict[str, ModelShapes], list[str]]:
    """(the shapes of a rank by family, sentences about them). `columns`: values for key columns of fmoe. Raises
    InputError if vLLM would not load the model so, or looks up no config file for it."""
    notes: list[str] = []
    lists: dict[str, ModelShapes] = {}
    if names := block_layers(model, ranks.tp):
        lists[LINEAR] = model_shapes(model, get_family(LINEAR), ms, ranks, only=names)
    reasons = [reason for experts in model.placed.experts if (reason := without_file(experts, ranks))]
    if reasons:
        notes.append(f"left out the experts, {reasons[0]}")
    elif model.placed.experts:
        shapes = model_shapes(model, get_family(EXPERTS), ms, ranks, columns=columns)
        # fp8 by channel and by tensor have one file in vLLM, whose look-up knows no channels (`_get_config_dtype_str`)
        calls = {
            tuple("QuantType.per_Tensor" if cell == "QuantType.per_Token" else cell for cell in key): count
            for key, count in shapes.calls.items()
        }
        lists[EXPERTS] = replace(shapes, calls=calls)
    if not lists:
        raise InputError(["vLLM looks up no config file of block FP8 or of fused experts for this model", *notes])
    return lists, notes


def sglang_shapes(
    model: Model, ms: Sequence[int], ranks: Ranks, columns: Mapping[str, str]
) -> tuple[dict[str, ModelShapes], list[str]]:
    """The same for SGLang 0.5.23, of experts alone: for block-FP8 linear layers it takes DeepGEMM before Triton. Raises
    InputError if SGLang would not load the model so, or looks up no file that gemmfleet tunes."""
    if not model.placed.experts:
        raise InputError("SGLang's files that count are of fused experts, and this model has none")
    for experts in model.placed.experts:
        if experts.scheme not in (None, FP8_BLOCK, FP8_TENSOR):
            raise InputError(f"the experts are stored as {experts.scheme.name}: {ONLY_TUNED}")
        width = experts.inter_dim if ranks.ep > 1 else experts.inter_dim // ranks.tp
        if experts.scheme is FP8_BLOCK and width % BLOCK:  # fp8.py, create_weights
            raise InputError(f"SGLang refuses --tp {ranks.tp}: blocks of {BLOCK} do not divide experts {width} wide")
    notes: list[str] = []
    if model.placed.shared_inter and not ranks.fuse_shared:
        notes.append("not known: whether SGLang runs shared experts as routed ones; if its log says so, --fuse-shared")
    return {EXPERTS: model_shapes(model, get_family(EXPERTS), ms, ranks, columns=columns)}, notes


def block_layers(model: Model, tp: int) -> list[str]:
    """Names of the layers in block FP8. Raises InputError if a rank would have a part of a block."""
    layers = [layer for layer in rank_layers(model.placed, tp) if layer.scheme is FP8_BLOCK]
    layers = [layer for layer in layers if not (layer.b or layer.gemm.is_apart)]
    broken = list[str]()
    for layer in layers:
        size = layer.k if layer.gemm.split == "rows" else layer.n
        block = 2 * BLOCK if layer.name.endswith("gate_up") else BLOCK
        if layer.gemm.split != "whole" and size % block:
            broken.append(layer.name)
    if broken and tp > 1:
        raise InputError(f"vLLM refuses --tp {tp}: blocks of {BLOCK} do not divide a rank's {', '.join(broken)}")
    return list(dict.fromkeys(layer.name for layer in layers))


def without_file(experts: Experts, ranks: Ranks) -> str:
    """The reason why experts have no config file that gemmfleet tunes, "" if they have one. Raises InputError."""
    if experts.scheme not in WITH_FILES:
        return f"stored as {experts.scheme.name}: {ONLY_TUNED}"
    width = experts.inter_dim if ranks.ep > 1 else experts.inter_dim // ranks.tp
    if experts.scheme is not FP8_BLOCK or width % BLOCK == 0:
        return ""
    block = math.gcd(BLOCK, width, experts.model_dim)
    if block < 32:
        raise InputError(f"vLLM refuses --tp {ranks.tp}: experts {width} wide on a rank would need blocks below 32")
    return (
        f"{width} wide on a rank: there vLLM makes the scales' blocks {block} x {block}, and only {BLOCK} x {BLOCK} can"
        " be tuned"
    )


def file_columns(model: Model, columns: Mapping[str, str]) -> dict[str, str]:
    """`columns` with those that the name of a MoE config file lacks: E and N are there as `expert` and `inter_dim`.

    Shared experts that run as routed ones make E larger, and every token takes them. A `topk` that the user gave says
    how many, as redundant experts make E larger, too. Raises InputError if E and N are not a rank's of this model.
    """
    local = int(columns["expert"])
    width = int(columns["inter_dim"])
    fitting = [experts for experts in model.placed.experts if width and experts.inter_dim % width == 0]
    topks = {topk for experts in fitting for topk in possible_topks(model, experts, local)}
    if not fitting or ("topk" not in columns and len(topks) != 1):
        sizes = [f"{experts.experts} experts of width {experts.inter_dim}" for experts in model.placed.experts]
        raise InputError(
            f"--model: the log has a file for E={local},N={width}, and the model has"
            f" {' and '.join(sizes) or 'no experts'}: is it the log of another model? With redundant experts write"
            " --set expert=... --set topk=..."
        )
    more = {"model_dim": fitting[0].model_dim, "topk": min(topks, default=0), **expert_columns(model, fitting[0], {})}
    return {**{name: str(value) for name, value in more.items() if not name.startswith("q_")}, **columns}


def possible_topks(model: Model, experts: Experts, local: int) -> set[int]:
    """The experts per token of a rank with `local` experts, with the shared ones among them or without.

    An even share counts before an uneven one, in which the first ranks have one more (vLLM's expert_map_manager.py).
    """
    fused, rest = divmod(model.placed.shared_inter, experts.inter_dim)
    routed = {extra: local - extra for extra in {0, 0 if rest else fused} if local > extra}
    even = {model.topk + extra for extra, number in routed.items() if experts.experts % number == 0}
    uneven = {model.topk + extra for extra, number in routed.items() if is_uneven_share(experts.experts, number)}
    return even or uneven


def is_uneven_share(experts: int, local: int) -> bool:
    """Tell whether some number of ranks shares the experts so that one has `local` of them."""
    ranks = range(experts // local, experts // local + 2)
    return any(local in (experts // number, -(-experts // number)) for number in ranks if number)
