"""How a model is quantised: one reading of `quantization_config` for every command.

The forms are those that vLLM 0.33 reads (`model_executor/layers/quantization/`: fp8.py, compressed_tensors/, quark/,
mxfp4.py, modelopt.py; `transformers_utils/config.py` for hf_quant_config.json). A method or a format that is not known
raises InputError. It never counts as 16 bits: a tuned file for a GEMM that no server runs is worse than an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from orchestrator.errors import InputError

FP8, FP4 = "torch.float8_e4m3fn", "torch.float4_e2m1fn_x2"
INT8, INT4 = "torch.int8", "torch.int4"
BLOCK = 128
OVERRIDE = "--set quantization=none lists the model as if its weights had 16 bits"


@dataclass(frozen=True, slots=True)
class Scheme:
    """How weights and activations are stored. `activation` "": the model's own type. `families`: those of its linear
    layers; a family with a column q_dtype_w has `weight` there."""

    name: str
    activation: str
    weight: str
    q_type: str
    families: tuple[str, ...] = ()


FP8_BLOCK = Scheme(
    "fp8 by blocks of 128 x 128", FP8, FP8, "per_1x128",
    ("a8w8_blockscale", "a8w8_blockscale_bpreshuffle", "batched_gemm_a8w8_blockscale_mxscale"),
)  # fmt: skip
FP8_CHANNEL = Scheme("fp8 by channel", FP8, FP8, "per_Token", ("a8w8", "a8w8_bpreshuffle"))
FP8_TENSOR = Scheme("fp8 by tensor", FP8, FP8, "per_Tensor")
INT8_CHANNEL = Scheme("int8 by channel", INT8, INT8, "per_Token", ("a8w8", "a8w8_bpreshuffle"))
MXFP4 = Scheme("mxfp4", FP4, FP4, "per_1x32", ("a4w4_blockscale",))
# gpt-oss: vLLM's mxfp4.py quantises experts only, and leaves activations in 16 bits
MXFP4_WEIGHTS = Scheme("mxfp4 weights", "", FP4, "per_1x32")
# DeepSeek-V4: `expert_dtype: fp4` beside fp8 (AITER's dsv4_fp8fp4_untuned_fmoe.csv)
FP8_MXFP4 = Scheme("fp8 activations and mxfp4 weights", FP8, FP4, "per_1x32")
# Kimi-K2.5 (AITER's kimik2_i4_untuned_fmoe.csv)
INT4_GROUP = Scheme("int4 weights by groups of 32", "", INT4, "per_1x32")
_MODELOPT = {"FP8": FP8_TENSOR, "FP8_PER_CHANNEL_PER_TOKEN": FP8_CHANNEL, "FP8_PB_WO": FP8_BLOCK}

Matcher = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Rule:
    """Modules that have a scheme; None: they keep the model's type."""

    matches: Matcher
    scheme: Scheme | None


@dataclass(frozen=True, slots=True)
class Quantisation:
    """The first rule that matches a module counts. `experts`: the scheme of experts that no rule excludes, where it is
    another one than that of linear layers."""

    method: str
    rules: tuple[Rule, ...] = ()
    experts: Scheme | None = None

    def scheme_of(self, paths: Sequence[str], *, experts: bool = False) -> Scheme | None:
        """The scheme of a server's weight, which the projections `paths` are in; None: 16 bits.

        One excluded projection excludes the whole weight, as vLLM wants all of them to be the same.
        """
        names = [name for path in paths for name in checkpoint_names(path, experts)]
        for rule in self.rules:
            if any(map(rule.matches, names)):
                return self.experts if experts and rule.scheme and self.experts else rule.scheme
        return None


def checkpoint_names(path: str, experts: bool) -> list[str]:
    """Names that a config may have for a module of the class. One expert stands for all.

    Checkpoints of Mixtral and MiniMax say `block_sparse_moe` where the class says `mlp`.
    """
    name = without_prefix(path)
    names = [name, name.replace(".mlp.", ".block_sparse_moe.")]
    return [*names, *(f"{n}.0.{part}" for n in names for part in ("gate_proj", "w1"))] if experts else names


