"""The tuner sglang: pairs of configs as one, the layout that a pair needs, the search for pairs; both products of the
engine's own kernel in Triton's interpreter."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import InputError
from orchestrator.families import check_family, get_tuner
from tests.kits.worker import answers_of, of_type, run_group
from tests.support.engine_search import search_file
from tests.support.engines import H200, MI355X, config_values, tree
from tests.support.marks import WITH_ENGINE
from tests.support.search_standin import StandIn, Timer
from worker.families import tuner_of
from worker.protocol import SpecShape
from worker.triton_configs.cutting import cut_ranges, unite_points
from worker.triton_configs.pair import join_pair, needs_down_file, split_pair
from worker.triton_configs.point_record import PointRecord, values_of
from worker.tuners.search.measuring_server import MeasuringServer
from worker.tuners.search.target import datasheet_target
from worker.tuners.search.tile_config import tile_config

pytest.importorskip("triton", reason="Triton is not installed")

from tests.unit.worker.engines.test_moe import BF16, BLOCK, CPU, KEY, TENSOR
from worker.tuners.engines import engine_file
from worker.tuners.engines.moe_problem import MoeProblem
from worker.tuners.engines.sglang_moe import SglangMoeSource
from worker.tuners.engines.source import argument_on_copy

pytestmark = WITH_ENGINE
TMA = {"USE_TMA": True}
PAIR = join_pair(config_values(64, 128), config_values(64, 256, **TMA))


def problem(**changes: Any) -> MoeProblem:
    return replace(SglangMoeSource("", H200).problem("fmoe", {**KEY, **changes}, "sm_90"), label="uniform")


ENTRIES = st.builds(
    lambda m, n, tma: {**config_values(m, n), **({"USE_TMA": tma} if tma is not None else {})},
    st.sampled_from([16, 64]), st.sampled_from([32, 64]), st.sampled_from([None, False, True]),
)  # fmt: skip


@given(ENTRIES, ENTRIES | st.none())
def test_two_entries_are_one_config_and_come_back_as_the_engine_launches_them(up: Any, down: Any) -> None:
    def launched(entry: Any) -> Any:
        return {**entry, "USE_TMA": entry.get("USE_TMA", False)}

    joined = join_pair(up, down)
    one, two = split_pair(joined)
    assert launched(one) == launched(up)
    if down is None:
        assert launched(two) == {**launched(up), "USE_TMA": False}, "SGLang's rule without a file of its own"
    else:
        assert launched(two) == {**launched(down), "BLOCK_SIZE_M": up["BLOCK_SIZE_M"]}
    assert join_pair(one, two) == joined
    assert needs_down_file(joined) == (launched(two) != {**launched(up), "USE_TMA": False} or launched(up)["USE_TMA"])


def test_a_pair_is_named_whole_and_its_rows_are_its_tuners() -> None:
    name = tile_config(PAIR, "sglang_").name
    assert name == "sglang_64x128x128_g1_w4_s2_down_-x256x128_g1_w4_s2_USE_TMA=True"
    assert tuner_of(name) == "sglang"


def test_a_product_of_a_pair_has_its_own_part_of_the_bytes_and_of_the_estimate() -> None:
    source, target, whole = SglangMoeSource("", H200), datasheet_target(90), problem(**BLOCK)
    up, down = (replace(whole, part=part) for part in ("up", "down"))
    assert (up.x_bytes, down.x_bytes) == (whole.m * whole.k, whole.slots * whole.n)
    assert (up.out_bytes, down.out_bytes) == (2 * whole.slots * 2 * whole.n, 2 * whole.slots * whole.k)
    for figure in ("flops", "x_bytes", "w_bytes", "out_bytes"):
        assert getattr(up, figure) + getattr(down, figure) == pytest.approx(getattr(whole, figure), abs=1), figure
    assert source.needed_bytes(up) == source.needed_bytes(whole), "both are drawn"

    def estimate(of: MoeProblem, **values: int) -> float:
        return source.space(of, target).estimate(tile_config(config_values(64, 128, **values)))

    assert estimate(up) + estimate(down) == pytest.approx(estimate(whole))
    for part in (whole, up, down):
        assert estimate(part, BLOCK_SIZE_K=256) == estimate(part), "a longer step is cut to the block of a scale"
    long_down = join_pair(config_values(64, 128), config_values(64, 256, BLOCK_SIZE_K=256, **TMA))
    space = source.space(whole, target)
    assert space.estimate(tile_config(long_down)) == space.estimate(tile_config(PAIR))


def test_linear_layers_are_refused_with_the_reason() -> None:
    with pytest.raises(InputError, match=r"does not tune family a8w8_blockscale; it tunes fmoe: .* DeepGEMM before"):
        check_family(get_tuner("sglang"), "a8w8_blockscale", {})


def test_today_is_what_a_server_does_with_the_files_of_its_triton() -> None:
    engine = SglangMoeSource(str(tree("sglang")), replace(H200, triton="3.6.0")).engine()
    exact = problem(expert=512, inter_dim=128, model_dim=4096, topk=10).layer
    folders = [path.parent.name for path in (engine.file_read(exact), engine.down_file_read(exact)) if path]
    assert folders == ["triton_3_6_0", "triton_3_6_0"]
    assert engine.config(exact, 1024)["down.USE_TMA"]
    older = problem(expert=128, inter_dim=384, model_dim=4096, topk=8).layer
    assert [path.parent.name for path in (engine.file_read(older), engine.down_file_read(older)) if path] == [
        "triton_3_2_0"
    ]
    assert not needs_down_file(engine.config(older, 256))
    assert engine.folders(older)[0].name == "triton_3_6_0"
    none = problem(**BF16, expert=32, inter_dim=1792, model_dim=2048, topk=4)
    source = SglangMoeSource(str(tree("sglang")), H200)
    assert engine.config(none.layer, 256) == source.default_config(replace(none, m=256))


@pytest.mark.parametrize(
    ("part", "config", "flags"),
    [
        ("", config_values(), [(False, False, False), (False, False, False)]),
        ("", config_values(**TMA), [(False, False, True), (False, False, False)]),
        ("", PAIR, [(True, False, False), (False, True, True)]),
        ("up", config_values(**TMA), [(True, False, True)]),
        ("down", config_values(**TMA), [(False, True, True)]),
    ],
)
def test_a_second_product_with_tma_changes_the_kernel_of_the_first(part: str, config: Any, flags: Any) -> None:
    source = SglangMoeSource(str(tree("sglang")), H200)
    p = replace(problem(), part=part)
    inputs = source.inputs(p, CPU, 0, 0)
    operands = source.operands(inputs)
    launches = source.launches(p, config, operands, inputs.output())
    descriptors = [(x.named["c_sorted"], x.args[1] is not None, x.args[3] is not None) for x in launches]
    assert descriptors == flags
    other = source.operands(inputs.copy())
    for argument in (argument for launch in launches for argument in launch.args if hasattr(argument, "block_shape")):
        name = next(name for name, tensor in operands.items() if tensor is argument.base)
        moved = argument_on_copy(argument, {id(operands[name]): other[name]})
        assert (moved.base is other[name], moved.block_shape) == (True, argument.block_shape)


class PairedDevice(StandIn):
    """A device on which a second product with TMA is much faster, with 64 rows the fastest."""

    def prepare(self, problem: Any, seed: int, rotate_bytes: int, tick: object) -> str:
        self.part = problem.part
        return ""

    def timer(self, loaded: Any) -> Timer:
        return Timer(self.us(loaded.candidate.values))

    def us(self, values: dict[str, Any]) -> float:
        up, down = (values, values) if self.part else split_pair(values)
        rows_off = abs(up["BLOCK_SIZE_M"] - 64) / 64
        up_us = 20 + 2 * rows_off + (up["BLOCK_SIZE_N"] != 128) + (not up.get("USE_TMA"))
        down_us = 15 + 2 * rows_off + (down["BLOCK_SIZE_N"] != 64) - 6 * bool(down.get("USE_TMA"))
        return float({"up": up_us, "down": down_us}.get(self.part, up_us + down_us))


def serve(conn: Any) -> None:
    MeasuringServer(conn, lambda: PairedDevice({}, "")).serve()


def search_at_1024(folder: Path, monkeypatch: pytest.MonkeyPatch, server: Any) -> tuple[list[Any], list[PointRecord]]:
    """The messages of a search of all candidates for a file with M = 1024 as the workload; its records at this M."""
    monkeypatch.setattr(engine_file, "LEAST_EXTRA_S", 0.0)
    monkeypatch.setattr(engine_file, "EXTRA_SHARE", 0.0)
    key = {**KEY, **BF16, "token": 1024, "expert": 32, "inter_dim": 1792, "model_dim": 2048, "topk": 4}
    source = SglangMoeSource(str(tree("sglang")), H200)
    messages = search_file(folder, source, server, "fmoe", [SpecShape(1, key)], search="exhaustive")
    records = [PointRecord.from_document(m["point"]) for m in messages if m["type"] == "point_timed"]
    return messages, [record for record in records if record.m == 1024]


def test_a_pair_of_one_block_size_m_is_found_and_measured_as_one_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages, records = search_at_1024(tmp_path, monkeypatch, serve)
    (first, *_) = cut_ranges(unite_points(record.point for record in records))
    up, down = split_pair(values_of(records)[first.config])
    assert (up["BLOCK_SIZE_M"], up["BLOCK_SIZE_N"]) == (64, 128)
    assert (down["BLOCK_SIZE_M"], down["BLOCK_SIZE_N"], down["USE_TMA"]) == (64, 64, True)
    (tuned,) = [m["row"] for m in messages if m["type"] == "shape_tuned"]
    assert tuned["us"] == pytest.approx(30.0, abs=0.1), "one config for both products takes 37"


class SkewedDevice(PairedDevice):
    """The same, but the fastest rows are slow where few experts get most tokens."""

    def prepare(self, problem: Any, seed: int, rotate_bytes: int, tick: object) -> str:
        self.is_skewed = problem.label == "zipf1.5"
        return super().prepare(problem, seed, rotate_bytes, tick)

    def us(self, values: dict[str, Any]) -> float:
        slow_us = 25.0 if self.is_skewed and values["BLOCK_SIZE_M"] == 64 else 0.0
        return super().us(values) + slow_us


def serve_skewed(conn: Any) -> None:
    MeasuringServer(conn, lambda: SkewedDevice({}, "")).serve()


def test_what_leads_at_one_routing_is_measured_beside_todays_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, records = search_at_1024(tmp_path, monkeypatch, serve_skewed)
    times = {record.label: {time.name: time for time in record.times} for record in records}
    fastest = min(times["uniform"].values(), key=lambda time: time.us)
    skewed = times["zipf1.5"][fastest.name]
    assert skewed.us > 1.5 * min(time.us for time in times["zipf1.5"].values())
    assert skewed.high_us < 1.005 * skewed.us, "else it would be known to 1 % alone"


def test_a_config_that_is_slower_at_one_routing_is_not_measured_at_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, records = search_at_1024(tmp_path, monkeypatch, serve)
    points = {record.label: record.point for record in records}
    first, *others = points.values()
    choosable = {name for name in first.us if first.allows(name)}
    assert first.today in choosable
    assert len(choosable) < len(first.us), "else there is nothing to leave out"
    assert others
    assert all(set(point.us) == choosable for point in others)


CODE = """
import json, sys
from dataclasses import replace
import torch
from worker.triton_configs.engine_package import EngineDevice
from worker.tuners.common.operands import error_ratio, poison
from worker.tuners.engines.sglang_moe import SglangMoeSource
from worker.tuners.search.compiling import compile_candidate
from worker.tuners.search.target import datasheet_target
from worker.tuners.search.tile_config import tile_config
what, root, given = sys.argv[1:]
target = datasheet_target(90)
source = SglangMoeSource(root, EngineDevice("NVIDIA H200", 90))
for key, dtype, part, values in json.loads(given):
    p = source.problem("fmoe", key, target.gfx)
    p = replace(p, dtype=dtype or p.dtype, label="zipf1", part=part)
    if what == "compile":
        status, detail, f = compile_candidate(source, target, source.job(p, tile_config(values)))
        print(json.dumps([status, detail, f and f.hash]))
        continue
    sets = [source.inputs(p, torch.device("cpu"), 0, draw) for draw in (0, 1)]
    out = sets[0].output()
    calls = source.launch(p, tile_config(values), [source.operands(s) for s in sets], out)
    errs = []
    for call, made in zip(calls, sets):
        poison([out])
        call()
        start = 0
        for reference in made.reference():
            end = start + reference.numel()
            errs.append(error_ratio(out[start:end].view_as(reference), reference))
            start = end
    print(json.dumps(errs))
