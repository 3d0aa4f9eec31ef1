"""The shapes of a model in the columns of a family: the GEMMs of one rank of a tensor-parallel group, for each M.

M is the number of tokens, N output features, K input features. Column-parallel layers split N, row-parallel layers
split K. With H heads, KV key-value heads, d the head size, tp ranks:

    qkv      N = (H/tp + 2*max(KV/tp, 1)) * d     K = hidden       KV heads are copied where there are fewer than ranks;
                                                                   H counts twice where the output has a gate
    o        N = hidden                           K = H/tp * d
    gate_up  N = 2*inter/tp (inter/tp: no gate)   K = hidden
    down     N = hidden                           K = inter/tp
    lm_head  N = ceil(vocab/tp)                   K = hidden
    router   N = experts                          K = hidden       on every rank

MLA (DeepSeek-V2 technical report, section 2.1; ranks r_q and r_kv, head parts nope, rope and v):

    q_a      N = r_q                              K = hidden       on every rank
    kv_a     N = r_kv + rope                      K = hidden       on every rank
    q_kv_a   N = r_q + r_kv + rope                K = hidden       the two in one, as serving stacks do it
    q_b      N = H/tp * (nope + rope)             K = r_q          (q: K = hidden, where there is no r_q)
    kv_b     N = H/tp * (nope + v)                K = r_kv
    index_q  N = index heads * their size         K = r_q          on every rank; sparse attention (DeepSeek-V3.2)
    o        N = hidden                           K = H/tp * v
    absorb_k B = H/tp   N = r_kv   K = nope       the batched GEMMs that stand for kv_b in decoding
    absorb_v B = H/tp   N = v      K = r_kv

Gated delta net (Qwen3-Next; heads and head sizes of keys and values):

    in_qkvz  N = 2*(keys + values)/tp             K = hidden
    in_ba    N = 2*(value heads)/tp               K = hidden
    gdn_o    N = hidden                           K = values/tp

The sizes are those of the model's config.json, with the keys of the Hugging Face configuration classes (LlamaConfig,
Qwen3Config, Qwen3MoeConfig, DeepseekV3Config, GptOssConfig, MixtralConfig and their like).

Checked against the lists that AITER ships for Llama-3 70B and 405B, Qwen3-235B, DeepSeek-V3 and gpt-oss.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.errors import InputError
from orchestrator.files.faults import Faults, shown
from orchestrator.files.read import read_bytes
from orchestrator.shapes.model import Key
from orchestrator.shapes.reader import MAX_INT, default_of, fixed_columns
from worker.families import Family
from worker.text import did_you_mean

MAX_BYTES = 4 * 2**20
# model types whose MLP has an up projection and no gate
_PLAIN_MLP = ("gpt_neox", "falcon", "phi", "starcoder2", "nemotron", "opt", "gpt_bigcode")
# model types whose q, k and v projections have a bias without saying so
_QKV_BIAS = ("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl")


@dataclass(frozen=True, slots=True)
class Mla:
    """Multi-head latent attention (DeepSeek): ranks of the compressed q and kv, and the parts of a head.

    `q_lora_rank` None: q is projected directly. `index`: width of the sparse attention's index heads (DeepSeek-V3.2),
    0 without.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    nope: int
    rope: int
    v: int
    index: int = 0


