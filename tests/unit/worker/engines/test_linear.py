"""vLLM's block-FP8 linear layer as a kernel source: its candidates, and compiling them for a chip that is not here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kits.worker import answers_of
from tests.support.engines import H200, MI355X, config_values, tree
from tests.support.marks import WITH_TORCH
from worker.families import tuner_of
from worker.tuners.search.target import datasheet_target
from worker.tuners.search.tile_config import tile_config

pytestmark = WITH_TORCH


@pytest.fixture
def linear() -> Any:
    pytest.importorskip("triton", reason="Triton is not installed")
    from worker.tuners.engines.linear import LinearSource

    return LinearSource("", H200)


AMD = {"waves_per_eu": 2, "matrix_instr_nonkdim": 16}
KEY: dict[str, int | str] = {"M": 64, "N": 2112, "K": 7168}


@pytest.mark.parametrize(
    ("arch", "m", "key", "legal"),
    [
        (90, 64, "BLOCK_SIZE_M", {16, 32, 64}),
        (90, 2048, "BLOCK_SIZE_M", {16, 32, 64, 128, 256}),
        (90, 64, "BLOCK_SIZE_K", {32, 64, 128}),
        (90, 64, "num_stages", {1, 2, 3, 4, 5, 6}),
        (90, 64, "waves_per_eu", {None}),
        ("gfx950", 64, "num_stages", {1, 2, 3}),
        ("gfx950", 64, "waves_per_eu", {0, 1, 2, 4}),
        ("gfx950", 64, "kpack", {None}),
        ("gfx942", 64, "kpack", {1, 2}),
    ],
)
def test_candidates_are_what_the_kernel_takes_on_the_chip(
    linear: Any, arch: int | str, m: int, key: str, legal: set[Any]
) -> None:
    target = datasheet_target(arch)
    p = linear.problem("a8w8_blockscale", {**KEY, "M": m}, target.gfx)
    assert p.dtype == ("float8_e4m3fnuz" if arch == "gfx942" else "float8_e4m3fn")
    space = linear.space(p, target)
    found = space.candidates()
    assert {c.values.get(key) for c in found} == legal
    assert len({c.name for c in found}) == len(found)
    assert {tuner_of(c.name) for c in found} == {"vllm"}
    with_seed = space.candidates([tile_config(config_values(16, 64, 128, GROUP_SIZE_M=1))], 300)
    assert 200 < len(with_seed) <= 300


@pytest.mark.parametrize(
    "config",
    [
        config_values(16, 64, 256),  # two scales in a step: wrong results
        config_values(128, 64),  # the tile is twice the output
        config_values(64, 256, num_warps=1),  # too many registers of a lane
        config_values(64, 256, num_stages=8),  # no pipeline is so small
    ],
)
def test_what_cannot_be_right_or_run_is_not_compiled(linear: Any, config: dict[str, int]) -> None:
    p = linear.problem("a8w8_blockscale", {**KEY, "M": 16}, "sm_90")
    space = linear.space(p, datasheet_target(90))
    assert not space.is_legal(tile_config(config))
    assert space.is_legal(tile_config(config_values()))
    short = linear.problem("a8w8_blockscale", {**KEY, "K": 128}, "sm_90")
    space = linear.space(short, datasheet_target(90))
    assert space.is_legal(tile_config(config_values(16, 64, 256))), "K has one scale"


def test_one_row_of_tiles_has_no_order(linear: Any) -> None:
    p = linear.problem("a8w8_blockscale", KEY, "sm_90")
    space = linear.space(p, datasheet_target(90))
    pairs = [[tile_config(config_values(m, GROUP_SIZE_M=g)) for g in (1, 16)] for m in (32, 64)]
    assert [len(space.distinct(pair)) for pair in pairs] == [2, 1]


def test_m_of_one_class_share_their_kernels(linear: Any) -> None:
    def alike(m: int, n: int = 2112) -> int:
        found: int = linear.compile_problem(linear.problem("a8w8_blockscale", {**KEY, "M": m, "N": n}, "sm_90")).m
        return found

    assert [alike(m) for m in (1, 2, 5, 17, 16, 48, 4096)] == [1, 17, 17, 17, 16, 16, 16]
    assert alike(1 << 19, 4096) == 1 << 19, "AMD's compiler tells large tensors from others"


CODE = """
import json, sys
from worker.triton_configs.engine_package import EngineDevice
from worker.tuners.engines.linear import LinearSource
from worker.tuners.search.compiling import compile_candidate
from worker.tuners.search.target import datasheet_target
from worker.tuners.search.tile_config import tile_config
root, key, jobs = sys.argv[1:]
for name, arch, values in json.loads(jobs):
    target = datasheet_target(arch)
    source = LinearSource(root, EngineDevice(name, arch))
    p = source.problem("a8w8_blockscale", json.loads(key), target.gfx)
    status, detail, f = compile_candidate(source, target, source.job(p, tile_config(values)))
    print(json.dumps([status, detail, f and [f.shared_bytes, f.vgprs, f.spills, repr(f.same_as)]]))
"""


def test_candidates_are_compiled_for_a_chip_that_is_not_here(tmp_path: Path) -> None:
    jobs: list[tuple[str, int | str, dict[str, int]]] = []
    fitting = [config_values(), config_values(GROUP_SIZE_M=16), config_values(64, 128, 128)]
    too_large = config_values(16, 256, num_stages=8, num_warps=8)
    jobs += [(H200.name, H200.arch, config) for config in (*fitting, too_large)]
    too_large = config_values(16, 1024, num_warps=8)
    jobs += [(MI355X.name, MI355X.arch, config | AMD) for config in (*fitting, too_large)]
    jobs.append((H200.name, H200.arch, config_values(waves_per_eu=1)))
    key = {"M": 64, "N": 512, "K": 7168}
    words = (str(tree("vllm")), json.dumps(key), json.dumps(jobs))
    *found, foreign = answers_of(CODE, *words, cache=tmp_path / "cache")
    for good in (found[:4], found[4:]):
        assert [status for status, _, _ in good] == ["ok"] * 3 + ["unsupported"]
        assert "bytes of shared memory" in good[-1][1]
        assert good[0][2][3] != good[1][2][3]
        assert good[2][2][0] > good[0][2][0]
    assert foreign[0] == "error"
