"""The tuner aiter-triton in Triton's interpreter on a stand-in tree; a bucket's config; seeds, legality, compiling."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import InputError
from orchestrator.families import check_tuner_options, get_tuner
from tests.kits.worker import answers_of, of_type, run_group
from tests.standins.aiter.triton_gemm import make, values
from worker.triton_configs.kinds import BY_NAME
from worker.triton_configs.resolve import ResolveError
from worker.triton_configs.slowdown import is_slower
from worker.tuners.aiter_triton import space
from worker.tuners.aiter_triton.problem import KindProblem, problem_of
from worker.tuners.aiter_triton.seeds import AiterSeeds
from worker.tuners.aiter_triton.tuner import AiterTritonTuner, bucket_of, points_of_buckets
from worker.tuners.base import Place
from worker.tuners.search.choice import Point, choose_config
from worker.tuners.search.measuring_process import NoDeviceError
from worker.tuners.search.target import Target, datasheet_target
from worker.tuners.search.tile_config import tile_config

HALF = {"dtype": "torch.float16", "outdtype": "torch.float16"}  # the interpreter takes bfloat16 for integers
DEFAULT = {"DEFAULT.json": {"M_LEQ_16": values(), "any": values(32, NUM_KSPLIT=2)}}
OLD = "today"


def test_an_m_is_measured_with_the_others_of_its_bucket_and_with_both_ends() -> None:
    weights = {20: 3.0, 48: 10.0, 16: 1.0, 1000: 2.0}
    bounds = (16, 64, 256)
    assert points_of_buckets(weights, {m: bucket_of(m, bounds, "any") for m in weights}, bounds) == {
        "M_LEQ_16": [Point(16, 1.0), Point(1, 0.0)],  # the bound is one of the workload's
        "M_LEQ_64": [Point(48, 10.0), Point(20, 3.0), Point(64, 0.0), Point(17, 0.0)],  # the most weighty first
        "any": [Point(1000, 2.0)],  # no bound lies beyond the last
    }


@pytest.mark.parametrize(
    ("us", "found"),
    [
        # the least weighted sum wins
        ({48: {OLD: 20.0, "a": 19.0, "b": 15.0}, 20: {OLD: 20.0, "a": 10.0, "b": 19.0}}, ("b", [])),
        # one that slows an M down is rejected, even at the bound, which has no weight
        ({48: {OLD: 20.0, "a": 10.0, "b": 18.0}, 64: {OLD: 20.0, "a": 20.7, "b": 20.5}}, ("b", ["a"])),
        ({48: {OLD: 20.0, "a": 10.0}, 64: {OLD: 2.0, "a": 3.9}}, ("a", [])),  # below 4 us the timer decides
        ({48: {OLD: 20.0, "a": 19.95, "b": 5.0}, 64: {OLD: 20.0, "a": 20.0}}, ("", [])),  # no better, not everywhere
        ({48: {"a": 30.0, "b": 20.0}}, ("b", [])),  # today's config does not run
    ],
)
def test_the_config_that_a_bucket_gets(us: dict[int, dict[str, float]], found: tuple[str, list[str]]) -> None:
    weights = {48: 10.0, 20: 1.0, 64: 0.0}
    assert choose_config([Point(m, weights[m]) for m in us], list(us.values()), [OLD] * len(us)) == found


TIMES = st.lists(st.floats(1, 100), min_size=5, max_size=5)


@given(st.dictionaries(st.integers(1, 6), st.tuples(st.floats(0, 9), TIMES), min_size=1))
def test_no_winner_is_slower_anywhere_than_the_rule_allows(drawn: dict[int, tuple[float, list[float]]]) -> None:
    points = [Point(m, weight) for m, (weight, _) in drawn.items()]
    us = {m: dict(zip([OLD, "a", "b", "c", "d"], times, strict=True)) for m, (_, times) in drawn.items()}
    winner, harmful = choose_config(points, list(us.values()), [OLD] * len(us))
    assert winner not in harmful
    if winner:
        assert not any(is_slower(us[m][OLD], us[m][winner]) for m in us)
        weight = {p.m: p.weight if any(q.weight for q in points) else 1.0 for p in points}
        assert sum(weight[m] * us[m][winner] for m in us) < sum(weight[m] * us[m][OLD] for m in us)


def run(folder: Path, *shapes: tuple[int, int], **options: Any) -> tuple[int, str, list[Any]]:
    """Tune shapes of these (M, N)."""
    keys = [{"M": m, "N": n, "K": 64, **HALF} for m, n in shapes]
    return run_group(folder, "aiter-triton", "a16w16", keys, options)


def test_a_group_is_tuned_by_buckets_and_its_rows_carry_the_config(tmp_path: Path) -> None:
    root = make(tmp_path / "tree", DEFAULT)
    counts = {"20x32x64xtorch.float16xtorch.float16": 9}
    code, output, records = run(tmp_path, (5, 32), (20, 32), (32, 32), root=str(root), counts=counts)
    assert code == 0, output
    tuned = {r["shape"]: r["row"] for r in of_type(records, "shape_tuned")}
    documents = {shape: json.loads(row["triton_config"]) for shape, row in tuned.items()}
    assert {s: d["bucket"] for s, d in documents.items()} == {1: "M_LEQ_16", 2: "M_LEQ_64", 3: "M_LEQ_64"}, output
    assert documents[2]["values"] == documents[3]["values"], "a bucket has one config"
    for shape, m in ((1, 5), (2, 20), (3, 32)):
        d, row, bound = documents[shape], tuned[shape], 16 if m == 5 else 64
        assert (d["kind"], d["arch"]) == ("a16w16", "90")
        assert row["errRatio"] <= 0.05
        assert row["kernelName"].startswith("config_" if d["values"] is None else tile_config(d["values"]).name)
        points = {p[0]: p for p in d["points"]}
        weights = {m: 9 if m == 20 else 1, bound: 0, 1 if m == 5 else 17: 0}
        assert {p[0]: p[1] for p in d["points"]} == weights, "each row has its own M and both ends"
        assert d["old"][points[m][5]] == DEFAULT["DEFAULT.json"]["M_LEQ_16" if m == 5 else "any"]
        assert all(p[2] > 0 for p in d["points"]), "today's config was measured too"
        assert {p[6] for p in d["points"]} == {""}, "fused operators are for the default's"
    names = [r["row"]["kernelName"] for r in of_type(records, "row") if r["shape"] == 2]
    assert len(names) == len(set(names)), "a measurement that is repeated for the bucket adds no row"
    assert tile_config(values(32, NUM_KSPLIT=2)).name in names


@pytest.mark.full
def test_a_config_for_the_default_file_is_measured_and_nothing_searched(tmp_path: Path) -> None:
    """By the wrapper, and in the fused operators of the tree that read the same files."""
    root = make(tmp_path / "tree", {**DEFAULT, "GEMM-A16W16-N=64-K=64.json": {"any": values()}}, fused=True)
    given: dict[str, Any] = {"default": {"M_LEQ_16": values(16, 16)}, "max_candidates": 9}
    code, output, records = run(tmp_path, (5, 32), (20, 32), (5, 64), root=str(root), **given)
    assert code == 1, output
    (tuned,) = of_type(records, "shape_tuned")
    document = json.loads(tuned["row"]["triton_config"])
    assert tuned["row"]["kernelName"] == tile_config(values(16, 16)).name, "the wrapper's own"
    assert (document["default"], document["values"]) == (True, values(16, 16))
    points = {(m, caller): (old, new, err) for m, _, old, new, err, _, caller in document["points"]}
    assert set(points) == {(m, caller) for m in (5, 16) for caller in ("", "fused_gemm_a16w16_quant_x")}
    assert all(old > 0 and new > 0 and err == 0 for old, new, err in points.values())
    assert len(of_type(records, "row")) == 2
    failed = {record["shape"]: record["detail"] for record in of_type(records, "shape_failed")}
    assert set(failed) == {2, 3}
    assert "M=20 reads any of DEFAULT.json" in failed[2]
    assert "N=64-K=64.json" in failed[3]


@pytest.mark.full
def test_a_wrong_config_of_today_is_replaced_and_told(tmp_path: Path) -> None:
    broken = {"DEFAULT.json": {"any": {**values(), "BLOCK_SIZE_K": 24}}}  # no power of two: it cannot run
    code, output, records = run(tmp_path, (5, 32), root=str(make(tmp_path / "tree", broken)))
    assert code == 0, output
    (row,) = [r["row"] for r in of_type(records, "shape_tuned")]
    document = json.loads(row["triton_config"])
    assert document["values"] is not None
    assert {p[2] for p in document["points"]} == {-1.0}
    assert "today's does not run" in row["detail"]


def test_without_a_tree_a_default_of_the_chip_or_a_gpu_the_reason_is_told(tmp_path: Path) -> None:
    import torch

    def opened(root: Path) -> None:
        tuner = AiterTritonTuner()
        tuner.configure({"family": "a16w16", "root": str(root)}, Place(node_dir=tmp_path))
        tuner.open()

    root = make(tmp_path / "tree", DEFAULT, "gfx950")
    code, output, records = run(tmp_path, (5, 32), root=str(root))
    assert code == 1, output
    (failed,) = of_type(records, "shape_failed")
    assert failed["reason"] == "unsupported"
    assert "no default file for 90" in failed["detail"]
    with pytest.raises(NoDeviceError, match=f"{tmp_path}/nothing"):
        opened(tmp_path / "nothing")
    if not torch.cuda.is_available():
        with pytest.raises(NoDeviceError, match="needs a GPU, and torch sees none here"):
            opened(root)


@pytest.mark.parametrize(
    ("tuner", "options", "words"),
    [
        ("aiter-triton", {"kind": "fused_a4w4_mul_add"}, "is not a kind that can be tuned"),
        ("aiter-triton", {"counts": {"1x2x3": -1}}, "not numbers of calls"),
        ("aiter-triton", {"warmup": 3}, "--warmup: for the tuner aiter only, and this is aiter-triton"),
        ("aiter-triton", {"serach": "fast", "search": "quick"}, "unknown option 'serach'.*neither fast nor exhaustive"),
        ("replay", {"budget_s_per_shape": 3.0}, "--budget: for the tuners aiter-triton, sglang, torch and vllm only"),
    ],
)
def test_bad_options_are_refused(tuner: str, options: dict[str, Any], words: str) -> None:
    check_tuner_options(get_tuner("aiter-triton"), {"search": "exhaustive", "budget_s_per_shape": 3.0})
    with pytest.raises(InputError, match=words):
        check_tuner_options(get_tuner(tuner), options)


KEY: dict[str, int | str] = {"M": 64, "N": 512, "K": 1024, "dtype": "torch.bfloat16", "outdtype": "torch.bfloat16"}
MI355X, H200 = datasheet_target("gfx950"), datasheet_target(90)
A16W16 = BY_NAME["a16w16"]


def problem(kind: str = "a16w16", family: str = "", gfx: str = "gfx950", **key: int | str) -> KindProblem:
    return problem_of(kind, family or BY_NAME[kind].family, {**KEY, **key}, gfx)


def as_given(given: dict[str, Any]) -> dict[str, Any]:
    """A wrapper that rewrites nothing."""
    return dict(given)


def test_seeds_are_todays_bucket_its_neighbours_the_defaults_and_those_of_near_shapes(tmp_path: Path) -> None:
    configs = {
        "DEFAULT.json": {"M_LEQ_16": values(16), "M_LEQ_64": values(32), "any": values(64)},
        "GEMM-A16W16-N=512-K=1024.json": {"M_LEQ_16": values(17), "M_LEQ_64": values(33), "any": values(65)},
        "GEMM-A16W16-N=512-K=2048.json": {"any": values(128)},
        "GEMM-A16W16-N=16-K=65536.json": {"any": values(256)},
        "GEMM-A16W16-N=1024-K=1024.json": {"any": {"BLOCK_SIZE_M": 99}},
    }
    seeds = AiterSeeds(make(tmp_path, configs), "90", A16W16)
    assert seeds.bounds == (16, 64, 256)
    p = problem(M=40)
    assert seeds.today(p).values == values(33)
    rows = [c.values["BLOCK_SIZE_M"] for c in seeds.seeds_of(p)]
    assert rows == [33, 65, 17, 32, 128, 256], "a bucket without the kind's keys does not count"
    assert [c.values["BLOCK_SIZE_M"] for c in seeds.seeds_of(problem(M=40, N=4096))][:2] == [32, 64]
    with pytest.raises(ResolveError, match="no default file for gfx950"):
        AiterSeeds(tmp_path, "gfx950", A16W16)


@pytest.mark.parametrize(
    ("kind", "target", "key", "legal"),
    [
        ("a16w16", H200, "BLOCK_SIZE_M", {16, 32, 64}),
        ("a16w16", H200, "waves_per_eu", {None}),  # keys of AMD's are left out on other chips,
        ("batched_bf16", H200, "waves_per_eu", {0}),  # but for what the kernel itself has as a parameter
        ("a8w8_blockscale", MI355X, "BLOCK_SIZE_K", {128}),
        ("a4w4", MI355X, "BLOCK_SIZE_K", {256, 512, 1024}),
        ("batched_a8w8", MI355X, "NUM_KSPLIT", {None}),  # it has no split-K
    ],
)
def test_values_are_those_that_kind_and_chip_take(kind: str, target: Target, key: str, legal: set[Any]) -> None:
    found = space.space_of(BY_NAME[kind], problem(kind, gfx=target.gfx, B=4), target, as_given).candidates()
    assert {c.values.get(key) for c in found} == legal


def test_what_the_wrapper_makes_equal_is_one_candidate() -> None:
    p = problem()
    found = space.space_of(A16W16, p, MI355X, lambda given: {**given, "NUM_KSPLIT": 1}).candidates()
    names = {tuple(sorted((k, str(v)) for k, v in c.values.items() if k != "NUM_KSPLIT")) for c in found}
    assert len(names) == len(found)
    for rows, equal in ((64, True), (16, False)):  # one row of tiles has no order
        pair = [tile_config({**values(rows), "GROUP_SIZE_M": group}) for group in (1, 8)]
        assert (len(space.space_of(A16W16, p, MI355X, as_given).distinct(pair)) == 1) is equal


@pytest.mark.parametrize(
    ("config", "target"),
    [
        (values(256, 64), MI355X),  # the tile is twice the output
        (values(64, 64, 1024, NUM_KSPLIT=2), MI355X),  # a split has less than one step
        (values(64, 256, 512, num_stages=3, num_warps=8), MI355X),  # too much shared memory
        (values(64, 256, 64, num_warps=1), H200),  # too many registers of a lane
    ],
)
def test_what_cannot_run_is_dropped_before_it_is_compiled(config: dict[str, Any], target: Target) -> None:
    p = problem(gfx=target.gfx)
    assert not space.is_legal(A16W16, p, tile_config(config), target)
    assert space.is_legal(A16W16, p, tile_config(values(64, 64, 64)), target)


@pytest.mark.parametrize(
    ("kind", "more", "kept", "copied"),
    [
        ("a16w16", {"num_stages": 1}, 32768, 32768),  # one operand at a time
        ("a16w16", {"num_stages": 2}, 40960, 81920),
        ("a16w16", {"num_stages": 3}, 81920, 122880),
        ("a8w8_blockscale_bpreshuffle", {"num_stages": 3}, 4096, 12288),  # W need not be there at all
        ("batched_a16w4", {"num_stages": 3}, 18432, 26624),  # X once
        ("a8w8_blockscale", {"NUM_KSPLIT": 8}, 16384, 16384),  # a loop of one step is a constant there, and not a loop
        ("a8w8_blockscale", {"NUM_KSPLIT": 4}, 20480, 40960),
    ],
)
def test_shared_memory_is_never_overestimated(kind: str, more: dict[str, Any], kept: int, copied: int) -> None:
    """`kept`: a stage is in registers; `copied`: asynchronous copies. As Triton 3.6 and 3.9 take at least."""
    p = problem(kind, {"batched_a16w4": "batched_bf16"}.get(kind, kind), B=2)
    c = tile_config(values(32, 128, 128, amd=True, **more))
    of = [space.least_shared_bytes(BY_NAME[kind], p, c, replace(MI355X, async_copy=a)) for a in (False, True)]
    assert of == [kept, copied]


CODE = """
import json, sys
from dataclasses import replace
from worker.triton_configs.kinds import BY_NAME
from worker.tuners.aiter_triton.source import AiterSource
from worker.tuners.aiter_triton.problem import problem_of
from worker.tuners.aiter_triton.space import least_shared_bytes
from worker.tuners.search.compiling import compile_candidate
from worker.tuners.search.target import copies_async, datasheet_target
from worker.tuners.search.tile_config import tile_config
root, arch, configs = sys.argv[1:]
target = datasheet_target(int(arch) if arch.isdigit() else arch)
target = replace(target, async_copy=target.backend == "hip" and copies_async(arch))
key = {"M": 20, "N": 64, "K": 4096, "dtype": "torch.bfloat16", "outdtype": "torch.bfloat16"}
p = problem_of("a16w16", "a16w16", key, target.gfx)
for values, caller in json.loads(configs):
    config = tile_config(values)
    job = (p.case, replace(config, caller=caller))
    status, detail, f = compile_candidate(AiterSource(root, "a16w16"), target, job)
    least = least_shared_bytes(BY_NAME["a16w16"], p, config, target)
    print(json.dumps([status, detail, f and [f.shared_bytes, f.vgprs, f.spills, repr(f.same_as), least]]))
