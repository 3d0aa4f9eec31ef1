"""A model's config.json as the numbers that its GEMMs follow from; every fault of the file at once.

Keys are those of the Hugging Face configuration classes (LlamaConfig, Qwen3Config, Qwen3MoeConfig, DeepseekV3Config,
GptOssConfig, MixtralConfig and their like).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.errors import InputError
from orchestrator.tables.faults import Faults
from orchestrator.tables.open import read_bytes

MAX_BYTES = 4 * 2**20
MAX_INT = 2**31 - 1
_PLAIN_MLP = ("gpt_neox", "falcon", "phi", "starcoder2", "nemotron", "opt", "gpt_bigcode")
"""Model types whose MLP has an up projection and no gate."""
_QKV_BIAS = ("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl")
"""Model types whose q, k and v projections have a bias without saying so."""


@dataclass(frozen=True, slots=True)
class Mla:
    """Multi-head latent attention (DeepSeek): ranks of the compressed q and kv, and the parts of a head.

    `q_lora_rank` None: q is projected directly.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    nope: int
    rope: int
    v: int


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
    """Sizes that the GEMMs of a decoder follow from. `inter` is the dense MLP's, 0 where every layer is MoE."""

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
    except (json.JSONDecodeError, RecursionError) as e:
        line = e.lineno if isinstance(e, json.JSONDecodeError) else None
        faults.add(f"is no JSON ({str(e).split(':')[0]}); a model's config.json is wanted", line=line)
    else:
        if isinstance(raw, dict):
            return _model(raw, faults)
        faults.add("holds no JSON object; a model's config.json is wanted")
    faults.raise_as(InputError)
    raise AssertionError  # there was a fault


class _Values:
    """The values of a config.json, checked as they are read."""

    def __init__(self, raw: Mapping[str, Any], faults: Faults) -> None:
        self.raw, self.faults = raw, faults

    def number(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """The first of `names` that is there; a fault where none is and there is no default."""
        for name in names:
            value = self.raw.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_INT:
                self.faults.add(f"{name} is {str(value)[:40]!r}, not a whole number from {least}")
                return 1
            return value
        if default is None:
            self.faults.add(f"{' or '.join(names)} is missing: is this the config.json of a language model?")
            return 1
        return default

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self.raw.get(name, default))


def _model(raw: dict[str, Any], faults: Faults) -> ModelConfig:
    notes = []
    inner = raw.get("text_config")
    if "hidden_size" not in raw and isinstance(inner, dict):
        notes.append("took the language model within it (text_config)")
        raw = {**{k: raw[k] for k in ("quantization_config", "torch_dtype", "dtype") if k in raw}, **inner}
    v = _Values(raw, faults)
    kind = str(raw.get("model_type", ""))
    hidden, heads = v.number("hidden_size"), v.number("num_attention_heads")
    explicit = v.number("head_dim", default=0, least=0)
    mla = _mla(v) if raw.get("kv_lora_rank") else None
    if not explicit and mla is None and hidden % heads:
        faults.add(f"head_dim is missing and hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    moe = _moe(v, kind)
    if any(k.startswith("linear_") and "head_dim" in k for k in raw):
        notes.append("has linear attention layers; their projections are not in the list (capture them instead)")
    config = ModelConfig(
        model_type=kind,
        hidden=hidden,
        heads=heads,
        kv_heads=v.number("num_key_value_heads", default=heads),
        head_dim=explicit or hidden // heads,
        inter=_dense_inter(v, moe),
        vocab=v.number("vocab_size"),
        dtype=_dtype(raw, faults),
        act=str(raw.get("hidden_act") or raw.get("hidden_activation") or "silu"),
        glu=kind not in _PLAIN_MLP,
        qkv_bias=v.flag("attention_bias") or v.flag("qkv_bias") or kind in _QKV_BIAS,
        o_bias=v.flag("attention_bias"),
        mlp_bias=v.flag("mlp_bias"),
        mla=mla,
        moe=moe,
        quant=raw["quantization_config"] if isinstance(raw.get("quantization_config"), dict) else {},
        notes=tuple(notes),
    )
    faults.raise_as(InputError)
    return config


def _mla(v: _Values) -> Mla:
    return Mla(
        q_lora_rank=v.number("q_lora_rank", default=0, least=0) or None,
        kv_lora_rank=v.number("kv_lora_rank"),
        nope=v.number("qk_nope_head_dim"),
        rope=v.number("qk_rope_head_dim"),
        v=v.number("v_head_dim"),
    )


def _moe(v: _Values, kind: str) -> Moe | None:
    experts = v.number("n_routed_experts", "num_experts", "num_local_experts", default=0, least=0)
    if experts < 2:
        return None
    inter = v.number("moe_intermediate_size", "intermediate_size")
    shared = v.number("n_shared_experts", default=0, least=0) * inter
    shared = v.number("shared_expert_intermediate_size", default=shared, least=0)
    topk = v.number("num_experts_per_tok", "experts_per_token", "moe_topk")
    if topk > experts:
        v.faults.add(f"num_experts_per_tok {topk} is more than the {experts} experts")
    return Moe(experts, topk, inter, shared, router_bias=kind == "gpt_oss")


def _dense_inter(v: _Values, moe: Moe | None) -> int:
    """The dense MLP's width. Where there are experts, the dense layers are those that the config names as such:
    first_k_dense_replace (DeepSeek), mlp_only_layers and decoder_sparse_step (Qwen)."""
    if moe is not None:
        only = v.raw.get("mlp_only_layers")
        dense = v.number("first_k_dense_replace", default=0, least=0) or v.number("decoder_sparse_step", default=1) > 1
        if not (dense or only):
            return 0
    return v.number("intermediate_size")


def _dtype(raw: Mapping[str, Any], faults: Faults) -> str:
    name = str(raw.get("torch_dtype") or raw.get("dtype") or "bfloat16").removeprefix("torch.")
    if name not in ("bfloat16", "float16", "float32"):
        faults.add(f"torch_dtype is {name[:40]!r}, not bfloat16, float16 or float32")
    return f"torch.{name}"
