"""The GEMMs that a server makes of a model's weights: which weights it joins into one, and which part of it a rank has.

All that gemmfleet itself knows of models is here. Names of modules decide: a block is a module that holds projections,
such as `self_attn`, and a form names the projections that a block must have, no more and no less. A block that fits no
form, or that has such a block within it, is unknown: its weights are named and not listed, because a server may fuse
with them what we do not know. `place` finds the forms of a model's blocks once; `rank_layers` then gives the GEMMs of
one rank, for Llama-3 8B with two ranks:

    model.layers.0.self_attn: q_proj, k_proj, v_proj, o_proj      a block
    heads qkv = q_proj k_proj v_proj; rows o = o_proj             its form: two GEMMs
    qkv with N 3072 and K 4096, o with N 4096 and K 2048          of each rank, 32 times

M is the number of tokens, N output features, K input features. How a rank has its part of a GEMM, its `split`:

    columns       N is split over the ranks
    head_columns  the same, where each rank must have whole heads
    heads         q, k and v in one: columns, but key-value heads are copied if there are fewer than ranks
                  (`QKVParallelLinear` in vLLM's layers/linear.py)
    rows          K is split
    whole         each rank has all of it
    vocabulary    columns after padding
    mamba         the parts of Mamba-2's in_proj are split one by one
    groups        a batched GEMM with a group a batch; the batches are split
    absorbed      a batched GEMM with a head a batch; the batches are split

Sources: vLLM 0.33, `model_executor/models/` (llama, deepseek_v2, qwen3_next, granitemoehybrid, nemotron_h, lfm2,
falcon, gpt2, phi3, bloom), `models/deepseek_v4/{attention,compressor}.py`, `models/deepseek_v32/attention.py`,
`layers/vocab_parallel_embedding.py`, `layers/mamba/{mamba_mixer2,mamba_utils}.py`; SGLang 0.5.23 agrees.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.errors import InputError
from orchestrator.shapes.model_class import Listing, Weight
from orchestrator.shapes.quantisation import Quantisation, Scheme
from worker.text import plural

MAX_INT = 2**31 - 1
VOCABULARY_PADDING = 64
"""vLLM pads the vocabulary to a multiple of this (DEFAULT_VOCAB_PADDING_SIZE), SGLang too."""
HEAD_NUMBERS = ("num_heads", "num_k_heads", "num_v_heads")
"""Names that a block has for numbers of its heads."""

FORMS = """
self_attn attention attn self_attention mixer:
    heads qkv = q_proj k_proj v_proj; rows o = o_proj
    # LFM2, Phi
    heads qkv = q_proj k_proj v_proj; rows o = out_proj
    heads qkv = q_proj k_proj v_proj; rows o = dense
    # AFMoE's gate of the output is a GEMM of its own
    heads qkv = q_proj k_proj v_proj; columns attention_gate = gate_proj; rows o = o_proj
    # Gemma 4, whose full attention has v = k: vLLM loads k twice
    heads qkv = q_proj k_proj k_proj; rows o = o_proj
    # Phi-3; Falcon, Bloom, GPT-NeoX; GPT-2
    heads qkv = qkv_proj; rows o = o_proj
    heads qkv = query_key_value; rows o = dense
    heads qkv = c_attn; rows o = c_proj
    # multi-head latent attention (DeepSeek-V2 report, section 2.1), with and without a low-rank q
    # absorb_k and absorb_v stand for kv_b in decoding (section 2.1.2)
    whole apart q_a = q_a_proj; whole q_kv_a = q_a_proj kv_a_proj_with_mqa; head_columns q_b = q_b_proj;
        whole apart kv_a = kv_a_proj_with_mqa; head_columns kv_b = kv_b_proj;
        absorbed apart absorb_k = kv_b_proj; absorbed apart absorb_v = kv_b_proj; rows o = o_proj
    head_columns q = q_proj; whole kv_a = kv_a_proj_with_mqa; head_columns kv_b = kv_b_proj;
        absorbed apart absorb_k = kv_b_proj; absorbed apart absorb_v = kv_b_proj; rows o = o_proj
    # DeepSeek-V4: fused_wqa_wkv, wq_b, wo_a (a batched GEMM, a group a batch), wo_b
    whole q_kv_a = q_a_proj kv_proj; head_columns q_b = q_b_proj; groups o_a = o_a_proj; rows o_b = o_b_proj
compressor:
    # fused_wkv_wgate of DeepSeek-V4 has no quant_config; nor has weights_proj of its indexer
    whole unquantised compressor_kv_gate = kv_proj gate_proj
