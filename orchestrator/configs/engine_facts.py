"""The answers of an engine about layers: the paths of their files, and the config that it takes for each M.

`engine_tree.py` asks `layer_facts` before a merge and `configs_at` to prove it. Both load the engine's own code, so
they run in a fresh process (`ask_engine`). Today's configs of a layer are ranges of M, such as

    [ConfigRange(1, 12, {"BLOCK_SIZE_M": 16, ...}, key=8), ConfigRange(13, None, {"BLOCK_SIZE_M": 64, ...}, key=16)]
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from worker.triton_configs.config_file import Bucket
from worker.triton_configs.engine_package import EngineDevice, Layer
from worker.triton_configs.m_ranges import ConfigRange, ranges_from_starts, ranges_served
from worker.triton_configs.serving_engine import ServingEngine, load_engine

LAST_M = 16384
"""The range of the last key is asked for up to here."""
LAST_STEPLESS_M = 1024
"""vLLM's default config may change at any M up to this."""


class FilePaths(NamedTuple):
    """The places of a file, told by its engine."""

    target: Path
    """The path where it looks first, whether or not there is a file."""
    read: Path | None
    """The file that it reads, None if it finds none."""


class LayerFacts(NamedTuple):
    """Facts of a layer, told by its engine."""

    file: FilePaths
    down_file: FilePaths | None
    """The places of the file for the second product alone; None if the engine looks for none."""
    today: list[ConfigRange]
    """All M with the configs that they get now."""
    source: str
    """The hash of the file with the kernel."""
    aliases: dict[str, str]
    """The name of the layer's file on the same chip with another driver, by the name that this driver gives it."""


def layer_facts(
    root: Path, device: EngineDevice, others: Sequence[EngineDevice], layers: Sequence[Layer]
) -> list[LayerFacts]:
    """The facts of each layer in their order, asked in a fresh process."""
    # the other devices first: a process holds one engine, that of the device which was loaded last
    aliases: dict[Layer, dict[str, str]] = {layer: {} for layer in layers}
    for layer in layers:
        for other in others:
            aliases[layer][other.name] = load_engine(root, other).file_name(layer)
    engine = load_engine(root, device)
    facts: list[LayerFacts] = []
    for layer in layers:
        file = FilePaths(engine.paths(layer)[0], engine.file_read(layer))
        down_file = None
        if engine.has_down_files and layer.e:
            down_file = FilePaths(engine.paths(layer.second_product)[0], engine.down_file_read(layer))
        today = _ranges_today(engine, layer)
        facts.append(LayerFacts(file, down_file, today, engine.source_hash(layer.op), aliases[layer]))
    return facts


def configs_at(root: Path, device: EngineDevice, calls: Sequence[tuple[Layer, int]]) -> list[Bucket]:
    """The config of each layer at an M, asked in a fresh process."""
    engine = load_engine(root, device)
    return [engine.config(layer, m) for layer, m in calls]


def _ranges_today(engine: ServingEngine, layer: Layer) -> list[ConfigRange]:
    """Ranges of M with what they get, entries of the files or the engine's default.

    vLLM's default may change at any M up to 1024, and at multiples of 16 or of the experts. Where another version's
    changes elsewhere, the proof finds out.
    """
    table = engine.table(layer)
    if table and not engine.has_down_files:
        return [ConfigRange(first, last, table[key], key) for key, (first, last) in ranges_served(table).items()]
    if table:
        down_table = engine.table(layer.second_product) if engine.down_file_read(layer) else None
        return _ranges_of_pairs(engine, layer, [table, down_table or {}])
    steps = set(range(16, LAST_M + 1, 16))
    if layer.e:
        steps |= {layer.e * i for i in range(1, 257)}
    ms = sorted({*range(1, LAST_STEPLESS_M + 1), *steps, *(m - 1 for m in steps)})
    starts: dict[int, tuple[Bucket, int]] = {}
    before: Bucket | None = None
    for m in ms:
        values = engine.config(layer, m)
        if values != before:
            starts[m] = (values, m)
        before = values
    return ranges_from_starts(starts)


def _ranges_of_pairs(engine: ServingEngine, layer: Layer, tables: Sequence[Mapping[int, Bucket]]) -> list[ConfigRange]:
    """The ranges in which the entries of both products' files stay the same."""
    firsts = sorted({served.first for table in tables for served in ranges_served(table).values()})
    starts: dict[int, tuple[Bucket, int]] = {}
    for first, next_first in itertools.pairwise([*firsts, LAST_M]):
        keys = [key for table in tables for key in table if first <= key < next_first]
        starts[first] = (engine.config(layer, first), keys[0] if keys else first)
    return ranges_from_starts(starts)