def without_prefix(name: str) -> str:
    """A module's name without the wrappers of a multimodal model."""
    return re.sub(r"^(?:model\.|language_model\.)+", "model.", name)


def read_quantisation(config: Any, expert_dtype: Any = None) -> Quantisation:
    """The quantisation of a config. Raises InputError for a method or format that gemmfleet does not know."""
    if not config:
        return Quantisation("none")
    if not isinstance(config, Mapping):
        raise InputError(f"quantization_config is {str(config)[:40]!r}, not a JSON object; {OVERRIDE}")
    # hf_quant_config.json has its values one level below
    inner = config.get("quantization")
    values = {**config, **inner} if isinstance(inner, Mapping) else config
    method = str(values.get("quant_method") or ("modelopt" if "quant_algo" in values else ""))
    reader = _READERS.get(method)
    if reader is None:
        raise unknown(method or "an unnamed method")
    rules, experts = reader(values), None
    if expert_dtype == "fp4":
        experts = FP8_MXFP4
    elif expert_dtype is not None and expert_dtype not in ("fp8", "bf16", "bfloat16"):
        raise unknown(f"{method} and expert_dtype {str(expert_dtype)[:40]!r}")
    return Quantisation(method, tuple(rules), experts)


def unknown(what: str) -> InputError:
    """The error for a method or a format that no family holds."""
    return InputError(f"the model is quantised with {what}, which gemmfleet has no family for; {OVERRIDE}")


def is_experts(name: str) -> bool:
    """Whether a module's name is that of routed experts."""
    return ".experts" in name


def everything(_: str) -> bool:
    """Matches each module."""
    return True


def matcher(patterns: Any, *, loose: bool = False) -> Matcher:
    """A function from a module's name to whether one of `patterns` names it: whole, as `re:` with a regular expression
    at its start, or with wildcards. `loose`: a part of the name will do, as modelopt has it.

    Patterns are compiled one by one, as engines do it: joined, an inline flag such as `(?i)` would be an error.
    """
    if patterns is None:
        patterns = ()
    if isinstance(patterns, str) or not isinstance(patterns, Iterable):
        raise InputError(f"quantization_config: {str(patterns)[:60]!r} is no list of modules; {OVERRIDE}")
    expressions, names = list[re.Pattern[str]](), set[str]()
    for pattern in map(str, patterns):
        if not pattern.startswith("re:"):
            # one expert stands for all
            names.add(re.sub(r"\.experts\..*", ".experts", without_prefix(pattern)))
            continue
        try:
            expressions.append(re.compile(pattern[3:]))
        except re.error as e:
            raise InputError(f"quantization_config: {pattern[:80]!r} is no regular expression ({e}); {OVERRIDE}") from e
    wildcards = [name for name in names if "*" in name]

    def matches(name: str) -> bool:
        if name in names or any(fnmatchcase(name, wildcard) for wildcard in wildcards):
            return True
        if loose and any(part in name for part in names):
            return True
        return any(expression.match(name) for expression in expressions)

    return matches


def ignored(values: Mapping[str, Any], *names: str, loose: bool = False) -> Rule:
    """The rule for modules that keep the model's type."""
    listed = next((values[name] for name in names if values.get(name)), ())
    return Rule(matcher(listed, loose=loose), None)


def read_fp8(values: Mapping[str, Any]) -> list[Rule]:
    """quant_method fp8, DeepSeek's and transformers'."""
    block = values.get("weight_block_size")
    if block not in (None, [BLOCK, BLOCK]):
        raise unknown(f"fp8 in blocks of {str(block)[:40]}, where only {BLOCK} x {BLOCK} can be tuned")
    scheme = FP8_BLOCK if block else FP8_TENSOR
    return [ignored(values, "ignored_layers", "modules_to_not_convert"), Rule(everything, scheme)]