"""
needs_triton = pytest.mark.skipif(not find_spec("triton"), reason="there is no Triton")


FUSED = "fused_gemm_a16w16_quant_x"


def compiled(tree: Path, arch: str, *configs: tuple[dict[str, Any], str]) -> list[list[Any]]:
    """(status, detail, [LDS, registers, spills, config of the same code, least LDS that is expected]) of configs, each
    with its caller, compiled in a fresh process."""
    return answers_of(CODE, str(tree), arch, json.dumps(configs), cache=tree / "cache")


@needs_triton
def test_facts_come_from_the_compiled_kernel(tmp_path: Path) -> None:
    tree = make(tmp_path, {"DEFAULT.json": {"any": values(amd=True)}}, "gfx950", fused=True)
    plain, huge = values(32, 64, 128, amd=True), values(16, 1024, 128, amd=True, num_warps=8)
    more: list[dict[str, Any]] = [{"NUM_KSPLIT": 2}, {"GROUP_SIZE_M": 8}, {"num_stages": 1}, {"num_stages": 3}]
    configs = [plain, *({**plain, **m} for m in more), {**plain, "BLOCK_SIZE_K": 24}, huge]
    *good, broken, large, fused = compiled(tree, "gfx950", *((c, "") for c in configs), (values(amd=True), FUSED))
    for status, _, (lds, vgprs, _, _, least) in good:
        assert status == "ok"
        assert 0 < vgprs <= 512
        assert least <= lds <= 1.1 * least, "the compiler takes what is expected and little more"
    same = [facts[3] for _, _, facts in good]
    assert same[0] == same[2], "this kernel has no order of tiles: the same machine code, started alike"
    assert same[0] != same[1]
    assert broken[0] == "error"
    assert "power of 2" in broken[1]
    assert large[::2] == ["unsupported", None]
    assert "bytes of shared memory, 163840 are there" in large[1]
    assert fused[0] == "ok", "an operator beside the wrapper"


@needs_triton
@pytest.mark.full
def test_a_chip_of_nvidia_is_compiled_for_as_well_and_a_tree_may_lack_an_operator(tmp_path: Path) -> None:
    tree = make(tmp_path, {"DEFAULT.json": {"any": values()}})
    plain = values(32, 64, 64)
    good, foreign, missing = compiled(tree, "90", (plain, ""), (values(32, 64, 64, amd=True), ""), (plain, FUSED))
    assert good[2][1:3] == [None, 0], "its files do not say"
    assert foreign[0] == "error"
    assert "waves_per_eu" in foreign[1]
    assert missing[0] == "unsupported"
    assert "no module aiter.ops.triton.gemm.fused" in missing[1]
