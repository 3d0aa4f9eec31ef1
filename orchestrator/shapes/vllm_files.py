"""The shapes of one rank whose Triton config files vLLM looks up: block-FP8 linear layers and fused experts.

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
from orchestrator.shapes.from_model import ModelShapes, Ranks, expert_columns, expert_shapes, model_shapes
from orchestrator.shapes.model_config import Model
from orchestrator.shapes.quantisation import BLOCK, FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR
from orchestrator.shapes.serving import Experts, rank_layers

FILES = (FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR)
LINEAR, EXPERTS = "a8w8_blockscale", "fmoe"


def vllm_shapes(
    model: Model, ms: Sequence[int], ranks: Ranks, columns: Mapping[str, str]
) -> tuple[dict[str, ModelShapes], list[str]]:
    """(the shapes of a rank by family, sentences about them). `columns`: values for key columns of fmoe. Raises
    InputError where vLLM would not load the model so, or looks up no config file for it."""
    notes, found = list[str](), dict[str, ModelShapes]()
    names = block_layers(model, ranks.tp)
    if names:
        found[LINEAR] = model_shapes(model, get_family(LINEAR), ms, ranks, only=names)
    if model.placed.experts:
        left_out = broken_blocks(model, ranks)
        if left_out:
            notes.append(left_out)
        else:
            found[EXPERTS] = one_file(model, expert_shapes(model, get_family(EXPERTS), ms, ranks, columns))
    if not found:
        raise InputError(["vLLM looks up no config file of block FP8 or of fused experts for this model", *notes])
    return found, notes


def block_layers(model: Model, tp: int) -> list[str]:
    """Names of the layers in block FP8. Raises InputError where a rank would have a part of a block."""
    broken, names = list[str](), list[str]()
    for layer in rank_layers(model.placed, tp):
        if layer.b or layer.gemm.is_apart or not layer.gemm.is_quantised:
            continue
        if not any(model.quantisation.scheme_of(paths) is FP8_BLOCK for paths in layer.paths):
            continue
        names.append(layer.name)
        size = layer.k if layer.gemm.split == "rows" else layer.n
        block = 2 * BLOCK if layer.name.endswith("gate_up") else BLOCK
        if layer.gemm.split != "whole" and size % block:
            broken.append(layer.name)
    if broken and tp > 1:
        raise InputError(f"vLLM refuses --tp {tp}: blocks of {BLOCK} do not divide a rank's {', '.join(broken)}")
    return list(dict.fromkeys(names))


def broken_blocks(model: Model, ranks: Ranks) -> str:
    """Why the experts have no config file: a rank's width is not whole blocks. "" where they have one."""
    for experts in model.placed.experts:
        schemes = {model.quantisation.scheme_of([path], experts=True) for path in experts.paths}
        if strange := [scheme.name for scheme in schemes if scheme and scheme not in FILES]:
            return f"left out the experts, stored as {strange[0]}: gemmfleet tunes files for bf16 and fp8 experts only"
        width = experts.inter_dim if ranks.ep > 1 else experts.inter_dim // ranks.tp
        if FP8_BLOCK not in schemes or not width % BLOCK:
            continue
        block = math.gcd(BLOCK, width, experts.model_dim)
        if block < 32:
            raise InputError(f"vLLM refuses --tp {ranks.tp}: experts {width} wide on a rank would need blocks below 32")
        return (
            f"left out the experts, {width} wide on a rank: there vLLM makes the scales' blocks {block} x {block}, and"
            f" only {BLOCK} x {BLOCK} can be tuned"
        )
    return ""


def one_file(model: Model, shapes: ModelShapes) -> ModelShapes:
    """fp8 by channel and by tensor have one file in vLLM, whose look-up knows no channels (`_get_config_dtype_str`)."""
    calls = {
        tuple("QuantType.per_Tensor" if cell == "QuantType.per_Token" else cell for cell in key): n
        for key, n in shapes.calls.items()
    }
    return replace(shapes, calls=calls)


def file_columns(model: Model, columns: Mapping[str, str]) -> dict[str, str]:
    """`columns` with those that the name of a MoE config file lacks: E and N are there as `expert` and `inter_dim`.

    Shared experts that run as routed ones make E larger, and every token takes them. A `topk` that the user gave says
    how many, as redundant experts make E larger, too. Raises InputError where E and N are not a rank's of this model.
    """
    if not model.placed.experts:
        raise InputError(f"--model: model type {model.model_type} has no experts, but the log names files of experts")
    local, width = int(columns["expert"]), int(columns["inter_dim"])
    fitting = [experts for experts in model.placed.experts if width and experts.inter_dim % width == 0]
    topks = {str(topk) for experts in fitting for topk in possible_topks(model, experts, local)}
    if "topk" in columns and fitting:
        topks = {columns["topk"]}
    if len(topks) != 1:
        sizes = " and ".join(f"{x.experts} experts of width {x.inter_dim}" for x in model.placed.experts)
        raise InputError(
            f"--model: the log has a file for E={local},N={width}, and the model has {sizes}: is it the log of another"
            " model? With redundant experts write --set expert=... --set topk=..."
        )
    more = {"model_dim": fitting[0].model_dim, "topk": topks.pop(), **expert_columns(model, fitting[0], {})}
    return {**{name: str(value) for name, value in more.items() if not name.startswith("q_")}, **columns}


def possible_topks(model: Model, experts: Experts, local: int) -> set[int]:
    """The experts per token of a rank with `local` experts: with shared ones among them or without."""
    shared = model.placed.shared_inter
    fused = shared // experts.inter_dim if shared % experts.inter_dim == 0 else 0
    routed = {extra: local - extra for extra in (0, fused) if 0 < local - extra <= experts.experts}
    even = {model.topk + extra for extra, number in routed.items() if experts.experts % number == 0}
    # where the ranks do not divide the experts, the first ranks have one more (vLLM's expert_map_manager.py)
    uneven = {model.topk + extra for extra, number in routed.items() if has_share(experts.experts, number)}
    return even or uneven


def has_share(experts: int, local: int) -> bool:
    """Whether some number of ranks shares the experts so that one has `local` of them."""
    fewest = experts // local
    return any(local in (experts // ranks, -(-experts // ranks)) for ranks in (fewest, fewest + 1))
