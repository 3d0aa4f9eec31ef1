"""Every weight of a model, from the model's own class in transformers.

The class is made on torch's meta device, where weights have sizes and no memory. `ask_class` does it in a child
process, because a class is not our code. This module knows nothing of servers; `serving.py` says what they make of the
weights.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.errors import InputError
from worker.foreign.runner import ForeignCodeError, Limits, call

TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
"""Names of a language model's part in the config of a multimodal one."""
LIMITS = Limits(seconds=60, memory=8 << 30)
"""A class is made in 0.1 to 3 s and 420 MB, after 6 s of imports that a busy machine makes many more."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
# a size that must be in the file, under this name or the type's own: the class's default would be a guess
REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads")
INSTALL = (
    "shapes of a model need transformers and torch; in the folder of gemmfleet: pip install '.[models]' (without a GPU:"
    " pip install '.[models]' --extra-index-url https://download.pytorch.org/whl/cpu)"
)
ALIASES = {"kimi_k2": "deepseek_v3"}
"""Model types with another type's class. kimi_k2: its config.json has `architectures: [DeepseekV3ForCausalLM]`."""
DROPPED = ("auto_map", "attn_implementation", "experts_implementation", "quantization_config")
"""Keys that would load code, choose a kernel from the hub, or quantise the weights."""
WITHIN_MULTIMODAL = re.compile(r"(?:\A|\.)(?:language_model|lm_head)(?:\.|\Z)")
"""Modules of a multimodal model that belong to its language model."""


class ClassError(Exception):
    """The class cannot be made of this config."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter of two dimensions or more, such as `model.layers.0.self_attn.q_proj` of 4096 x 4096.

    `path` has no `.weight` at its end, `kind` is the module's class. `shape`: as the module stores it. `transposed`:
    whether that is (input, output); None: the class does not say it. `sizes`: numbers of the module and of the block
    that holds it, such as its head_dim, which say how a server splits the weight.
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

    try:
        config = make_config(without_dropped(raw))
        text = config.get_text_config()
        check_config(text, raw)
        auto: Any = transformers.AutoModelForCausalLM  # without types
        is_text = type(text) in auto._model_mapping
        if is_text:
            class_config = text
        else:
            # the class is one within a multimodal one, whose other modules are not listed
            auto = transformers.AutoModelForImageTextToText
            class_config = config
        with torch.device("meta"):
            model = auto.from_config(class_config, attn_implementation="eager", trust_remote_code=False)
    except KeyError as e:
        raise ClassError(f"in transformers {transformers.__version__} {describe_missing_key(e, raw)}") from e
    weights = list[Weight]()
    for path, module in model.named_modules():
        if is_text or WITHIN_MULTIMODAL.search(path):
            weights += module_weights(model, path, module)
    values = json.loads(text.to_json_string(use_diff=False))
    # the names that this type has for common sizes, such as n_embd for hidden_size
    values |= {name: getattr(text, name) for name in text.attribute_map if hasattr(text, name)}
    return Listing(transformers.__version__, text.model_type, values, tuple(weights))


def describe_missing_key(error: KeyError, raw: Mapping[str, Any]) -> str:
    """Say in words what a class looked up in vain, as its KeyError has often nothing but the key.

    The key is a value of the config that the class has no entry for, such as an activation (`hidden_act: situ`), or
    else the name of a value that the config lacks.
    """
    key = str(error.args[0]) if error.args else ""
    if " " in key:  # a sentence of transformers
        return f"says: {key}"
    name = name_of_value(raw, key)
    if name is not None:
        return f"does not know {key[:60]!r}, which the config has as {name[:60]}"
    return f"needs {key[:60]!r}, which the config lacks"


def name_of_value(config: Mapping[str, Any], wanted: str) -> str | None:
    """The name that a config, or an object within it, has for a value; None if it has no such value."""
    for name, value in config.items():
        if value == wanted:
            return name
        inner_name = name_of_value(value, wanted) if isinstance(value, Mapping) else None
        if inner_name is not None:
            return inner_name
    return None


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
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    model_type = str(raw.get("model_type"))
    if model_type not in transformers.CONFIG_MAPPING:
        inner = text_config(raw)
        if inner is not raw:
            return make_config(inner)
        # the first of the types that share a class is the one that the class was written for
        same_class = [kind for kind, name in CLASSES.items() if [name] == raw.get("architectures")]
        known = [*same_class, ALIASES.get(model_type)][0]
        if known is None:
            version = transformers.__version__
            fault = f"is not known: transformers {version} has none for model type {model_type[:60]}"
            raise ClassError(f"{fault}; a newer transformers may have it")
        model_type = known
    values = {name: value for name, value in raw.items() if name not in ("model_type", "architectures")}
    return transformers.CONFIG_MAPPING[model_type](**values)


def check_config(config: Any, raw: Mapping[str, Any]) -> None:
    """Refuse a class that is not a decoder, and a config without sizes: the class then has those of some model."""
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
    block = model.get_submodule(path.rpartition(".")[0])
    sizes = {name: value for name, value in {**vars(block), **vars(module)}.items() if type(value) is int}
    kind = type(module).__name__
    weights = list[Weight]()
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.dim() < 2:
            continue
        # GPT-2's Conv1D is a linear layer; experts say it themselves, but not in each class
        transposed = kind == "Conv1D" if parameter.dim() == 2 else getattr(module, "is_transposed", None)
        is_weight = name == "weight"
        bias = getattr(module, "bias" if is_weight else f"{name}_bias", None) is not None
        whole = path if is_weight else f"{path}.{name}"
        weights.append(Weight(whole, kind, tuple(parameter.shape), bias, transposed, sizes))
    return weights