scorer:
    whole unquantised index_weights = weights_proj
indexer:
    whole unquantised index_kv_gate = kv_proj gate_proj; whole index_q = q_b_proj
    # DeepSeek-V3.2 and GLM-5: wk_weights_proj has no quant_config
    whole index_q = wq_b; whole unquantised index_k = wk weights_proj
linear_attn:
    # gated delta net of Qwen3-Next, and of Qwen3.5, which stores the same weights in four
    head_columns in_qkvz = in_proj_qkvz; head_columns unquantised in_ba = in_proj_ba; rows gdn_o = out_proj
    head_columns in_qkvz = in_proj_qkv in_proj_z; head_columns unquantised in_ba = in_proj_b in_proj_a;
        rows gdn_o = out_proj
mamba mixer:
    mamba mamba_in = in_proj; rows mamba_out = out_proj
mlp feed_forward mlps mixer moe block_sparse_moe:
    columns gate_up = gate_proj up_proj; rows down = down_proj
    columns gate_up = gate_up_proj; rows down = down_proj
    columns gate_up = w1 w3; rows down = w2
    columns up = up_proj; rows down = down_proj
    columns up = fc1; rows down = fc2
    columns up = c_fc; rows down = c_proj
    columns up = dense_h_to_4h; rows down = dense_4h_to_h
    whole unquantised router = gate
    whole unquantised router = router
    # Nemotron 3: experts in a narrower space
    whole unquantised router = gate; whole fc1_latent = fc1_latent_proj; whole fc2_latent = fc2_latent_proj
    # the gate of a shared expert has one output
    whole unquantised router = gate; whole unquantised shared_gate = shared_expert_gate
router:
    # LongCat, with its experts that compute nothing; AFMoE
    whole unquantised router = classifier
    whole unquantised router = gate
    # Gemma 4
    whole unquantised router = proj
gate:
    whole unquantised router = wg
shared_experts shared_expert shared_mlp:
    columns shared_gate_up = gate_proj up_proj; rows shared_down = down_proj
    columns shared_gate_up = gate_up_proj; rows shared_down = down_proj
    columns shared_gate_up = input_linear; rows shared_down = output_linear
    columns shared_up = up_proj; rows shared_down = down_proj
"""
"""Below the names of blocks, their forms: `split [apart] [unquantised] GEMM = projections; ...`.

A GEMM's projections are one weight in the server. `apart`: only stacks that do not fuse it run it; vLLM does not.
`unquantised`: it keeps 16 bits in a model that is quantised.
"""


@dataclass(frozen=True, slots=True)
class Gemm:
    """A GEMM of a block, as a line of FORMS has it."""

    name: str
    projections: tuple[str, ...]
    split: str
    is_apart: bool = False
    is_quantised: bool = True


def read_forms(text: str) -> dict[tuple[str, frozenset[str]], tuple[Gemm, ...]]:
    """The GEMMs by the name of a block and the projections that it has."""
    forms = dict[tuple[str, frozenset[str]], tuple[Gemm, ...]]()
    blocks = list[str]()
    for line in text.replace(";\n", ";").split("\n"):
        if line.endswith(":"):
            blocks = line[:-1].split()
        elif line and not line.lstrip().startswith("#"):
            gemms = tuple(map(read_gemm, line.split(";")))
            projections = frozenset(name for gemm in gemms for name in gemm.projections)
            forms |= {(block, projections): gemms for block in blocks}
    return forms


def read_gemm(text: str) -> Gemm:
    """`whole apart q_a = q_a_proj`."""
    words, _, projections = text.partition("=")
    split, *flags, name = words.split()
    return Gemm(name, tuple(projections.split()), split, "apart" in flags, "unquantised" not in flags)


GEMMS_OF = read_forms(FORMS)
HEAD = read_gemm("vocabulary unquantised lm_head = lm_head")
NO_GEMM_CLASSES = re.compile(r"Embedding|Conv\dd|Norm")
"""Classes of modules whose weights no GEMM of the language model reads."""
NO_GEMM_NAMES = re.compile(r"(?:_bias|bias|A_log)\Z|embed_tokens")
"""Names of such parameters."""
MODALITIES = re.compile(r"(?:\A|[._])(?:vision|visual|image|img|audio|video|speech)")
"""Towers of a model beside its language model, in the paths of weights."""


@dataclass(frozen=True, slots=True)
class PlacedGemm:
    """A GEMM of one block of the model, with its weights. `scheme` None: they have 16 bits."""

    gemm: Gemm
    weights: tuple[Weight, ...]
    scheme: Scheme | None


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of `layers` layers, as the class has them. `has_gate`: up and gate are one weight. `scheme` None:
    their weights have 16 bits."""

    model_dim: int
    inter_dim: int
    experts: int
    has_gate: bool
    scheme: Scheme | None = None
    layers: int = 1


