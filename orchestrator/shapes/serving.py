"""What a server makes of a model's weights: which neighbours are one GEMM, and which part of it a rank has.

The only knowledge of models that is ours. Names of modules decide: a block is a module that holds projections, such as
`self_attn`, and a form names the projections that a block must have, no more and no less. A block that fits no form, or
that has such a block within it, is unknown: its weights are named and not listed, because a server may fuse with them
what we do not know.

M is the number of tokens, N output features, K input features. `columns` splits N over the ranks, `rows` splits K,
`whole` is the same on every rank. `heads` is q, k and v in one: key-value heads are copied where there are fewer than
ranks (`QKVParallelLinear` in vLLM's layers/linear.py). `groups`: a batched GEMM, a group a batch.

Sources: vLLM 0.33, `model_executor/models/` (llama, deepseek_v2, qwen3_next, granitemoehybrid, nemotron_h, lfm2,
falcon, gpt2, phi3, bloom), `models/deepseek_v4/{attention,compressor}.py`, `models/deepseek_v32/attention.py`,
`layers/vocab_parallel_embedding.py`, `layers/mamba/{mamba_mixer2,mamba_utils}.py`; SGLang 0.5.23 agrees.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from orchestrator.errors import InputError
from orchestrator.shapes.model_class import Listing, Weight
from worker.text import plural

MAX_INT = 2**31 - 1
VOCABULARY_PADDING = 64
"""vLLM pads the vocabulary to a multiple of this (DEFAULT_VOCAB_PADDING_SIZE), SGLang too."""

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
    whole apart q_a = q_a_proj; whole q_kv_a = q_a_proj kv_a_proj_with_mqa; columns q_b = q_b_proj;
        whole apart kv_a = kv_a_proj_with_mqa; columns kv_b = kv_b_proj; rows o = o_proj
    columns q = q_proj; whole kv_a = kv_a_proj_with_mqa; columns kv_b = kv_b_proj; rows o = o_proj
    # DeepSeek-V4: fused_wqa_wkv, wq_b, wo_a (a batched GEMM, a group a batch), wo_b
    whole q_kv_a = q_a_proj kv_proj; columns q_b = q_b_proj; groups o_a = o_a_proj; rows o_b = o_b_proj
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
    columns in_qkvz = in_proj_qkvz; columns unquantised in_ba = in_proj_ba; rows gdn_o = out_proj
    columns in_qkvz = in_proj_qkv in_proj_z; columns unquantised in_ba = in_proj_b in_proj_a; rows gdn_o = out_proj
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
    parts: tuple[str, ...]
    split: str
    is_apart: bool = False
    is_quantised: bool = True


def read_forms(text: str) -> dict[tuple[str, frozenset[str]], tuple[Gemm, ...]]:
    """The GEMMs by the name of a block and the projections that it has."""
    forms, blocks = dict[tuple[str, frozenset[str]], tuple[Gemm, ...]](), list[str]()
    lines = text.replace(";\n", ";").splitlines()
    for line in (line.strip() for line in lines if line.strip()):
        if line.endswith(":"):
            blocks = line[:-1].split()
        elif not line.startswith("#"):
            gemms = tuple(map(read_gemm, line.split(";")))
            projections = frozenset(part for gemm in gemms for part in gemm.parts)
            forms |= {(block, projections): gemms for block in blocks}
    return forms


def read_gemm(text: str) -> Gemm:
    """`whole apart q_a = q_a_proj`."""
    left, _, parts = text.partition("=")
    split, *flags, name = left.split()
    return Gemm(name, tuple(parts.split()), split, "apart" in flags, "unquantised" not in flags)


GEMMS_OF = read_forms(FORMS)
# GEMMs whose columns are whole heads -> the numbers of those heads in their block
HEADS = {
    **dict.fromkeys(("q", "q_b", "kv_b"), ("num_heads",)),
    **dict.fromkeys(("in_qkvz", "in_ba"), ("num_k_heads", "num_v_heads")),
}
HEAD = read_gemm("vocabulary unquantised lm_head = lm_head")
# parameters that no GEMM of the language model reads: by their module's class, their own name, the tower they are in
NO_GEMM = re.compile(r"Embedding|Conv\dd|Norm")
MODALITIES = re.compile(r"(?:\A|[._])(?:vision|visual|image|img|audio|video|speech)")
NO_GEMM_NAMES = re.compile(r"(?:_bias|bias|A_log)\Z|embed_tokens")


@dataclass(frozen=True, slots=True)
class Layer:
    """One kind of GEMM of a rank. `b`: the size of the batch; 0: the GEMM is not batched. `count`: how often a rank
    runs it in one forward pass. `paths`: the weights of each of those."""

    gemm: Gemm
    n: int
    k: int
    b: int
    bias: bool
    paths: tuple[tuple[str, ...], ...]

    @property
    def name(self) -> str:
        """The name that --layers knows."""
        return self.gemm.name

    @property
    def count(self) -> int:
        """How often a rank runs it in one forward pass."""
        return len(self.paths)


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts of some layers, as the class has them. `has_gate`: up and gate are one weight."""

    model_dim: int
    inter_dim: int
    experts: int
    has_gate: bool
    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Placed:
    """The GEMMs of a model's blocks, the same for each number of ranks, and the weights that no form places.

    `blocks`: (form's GEMM, its weights) of each block, in the order of the model.
    """

    listing: Listing
    gemms: tuple[tuple[Gemm, tuple[Weight, ...]], ...]
    experts: tuple[Experts, ...]
    shared_inter: int
    unknown: tuple[Weight, ...]


