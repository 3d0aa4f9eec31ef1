"""The shapes of a model in the columns of a family: the GEMMs of one rank, for each M, with how often they run.

`model_config.py` reads the model, `serving.py` knows the GEMMs of a rank. This module decides which of them a family
holds: those with the family's quantisation. For the config files of vLLM see `vllm_files.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.errors import InputError
from orchestrator.shapes.model import Key
from orchestrator.shapes.model_config import Model
from orchestrator.shapes.quantisation import FP4, OVERRIDE, Quantisation, Scheme
from orchestrator.shapes.reader import default_of, fixed_columns
from orchestrator.shapes.serving import Experts, Gemm, Layer, describe_unknown, name_of, rank_layers
from orchestrator.tables.textfiles import Faults, shown
from worker.families import Family
from worker.text import did_you_mean

MAX_SHAPES = 100_000
ABSORBED = ("absorb_k", "absorb_v")


@dataclass(frozen=True, slots=True)
class Ranks:
    """How a server is spread: `tp` ranks of tensor parallelism; `ep` > 1 ranks with whole experts. `fuse_shared`:
    shared experts run as further routed ones, which every token takes."""

    tp: int = 1
    ep: int = 1
    fuse_shared: bool = False


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """Keys of a family without duplicates, with how often a rank runs each in a forward pass, the layers that they
    come from, and what should be known of them."""

    calls: Mapping[Key, int]
    layers: Sequence[tuple[str, str]]  # (name, its numbers in words)
    notes: Sequence[str]

    @property
    def keys(self) -> list[Key]:
        """The keys in the order of the model."""
        return list(self.calls)


def parse_m(text: str) -> list[int]:
    """`1,16,64` as numbers, each once, in order. Raises InputError."""
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not (word.isascii() and word.isdigit() and 0 < int(word[:11]) <= 2**31 - 1):
            raise InputError(f"--m: {shown(word)} is not a whole number from 1; write a list such as --m 1,16,64,1024")
    return list(dict.fromkeys(map(int, words)))


def model_shapes(
    model: Model,
    family: Family,
    ms: Sequence[int],
    ranks: Ranks,
    *,
    only: Sequence[str] = (),
    columns: Mapping[str, str] | None = None,
) -> ModelShapes:
    """The shapes of one rank. `only`: these layers instead of all that the family holds. `columns`: values for key
    columns such as q_dtype_w, over what follows from the model. Raises InputError."""
    if family.two_stages:
        return expert_shapes(model, family, ms, ranks, columns or {})
    layers = family_layers(model, family, ranks.tp, only)
    notes = [*model.notes, *describe_unknown(model.placed)]
    fixed = checked_columns(family, columns or {})
    for limit in family.limits:
        bad = [layer.name for layer in layers if {"N": layer.n, "K": layer.k}.get(limit.column, 0) % limit.multiple_of]
        if bad:
            layers = [layer for layer in layers if layer.name not in bad]
            rule = f"{limit.column} is not a multiple of {limit.multiple_of} ({limit.why})"
            notes.append(f"left out {', '.join(dict.fromkeys(bad))}: {rule}")
    if not layers:
        raise InputError(
            f"no GEMM of this model with --tp {ranks.tp} can be of family {family.name}: {'; '.join(notes)}"
        )
    calls = Counter[Key]()
    for layer in layers:
        values = {**layer_columns(model, family, layer), **fixed}
        for m in ms:
            calls[family_key(family, {**values, "M": m})] += layer.count
    if len(calls) > MAX_SHAPES:
        raise InputError(f"that makes {len(calls)} shapes; name fewer with --m or --layers")
    return ModelShapes(calls, [(layer.name, describe_layer(layer)) for layer in layers], notes)


def describe_layer(layer: Layer) -> str:
    """A layer's sizes in words."""
    batch = f", B {layer.b}" if layer.b else ""
    return f"N {layer.n}, K {layer.k}{batch}, {layer.count} times"


def layer_columns(model: Model, family: Family, layer: Layer) -> dict[str, int | str]:
    """The key columns of a layer but M."""
    values: dict[str, int | str] = {"N": layer.n, "K": layer.k}
    if layer.b:
        values["B"] = layer.b
    if "bias" in family.key_names:
        values["bias"] = str(layer.bias)
    if "dtype" in family.key_names:
        values |= {"dtype": model.dtype, "outdtype": model.dtype}
    scheme = layer_scheme(model.quantisation, layer)
    if scheme and "q_dtype_w" in family.key_names:
        values["q_dtype_w"] = scheme.weight
    return values


