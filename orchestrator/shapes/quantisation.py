"""The quantisation of a model: one reading of `quantization_config` for every command.

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
    """A way to store weights and activations. `activation` "": the model's own type. `families`: those of its linear
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
# a format as `describe` has it: weights, then activations if they are quantised
COMPRESSED_TENSORS = {
    "float 8 block [128, 128], 8": FP8_BLOCK,
    "float 8 channel, 8": FP8_CHANNEL,
    "float 8 tensor, 8": FP8_TENSOR,
    "int 8 channel, 8": INT8_CHANNEL,
    "int 4 group 32": INT4_GROUP,
}
QUARK = {
    "fp4 per_group 32, fp4 per_group 32": MXFP4,
    "fp8_e4m3 per_channel, fp8_e4m3 per_token": FP8_CHANNEL,
    "fp8_e4m3 per_channel, fp8_e4m3 per_channel": FP8_CHANNEL,
    "fp8_e4m3 per_tensor, fp8_e4m3 per_tensor": FP8_TENSOR,
}
MODELOPT = {"FP8": FP8_TENSOR, "FP8_PER_CHANNEL_PER_TOKEN": FP8_CHANNEL, "FP8_PB_WO": FP8_BLOCK}

Matcher = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Rule:
    """Modules that have a scheme; None: they keep the model's type."""

    matches: Matcher
    scheme: Scheme | None


@dataclass(frozen=True, slots=True)
class Quantisation:
    """The first rule that matches a module counts. `experts`: the scheme of experts that no rule excludes, if it is
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

    Checkpoints of Mixtral and MiniMax say `block_sparse_moe` if the class says `mlp`.
    """
    name = without_prefix(path)
    names = [name, name.replace(".mlp.", ".block_sparse_moe.")]
    if experts:
        names += [f"{block}.0.{part}" for block in names for part in ("gate_proj", "w1")]
    return names


def without_prefix(name: str) -> str:
    """A module's name without the wrappers of a multimodal model."""
    return re.sub(r"^(?:model\.|language_model\.)+", "model.", name)


def read_quantisation(config: Any, expert_dtype: Any = None) -> Quantisation:
    """The quantisation of a config. Raises InputError for a method or format that gemmfleet does not know."""
    if not config:
        return Quantisation("none")
    if not isinstance(config, Mapping):
        raise unknown(f"{str(config)[:40]!r}, where a JSON object is wanted,")
    # hf_quant_config.json has its values one level below
    inner = config.get("quantization")
    values = {**config, **inner} if isinstance(inner, Mapping) else config
    method = str(values.get("quant_method") or ("modelopt" if "quant_algo" in values else "an unnamed method"))
    if method not in READERS:
        raise unknown(method[:40])
    rules = tuple(READERS[method](values))
    if expert_dtype in (None, "fp8", "bf16", "bfloat16"):
        return Quantisation(method, rules)
    if expert_dtype != "fp4":
        raise unknown(f"{method} and expert_dtype {str(expert_dtype)[:40]!r}")
    return Quantisation(method, rules, FP8_MXFP4)


def unknown(what: str) -> InputError:
    """The error for a method or a format that no family holds."""
    return InputError(f"the model is quantised with {what}, which gemmfleet has no family for; {OVERRIDE}")


def is_experts(name: str) -> bool:
    """Tell whether a module's name is that of routed experts."""
    return ".experts" in name


def everything(_: str) -> bool:
    """Matches each module."""
    return True


def matcher(patterns: Any, *, loose: bool = False) -> Matcher:
    """A function from a module's name to whether one of `patterns` names it: whole, as `re:` with a regular expression
    at its start, or with wildcards. `loose`: a part of the name will do, as modelopt has it.

    Patterns are compiled one by one, as engines do it: joined, an inline flag such as `(?i)` would be an error.
    """
    if isinstance(patterns, str) or not isinstance(patterns, Iterable):
        raise unknown(f"a list of modules that is {str(patterns)[:40]!r}")
    expressions: list[re.Pattern[str]] = []
    names = set[str]()
    for pattern in map(str, patterns):
        if not pattern.startswith("re:"):
            # one expert stands for all
            names.add(re.sub(r"\.experts\..*", ".experts", without_prefix(pattern)))
            continue
        try:
            expressions.append(re.compile(pattern[3:]))
        except re.error as e:
            raise unknown(f"{pattern[:80]!r}, which is not a regular expression ({e}),") from e

    # most of the names of a long list are plain
    inexact = [pattern for pattern in names if loose or "*" in pattern]

    def matches(name: str) -> bool:
        if name in names or any(expression.match(name) for expression in expressions):
            return True
        return any(fnmatchcase(name, pattern) or (loose and pattern in name) for pattern in inexact)

    return matches