@dataclass(frozen=True, slots=True)
class Placed:
    """The GEMMs and experts of a model, the same for each number of ranks, and the weights that no form places.

    `shared_inter`: width of all shared experts of a layer together.
    """

    listing: Listing
    gemms: tuple[PlacedGemm, ...]
    experts: tuple[Experts, ...]
    shared_inter: int
    unknown: tuple[Weight, ...]


@dataclass(frozen=True, slots=True)
class Layer:
    """One kind of GEMM of a rank. `b`: the size of the batch; 0: the GEMM is not batched. `count`: how often a rank
    runs it in one forward pass."""

    gemm: Gemm
    n: int
    k: int
    b: int
    bias: bool
    scheme: Scheme | None
    count: int = 1

    @property
    def name(self) -> str:
        """The name that --layers knows."""
        return self.gemm.name


def place(listing: Listing, quantisation: Quantisation) -> Placed:
    """Find the form of each block. Raises InputError if the model has no GEMM of a decoder that we know."""
    blocks = blocks_of(listing)
    unknown_blocks = {block for block, weights in blocks.items() if not is_known(block, weights)}
    # MiniMax-M3's servers fuse the indexer within an attention with q, k and v
    around_unknown = {block for block in blocks if any(inner.startswith(f"{block}.") for inner in unknown_blocks)}
    gemms: list[PlacedGemm] = []
    unknown: list[Weight] = []
    experts = Counter[Experts]()
    for block, weights in blocks.items():
        if block in unknown_blocks | around_unknown:
            unknown += weights.values()
        elif is_experts(block):
            experts[place_experts(block, weights, quantisation)] += 1
        else:
            gemms += [place_gemm(gemm, weights, quantisation) for gemm in gemms_of(block, weights)]
    if not any(placed.gemm.split in ("heads", "rows") for placed in gemms):
        raise InputError(f"model type {listing.model_type}: no GEMM of a decoder layer is known, so nothing is listed")
    shared = [placed.weights[0].shape[1] for placed in gemms if placed.gemm.name == "shared_down"]
    counted = tuple(replace(kind, layers=layers) for kind, layers in experts.items())
    return Placed(listing, tuple(gemms), counted, max(shared, default=0), tuple(unknown))


def blocks_of(listing: Listing) -> dict[str, dict[str, Weight]]:
    """The weights that a GEMM may read, by block and projection: `{"model.layers.0.self_attn": {"q_proj": ...}}`."""
    blocks: dict[str, dict[str, Weight]] = defaultdict(dict)
    for weight in listing.weights:
        block, _, name = weight.path.rpartition(".")
        if not (NO_GEMM_CLASSES.search(weight.kind) or NO_GEMM_NAMES.search(name) or MODALITIES.search(weight.path)):
            blocks[block][name] = weight
    return blocks


def is_experts(block: str) -> bool:
    """Tell whether a block holds the routed experts of a layer."""
    return block.rpartition(".")[2] == "experts"


def is_known(block: str, weights: Mapping[str, Weight]) -> bool:
    """Tell whether a server's GEMMs of a block are known."""
    if is_experts(block):
        return experts_of(weights) is not None
    return bool(gemms_of(block, weights))


def gemms_of(block: str, weights: Mapping[str, Weight]) -> tuple[Gemm, ...]:
    """The GEMMs of a block, none if no form has exactly its projections."""
    if list(weights) == ["lm_head"]:
        return (HEAD,)
    if any(len(weight.shape) != 2 for weight in weights.values()):
        return ()
    names = [word for word in block.split(".") if not word.isdigit()]
    gemms = GEMMS_OF.get((names[-1] if names else "", frozenset(weights)), ())
    if gemms and gemms[0].split == "mamba" and not is_mamba_2(weights[gemms[0].projections[0]]):
        return ()
    return gemms


def place_gemm(gemm: Gemm, weights: Mapping[str, Weight], quantisation: Quantisation) -> PlacedGemm:
    """A GEMM with its weights among those of its block."""
    gemm_weights = tuple(weights[name] for name in gemm.projections)
    scheme = quantisation.scheme_of([weight.path for weight in gemm_weights]) if gemm.is_quantised else None
    return PlacedGemm(gemm, gemm_weights, scheme)