def layer_scheme(quantisation: Quantisation, layer: Layer) -> Scheme | None:
    """The scheme of a layer whose weights all have the same one (`family_layers` splits them)."""
    return quantisation.scheme_of(layer.paths[0]) if layer.gemm.is_quantised else None


def family_layers(model: Model, family: Family, tp: int, only: Sequence[str]) -> list[Layer]:
    """The layers of a rank that a family holds: of its batching, and stored as it computes them.

    A model that is not quantised fits each family; its router and its like then stay out of quantised ones. `only`
    names layers, also of weights that no form places. Raises InputError where none is left.
    """
    is_batched = "B" in family.key_names
    every = rank_layers(model.placed, tp)
    fitting = [layer for layer in every if bool(layer.b) == is_batched]
    if not is_batched:
        fitting += [whole_layer(model, name) for name in only if name not in {layer.name for layer in fitting}]
    if not fitting:
        raise InputError(f"model type {model.model_type} has no batched GEMMs (MLA has), as {family.name} is")
    held = [part for layer in fitting for part in held_parts(model, family, layer, explicit=layer.name in only)]
    if only:
        names = list(dict.fromkeys(layer.name for layer in fitting))
        if unheld := next((name for name in only if name not in {layer.name for layer in held}), ""):
            raise InputError(
                f"--layers: this model has no {shown(unheld)} for family {family.name}{did_you_mean(unheld, names)}"
                f" (it has {', '.join(names)}); its quantisation is {model.quantisation.method}, and {OVERRIDE}"
            )
        return [layer for layer in held if layer.name in only]
    if not held:
        if is_batched and not family.format:
            raise InputError(f"gemmfleet has no formula for {family.name} of this model: take its shapes from a log")
        raise InputError(
            f"the model is quantised with {model.quantisation.method}: none of its GEMMs is of family {family.name};"
            f" {OVERRIDE}"
        )
    return held


def held_parts(model: Model, family: Family, layer: Layer, *, explicit: bool) -> list[Layer]:
    """The occurrences of a layer that are stored as the family computes; several where schemes differ."""
    if layer.name in ABSORBED:
        # engines unpack kv_b for these products, whatever the checkpoint has
        return [layer] if family.name in ("batched_bf16", "batched_a8w8") else []
    if family.name == "batched_gemm_a8w8_blockscale_mxscale" and model.quantisation.method == "none":
        return []
    if model.quantisation.method == "none":
        is_wanted = explicit or layer.gemm.is_quantised or family.name in ("a16w16", "batched_bf16")
        return [layer] if is_wanted else []
    by_scheme: dict[Scheme | None, list[tuple[str, ...]]] = {}
    for paths in layer.paths:
        scheme = model.quantisation.scheme_of(paths) if layer.gemm.is_quantised else None
        by_scheme.setdefault(scheme, []).append(paths)
    return [
        replace(layer, paths=tuple(paths))
        for scheme, paths in by_scheme.items()
        if family.name in (scheme.families if scheme else ("a16w16", "batched_bf16"))
    ]


def whole_layer(model: Model, name: str) -> Layer:
    """A weight that no form places, as it is. Raises InputError where there is none, or several sizes."""
    weights = [weight for weight in model.placed.unknown if name_of(weight) == name and len(weight.shape) == 2]
    sizes = {weight.shape for weight in weights}
    if len(sizes) != 1:
        known = sorted({layer.name for layer in rank_layers(model.placed, 1)})
        raise InputError(
            f"--layers: this model has no {shown(name)}{did_you_mean(name, known)} (it has {', '.join(known)})"
        )
    n, k = weights[0].shape[::-1] if weights[0].transposed else weights[0].shape
    return Layer(Gemm(name, (name,), "whole"), n, k, 0, weights[0].bias, tuple((w.path,) for w in weights))


# --- experts ---------------------------------------------------------------------------------------------------------


