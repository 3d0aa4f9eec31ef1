"""The shapes of a model in the columns of a family: the GEMMs of one rank, for each M, with how often they run.

`shapes from-model` calls `read_model` (`model_config.py`), then `model_shapes` here. The GEMMs of a rank come from
`serving.py`. This module decides which of them a family holds: those with the family's quantisation. For the config
files of vLLM see `vllm_files.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.errors import InputError
from orchestrator.files.faults import Faults, shown
from orchestrator.shapes.model import Key
from orchestrator.shapes.model_config import Model
from orchestrator.shapes.quantisation import FP4, OVERRIDE, Scheme
from orchestrator.shapes.reader import default_of, fixed_columns
from orchestrator.shapes.serving import Experts, Layer, describe_unknown, divided, rank_layers
from worker.families import Family
from worker.text import did_you_mean

MAX_SHAPES = 100_000
SIXTEEN_BITS = ("a16w16", "batched_bf16")
UNPACKED = ("batched_bf16", "batched_a8w8")
"""Families of absorbed products: engines unpack kv_b for them, whatever the checkpoint has."""
MXSCALE = "batched_gemm_a8w8_blockscale_mxscale"
SIXTEEN = Scheme("16 bits", "", "", "No")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a server: `tp` ranks of tensor parallelism; `ep` > 1 ranks with whole experts. `fuse_shared`:
    shared experts run as further routed ones, which every token takes."""

    tp: int = 1
    ep: int = 1
    fuse_shared: bool = False


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """Keys of a family without duplicates, with how often a rank runs each in a forward pass, the layers that they
    come from, and what should be known of them."""

    calls: Mapping[Key, int]
    layers: Sequence[tuple[str, str]]
    """(name, its numbers in words), such as ("qkv", "N 1280, K 8192, 80 times")."""
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
    faults = Faults("--set")
    fixed = fixed_columns(family, columns or {}, faults)
    faults.raise_as(InputError)
    if family.two_stages:
        return expert_shapes(model, family, ms, ranks, fixed)
    notes = [*model.notes, *describe_unknown(model.placed)]
    layers = []
    wrong_sizes: dict[str, list[str]] = {}  # what is wrong, with the names of the layers
    for layer in family_layers(model, family, ranks.tp, only):
        problem = size_problem(layer, family)
        if problem:
            wrong_sizes.setdefault(problem, []).append(layer.name)
        else:
            layers.append(layer)
    for problem, names in wrong_sizes.items():
        notes.append(f"left out {', '.join(dict.fromkeys(names))}: {problem}")
    if not layers:
        raise InputError(f"no GEMM with --tp {ranks.tp} can be of family {family.name}: {'; '.join(notes)}")
    calls = Counter[Key]()
    descriptions: list[tuple[str, str]] = []
    for layer in layers:
        values = {**layer_columns(model, layer), **fixed}
        for m in ms:
            calls[family_key(family, {**values, "M": m})] += layer.count
        batch = f", B {layer.b}" if layer.b else ""
        descriptions.append((layer.name, f"N {layer.n}, K {layer.k}{batch}, {layer.count} times"))
    if len(calls) > MAX_SHAPES:
        raise InputError(f"that makes {len(calls)} shapes; name fewer with --m or --layers")
    return ModelShapes(calls, descriptions, notes)


def size_problem(layer: Layer, family: Family) -> str | None:
    """The reason why no kernel of the family takes the sizes of a layer."""
    for limit in family.limits:
        size = {"N": layer.n, "K": layer.k}.get(limit.column, 0)
        if size % limit.multiple_of:
            return f"{limit.column} is not a multiple of {limit.multiple_of} ({limit.why})"
    return None


def layer_columns(model: Model, layer: Layer) -> dict[str, int | str]:
    """Values for key columns of a layer but M; a family takes those that it has."""
    values: dict[str, int | str] = {"N": layer.n, "K": layer.k, "bias": str(layer.bias)}
    values |= {"dtype": model.dtype, "outdtype": model.dtype}
    if layer.b:
        values["B"] = layer.b
    if layer.scheme:
        values["q_dtype_w"] = layer.scheme.weight
    return values


def family_key(family: Family, values: Mapping[str, int | str]) -> Key:
    """A key of the family; columns without a value have their default."""
    return tuple(values[c.name] if c.name in values else default_of(c) for c in family.columns)


