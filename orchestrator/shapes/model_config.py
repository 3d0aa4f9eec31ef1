"""A model's config.json as `shapes` reads it: checked, asked of the model's own class, with its quantisation.

The class comes from transformers and runs in a child process (`model_class.py`). `serving.py` places its weights, and
`from_model.py` makes shapes of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.errors import InputError
from orchestrator.files.faults import Faults
from orchestrator.files.read import read_text
from orchestrator.shapes.model_class import Listing, ask_class, text_config
from orchestrator.shapes.quantisation import Quantisation, read_quantisation
from orchestrator.shapes.serving import MAX_INT, Placed, place

MAX_BYTES = 4 * 2**20
MAX_LAYERS = 2000
MAX_EXPERTS = 100_000
MAX_DEPTH = 50
"""Levels of a config; published ones have five."""
LIMITS = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), (1, MAX_LAYERS)),
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"), (0, MAX_EXPERTS)),
}
"""Keys of a config -> the least and the most that they may be. More would make the class run for hours."""
TOPK_KEYS = (
    "num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k",
    "top_k_experts",
)  # fmt: skip
# layers of multi-token prediction, which servers run and the classes of transformers lack
PREDICTION_KEYS = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers")
DTYPES = ("bfloat16", "float16", "float32")
ACTIVATIONS = {
    "silu": "ActivationType.Silu", "swish": "ActivationType.Silu", "gelu": "ActivationType.Gelu",
    "gelu_new": "ActivationType.Gelu", "gelu_pytorch_tanh": "ActivationType.Gelu",
}  # fmt: skip
AskClass = Callable[[dict[str, Any]], Listing]


@dataclass(frozen=True, slots=True)
class Model:
    """A model as its class has it. `dtype` and `act` are AITER's words, `act` "" if it has none. `topk`: the experts
    that a token takes."""

    placed: Placed
    quantisation: Quantisation
    dtype: str
    act: str
    topk: int
    notes: tuple[str, ...] = ()

    @property
    def model_type(self) -> str:
        """The type of the language model."""
        return self.placed.listing.model_type


def read_model(path: str | Path, *, quantised: bool = True, ask: AskClass | None = None) -> Model:
    """The model of a config.json, or of the folder that holds one. Raises InputError with every fault.

    `quantised` False: as if its weights had 16 bits. `ask`: lists the weights; by default in a child process.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    raw = read_config(file)
    text = text_config(raw)
    faults = Faults(file)
    check_numbers(raw, faults)
    dtypes = (str(part[name]) for part in (raw, text) for name in ("torch_dtype", "dtype") if part.get(name))
    dtype = next(dtypes, DTYPES[0]).removeprefix("torch.")
    if dtype not in DTYPES:
        faults.add(f"torch_dtype is {dtype[:40]!r}, not {', '.join(DTYPES)}")
    faults.raise_as(InputError)
    try:
        stored = quantisation_config(file, raw, text) if quantised else None
        quantisation = read_quantisation(stored, text.get("expert_dtype") if quantised else None)
        placed = place((ask or ask_class)(raw), quantisation)
        topk = experts_per_token(placed)
    except InputError as e:
        raise InputError([f"{file}: {fault}" for fault in e.faults]) from e
    act = activation(placed.listing)
    return Model(placed, quantisation, f"torch.{dtype}", act, topk, notes_on(text, placed.listing))


def read_config(file: Path) -> dict[str, Any]:
    """The JSON object of a file. Raises InputError."""
    try:
        raw = json.loads(read_text(file, MAX_BYTES, InputError))
    except json.JSONDecodeError as e:
        raise InputError(f"{file}:{e.lineno}: is no JSON ({e.msg}); a model's config.json is wanted") from e
    except RecursionError as e:
        raise InputError(f"{file}: is JSON of too many levels; a model's config.json is wanted") from e
    except ValueError as e:  # Python reads a number of at most 4,300 digits
        raise InputError(f"{file}: has a number of thousands of digits; a model's config.json is wanted") from e
    if not isinstance(raw, dict) or depth(raw) > MAX_DEPTH:
        raise InputError(f"{file}: holds no JSON object of at most {MAX_DEPTH} levels; a model's config.json is wanted")
    return raw


def depth(document: Any) -> int:
    """Levels of a JSON value, counted up to one more than MAX_DEPTH."""
    level = [document]
    count = 0
    while level and count <= MAX_DEPTH:
        within = list[Any]()
        for value in level:
            if isinstance(value, dict):
                within += value.values()
            elif isinstance(value, list):
                within += value
        level = within
        count += 1
    return count


def quantisation_config(file: Path, raw: Mapping[str, Any], text: Mapping[str, Any]) -> Any:
    """The quantisation of the config, else of hf_quant_config.json beside it, as vLLM looks for it."""
    beside = file.with_name("hf_quant_config.json")
    found = raw.get("quantization_config") or text.get("quantization_config")
    return read_config(beside) if not found and beside.is_file() else found


def check_numbers(config: Mapping[str, Any], faults: Faults) -> None:
    """Refuse numbers that are no sizes, and those that would make the class of the model run for hours."""
    for name, value in config.items():
        if isinstance(value, dict):
            check_numbers(value, faults)
        least, most = LIMITS.get(name, (-MAX_INT, MAX_INT))
        is_number = type(value) is int
        if is_number and not least <= value <= most and not name.startswith("max_"):
            faults.add(f"{name} is {str(value)[:40]}, not a whole number from {least} to {most}")
        if name in LIMITS and value is not None and not is_number:
            faults.add(f"{name} is {str(value)[:40]!r}, not a whole number from {least} to {most}")


def experts_per_token(placed: Placed) -> int:
    """The experts that a token takes; 0: the model has none. Raises InputError if the config does not say it, or says
    it by layer."""
    if not placed.experts:
        return 0
    config = placed.listing.config
    given = next((config[name] for name in TOPK_KEYS if config.get(name)), None)
    numbers = set(given) if isinstance(given, list) else {given}
    topk = numbers.pop()
    if numbers or type(topk) is not int:
        raise InputError(f"experts per token are {str(given)[:60]}, not one whole number for all layers")
    fewest = min(layer.experts for layer in placed.experts)
    if not 0 < topk <= fewest:
        raise InputError(f"experts per token {topk} is more than the {fewest} experts, or less than one")
    return topk


def activation(listing: Listing) -> str:
    """The activation as AITER names it, "" if it has no name for it."""
    if listing.model_type == "gpt_oss":
        return "ActivationType.Swiglu"  # its class clamps and scales beside SiLU, whatever hidden_act says
    names = ("hidden_act", "hidden_activation", "activation", "mlp_hidden_act")
    name = next((str(listing.config[key]) for key in names if listing.config.get(key)), "")
    return ACTIVATIONS.get(name, "")


def notes_on(text: Mapping[str, Any], listing: Listing) -> tuple[str, ...]:
    """Sentences about what the class lacks, and where the answer comes from."""
    source = f"sizes of the class of {listing.model_type} in transformers {listing.version}"
    predicted = next((text[name] for name in PREDICTION_KEYS if text.get(name)), 0)
    if not predicted:
        return (source,)
    return source, f"not listed: {predicted} layers of multi-token prediction, which the class lacks and servers run"