def place_experts(block: str, weights: Mapping[str, Weight], quantisation: Quantisation) -> Experts:
    """The experts of a layer of a known kind. Raises InputError for a size out of range."""
    kind = experts_of(weights)
    assert kind is not None, "its block is known"
    sizes = (kind.experts, kind.inter_dim, kind.model_dim)
    if not 0 < min(sizes) <= max(sizes) <= MAX_INT:
        described = f"{kind.experts} experts {kind.inter_dim} wide with {kind.model_dim} inputs"
        raise InputError(f"{described}: sizes are from 1 to {MAX_INT}")
    return replace(kind, scheme=quantisation.scheme_of([block], experts=True))


def experts_of(weights: Mapping[str, Weight]) -> Experts | None:
    """The experts of a layer without their scheme, None if the class does not say how it stores them.

    Some classes store a weight as (input, output). With a gate the sizes show it, because up has twice the width of
    down. LongCat's `gate_up_proj` also has experts that compute nothing; `down_proj` has the real ones only.
    """
    has_gate = "gate_up_proj" in weights
    up = weights.get("gate_up_proj" if has_gate else "up_proj")
    down = weights.get("down_proj")
    if up is None or down is None or len(weights) != 2 or not len(up.shape) == len(down.shape) == 3:
        return None
    is_transposed = up.transposed
    up_per_inter = 1
    if has_gate:
        is_transposed = up.shape[1] != 2 * down.shape[2]
        up_per_inter = 2
    if is_transposed is None:
        return None
    outputs, inputs = up.shape[1:]
    model_dim, inter_dim = down.shape[1:]
    if is_transposed:
        inputs, outputs = up.shape[1:]
        inter_dim, model_dim = down.shape[1:]
    if inputs != model_dim or outputs != up_per_inter * inter_dim:
        return None
    return Experts(model_dim, inter_dim, down.shape[0], has_gate)


def rank_layers(placed: Placed, tp: int, only: Sequence[str] = ()) -> list[Layer]:
    """Every GEMM of one rank of `tp`, in the order of the model. `only`: names of weights that no form places, which
    are listed as they are. Raises InputError if `tp` does not fit."""
    layers = Counter[Layer]()
    faults = dict[str, None]()
    named = [weight for weight in placed.unknown if name_of(weight) in only and len(weight.shape) == 2]
    for placed_gemm in (*placed.gemms, *map(as_it_is, named)):
        gemm = placed_gemm.gemm
        try:
            b, n, k = rank_sizes(placed.listing.config, placed_gemm, tp)
        except InputError as e:
            faults |= dict.fromkeys(e.faults)
            continue
        if not 0 < min(n, k) <= max(n, k) <= MAX_INT:
            faults[f"{gemm.name} would have N {n} and K {k}: sizes are from 1 to {MAX_INT}"] = None
        layers[Layer(gemm, n, k, b, placed_gemm.weights[0].bias, placed_gemm.scheme)] += 1
    if faults:
        raise InputError(list(faults))
    return [replace(layer, count=count) for layer, count in layers.items()]


def as_it_is(weight: Weight) -> PlacedGemm:
    """A weight that no form places, as a GEMM that each rank has."""
    return PlacedGemm(Gemm(name_of(weight), (weight.path,), "whole"), (weight,), None)