def place(listing: Listing) -> Placed:
    """Find the form of each block. Raises InputError where the model has no GEMM of a decoder that we know."""
    blocks: dict[str, dict[str, Weight]] = defaultdict(dict)
    experts, unknown, gemms = list[Weight](), list[Weight](), list[tuple[Gemm, tuple[Weight, ...]]]()
    for weight in listing.weights:
        block, _, name = weight.path.rpartition(".")
        if NO_GEMM.search(weight.kind) or NO_GEMM_NAMES.search(name) or MODALITIES.search(weight.path):
            continue
        if block.rpartition(".")[2] == "experts":
            experts.append(weight)
        else:
            blocks[block][name] = weight
    found = {block: gemms_of(block, weights) for block, weights in blocks.items()}
    strange_blocks = [block for block in blocks if not found[block]]
    for block, weights in blocks.items():
        # MiniMax-M3's servers fuse the indexer within an attention with q, k and v
        if any(f"{strange}.".startswith(f"{block}.") for strange in strange_blocks):
            unknown += weights.values()
            continue
        gemms += [(gemm, tuple(weights[part] for part in gemm.parts)) for gemm in found[block]]
    known, strange = place_experts(experts)
    if not any(gemm.split in ("heads", "rows") for gemm, _ in gemms):
        raise InputError(f"model type {listing.model_type}: no GEMM of a decoder layer is known, so nothing is listed")
    shared = {g.name: w for g, w in gemms}.get("shared_down", ())
    inter = shared[0].shape[1] if shared else 0
    return Placed(listing, tuple(gemms), tuple(known), inter, (*unknown, *strange))


def gemms_of(block: str, weights: Mapping[str, Weight]) -> tuple[Gemm, ...]:
    """The GEMMs of a block, none where no form has exactly its projections."""
    if list(weights) == ["lm_head"]:
        return (HEAD,)
    names = [word for word in block.split(".") if not word.isdigit()]
    gemms = GEMMS_OF.get((names[-1] if names else "", frozenset(weights)), ())
    is_flat = all(len(weight.shape) == 2 for weight in weights.values())
    is_known = all(is_mamba_2(weights[gemm.parts[0]]) for gemm in gemms if gemm.split == "mamba")
    return gemms if is_flat and is_known else ()