def expert_shapes(
    model: Model, family: Family, ms: Sequence[int], ranks: Ranks, columns: Mapping[str, str]
) -> ModelShapes:
    """The fused experts of one rank. Where `ep` does not divide the experts, the first ranks have one more."""
    if not model.placed.experts:
        raise InputError(f"model type {model.model_type} has no experts, so family fmoe has no shapes of it")
    fixed = checked_columns(family, columns)
    notes = [*model.notes, *describe_unknown(model.placed)]
    calls, words = Counter[Key](), list[tuple[str, str]]()
    for experts in model.placed.experts:
        values = {**expert_columns(model, experts, fixed), **fixed}
        for sizes in rank_experts(model, experts, ranks):
            for m in ms:
                calls[family_key(family, {**sizes, **values, "token": m})] += len(experts.paths)
            text = "model_dim {model_dim}, inter_dim {inter_dim}, {expert} experts, top {topk}".format(**sizes)
            words.append(("experts", f"{text}, {len(experts.paths)} times"))
        if values["q_dtype_w"] == FP4 and any(sizes[name] % 256 for name in ("model_dim", "inter_dim")):
            notes.append("serving stacks pad the experts of FP4 models to a multiple of 256: check with a capture")
    if model.placed.shared_inter and not ranks.fuse_shared:
        notes.append("shared experts are not counted as routed ones; stacks that fuse them need --fuse-shared")
    return ModelShapes(calls, words, notes)


def rank_experts(model: Model, experts: Experts, ranks: Ranks) -> list[dict[str, int]]:
    """fmoe's sizes of a rank. Raises InputError where the ranks do not fit."""
    shared = model.placed.shared_inter
    if ranks.ep == 1 and experts.inter_dim % ranks.tp:
        raise InputError(
            f"--tp {ranks.tp} does not divide the experts' width {experts.inter_dim}; experts can be spread with --ep"
        )
    if ranks.ep > experts.experts:
        raise InputError(f"--ep {ranks.ep} is more than the {experts.experts} experts")
    if ranks.fuse_shared and (not shared or shared % experts.inter_dim):
        raise InputError("--fuse-shared: the model has no shared expert of the routed experts' width")
    fused = shared // experts.inter_dim if ranks.fuse_shared else 0
    inter = experts.inter_dim if ranks.ep > 1 else experts.inter_dim // ranks.tp
    numbers = sorted({-(-experts.experts // ranks.ep), experts.experts // ranks.ep}, reverse=True)
    return [
        {"model_dim": experts.model_dim, "inter_dim": inter, "expert": number + fused, "topk": model.topk + fused}
        for number in numbers
    ]


def expert_columns(model: Model, experts: Experts, fixed: Mapping[str, int | str]) -> dict[str, int | str]:
    """fmoe's text columns as the model has them. Raises InputError where it has an activation without a name."""
    if not model.act and "act_type" not in fixed:
        raise InputError("the activation of this model has no name in AITER; write --set act_type=...")
    schemes = {model.quantisation.scheme_of([path], experts=True) for path in experts.paths}
    if len(schemes) > 1 and "q_type" not in fixed:
        names = " and ".join(sorted(scheme.name if scheme else "16 bits" for scheme in schemes))
        raise InputError(f"the experts of this model are stored in {names}; write --set q_type=... and q_dtype_w")
    scheme = schemes.pop() or Scheme("16 bits", "", "", "No")
    return {
        "act_type": model.act,
        "dtype": model.dtype,
        "q_dtype_a": scheme.activation or model.dtype,
        "q_dtype_w": scheme.weight or model.dtype,
        "q_type": f"QuantType.{scheme.q_type}",
        "use_g1u1": int(experts.has_gate),
        # Llama 4 weights a token before its expert (apply_router_weight_on_input in vLLM's llama4.py)
        "doweight_stage1": int(model.model_type == "llama4_text"),
    }


def checked_columns(family: Family, columns: Mapping[str, str]) -> dict[str, int | str]:
    """Values that the user gave to key columns. Raises InputError."""
    faults = Faults("--set")
    values = fixed_columns(family, columns, faults)
    faults.raise_as(InputError)
    return values


def family_key(family: Family, values: Mapping[str, int | str]) -> Key:
    """A key of the family; columns without a value have their default."""
    return tuple(values[c.name] if c.name in values else default_of(c) for c in family.columns)