"""
SMALL = {**KEY, "token": 3, "model_dim": 128, "expert": 4}


def asked(what: str, folder: Path, *given: tuple[dict[str, Any], str, str, dict[str, Any]]) -> list[Any]:
    """Run the code above: an answer for each (key, dtype, part, config)."""
    words = (what, str(tree("sglang")), json.dumps(given))
    return answers_of(CODE, *words, cache=folder / "cache", interpreted=what == "run")


def test_both_products_are_right(tmp_path: Path) -> None:
    """In the interpreter, which takes bfloat16 for integers: that is run in float32. (Triton 3.9 cannot swap the
    operands of block FP8 below 64 rows.) The first product of a pair's timed copies stays in the order of experts."""
    block, tensor, bf16 = ({**SMALL, **quant} for quant in (BLOCK, TENSOR, BF16))
    found = asked(
        "run",
        tmp_path,
        (block, "", "", config_values(16, 32)),
        (block, "", "", join_pair(config_values(16, 32), config_values(16, 16, **TMA))),
        (block, "", "", join_pair(config_values(64, 64, **TMA), config_values(64, 128, **TMA))),
        (block, "", "down", config_values(16, 32, **TMA)),
        (tensor, "", "", join_pair(config_values(16, 64), config_values(16, 32, 64))),
        (bf16, "float32", "", config_values(16, 64)),
    )
    alike, pair = [0.0] * 4, [0.0, 0.0, 1.0, 0.0]
    assert found == [alike, pair, pair, [0.0] * 2, alike, alike]