def place_experts(weights: Iterable[Weight]) -> tuple[list[Experts], list[Weight]]:
    """(experts of equal sizes with the layers that have them, weights of experts of a kind that is not known)."""
    by_block: dict[str, dict[str, Weight]] = defaultdict(dict)
    for weight in weights:
        block, _, name = weight.path.rpartition(".")
        by_block[block][name] = weight
    found: dict[tuple[int, int, int, bool], list[str]] = defaultdict(list)
    strange = list[Weight]()
    for block, parts in by_block.items():
        sizes = expert_sizes(parts)
        if sizes is None:
            strange += parts.values()
        else:
            found[sizes].append(block)
    return [Experts(*sizes, tuple(paths)) for sizes, paths in found.items()], strange


def expert_sizes(parts: Mapping[str, Weight]) -> tuple[int, int, int, bool] | None:
    """(model_dim, inter_dim, experts, whether they have a gate), None where the class does not say how it stores them.

    LongCat's `gate_up_proj` has rows for experts that compute nothing; `down_proj` has the real ones only.
    """
    has_gate = "gate_up_proj" in parts
    up, down = parts.get("gate_up_proj" if has_gate else "up_proj"), parts.get("down_proj")
    is_known = up and down and len(parts) == 2 and len(up.shape) == len(down.shape) == 3
    if not is_known or up is None or down is None or up.transposed is None or up.transposed != down.transposed:
        return None
    (outputs, inputs), (model_dim, inter) = up.shape[1:], down.shape[1:]
    if up.transposed:
        outputs, inputs, model_dim, inter = inputs, outputs, inter, model_dim
    if not 0 < min(inter, model_dim) <= max(inter, model_dim) <= MAX_INT:
        raise InputError(f"experts would be {inter} wide and take {model_dim} values: sizes are from 1 to {MAX_INT}")
    fits = inputs == model_dim and outputs == inter * (2 if has_gate else 1)
    return (model_dim, inter, down.shape[0], has_gate) if fits else None


def rank_layers(placed: Placed, tp: int) -> list[Layer]:
    """Every GEMM of one rank of `tp`, in the order of the model. Raises InputError where `tp` does not fit."""
    found: dict[tuple[Gemm, int, int, int, bool], list[tuple[str, ...]]] = defaultdict(list)
    faults = Counter[str]()
    for gemm, weights in placed.gemms:
        try:
            b, n, k = rank_sizes(placed, gemm, weights, tp)
        except InputError as e:
            faults.update(e.faults)
            continue
        if not 0 < min(n, k) <= max(n, k) <= MAX_INT:
            faults[f"{gemm.name} would have N {n} and K {k}: sizes are from 1 to {MAX_INT}"] += 1
        found[gemm, n, k, b, weights[0].bias].append(tuple(weight.path for weight in weights))
        if gemm.name == "kv_b":
            for absorbed, size in absorbed_products(weights[0], tp).items():
                found[absorbed, size[1], size[2], size[0], False].append((weights[0].path,))
    if faults:
        raise InputError(list(faults))
    return [Layer(*key, tuple(paths)) for key, paths in found.items()]