def read_compressed_tensors(values: Mapping[str, Any]) -> list[Rule]:
    """Groups of compressed-tensors; named modules come before the class `Linear`, which stands for all."""
    groups = values.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        raise unknown("compressed-tensors without groups")
    named, general = list[Rule](), list[Rule]()
    for name, group in groups.items():
        if not isinstance(group, Mapping):
            raise unknown(f"the preset {str(name)[:40]} of compressed-tensors")
        if group.get("weights") is None:
            continue  # only activations or the KV cache
        scheme = compressed_scheme(group["weights"], group.get("input_activations"))
        targets = group.get("targets") or []
        (general if "Linear" in targets else named).append(
            Rule(everything if "Linear" in targets else matcher(targets), scheme)
        )
    return [ignored(values, "ignore"), *named, *general]


def compressed_scheme(weights: Any, activations: Any) -> Scheme:
    """The scheme of a group's weights and activations."""
    if not isinstance(weights, Mapping):
        raise unknown(f"compressed-tensors weights {str(weights)[:40]}")
    kind = weights.get("type"), weights.get("num_bits"), weights.get("strategy")
    has_activations = isinstance(activations, Mapping) and activations.get("num_bits") == 8
    if kind == ("int", 4, "group") and weights.get("group_size") == 32 and not activations:
        return INT4_GROUP
    is_blocked = weights.get("block_structure") == [BLOCK, BLOCK]
    schemes: dict[tuple[Any, Any, Any], Scheme | None] = {
        ("float", 8, "block"): FP8_BLOCK if is_blocked else None,
        ("float", 8, "channel"): FP8_CHANNEL,
        ("float", 8, "tensor"): FP8_TENSOR,
        ("int", 8, "channel"): INT8_CHANNEL,
    }
    scheme = schemes.get(kind)
    if scheme is None or not has_activations:
        parts = " ".join(str(part)[:20] for part in (*kind, weights.get("group_size") or "") if part)
        raise unknown(f"compressed-tensors {parts} weights{'' if has_activations else ' alone'}")
    return scheme


def read_quark(values: Mapping[str, Any]) -> list[Rule]:
    """AMD Quark: modules that are excluded, modules with a scheme of their own, all others."""
    rules = [ignored(values, "exclude")]
    layers = values.get("layer_quant_config") or {}
    if not isinstance(layers, Mapping):
        raise unknown("quark with a layer_quant_config that is no JSON object")
    rules += [Rule(matcher([pattern]), quark_scheme(config)) for pattern, config in layers.items()]
    return [*rules, Rule(everything, quark_scheme(values.get("global_quant_config")))]


def quark_scheme(config: Any) -> Scheme:
    """The scheme of a Quark config."""
    parts = [config.get(name) if isinstance(config, Mapping) else None for name in ("weight", "input_tensors")]
    weight, inputs = (part if isinstance(part, Mapping) else {} for part in parts)
    kinds = [(part.get("dtype"), part.get("qscheme")) for part in (weight, inputs)]
    if kinds == [("fp4", "per_group")] * 2 and weight.get("group_size") == inputs.get("group_size") == 32:
        return MXFP4
    if kinds[0] == ("fp8_e4m3", "per_channel") and kinds[1][0] == "fp8_e4m3":
        return FP8_CHANNEL
    if kinds == [("fp8_e4m3", "per_tensor")] * 2:
        return FP8_TENSOR
    raise unknown(f"quark {str(weight.get('dtype'))[:20]} {str(weight.get('qscheme'))[:20]}")


def read_modelopt(values: Mapping[str, Any]) -> list[Rule]:
    """NVIDIA ModelOpt."""
    algorithm = str(values.get("quant_algo"))[:40]
    scheme = _MODELOPT.get(algorithm)
    if scheme is None:
        raise unknown(f"modelopt {algorithm}")
    return [ignored(values, "exclude_modules", "ignore", loose=True), Rule(everything, scheme)]


def read_mxfp4(values: Mapping[str, Any]) -> list[Rule]:
    """quant_method mxfp4, gpt-oss's: only experts are quantised."""
    return [ignored(values, "modules_to_not_convert"), Rule(is_experts, MXFP4_WEIGHTS)]


_READERS: dict[str, Callable[[Mapping[str, Any]], list[Rule]]] = {
    "fp8": read_fp8,
    "compressed-tensors": read_compressed_tensors,
    "quark": read_quark,
    "modelopt": read_modelopt,
    "mxfp4": read_mxfp4,
}