def test_pairs_compile_for_a_chip_that_is_not_here(tmp_path: Path) -> None:
    parts = [
        ("", config_values(16, 32)),
        ("", PAIR),
        ("up", config_values(64, 128)),
        ("down", config_values(64, 256, **TMA)),
    ]
    found = asked("compile", tmp_path, *[({**SMALL, **BF16}, "", part, config) for part, config in parts])
    assert [status for status, _, _ in found] == ["ok"] * 4, found
    assert len({code for _, _, code in found}) == 4


def test_other_devices_have_no_pairs_and_one_m_of_many_shares_its_kernels() -> None:
    source = SglangMoeSource("", H200)
    assert source.has_pairs(datasheet_target(90))
    assert not SglangMoeSource("", MI355X).has_pairs(datasheet_target("gfx950"))
    assert [source.compile_problem(replace(problem(expert=64), m=m)).m for m in (256, 512, 1024, 1537)] == [
        256,
        512,
        528,
        529,
    ]


@pytest.mark.full
def test_a_file_is_tuned_through_the_worker(tmp_path: Path) -> None:
    root = tmp_path / "engine"
    shutil.copytree(tree("sglang"), root, ignore=shutil.ignore_patterns("*.json"))
    folder = root / "sglang/srt/layers/moe/moe_runner/triton_utils/configs/triton_3_6_0"
    folder.mkdir(parents=True, exist_ok=True)
    name = "E=4,N=128,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128].json"
    (folder / name).write_text(json.dumps({"1": config_values(16, 32)}))
    key = {**SMALL, "token": 1, "topk": 1}
    captured = {"captured": "[[1, 0, 0, 0]]", "captured_only": True}  # one routing: the interpreter takes seconds each
    code, output, records = run_group(tmp_path, "sglang", "fmoe", [key], {"root": str(root), **captured})
    assert code == 0, output
    (tuned,) = [record["row"] for record in of_type(records, "shape_tuned")]
    assert tuned["errRatio"] == 0.0
    points = [PointRecord.from_document(record["point"]) for record in of_type(records, "point_timed")]
    assert {(point.m, point.file["file"], point.file["project"]) for point in points} == {(1, name, "sglang")}
    assert points[0].file["device"]["triton"]
    assert points[0].today.values == config_values(16, 32)
    assert any(needs_down_file(time.values) and time.us > 0 for time in points[0].times), "a pair was measured"
    assert {time.err_ratio for point in points for time in point.times if time.us > 0} == {0.0}