@dataclass(frozen=True, slots=True)
class Moe:
    """Mixture of experts. `inter` is one routed expert's, `shared_inter` that of all shared experts together."""

    experts: int
    topk: int
    inter: int
    shared_inter: int = 0
    router_bias: bool = False


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes that the GEMMs of a decoder follow from. `inter` is the dense MLP's, 0 where every layer is MoE.

    `gdn`: (heads, their size) of the keys and of the values of a gated delta net, the linear attention of Qwen3-Next.
    `gated`: q comes with a gate of its size. `raw`: the language model's part of config.json.
    """

    model_type: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inter: int
    vocab: int
    dtype: str
    act: str
    glu: bool = True
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    mla: Mla | None = None
    moe: Moe | None = None
    gdn: tuple[int, int, int, int] | None = None
    gated: bool = False
    raw: Mapping[str, Any] = field(default_factory=dict)
    quant: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read_model(path: str | Path) -> ModelConfig:
    """The model of a config.json (or of the folder that holds one). Raises InputError with every fault."""
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    faults = Faults(file)
    try:
        raw = json.loads(read_bytes(file, MAX_BYTES, InputError))
    except UnicodeDecodeError:
        faults.add("is no UTF-8 text; a model's config.json is wanted")
    except (ValueError, RecursionError) as e:
        line = e.lineno if isinstance(e, json.JSONDecodeError) else None
        faults.add(f"is no JSON ({str(e).split(':')[0]}); a model's config.json is wanted", line=line)
    else:
        if isinstance(raw, dict):
            return _model(raw, faults)
        faults.add("holds no JSON object; a model's config.json is wanted")
    faults.raise_as(InputError)
    raise AssertionError  # there was a fault


def _number(raw: Mapping[str, Any], faults: Faults, *names: str, default: int | None = None, least: int = 1) -> int:
    """The first of `names` that the config has; a fault where it has none and there is no default."""
    name, value = next(((n, v) for n in names if (v := raw.get(n)) is not None), ("", default))
    if type(value) is int and (not name or least <= value <= MAX_INT):
        return value
    wrong = f"{name} is {str(value)[:40]!r}, not a whole number from {least}"
    missing = f"{' or '.join(names)} is missing: is this the config.json of a language model?"
    faults.add(wrong if name else missing)
    return 1


def _model(raw: dict[str, Any], faults: Faults) -> ModelConfig:
    notes = []
    inner = raw.get("text_config")
    if "hidden_size" not in raw and isinstance(inner, dict):
        notes.append("took the language model within it (text_config)")
        raw = {**{k: raw[k] for k in ("quantization_config", "torch_dtype", "dtype") if k in raw}, **inner}
    number = partial(_number, raw, faults)
    kind = str(raw.get("model_type", ""))
    hidden, heads = number("hidden_size"), number("num_attention_heads")
    explicit = number("head_dim", default=0, least=0)
    mla = Mla(
        q_lora_rank=number("q_lora_rank", default=0, least=0) or None,
        kv_lora_rank=number("kv_lora_rank"),
        nope=number("qk_nope_head_dim"),
        rope=number("qk_rope_head_dim"),
        v=number("v_head_dim"),
        index=number("index_n_heads", default=0, least=0) * number("index_head_dim", default=0, least=0),
    ) if raw.get("kv_lora_rank") else None  # fmt: skip
    if not explicit and mla is None and hidden % heads:
        faults.add(f"head_dim is missing and hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    moe = None
    if (experts := number("n_routed_experts", "num_experts", "num_local_experts", default=0, least=0)) > 1:
        width = number("moe_intermediate_size", "intermediate_size")
        shared = number("n_shared_experts", default=0, least=0) * width
        shared = number("shared_expert_intermediate_size", default=shared, least=0)
        topk = number("num_experts_per_tok", "experts_per_token", "moe_topk")
        if topk > experts:
            faults.add(f"num_experts_per_tok {topk} is more than the {experts} experts")
        moe = Moe(experts, topk, width, shared, router_bias=kind == "gpt_oss")
    # where there are experts, the dense layers are those that the config names as such: mlp_only_layers and
    # decoder_sparse_step (Qwen), first_k_dense_replace (DeepSeek)
    dense = moe is None or raw.get("mlp_only_layers") or number("first_k_dense_replace", default=0, least=0)
    names = ("num_key_heads", "key_head_dim", "num_value_heads", "value_head_dim")
    k_heads, k_dim, v_heads, v_dim = (number(f"linear_{name}", default=0) for name in names)
    config = ModelConfig(
        model_type=kind,
        hidden=hidden,
        heads=heads,
        kv_heads=number("num_key_value_heads", default=heads),
        head_dim=explicit or hidden // heads,
        inter=number("intermediate_size") if dense or number("decoder_sparse_step", default=1) > 1 else 0,
        vocab=number("vocab_size"),
        dtype=_dtype(raw, faults),
        act=str(raw.get("hidden_act") or raw.get("hidden_activation") or "silu"),
        glu=kind not in _PLAIN_MLP,
        qkv_bias=bool(raw.get("attention_bias") or raw.get("qkv_bias")) or kind in _QKV_BIAS,
        o_bias=bool(raw.get("attention_bias")),
        mlp_bias=bool(raw.get("mlp_bias")),
        mla=mla,
        moe=moe,
        gdn=(k_heads, k_dim, v_heads, v_dim) if k_heads else None,
        gated=bool(raw.get("attn_output_gate", k_heads)),
        raw=raw,
        quant=raw["quantization_config"] if isinstance(raw.get("quantization_config"), dict) else {},
        notes=tuple(notes),
    )
    faults.raise_as(InputError)
    return config


def _dtype(raw: Mapping[str, Any], faults: Faults) -> str:
    name = str(raw.get("torch_dtype") or raw.get("dtype") or "bfloat16").removeprefix("torch.")
    if name not in ("bfloat16", "float16", "float32"):
        faults.add(f"torch_dtype is {name[:40]!r}, not bfloat16, float16 or float32")
    return f"torch.{name}"


# --- layers ----------------------------------------------------------------------------------------------------------

# layers that stay in the model's own dtype when the others are quantised
UNQUANTISED = ("router", "lm_head", "in_ba")


@dataclass(frozen=True, slots=True)
class Layer:
    """One kind of GEMM of a rank. `b`: the size of the batch; 0: the GEMM is not batched."""

    name: str
    n: int
    k: int
    bias: bool = False
    b: int = 0


def layers(model: ModelConfig, tp: int) -> list[Layer]:
    """Every GEMM of a rank, in the order of a forward pass. Raises InputError where `tp` does not fit the model."""
    _check(model, tp)
    factor, up = (2, "gate_up") if model.glu else (1, "up")
    moe, shared = model.moe, model.moe.shared_inter if model.moe else 0
    dense = [
        Layer(up, factor * model.inter // tp, model.hidden, model.mlp_bias),
        Layer("down", model.hidden, model.inter // tp, model.mlp_bias),
    ]
    common = [
        Layer(f"shared_{up}", factor * shared // tp, model.hidden), Layer("shared_down", model.hidden, shared // tp)
    ]  # fmt: skip
    return [
        *(_mla(model, model.mla, tp) if model.mla else _attention(model, tp)),
        *(_gdn(model, model.gdn, tp) if model.gdn else []),
        *(dense if model.inter else []),
        *([Layer("router", moe.experts, model.hidden, moe.router_bias)] if moe else []),
        *(common if shared else []),
        Layer("lm_head", -(-model.vocab // tp), model.hidden),
    ]


def _check(model: ModelConfig, tp: int) -> None:
    shared = model.moe.shared_inter if model.moe else 0
    heads = model.mla is None and model.kv_heads % tp and tp % model.kv_heads
    faults = [
        why for wrong, why in (
            (model.heads % tp, f"--tp {tp} does not divide the {model.heads} attention heads"),
            (heads, f"--tp {tp} and {model.kv_heads} key-value heads: neither divides the other"),
            (model.inter % tp, f"--tp {tp} does not divide the MLP's width {model.inter}"),
            (shared % tp, f"--tp {tp} does not divide the shared experts' width {shared}"),
            (any(n % tp for n in (model.gdn or ())[::2]), f"--tp {tp} does not divide the linear attention's heads"),
        ) if wrong
    ]  # fmt: skip
    if faults:
        raise InputError(faults)


def _attention(model: ModelConfig, tp: int) -> list[Layer]:
    q, kv = model.heads // tp, max(model.kv_heads // tp, 1)
    return [
        Layer("qkv", (q * (1 + model.gated) + 2 * kv) * model.head_dim, model.hidden, model.qkv_bias),
        Layer("o", model.hidden, q * model.head_dim, model.o_bias),
    ]


def _gdn(model: ModelConfig, gdn: tuple[int, int, int, int], tp: int) -> list[Layer]:
    keys, values = gdn[0] * gdn[1] // tp, gdn[2] * gdn[3] // tp
    n = {"in_qkvz": 2 * (keys + values), "in_ba": 2 * gdn[2] // tp}
    return [*(Layer(name, n[name], model.hidden) for name in n), Layer("gdn_o", model.hidden, values)]


def _mla(model: ModelConfig, mla: Mla, tp: int) -> list[Layer]:
    heads, kv_a, rank = model.heads // tp, mla.kv_lora_rank + mla.rope, mla.q_lora_rank
    q, down = heads * (mla.nope + mla.rope), Layer("kv_a", kv_a, model.hidden, bool(rank) and model.qkv_bias)
    return [
        *([Layer("q_a", rank, model.hidden, model.qkv_bias)] if rank else [Layer("q", q, model.hidden)]),
        down,
        *([Layer("q_kv_a", rank + kv_a, model.hidden, model.qkv_bias), Layer("q_b", q, rank)] if rank else []),
        *([Layer("index_q", mla.index, rank)] if rank and mla.index else []),
        Layer("kv_b", heads * (mla.nope + mla.v), mla.kv_lora_rank),
        Layer("absorb_k", mla.kv_lora_rank, mla.nope, b=heads),
        Layer("absorb_v", mla.v, mla.kv_lora_rank, b=heads),
        Layer("o", model.hidden, heads * mla.v, model.o_bias),
    ]


MAX_SHAPES = 100_000
_FP8 = "torch.float8_e4m3fn"
_FP4 = "torch.float4_e2m1fn_x2"


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """Keys of a family without duplicates, which layers they come from, and what should be known of them."""

    keys: list[Key]
    layers: list[tuple[str, str]]  # (name, its numbers in words)
    notes: list[str]


def parse_m(text: str) -> list[int]:
    """`1,16,64` as numbers, each once, in order. Raises InputError."""
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not (word.isascii() and word.isdigit() and 0 < int(word[:11]) <= 2**31 - 1):
            raise InputError(f"--m: {shown(word)} is not a whole number from 1; write a list such as --m 1,16,64,1024")
    return list(dict.fromkeys(map(int, words)))


def model_shapes(
    model: ModelConfig,
    family: Family,
    ms: Sequence[int],
    *,
    tp: int = 1,
    ep: int = 1,
    fuse_shared: bool = False,
    only: Sequence[str] = (),
    columns: Mapping[str, str] | None = None,
) -> ModelShapes:
    """The shapes of one rank. `only`: these layers instead of all that the family holds. `columns`: values for key
    columns such as q_dtype_w, over what follows from the model. Raises InputError."""
    notes = [*model.notes]
    if family.two_stages:
        fixed = {**expert_columns(model), **_checked(family, columns or {})}
        sizes, shared_too = _experts(model, tp, ep, fuse_shared)
        if shared_too:
            notes.append("shared experts are not counted as routed ones; stacks that fuse them need --fuse-shared")
        if str(fixed["q_dtype_w"]) == _FP4 and (sizes["model_dim"] % 256 or sizes["inter_dim"] % 256):
            notes.append("serving stacks pad the experts of FP4 models to a multiple of 256: check with a capture")
        keys = [_key(family, {**sizes, "token": m}, fixed) for m in ms]
        words = "model_dim {model_dim}, inter_dim {inter_dim}, {expert} experts, top {topk}".format(**sizes)
        return ModelShapes(keys, [("experts", words)], notes)
    wanted = _wanted(layers(model, tp), family, model, only)
    fixed = _checked(family, columns or {})
    if "dtype" in family.key_names:
        fixed = {"dtype": model.dtype, "outdtype": model.dtype, **fixed}
    seen: dict[Key, None] = {}
    for layer in wanted:
        own: dict[str, int | str] = {
            "N": layer.n, "K": layer.k, **({"B": layer.b} if layer.b else {}),
            **({"bias": str(layer.bias)} if "bias" in family.key_names else {}),
        }  # fmt: skip
        for m in ms:
            seen[_key(family, {**own, "M": m}, fixed)] = None
    for limit in family.limits:
        bad = [x.name for x in wanted if {"N": x.n, "K": x.k}.get(limit.column, 0) % limit.multiple_of]
        if bad:
            at = family.key_names.index(limit.column)
            seen = {key: None for key in seen if int(key[at]) % limit.multiple_of == 0}
            rule = f"{limit.column} is not a multiple of {limit.multiple_of} ({limit.why})"
            notes.append(f"left out {', '.join(bad)}: {rule}")
    if not seen:
        raise InputError(f"no GEMM of this model with --tp {tp} can be of family {family.name}: {'; '.join(notes)}")
    if len(seen) > MAX_SHAPES:
        raise InputError(f"that makes {len(seen)} shapes; name fewer with --m or --layers")
    used = [(x.name, f"N {x.n}, K {x.k}" + (f", B {x.b}" if x.b else "")) for x in wanted]
    return ModelShapes(list(seen), used, notes)


def _experts(model: ModelConfig, tp: int, ep: int, fuse_shared: bool) -> tuple[dict[str, int], bool]:
    """(fmoe's sizes of a rank of `tp`, or with `ep` > 1 of one with whole experts; whether shared ones are left out).

    `fuse_shared`: shared experts run as further routed ones that every token takes. Raises InputError.
    """
    moe = model.moe
    if moe is None:
        raise InputError(f"model type {model.model_type or '?'} has no experts, so family fmoe has no shapes of it")
    for wrong, why in (
        (moe.experts % ep, f"--ep {ep} does not divide the {moe.experts} experts"),
        (ep == 1 and moe.inter % tp,
         f"--tp {tp} does not divide the experts' width {moe.inter}; experts can be spread with --ep"),
        (fuse_shared and (not moe.shared_inter or moe.shared_inter % moe.inter),
         "--fuse-shared: the model has no shared expert of the routed experts' width"),
    ):  # fmt: skip
        if wrong:
            raise InputError(why)
    more = moe.shared_inter // moe.inter if fuse_shared else 0
    inter = moe.inter // (tp if ep == 1 else 1)
    sizes = {"model_dim": model.hidden, "inter_dim": inter, "expert": moe.experts // ep + more, "topk": moe.topk + more}
    return sizes, bool(moe.shared_inter) and not fuse_shared


def _wanted(of: Sequence[Layer], family: Family, model: ModelConfig, only: Sequence[str]) -> list[Layer]:
    batched = "B" in family.key_names
    if batched and not family.format:
        raise InputError(f"gemmfleet has no formula for {family.name}: take its shapes from a log (shapes from-log)")
    fitting = [x for x in of if bool(x.b) == batched]
    if not fitting:
        raise InputError(
            f"model type {model.model_type or '?'} has no batched GEMMs (only MLA has), as {family.name} is"
        )
    if not only:
        own = "a16w16" if not batched else family.name
        return [x for x in fitting if family.name == own or x.name not in UNQUANTISED]
    names = [x.name for x in fitting]
    if unknown := next((name for name in only if name not in names), ""):
        raise InputError(
            f"--layers: this model has no {shown(unknown)} for family {family.name}{did_you_mean(unknown, names)}"
            f" (it has {', '.join(names)})"
        )
    return [x for x in fitting if x.name in only]


def expert_columns(model: ModelConfig) -> dict[str, int | str]:
    """fmoe's text columns as the model's quantization_config says; they can be set otherwise."""
    method = str(model.quant.get("quant_method", ""))
    block = model.quant.get("weight_block_size")
    a, w, how = model.dtype, model.dtype, "No"
    if method == "mxfp4":
        w, how = _FP4, "per_1x32"
    elif method == "fp8":
        a, w = _FP8, _FP8
        how = "per_1x128" if block == [128, 128] else "per_Tensor"
    act = {"gpt_oss": "Swiglu"}.get(model.model_type) or ("Gelu" if model.act.startswith("gelu") else "Silu")
    return {
        "act_type": f"ActivationType.{act}", "dtype": model.dtype, "q_dtype_a": a, "q_dtype_w": w,
        "q_type": f"QuantType.{how}", "use_g1u1": int(model.glu), "doweight_stage1": 0,
    }  # fmt: skip


def _checked(family: Family, columns: Mapping[str, str]) -> dict[str, int | str]:
    """Values that the user gave to key columns. Raises InputError."""
    faults = Faults("--set")
    values = fixed_columns(family, columns, faults)
    faults.raise_as(InputError)
    return values


def _key(family: Family, own: Mapping[str, int | str], fixed: Mapping[str, int | str]) -> Key:
    values = {**own, **fixed}
    return tuple(values[c.name] if c.name in values else default_of(c) for c in family.columns)