def rank_sizes(config: Mapping[str, Any], placed: PlacedGemm, tp: int) -> tuple[int, int, int]:
    """(B, N, K) of a rank; B 0: not batched. Raises InputError if `tp` does not fit."""
    name = placed.gemm.name
    split = placed.gemm.split
    weights = placed.weights
    widths = [matrix(weight)[0] for weight in weights]
    n = sum(widths)
    k = matrix(weights[0])[1]
    block = weights[0].sizes  # heads, groups and the like
    if split == "rows":
        return 0, n, divided(k, tp, f"the width {k} of {name}")
    if split == "heads":
        return 0, rank_heads(config, block, widths, tp), k
    if split == "mamba":
        return 0, rank_mamba(block, tp), k
    if split == "groups":
        return divided(block["n_groups"], tp, f"the groups of {name}"), n // block["n_groups"], k
    if split == "absorbed":
        heads = block["num_heads"]
        v_width = block["v_head_dim"]
        rank_share = divided(heads, tp, f"the {heads} heads")
        if name == "absorb_k":  # from a head's q to the latent vector
            return rank_share, k, n // heads - v_width
        return rank_share, v_width, k  # from the latent vector to a head's v
    if split == "vocabulary":
        n = -(-n // VOCABULARY_PADDING) * VOCABULARY_PADDING
        return 0, divided(n, tp, f"the padded vocabulary {n}"), k
    if split == "head_columns":
        for number in HEAD_NUMBERS:
            if number in block:
                divided(block[number], tp, f"the {block[number]} heads of {name}")
    if split == "whole":
        return 0, n, k
    for weight, width in zip(weights, widths, strict=True):
        divided(width, tp, f"the width {width} of {name_of(weight)}")
    return 0, n // tp, k


def matrix(weight: Weight) -> tuple[int, int]:
    """(outputs, inputs) of a weight of two dimensions."""
    outputs, inputs = weight.shape
    return (inputs, outputs) if weight.transposed else (outputs, inputs)


def divided(number: int, tp: int, what: str) -> int:
    """A rank's share. Raises InputError if it is not whole."""
    if number % tp:
        raise InputError(f"--tp {tp} does not divide {what}")
    return number // tp


def rank_heads(config: Mapping[str, Any], block: Mapping[str, int], widths: Sequence[int], tp: int) -> int:
    """N of q, k and v in one, with a copy of a key-value head if there are fewer than ranks. `widths`: of the three, or
    of a weight that holds them all.

    q may be twice as wide as its heads, if a gate comes with it (Qwen3-Next), and v another width than k (MiMo-V2).
    """
    heads = int(config["num_attention_heads"])
    head_dim = block.get("head_dim") or int(config["hidden_size"]) // heads
    if len(widths) == 3:
        q, k, v = widths
    else:
        q = heads * head_dim
        k = (widths[0] - q) // 2
        v = widths[0] - q - k
    kv_heads = k // head_dim
    if kv_heads < 1 or k % head_dim or v % kv_heads or q % (heads * head_dim):
        raise InputError(f"q, k and v of {', '.join(map(str, widths))} rows do not fit {heads} heads of {head_dim}")
    if heads % kv_heads:
        raise InputError(f"{heads} attention heads are not a multiple of the {kv_heads} key-value heads")
    divided(heads, tp, f"the {heads} attention heads")
    if kv_heads % tp and tp % kv_heads:
        raise InputError(f"--tp {tp} and {kv_heads} key-value heads: neither divides the other")
    return q // tp + max(kv_heads // tp, 1) * (k + v) // kv_heads


def mamba_sizes(block: Mapping[str, int]) -> tuple[int, int, int, int]:
    """(inner width, heads, state, groups) of the block."""
    names = ("intermediate_size", "num_heads", "ssm_state_size", "n_groups")
    inner, heads, state, groups = (block.get(name, 0) for name in names)
    return inner, heads, state, groups


def is_mamba_2(weight: Weight) -> bool:
    """Tell whether in_proj has a gate and x, B and C of each group, and a step size a head."""
    inner, heads, state, groups = mamba_sizes(weight.sizes)
    return groups > 0 and weight.shape[0] == 2 * inner + 2 * groups * state + heads


def rank_mamba(block: Mapping[str, int], tp: int) -> int:
    """N of Mamba-2's in_proj. One group is copied to each rank; several must be a multiple of the ranks (vLLM's
    mamba_mixer2.py asserts it)."""
    inner, heads, state, groups = mamba_sizes(block)
    if groups > 1:
        divided(groups, tp, f"the {groups} groups of mamba_in")
    divided(heads, tp, f"the {heads} heads of mamba_in")
    return 2 * inner // tp + 2 * max(groups // tp, 1) * state + heads // tp


def name_of(weight: Weight) -> str:
    """A weight's path within a layer, which --layers takes for one that no form places."""
    return re.split(r"\.\d+\.", weight.path)[-1]


def describe_unknown(placed: Placed) -> list[str]:
    """A sentence about each kind of weight that no form places."""
    kinds = Counter((name_of(weight), weight.shape) for weight in placed.unknown)
    sentences = list[str]()
    for (name, shape), number in kinds.items():
        sizes = "x".join(map(str, shape))
        hint = f"; --layers {name} lists it as it is" if len(shape) == 2 else ""
        sentences.append(
            f"not listed: {name} {sizes} ({plural(number, 'weight')}), because gemmfleet does not know how a server"
            f" runs it{hint}"
        )
    return sentences
