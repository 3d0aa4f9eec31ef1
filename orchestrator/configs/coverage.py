"""Layers of a shape list or a server's log against the config files that an engine ships, by device and dtype.

`configs check --coverage` calls `read_layers`, then `cover`. Nothing of the engine runs: a file counts by its name. The
document of a layer that two devices have a file for:

    {"layer": "E=128 N=384", "dtype": "fp8_w8a8 128x128", "devices": {"NVIDIA_H200": ["triton_3_2_0"], ...}}

SGLang has a folder for each version of Triton; vLLM has one, which is "" here. `triton_3_6_0 + down`: there is a file
for the second product of experts as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.errors import InputError
from orchestrator.shapes.aiter_log import count_misses
from orchestrator.shapes.reader import family_of_list, read_shapes
from worker.families import FAMILIES
from worker.triton_configs.engine_config_file import config_files
from worker.triton_configs.engine_package import EnginePackage, Layer

FAMILIES_WITH_FILES = ("a8w8_blockscale", "fmoe")


def read_layers(source: Path) -> list[Layer]:
    """The layers of a shape list (.csv) or of a server's log, in their order. Raises InputError if it has none."""
    layers: list[Layer] = []
    if source.suffix == ".csv":
        family = family_of_list(source, FAMILIES_WITH_FILES)
        if family not in FAMILIES_WITH_FILES:
            raise InputError(f"{source}: is not a list of {' or '.join(FAMILIES_WITH_FILES)}, which have config files")
        names = FAMILIES[family].key_names
        shapes = read_shapes(source, FAMILIES[family]).shapes
        layers = [_layer_of(dict(zip(names, shape.key, strict=True))) for shape in shapes]
    else:
        layers = [_layer_of(dict(columns)) for _, columns in count_misses([source]).files]
    if not layers:
        raise InputError(f"{source}: names no layer that has a config file")
    return list(dict.fromkeys(layers))


def _layer_of(columns: Mapping[str, Any]) -> Layer:
    """The layer of key columns, with what its file's name says and no more."""
    layer = Layer.from_key(columns)
    return replace(layer, k=0, topk=0) if layer.e else layer


def cover(package: EnginePackage, layers: Sequence[Layer], device: str | None) -> list[dict[str, Any]]:
    """The document of each layer. `device`: only this one, as file names spell it; None: all that have a file."""
    shipped = [file for file in config_files(package) if device in (None, file.device)]
    documents: list[dict[str, Any]] = []
    for layer in layers:
        folders: dict[str, dict[str, str]] = {}  # by device: by folder what it holds
        for file in shipped:
            if _named_sizes(file.layer) != _named_sizes(layer) or file.rest not in ("", "_down"):
                continue
            folder = file.path.parent.name if file.path.parent.name != "configs" else ""
            has = folders.setdefault(file.device, {})
            has[folder] = f"{folder} + down".strip() if file.is_second_product else has.get(folder, folder)
        devices = {name: sorted(has.values()) for name, has in sorted(folders.items())}
        block = "" if layer.block is None else f" {layer.block[0]}x{layer.block[1]}"
        dtype = (layer.dtype or "bf16") + block
        documents.append({"layer": layer.sizes_in_words, "dtype": dtype, "devices": devices})
    return documents


def _named_sizes(layer: Layer) -> tuple[Any, ...]:
    """The parts of a layer that are in its file's name."""
    return layer.op, layer.sizes_in_name, layer.dtype, layer.block