def family_layers(model: Model, family: Family, tp: int, only: Sequence[str]) -> list[Layer]:
    """The layers of a rank that a family holds. `only` names layers, also weights that no form places. Raises
    InputError if none is left, or one of `only` is not among them."""
    is_batched = "B" in family.key_names
    layers = [layer for layer in rank_layers(model.placed, tp, only) if bool(layer.b) == is_batched]
    if not layers:
        raise InputError(f"model type {model.model_type} has no batched GEMMs (MLA has), as {family.name} is")
    names = list(dict.fromkeys(layer.name for layer in layers))
    held = [layer for layer in layers if is_held(model, family, layer, is_named=layer.name in only)]
    for name in only:
        if name not in {layer.name for layer in held}:
            raise InputError(
                f"--layers: this model has no {shown(name)} for family {family.name}{did_you_mean(name, names)} (it has"
                f" {', '.join(names)}); its quantisation is {model.quantisation.method}, and {OVERRIDE}"
            )
    if not held and family.name == MXSCALE:
        raise InputError(f"gemmfleet has no formula for {family.name} of this model: take its shapes from a log")
    if not held:
        raise InputError(
            f"the model is quantised with {model.quantisation.method}: none of its GEMMs is of family {family.name};"
            f" {OVERRIDE}"
        )
    return [layer for layer in held if not only or layer.name in only]


def is_held(model: Model, family: Family, layer: Layer, *, is_named: bool) -> bool:
    """Tell whether a layer is stored as a family computes it.

    A model that is not quantised fits each family, as if it were; its router and its like stay out unless named.
    """
    if layer.gemm.split == "absorbed":
        return family.name in UNPACKED
    if layer.scheme:
        return family.name in layer.scheme.families
    if model.quantisation.method == "none" and (is_named or layer.gemm.is_quantised):
        return family.name != MXSCALE
    return family.name in SIXTEEN_BITS


# --- experts ---------------------------------------------------------------------------------------------------------


def expert_shapes(
    model: Model, family: Family, ms: Sequence[int], ranks: Ranks, fixed: Mapping[str, int | str]
) -> ModelShapes:
    """The fused experts of one rank. `fixed`: values that the user gave to key columns. If `ep` does not divide the
    experts, the first ranks have one more."""
    if not model.placed.experts:
        raise InputError(f"model type {model.model_type} has no experts, so family {family.name} has no shapes of it")
    notes = [*model.notes, *describe_unknown(model.placed)]
    calls = Counter[Key]()
    descriptions: list[tuple[str, str]] = []
    for experts in model.placed.experts:
        values = {**expert_columns(model, experts, fixed), **fixed}
        for sizes in rank_experts(model, experts, ranks):
            for m in ms:
                calls[family_key(family, {**sizes, **values, "token": m})] += experts.layers
            text = "model_dim {model_dim}, inter_dim {inter_dim}, {expert} experts, top {topk}".format(**sizes)
            descriptions.append(("experts", f"{text}, {experts.layers} times"))
            if values["q_dtype_w"] == FP4 and (sizes["model_dim"] % 256 or sizes["inter_dim"] % 256):
                notes.append("serving stacks pad the experts of FP4 models to a multiple of 256: check with a capture")
    if model.placed.shared_inter and not ranks.fuse_shared:
        notes.append("shared experts are not counted as routed ones; stacks that fuse them need --fuse-shared")
    return ModelShapes(calls, descriptions, list(dict.fromkeys(notes)))


def rank_experts(model: Model, experts: Experts, ranks: Ranks) -> list[dict[str, int]]:
    """fmoe's sizes of the ranks, the largest first. Raises InputError if the ranks do not fit."""
    if ranks.ep > experts.experts:
        raise InputError(f"--ep {ranks.ep} is more than the {experts.experts} experts")
    inter_dim = experts.inter_dim
    if ranks.ep == 1:
        inter_dim = divided(inter_dim, ranks.tp, f"the experts' width {inter_dim}; experts can be spread with --ep")
    fused = 0
    if ranks.fuse_shared:
        fused, rest = divmod(model.placed.shared_inter, experts.inter_dim)
        if rest or not fused:
            raise InputError("--fuse-shared: the model has no shared expert of the routed experts' width")
    most = -(-experts.experts // ranks.ep)
    fewest = experts.experts // ranks.ep
    return [
        {"model_dim": experts.model_dim, "inter_dim": inter_dim, "expert": number + fused, "topk": model.topk + fused}
        for number in dict.fromkeys((most, fewest))
    ]


def expert_columns(model: Model, experts: Experts, fixed: Mapping[str, int | str]) -> dict[str, int | str]:
    """fmoe's text columns as the model has them. Raises InputError if it has an activation without a name."""
    if not model.act and "act_type" not in fixed:
        raise InputError("the activation of this model has no name in AITER; write --set act_type=...")
    scheme = experts.scheme or SIXTEEN
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
