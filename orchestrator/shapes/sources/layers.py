"""The GEMMs of a model as each rank of a tensor-parallel group runs them: N output features, K input features.

M is the number of tokens. Column-parallel layers split N, row-parallel layers split K. With H heads, KV key-value
heads, d the head size, tp ranks:

    qkv      N = (H/tp + 2*max(KV/tp, 1)) * d     K = hidden       KV heads are copied where there are fewer than ranks
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
    o        N = hidden                           K = H/tp * v
    absorb_k B = H/tp   N = r_kv   K = nope       the batched GEMMs that stand for kv_b in decoding
    absorb_v B = H/tp   N = v      K = r_kv

Checked against the lists that AITER ships for Llama-3 70B and 405B, Qwen3-235B, DeepSeek-V3 and gpt-oss.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.errors import InputError
from orchestrator.shapes.sources.modelconfig import Mla, ModelConfig

UNQUANTISED = ("router", "lm_head")
"""Layers that stay in the model's own dtype when the others are quantised."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One kind of GEMM of a rank. `b`: of a batched GEMM, how many; 0: it is none."""

    name: str
    n: int
    k: int
    bias: bool = False
    b: int = 0


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed experts as a rank sees them: `inter` is its share of each, `experts` how many are its own."""

    model_dim: int
    inter: int
    experts: int
    topk: int


def layers(model: ModelConfig, tp: int) -> list[Layer]:
    """Every GEMM of a rank, in the order of a forward pass. Raises InputError where `tp` does not fit the model."""
    _check(model, tp)
    out = _mla(model, model.mla, tp) if model.mla else _attention(model, tp)
    factor, up = (2, "gate_up") if model.glu else (1, "up")
    if model.inter:
        out.append(Layer(up, factor * model.inter // tp, model.hidden, model.mlp_bias))
        out.append(Layer("down", model.hidden, model.inter // tp, model.mlp_bias))
    if model.moe:
        out.append(Layer("router", model.moe.experts, model.hidden, model.moe.router_bias))
        if shared := model.moe.shared_inter:
            out.append(Layer(f"shared_{up}", factor * shared // tp, model.hidden))
            out.append(Layer("shared_down", model.hidden, shared // tp))
    out.append(Layer("lm_head", -(-model.vocab // tp), model.hidden))
    return out


def experts(model: ModelConfig, tp: int, ep: int = 1, fuse_shared: bool = False) -> Experts:
    """The routed experts of a rank of `tp`, or with `ep` > 1 whole experts on `ep` ranks.

    `fuse_shared`: shared experts run as further routed ones that every token takes. Raises InputError.
    """
    moe = model.moe
    if moe is None:
        raise InputError(f"model type {model.model_type or '?'} has no experts, so family fmoe has no shapes of it")
    if moe.experts % ep:
        raise InputError(f"--ep {ep} does not divide the {moe.experts} experts")
    if ep == 1 and moe.inter % tp:
        raise InputError(f"--tp {tp} does not divide the experts' width {moe.inter}; experts can be spread with --ep")
    more = 0
    if fuse_shared:
        if not moe.shared_inter or moe.shared_inter % moe.inter:
            raise InputError("--fuse-shared: the model has no shared expert of the routed experts' width")
        more = moe.shared_inter // moe.inter
    return Experts(model.hidden, moe.inter // (tp if ep == 1 else 1), moe.experts // ep + more, moe.topk + more)


def _check(model: ModelConfig, tp: int) -> None:
    faults = []
    if model.heads % tp:
        faults.append(f"--tp {tp} does not divide the {model.heads} attention heads")
    if model.mla is None and model.kv_heads % tp and tp % model.kv_heads:
        faults.append(f"--tp {tp} and {model.kv_heads} key-value heads: neither divides the other")
    if model.inter % tp:
        faults.append(f"--tp {tp} does not divide the MLP's width {model.inter}")
    if model.moe and model.moe.shared_inter % tp:
        faults.append(f"--tp {tp} does not divide the shared experts' width {model.moe.shared_inter}")
    if faults:
        raise InputError(faults)


def _attention(model: ModelConfig, tp: int) -> list[Layer]:
    q, kv = model.heads // tp, max(model.kv_heads // tp, 1)
    return [
        Layer("qkv", (q + 2 * kv) * model.head_dim, model.hidden, model.qkv_bias),
        Layer("o", model.hidden, q * model.head_dim, model.o_bias),
    ]


def _mla(model: ModelConfig, mla: Mla, tp: int) -> list[Layer]:
    heads, kv_a = model.heads // tp, mla.kv_lora_rank + mla.rope
    out = []
    if mla.q_lora_rank:
        out.append(Layer("q_a", mla.q_lora_rank, model.hidden, model.qkv_bias))
        out.append(Layer("kv_a", kv_a, model.hidden, model.qkv_bias))
        out.append(Layer("q_kv_a", mla.q_lora_rank + kv_a, model.hidden, model.qkv_bias))
        out.append(Layer("q_b", heads * (mla.nope + mla.rope), mla.q_lora_rank))
    else:
        out.append(Layer("q", heads * (mla.nope + mla.rope), model.hidden))
        out.append(Layer("kv_a", kv_a, model.hidden, model.qkv_bias))
    out.append(Layer("kv_b", heads * (mla.nope + mla.v), mla.kv_lora_rank))
    out.append(Layer("absorb_k", mla.kv_lora_rank, mla.nope, b=heads))
    out.append(Layer("absorb_v", mla.v, mla.kv_lora_rank, b=heads))
    out.append(Layer("o", model.hidden, heads * mla.v, model.o_bias))
    return out
