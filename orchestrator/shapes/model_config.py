"""A model's config.json as `shapes` reads it: checked, asked of the model's own class, with its quantisation.

The class comes from transformers and runs in a child process (`model_class.py`). `serving.py` places its weights, and
`from_model.py` makes shapes of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.errors import InputError
from orchestrator.shapes.model_class import Listing, ask_class, text_config
from orchestrator.shapes.quantisation import Quantisation, read_quantisation
from orchestrator.shapes.serving import MAX_INT, Experts, Placed, place
from orchestrator.tables.textfiles import Faults, read_bytes

MAX_BYTES = 4 * 2**20
MAX_LAYERS = 2000
MAX_EXPERTS = 100_000
MAX_DEPTH = 50
"""Levels of a config; published ones have five."""
LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
EXPERT_KEYS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
TOPK_KEYS = (
    "num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k",
    "top_k_experts",
)  # fmt: skip
# layers of multi-token prediction, which servers run and the classes of transformers lack
PREDICTION_KEYS = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers")
DTYPES = ("bfloat16", "float16", "float32")
AskClass = Callable[[dict[str, Any]], Listing]


@dataclass(frozen=True, slots=True)
class Model:
    """A model as its class has it. `dtype` and `act` are AITER's words; `act` "" where they have none for it."""

    placed: Placed
    quantisation: Quantisation
    dtype: str
    act: str
    topk: int
    notes: tuple[str, ...] = field(default=())

    @property
    def model_type(self) -> str:
        """The type of the language model."""
        return self.placed.listing.model_type


def read_model(path: str | Path, *, quantised: bool = True, ask: AskClass | None = None) -> Model:
    """The model of a config.json, or of the folder that holds one. Raises InputError with every fault.

    `quantised` False: as if its weights had 16 bits. `ask`: lists the weights; by default in a child process.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    raw = read_json(file)
    text = text_config(raw)
    faults = Faults(file)
    check_sizes(text, faults)
    dtype = str(raw.get("torch_dtype") or raw.get("dtype") or text.get("torch_dtype") or text.get("dtype") or DTYPES[0])
    if dtype.removeprefix("torch.") not in DTYPES:
        faults.add(f"torch_dtype is {dtype[:40]!r}, not bfloat16, float16 or float32")
    faults.raise_as(InputError)
    quantisation = Quantisation("none")
    if quantised:
        quantisation = read_quantisation(quantisation_config(file, raw, text), text.get("expert_dtype"))
    try:
        listing = (ask or ask_class)(raw)
        placed = place(listing)
        topk = experts_per_token(listing.config, placed.experts) if placed.experts else 0
    except InputError as e:
        raise InputError([f"{file}: {fault}" for fault in e.faults]) from e
    dtype = f"torch.{dtype.removeprefix('torch.')}"
    return Model(placed, quantisation, dtype, activation(listing), topk, tuple(notes_on(text, listing)))


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object of a file. Raises InputError."""
    fault, line = "holds no JSON object", None
    try:
        raw = json.loads(read_bytes(file, MAX_BYTES, InputError))
        if isinstance(raw, dict) and depth_within(raw, MAX_DEPTH):
            return raw
    except UnicodeDecodeError:
        fault = "is no UTF-8 text"
    except json.JSONDecodeError as e:
        fault, line = f"is no JSON ({str(e).split(':')[0]})", e.lineno
    except (RecursionError, ValueError) as e:  # ValueError: a number of more than 4300 digits
        fault = f"is no JSON that can be read ({str(e)[:60]})"
    faults = Faults(file)
    faults.add(f"{fault}; a model's config.json is wanted", line=line)
    faults.raise_as(InputError)
    raise AssertionError  # there was a fault


def depth_within(value: Any, levels: int) -> bool:
    """Whether a JSON value has at most so many levels."""
    if levels == 0:
        return False
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return all(depth_within(one, levels - 1) for one in inner)


def quantisation_config(file: Path, raw: Mapping[str, Any], text: Mapping[str, Any]) -> Any:
    """The quantisation of the config, else of hf_quant_config.json beside it, as vLLM looks for it."""
    beside = file.with_name("hf_quant_config.json")
    found = raw.get("quantization_config") or text.get("quantization_config")
    return read_json(beside) if not found and beside.is_file() else found


def check_sizes(text: Mapping[str, Any], faults: Faults) -> None:
    """Refuse sizes that would make the class of the model run for hours, or fill the memory."""
    for name, value in text.items():
        if type(value) is int and abs(value) > MAX_INT and not name.startswith("max_"):
            faults.add(f"{name} is {str(value)[:40]}: sizes are whole numbers from 1 to {MAX_INT}")
    for names, limit in ((LAYER_KEYS, MAX_LAYERS), (EXPERT_KEYS, MAX_EXPERTS)):
        for name in names:
            value = text.get(name)
            least = 1 if names is LAYER_KEYS else 0
            if value is not None and not (type(value) is int and least <= value <= limit):
                faults.add(f"{name} is {str(value)[:40]!r}, not a whole number from {least} to {limit}")


def experts_per_token(config: Mapping[str, Any], experts: Sequence[Experts]) -> int:
    """The experts that a token takes. Raises InputError where the config does not say it, or by layer."""
    values = [config[name] for name in TOPK_KEYS if config.get(name)]
    numbers = set(values[0] if values and isinstance(values[0], list) else values[:1])
    if len(numbers) != 1 or not all(type(number) is int and number > 0 for number in numbers):
        raise InputError(f"experts per token are {sorted(map(str, numbers))[:9]}, not one whole number for all layers")
    topk, fewest = int(numbers.pop()), min(layer.experts for layer in experts)
    if topk > fewest:
        raise InputError(f"experts per token {topk} is more than the {fewest} experts")
    return topk


def activation(listing: Listing) -> str:
    """The activation as AITER names it, "" where it has no name for it."""
    names = ("hidden_act", "hidden_activation", "activation", "mlp_hidden_act")
    name = next((str(listing.config[n]) for n in names if listing.config.get(n)), "")
    if listing.model_type == "gpt_oss":
        return "ActivationType.Swiglu"  # its class clamps and scales beside SiLU, whatever hidden_act says
    if name.startswith("gelu"):
        return "ActivationType.Gelu"
    return "ActivationType.Silu" if name in ("silu", "swish") else ""


def notes_on(text: Mapping[str, Any], listing: Listing) -> list[str]:
    """Sentences about what the class lacks, and where the answer comes from."""
    notes = [f"sizes of the class of {listing.model_type} in transformers {listing.version}"]
    predicted = next((text[name] for name in PREDICTION_KEYS if text.get(name)), 0)
    if predicted:
        notes.append(f"not listed: {predicted} layers of multi-token prediction, which the class lacks and servers run")
    return notes