def rank_sizes(placed: Placed, gemm: Gemm, weights: tuple[Weight, ...], tp: int) -> tuple[int, int, int]:
    """(B, N, K) of a rank; B 0: not batched."""
    sizes = [weight.shape[::-1] if weight.transposed else weight.shape for weight in weights]
    n, k = sum(size[0] for size in sizes), sizes[0][1]
    if gemm.split == "whole":
        return 0, n, k
    if gemm.split == "vocabulary":
        padded = -(-n // VOCABULARY_PADDING) * VOCABULARY_PADDING
        return 0, -(-padded // tp), k
    if gemm.split == "rows":
        return 0, n, divided(k, tp, f"the width {k} of {gemm.name}")
    if gemm.split == "heads":
        return 0, rank_heads(placed, weights, [size[0] for size in sizes], tp), k
    if gemm.split == "mamba":
        return 0, rank_mamba(weights[0], tp), k
    if gemm.split == "groups":
        groups = weights[0].sizes["n_groups"]
        return divided(groups, tp, f"the {groups} groups of {gemm.name}"), n // groups, k
    for name in HEADS.get(gemm.name, ()):
        heads = weights[0].sizes.get(name, 1)
        divided(heads, tp, f"the {heads} heads of {gemm.name}")
    for weight, size in zip(weights, sizes, strict=True):
        divided(size[0], tp, f"the width {size[0]} of {weight.path.rpartition('.')[2]}")
    return 0, n // tp, k


def divided(number: int, tp: int, what: str) -> int:
    """A rank's share. Raises InputError where it is not whole."""
    if number % tp:
        raise InputError(f"--tp {tp} does not divide {what}")
    return number // tp


def rank_heads(placed: Placed, weights: tuple[Weight, ...], rows: list[int], tp: int) -> int:
    """N of q, k and v in one, with a copy of a key-value head where there are fewer than ranks.

    q may be twice as wide as its heads, where a gate comes with it (Qwen3-Next).
    """
    config = placed.listing.config
    heads = int(config["num_attention_heads"])
    head_dim = weights[0].sizes.get("head_dim") or int(config["hidden_size"]) // heads
    q = rows[0] if len(rows) == 3 else heads * head_dim
    kv_rows = rows[1] if len(rows) == 3 else (rows[0] - q) // 2
    kv_heads = kv_rows // head_dim
    if q + 2 * kv_rows != sum(rows) or not kv_heads or kv_heads * head_dim != kv_rows or q % (heads * head_dim):
        raise InputError(f"q, k and v of {rows} rows do not fit {heads} heads of {head_dim}")
    if heads % kv_heads:
        raise InputError(f"{heads} attention heads are not a multiple of the {kv_heads} key-value heads")
    divided(heads, tp, f"the {heads} attention heads")
    if kv_heads % tp and tp % kv_heads:
        raise InputError(f"--tp {tp} and {kv_heads} key-value heads: neither divides the other")
    return q // tp + 2 * max(kv_heads // tp, 1) * head_dim


def mamba_sizes(weight: Weight) -> tuple[int, int, int, int]:
    """(inner width, heads, state, groups) of the block."""
    names = ("intermediate_size", "num_heads", "ssm_state_size", "n_groups")
    inner, heads, state, groups = (weight.sizes.get(name, 0) for name in names)
    return inner, heads, state, groups


def is_mamba_2(weight: Weight) -> bool:
    """Whether in_proj has a gate and x, B and C of each group, and a step size a head."""
    inner, heads, state, groups = mamba_sizes(weight)
    return groups > 0 and weight.shape[0] == 2 * inner + 2 * groups * state + heads


def rank_mamba(weight: Weight, tp: int) -> int:
    """N of Mamba-2's in_proj. One group is copied to each rank; several must be a multiple of the ranks (vLLM's
    mamba_mixer2.py asserts it)."""
    inner, heads, state, groups = mamba_sizes(weight)
    if groups > 1:
        divided(groups, tp, f"the {groups} groups of mamba_in")
    divided(heads, tp, f"the {heads} heads of mamba_in")
    return 2 * inner // tp + 2 * max(groups // tp, 1) * state + heads // tp


def absorbed_products(kv_b: Weight, tp: int) -> dict[Gemm, tuple[int, int, int]]:
    """(B, N, K) of the two batched GEMMs that stand for kv_b in decoding (DeepSeek-V2 report, section 2.1.2)."""
    heads, rank = kv_b.sizes["num_heads"] // tp, kv_b.shape[1]
    v = kv_b.sizes["v_head_dim"]
    nope = kv_b.shape[0] // kv_b.sizes["num_heads"] - v
    absorb_k, absorb_v = (Gemm(name, ("kv_b_proj",), "batches", True) for name in ("absorb_k", "absorb_v"))
    return {absorb_k: (heads, rank, nope), absorb_v: (heads, v, rank)}


def name_of(weight: Weight) -> str:
    """The name that --layers has for a weight that no form places: its path within a layer."""
    return re.split(r"\.\d+\.", weight.path)[-1]


def describe_unknown(placed: Placed) -> list[str]:
    """A sentence about each kind of weight that no form places."""
    kinds = Counter((name_of(weight), weight.shape) for weight in placed.unknown)
    return [
        f"not listed: {name} {'x'.join(map(str, shape))} ({plural(n, 'weight')}), because gemmfleet does not know how a"
        f" server runs it; --layers {name} lists it as it is"
        for (name, shape), n in kinds.items()
    ]
