"""Every weight of a model, from the model's own class in transformers.

The class is made on torch's meta device, where weights have sizes and no memory. `ask_class` does it in a child
process, because a class is not our code. This module knows nothing of servers; `serving.py` says what they make of the
weights.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.errors import InputError
from worker.foreign.runner import ForeignCodeError, Limits, call

TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
"""Names of a language model's part in the config of a multimodal one."""
LIMITS = Limits(seconds=60, memory=8 << 30)
"""A class is made in 0.1 to 5 s, after 10 s of imports on a busy machine."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
# a size that must be in the file, under this name or the type's own: the class's default would be a guess
REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads")
INSTALL = (
    "shapes of a model need transformers and torch: pip install 'gemmfleet[models]' (without a GPU:"
    " pip install 'gemmfleet[models]' --extra-index-url https://download.pytorch.org/whl/cpu)"
)
ALIASES = {"kimi_k2": "deepseek_v3"}
"""Model types with another type's class. kimi_k2: its config.json has `architectures: [DeepseekV3ForCausalLM]`."""
TRANSPOSED = {"Llama4TextExperts": True}
"""Classes of experts that do not say how they store weights. Llama 4 calls torch.bmm(hidden, gate_up_proj)."""
# keys that would load code, choose a kernel from the hub, or quantise the weights
DROPPED = ("auto_map", "attn_implementation", "experts_implementation", "quantization_config")


class ClassError(Exception):
    """The class cannot be made of this config."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter of two dimensions or more, such as `model.layers.0.self_attn.q_proj` of 4096 x 4096.

    `path` has no `.weight` at its end. `shape`: as the module stores it. `transposed`: whether that is (input, output);
    None: the class does not say it. `sizes`: numbers of the block that holds the module, such as its head_dim, which
    say how a server splits the weight.
    """

    path: str
    kind: str
    shape: tuple[int, ...]
    bias: bool = False
    transposed: bool | None = False
    sizes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Listing:
    """The weights of a model. `version` is that of transformers; `config` has the values of the class's config."""

    version: str
    model_type: str
    config: Mapping[str, Any]
    weights: tuple[Weight, ...]


def ask_class(raw: dict[str, Any]) -> Listing:
    """List the weights in a child process. Raises InputError where the class does not take the config."""
    if not all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
        raise InputError(INSTALL)
    try:
        return call(list_weights, raw, limits=LIMITS, packages=True, env=OFFLINE, raises=(ClassError,))
    except (ClassError, ForeignCodeError) as e:
        raise InputError(f"the model's class {' '.join(str(e).split())[:300]}") from e


def list_weights(raw: dict[str, Any]) -> Listing:
    """Make the model's class and list its weights. Raises ClassError, or what the class raises."""
    import torch
    import transformers

    config = make_config(without_dropped(raw))
    text = config.get_text_config()
    check_config(text, raw)
    auto: Any = transformers.AutoModelForCausalLM  # without types
    is_text = type(text) in auto._model_mapping
    if not is_text:
        # a class within a multimodal one: its other modules are left out below
        auto = transformers.AutoModelForImageTextToText
    with torch.device("meta"):
        model = auto.from_config(text if is_text else config, attn_implementation="eager", trust_remote_code=False)
    weights = [
        weight
        for path, module in model.named_modules()
        if is_text or re.search(r"(?:\A|\.)(?:language_model|lm_head)(?:\.|\Z)", path)
        for weight in module_weights(model, path, module)
    ]
    config = text
    values = {name: value for name, value in config.to_dict().items() if isinstance(value, (int, float, str, list))}
    # the names that this type has for common sizes, such as n_embd for hidden_size
    values |= {name: getattr(config, name) for name in config.attribute_map if hasattr(config, name)}
    return Listing(transformers.__version__, str(config.model_type), values, tuple(weights))


def without_dropped(value: Any) -> Any:
    """The config without names that start with `_` and those of DROPPED, at every depth."""
    if isinstance(value, Mapping):
        return {
            name: without_dropped(inner)
            for name, inner in value.items()
            if not name.startswith("_") and name not in DROPPED
        }
    return value


def make_config(raw: Mapping[str, Any]) -> Any:
    """The config of the class: by model_type, else by the class's name in `architectures`, else by an alias."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as classes

    model_type = str(raw.get("model_type"))
    if model_type not in transformers.CONFIG_MAPPING:
        for inner in (raw.get(name) for name in TEXT_CONFIGS):
            if isinstance(inner, Mapping):
                return make_config(inner)
        architectures = raw.get("architectures")
        named = architectures[0] if isinstance(architectures, list) and architectures else None
        # the first of the types that share a class is the one that the class was written for
        same_class = [kind for kind, name in classes.items() if name == named]
        known = ALIASES.get(model_type) or next(iter(same_class), None)
        if known is None:
            raise ClassError(
                f"is not known: transformers {transformers.__version__} has none for model type {model_type[:60]}"
            )
        model_type = known
    config_class = transformers.CONFIG_MAPPING[model_type]
    return config_class(**{name: value for name, value in raw.items() if name not in ("model_type", "architectures")})


def check_config(config: Any, raw: Mapping[str, Any]) -> None:
    """Refuse what is no decoder, and a config without sizes, where the class has those of some model by default."""
    if config.is_encoder_decoder:
        raise ClassError(f"is not that of a decoder: {config.model_type} has an encoder")
    given = text_config(raw)
    for name in REQUIRED:
        # Nemotron 3 names the kind of each layer instead of their number
        names = (name, config.attribute_map.get(name), "layers_block_type" if name == "num_hidden_layers" else None)
        if not any(known in given for known in names):
            raise ClassError(f"needs {name}, which is missing: is this the config.json of a language model?")


def text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config."""
    inner = next((raw[name] for name in TEXT_CONFIGS if isinstance(raw.get(name), dict)), None)
    return raw if inner is None else inner


def module_weights(model: Any, path: str, module: Any) -> list[Weight]:
    """The weights that a module holds itself, without those of modules within it."""
    owner = model.get_submodule(path.rpartition(".")[0])
    kind, found = type(module).__name__, list[Weight]()
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.dim() < 2:
            continue
        is_weight = name == "weight"
        holder = owner if is_weight else module
        sizes = {key: value for key, value in vars(holder).items() if type(value) is int}
        sizes |= {key: value for key, value in vars(module).items() if key == "n_groups" and type(value) is int}
        transposed: bool | None = kind == "Conv1D"
        if parameter.dim() == 3:
            transposed = getattr(module, "is_transposed", TRANSPOSED.get(kind))
        bias = getattr(module, "bias" if is_weight else f"{name}_bias", None) is not None
        whole = path if is_weight else f"{path}.{name}"
        found.append(Weight(whole, kind, tuple(parameter.shape), bias, transposed, sizes))
    return found
