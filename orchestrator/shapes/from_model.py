"""The shapes of a model in the columns of a family: the GEMMs of one rank of a tensor-parallel group, for each M.

M is the number of tokens, N output features, K input features. Column-parallel layers split N, row-parallel layers
split K. With H heads, KV key-value heads, d the head size, tp ranks:

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.errors import InputError
from orchestrator.shapes.model import Key
from orchestrator.shapes.model_config import Mla, ModelConfig
from orchestrator.shapes.reader import CellError, CellReader, Notes, default_of
from orchestrator.tables.faults import did_you_mean, shown
from worker.families import Family

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


MAX_SHAPES = 100_000
_FP8 = "torch.float8_e4m3fn"
_FP4 = "torch.float4_e2m1fn_x2"


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """Keys of a family without duplicates, which layers they come from, and what should be known of them."""

    keys: list[Key]
    layers: list[tuple[str, str]]
    """(name, its numbers in words)"""
    notes: list[str]


def parse_m(text: str) -> list[int]:
    """`1,16,64` as numbers, each once, in order. Raises InputError."""
    out: dict[int, None] = {}
    for word in text.split(","):
        word = word.strip()
        if not (word.isascii() and word.isdigit() and 0 < int(word[:11]) <= 2**31 - 1):
            raise InputError(f"--m: {shown(word)} is not a whole number from 1; write a list such as --m 1,16,64,1024")
        out[int(word)] = None
    return list(out)


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
        e = experts(model, tp, ep, fuse_shared)
        fixed = {**_moe_columns(model), **_checked(family, columns or {})}
        sizes = {"model_dim": e.model_dim, "inter_dim": e.inter, "expert": e.experts, "topk": e.topk}
        if model.moe and model.moe.shared_inter and not fuse_shared:
            notes.append("shared experts are not counted as routed ones; stacks that fuse them need --fuse-shared")
        if str(fixed["q_dtype_w"]) == _FP4 and (e.model_dim % 256 or e.inter % 256):
            notes.append("serving stacks pad the experts of FP4 models to a multiple of 256: check with a capture")
        keys = [_key(family, {**sizes, "token": m}, fixed) for m in ms]
        words = f"model_dim {e.model_dim}, inter_dim {e.inter}, {e.experts} experts, top {e.topk}"
        return ModelShapes(keys, [("experts", words)], notes)
    wanted = _wanted(layers(model, tp), family, model, only)
    fixed = _checked(family, columns or {})
    if "dtype" in family.key_names:
        fixed = {"dtype": model.dtype, "outdtype": model.dtype, **fixed}
    seen: dict[Key, None] = {}
    for layer in wanted:
        own: dict[str, int | str] = {"N": layer.n, "K": layer.k}
        own |= {"B": layer.b} if layer.b else {}
        own |= {"bias": str(layer.bias)} if "bias" in family.key_names else {}
        for m in ms:
            seen[_key(family, {**own, "M": m}, fixed)] = None
    for limit in family.limits:
        bad = [x.name for x in wanted if {"N": x.n, "K": x.k}.get(limit.column, 0) % limit.multiple_of]
        if bad:
            at = family.key_names.index(limit.column)
            seen = {key: None for key in seen if int(key[at]) % limit.multiple_of == 0}
            rule = f"{limit.column} is no multiple of {limit.multiple_of} ({limit.why})"
            notes.append(f"left out {', '.join(bad)}: {rule}")
    if not seen:
        raise InputError(f"no GEMM of this model with --tp {tp} can be of family {family.name}: {'; '.join(notes)}")
    if len(seen) > MAX_SHAPES:
        raise InputError(f"that makes {len(seen)} shapes; name fewer with --m or --layers")
    used = [(x.name, f"N {x.n}, K {x.k}" + (f", B {x.b}" if x.b else "")) for x in wanted]
    return ModelShapes(list(seen), used, notes)


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
    for name in only:
        if name not in names:
            raise InputError(
                f"--layers: this model has no {shown(name)} for family {family.name}{did_you_mean(name, names)}"
                f" (it has {', '.join(names)})"
            )
    return [x for x in fitting if x.name in only]


def _moe_columns(model: ModelConfig) -> dict[str, int | str]:
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
    free = [c.name for c in family.columns if not c.required]
    out: dict[str, int | str] = {}
    for name, text in columns.items():
        if name not in free:
            raise InputError(
                f"--set: {shown(name)} cannot be set for {family.name} (can be: {', '.join(free) or 'none'})"
            )
        try:
            out[name] = CellReader(family.column(name), family.limits, Notes()).read(text, 0)
        except CellError as e:
            raise InputError(f"--set {name}: {e}") from e
    return out


def _key(family: Family, own: Mapping[str, int | str], fixed: Mapping[str, int | str]) -> Key:
    values = {**own, **fixed}
    return tuple(values[c.name] if c.name in values else default_of(c) for c in family.columns)