def ignored(values: Mapping[str, Any], *names: str, loose: bool = False) -> Rule:
    """The rule for modules that keep the model's type."""
    listed = next((values[name] for name in names if values.get(name)), ())
    return Rule(matcher(listed, loose=loose), None)


def describe(config: Any, names: Sequence[str]) -> str:
    """The values of a format in one line, such as `float 8 channel`; "" for none."""
    if not isinstance(config, Mapping):
        return ""
    return " ".join(str(config[name])[:20] for name in names if config.get(name) is not None)


def known_scheme(schemes: Mapping[str, Scheme], method: str, *parts: str) -> Scheme:
    """The scheme of a format. Raises InputError."""
    words = ", ".join(part for part in parts if part)
    if words not in schemes:
        raise unknown(f"{method} {words or 'without a format'}")
    return schemes[words]


def read_fp8(values: Mapping[str, Any]) -> list[Rule]:
    """quant_method fp8, DeepSeek's and transformers'."""
    block = values.get("weight_block_size")
    if block not in (None, [BLOCK, BLOCK]):
        raise unknown(f"fp8 in blocks of {str(block)[:40]} ({BLOCK} x {BLOCK} is wanted)")
    scheme = FP8_BLOCK if block else FP8_TENSOR
    return [ignored(values, "ignored_layers", "modules_to_not_convert"), Rule(everything, scheme)]


def read_compressed_tensors(values: Mapping[str, Any]) -> list[Rule]:
    """Groups of compressed-tensors; named modules come before the class `Linear`, which stands for all.

    A model without groups has only its KV cache quantised.
    """
    groups = values.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not (groups or values.get("kv_cache_scheme")):
        raise unknown("compressed-tensors without groups")
    named: list[Rule] = []
    general: list[Rule] = []
    for name, group in groups.items():
        if not isinstance(group, Mapping):
            raise unknown(f"the preset {str(name)[:40]} of compressed-tensors")
        if not group.get("weights"):
            raise unknown(f"the group {str(name)[:40]} of compressed-tensors, which has no format of weights")
        weights = describe(group.get("weights"), ("type", "num_bits", "strategy", "group_size", "block_structure"))
        activations = describe(group.get("input_activations"), ("num_bits",))
        scheme = known_scheme(COMPRESSED_TENSORS, "compressed-tensors", weights, activations)
        if "Linear" in (group.get("targets") or ()):
            general.append(Rule(everything, scheme))
        else:
            named.append(Rule(matcher(group.get("targets")), scheme))
    return [ignored(values, "ignore"), *named, *general]


def read_quark(values: Mapping[str, Any]) -> list[Rule]:
    """AMD Quark: modules that are excluded, modules with a scheme of their own, all others."""
    layers = values.get("layer_quant_config") or {}
    if not isinstance(layers, Mapping):
        raise unknown("quark with a layer_quant_config that is no JSON object")
    named = [Rule(matcher([pattern]), quark_scheme(config)) for pattern, config in layers.items()]
    return [ignored(values, "exclude"), *named, Rule(everything, quark_scheme(values.get("global_quant_config")))]


def quark_scheme(config: Any) -> Scheme:
    """The scheme of a Quark config."""
    parts = config if isinstance(config, Mapping) else {}
    words = [describe(parts.get(name), ("dtype", "qscheme", "group_size")) for name in ("weight", "input_tensors")]
    return known_scheme(QUARK, "quark", *words)


def read_modelopt(values: Mapping[str, Any]) -> list[Rule]:
    """NVIDIA ModelOpt."""
    scheme = known_scheme(MODELOPT, "modelopt", str(values.get("quant_algo"))[:40])
    return [ignored(values, "exclude_modules", "ignore", loose=True), Rule(everything, scheme)]


def read_mxfp4(values: Mapping[str, Any]) -> list[Rule]:
    """quant_method mxfp4, gpt-oss's: only experts are quantised."""
    return [ignored(values, "modules_to_not_convert"), Rule(is_experts, MXFP4_WEIGHTS)]


READERS: dict[str, Callable[[Mapping[str, Any]], list[Rule]]] = {
    "fp8": read_fp8,
    "compressed-tensors": read_compressed_tensors,
    "quark": read_quark,
    "modelopt": read_modelopt,
    "mxfp4": read_mxfp4,
}
