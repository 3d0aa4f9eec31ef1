"""The configs that the search for a file tries first."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.engines import H200, config_values, copy_without_files, linear_file, linear_folder
from tests.support.marks import WITH_TORCH
from worker.tuners.engines.engine_seeds import EngineSeeds
from worker.tuners.search.tile_config import tile_config

pytestmark = WITH_TORCH


def test_seeds_are_todays_entry_its_neighbours_the_default_and_those_of_near_files(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from worker.tuners.engines.linear import LinearSource

    root = copy_without_files(tmp_path)
    files = {
        (2112, 7168): {"16": config_values(16), "64": config_values(32), "128": config_values(128)},
        (2112, 8192): {"1": config_values(256)},
        (64, 64): {"8": config_values(16, 256), "4096": config_values(16, 32)},
    }
    for (n, k), entries in files.items():
        (linear_folder(root) / linear_file(n, k)).write_text(json.dumps(entries))
    (linear_folder(root) / linear_file(2112, 4096, "NVIDIA_H20")).write_text(json.dumps({"1": config_values(16, 16)}))
    source = LinearSource(str(root), H200)
    seeds = EngineSeeds(source)
    key: dict[str, int | str] = {"M": 64, "N": 2112, "K": 7168}
    p = source.problem("a8w8_blockscale", key, "sm_90")
    default = {**config_values(64, 128), "GROUP_SIZE_M": 32}
    wanted = [
        config_values(32),
        config_values(128),
        config_values(16),
        default,
        config_values(256),
        config_values(16, 256),
    ]
    assert [c.values for c in seeds.seeds_of(p)] == wanted, "of other (N, K) the nearest first, of other devices none"
    won = tile_config(config_values(64, 64), "vllm_")
    seeds.add_winner(replace(p, m=32), won)
    assert seeds.seeds_of(p)[-1] == won
    other = source.problem("a8w8_blockscale", {**key, "N": 4096}, "sm_90")
    assert seeds.seeds_of(other)[0].values == default
