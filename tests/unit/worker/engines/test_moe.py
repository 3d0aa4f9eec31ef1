"""vLLM's fused mixture of experts: sorted slots, routings, operands and their meaning; the engine's own
launcher; the whole of it in Triton's interpreter, with the kernel and the look-ups of a real wheel."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kits.worker import answers_of, of_type, run_group
from tests.support.engines import H200, MI355X, config_values, tree
from tests.support.marks import WITH_TORCH
from worker.triton_configs.engine_package import EngineDevice
from worker.triton_configs.point_record import PointRecord
from worker.tuners.common.problem import UnsupportedError
from worker.tuners.search.target import datasheet_target
from worker.tuners.search.tile_config import tile_config

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from worker.tuners.common.operands import generator  # noqa: E402
from worker.tuners.engines.moe import MoeSource, sort_slots_by_expert  # noqa: E402
from worker.tuners.engines.moe_problem import (  # noqa: E402
    EXPONENTS,
    MoeInputs,
    MoeProblem,
    batched_products,
    expected_experts_hit,
    route,
)

pytestmark = WITH_TORCH
CPU = torch.device("cpu")
FP8 = {"q_dtype_a": "torch.float8_e4m3fn", "q_dtype_w": "torch.float8_e4m3fn"}
BF16 = {"q_type": "QuantType.No", "q_dtype_a": "torch.bfloat16", "q_dtype_w": "torch.bfloat16"}
TENSOR, BLOCK = {"q_type": "QuantType.per_Tensor", **FP8}, {"q_type": "QuantType.per_1x128", **FP8}
KEY: dict[str, Any] = {
    "token": 64, "model_dim": 256, "inter_dim": 128, "expert": 8, "topk": 2, "act_type": "ActivationType.Silu",
    "dtype": "torch.bfloat16", **BLOCK, "use_g1u1": 1, "doweight_stage1": 0,
}  # fmt: skip


def problem(label: str = "uniform", gfx: str = "sm_90", **changes: Any) -> MoeProblem:
    return replace(MoeSource("", H200).problem("fmoe", {**KEY, **changes}, gfx), label=label)


@given(
    st.integers(1, 9).flatmap(lambda e: st.tuples(st.just(e), st.lists(st.integers(0, e - 1), min_size=1))),
    st.sampled_from([1, 2, 4, 16]),
)
def test_slots_are_sorted_as_a_plain_loop_sorts_them(drawn: tuple[int, list[int]], block: int) -> None:
    experts, ids = drawn
    slots, owners, padded = sort_slots_by_expert(torch.tensor(ids, dtype=torch.int32).view(-1, 1), block, experts)
    wanted: list[int] = []
    for e in range(experts):
        mine = [i for i, x in enumerate(ids) if x == e]
        wanted += mine + [len(ids)] * (-len(mine) % block)
    assert padded.tolist() == [len(wanted)]
    assert slots[: len(wanted)].tolist() == wanted
    assert [ids[s] for s in wanted[::block]] == owners[: len(wanted) // block].tolist()
    most = len(ids) + experts * (block - 1)
    assert len(slots) == (min(most, len(ids) * block) if len(ids) < experts else most), "as vLLM allocates them"
    assert {t.dtype for t in (slots, owners, padded)} == {torch.int32}


@pytest.mark.parametrize(("label", "hottest", "hit"), [("uniform", (0.03, 0.1), 16), ("zipf1.5", (0.33, 0.41), 13)])
def test_tokens_get_experts_without_repetition_by_their_popularity(
    label: str, hottest: tuple[float, float], hit: int
) -> None:
    """Beside a weight of 1 the others add up to 1.12: the first draw takes it with 0.47, either of two with 0.74."""
    p = problem(label, token=500, expert=16, topk=2)
    ids = route(p, generator(CPU, 1))
    assert ids.shape == (500, 2)
    assert all(a != b for a, b in ids.tolist())
    assert torch.equal(ids, route(p, generator(CPU, 1)))
    counts = Counter(ids.flatten().tolist())
    ((popular, most),) = counts.most_common(1)
    assert hottest[0] < most / 1000 < hottest[1]
    assert len(counts) >= hit
    others = [Counter(route(p, generator(CPU, i)).flatten().tolist()).most_common(1)[0][0] for i in range(8)]
    assert len({popular, *others}) > 2, "the order of popularity is drawn as well"


@pytest.mark.parametrize("label", EXPONENTS)
@pytest.mark.parametrize("m", [1, 8, 64])
def test_the_experts_that_are_hit_are_about_as_many_as_expected(label: str, m: int) -> None:
    p = problem(label, token=m, expert=64, topk=4)
    drawn = [len(set(route(p, generator(CPU, i)).flatten().tolist())) for i in range(20)]
    assert expected_experts_hit(p) == pytest.approx(sum(drawn) / 20, rel=0.06)
    assert all(q.b * q.m >= p.slots for q in batched_products(p))


def test_captured_routings_have_their_experts_as_often_at_every_m() -> None:
    counts = (400, 250, 100, 50, 0, 0, 0, 0)  # of 400 tokens: the first expert has all of them
    p = replace(problem("captured", token=500), captured=(counts, counts))
    drawn = Counter(route(p, generator(CPU, 1)).flatten().tolist())
    assert [drawn[expert] / 500 for expert in range(8)] == pytest.approx([c / 400 for c in counts], abs=0.06)
    few = replace(p, m=4)
    hit = [len(set(route(few, generator(CPU, i)).flatten().tolist())) for i in range(40)]
    assert expected_experts_hit(few) == pytest.approx(sum(hit) / 40, rel=0.08)
    source = MoeSource("", H200)
    assert source.compile_problem(p) == source.compile_problem(problem(token=500)), "they share their kernels"


@pytest.mark.parametrize("quant", [BF16, TENSOR, BLOCK])
@pytest.mark.parametrize("gated", [0, 1])
def test_the_reference_is_what_a_plain_loop_computes(quant: dict[str, str], gated: int) -> None:
    p = problem(token=3, use_g1u1=gated, **quant)
    made = MoeInputs.make(p, CPU, 0, 1)
    own, w = made.tokens, made.weight_sets[0]
    one, two = made.reference()

    def scaled(name: str, scale: str, place: int | tuple[int, int], n: int) -> Any:
        source = own if name in own else w
        rows = source[name][place].float()
        if p.scale == "none":
            return rows
        s = source[scale]
        if p.scale == "tensor":
            return rows * (s if name in own else s[place])
        wide = s[place].repeat_interleave(128, -1)
        return rows * (wide if name in own else wide.repeat_interleave(128, -2)[:n])

    for token, slot in [(t, j) for t in range(3) for j in range(2)]:
        e, row = int(made.experts_of_tokens[token, slot]), token * 2 + slot
        x, w1 = scaled("x", "xs", token, 0), scaled("w1", "s1", e, p.products[0][0])
        y, w2 = scaled("y", "ys", row, 0), scaled("w2", "s2", e, p.products[1][0])
        torch.testing.assert_close(one[row], w1 @ x, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(two[row], (w2 @ y) * own["scores"][token, slot], rtol=1e-4, atol=1e-4)
    assert 0.3 < one.std() < 3
    assert one.shape == (6, 128 * (1 + gated))
    assert made.output().numel() == one.numel() + two.numel()


def test_copies_have_routings_of_their_own_and_share_large_weights() -> None:
    p = problem(token=64)
    made = MoeInputs.make(p, CPU, 0, 1)
    copies = [made.copy() for _ in range(3)]
    assert len({str(c.experts_of_tokens.tolist()) for c in (made, *copies)}) == 4
    assert len({c.tokens["x"].data_ptr() for c in (made, *copies)}) == 4
    assert len({c.weights["w1"].data_ptr() for c in (made, *copies)}) == 4
    wide = replace(p, n=1 << 22)
    large = replace(made, problem=wide, weight_sets=made.weight_sets[:1])
    assert large.copy().weight_sets is large.weight_sets
    assert len(large.weight_sets) == 1
    assert made.bytes < MoeSource("", H200).needed_bytes(p)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q_type": "QuantType.per_Token"}, "q_type is QuantType.per_Token; this tuner has"),
        ({"q_dtype_w": "torch.int4"}, "dtype and operands are"),
        ({"dtype": "torch.float16"}, "dtype and operands are"),
        ({**BF16, "q_dtype_a": "torch.float8_e4m3fn"}, "dtype and operands are"),
        ({"doweight_stage1": 1}, "weights the second product"),
        ({"topk": 9}, "topk is 9, of 8 experts"),
        ({"inter_dim": 192}, "multiples of 128"),
        ({**BF16, "inter_dim": 100}, "multiples of 8"),
    ],
)
def test_what_is_not_measured_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        problem(**changes)


def test_a_problem_names_its_file() -> None:
    source = MoeSource(str(tree("vllm")), H200)
    engine = source.engine()
    assert engine.file_name(problem().layer) == (
        "E=8,N=128,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
    )
    assert engine.file_name(problem(**TENSOR).layer) == "E=8,N=128,device_name=NVIDIA_H200,dtype=fp8_w8a8.json"
    assert engine.file_name(problem(**BF16).layer) == "E=8,N=128,device_name=NVIDIA_H200.json"
    assert problem(gfx="gfx942").dtype == "float8_e4m3fnuz"
    for quant in (BF16, TENSOR, BLOCK):
        p = problem(token=40, expert=250, **quant)
        assert engine.config(p.layer, p.m) == source.default_config(p)


@pytest.mark.parametrize(("m", "is_sorted"), [(1, False), (2, False), (3, True)])
def test_the_engine_decides_whether_slots_are_sorted(m: int, is_sorted: bool) -> None:
    source, p = MoeSource(str(tree("vllm")), H200), problem(token=m, expert=16)
    inputs = source.inputs(p, CPU, 0, 0)
    operands = source.operands(inputs)
    assert ("slots16" in operands) == is_sorted, "vLLM's own rule: 4 M topk <= E"
    if not is_sorted:
        assert operands["owners16"].tolist() == inputs.experts_of_tokens.flatten().tolist()
        assert operands["padded16"].tolist() == [m * 2 * 16]
    launches = source.launches(p, config_values(16), operands, inputs.output())
    assert [x.named["top_k"] for x in launches] == [2, 1]
    assert [x.named["MUL_ROUTED_WEIGHT"] for x in launches] == [False, True]
    assert [x.named["naive_block_assignment"] for x in launches] == [not is_sorted] * 2
    assert [x.named["SWAP_AB"] for x in launches] == [True] * 2, "on Hopper, in fp8, below 64 rows"


def test_weights_lie_on_rocm_as_vllm_pads_them() -> None:
    for device, quant, stride in ((MI355X, BF16, 256 + 128), (MI355X, BLOCK, 256), (H200, BF16, 256)):
        p, source = problem(token=1, **quant), MoeSource(str(tree("vllm")), device)
        inputs = source.inputs(p, CPU, 0, 0)
        one, _ = inputs.reference()
        operands = source.operands(inputs)
        assert operands["w1"].stride() == (stride * 256, stride, 1)
        torch.testing.assert_close(inputs.reference()[0], one)
        again = source.operands(inputs)
        assert again["w1"].data_ptr() == operands["w1"].data_ptr(), "once"


@pytest.mark.parametrize(
    ("arch", "changes", "key", "legal"),
    [
        (90, {}, "BLOCK_SIZE_K", {64, 128}),
        (90, BF16, "BLOCK_SIZE_K", {64, 128, 256}),
        (90, {"token": 1}, "BLOCK_SIZE_M", {8, 16}),
        (90, {"token": 4096}, "BLOCK_SIZE_M", {8, 16, 32, 64, 128, 256}),
        (90, {}, "GROUP_SIZE_M", {1, 16, 32, 64}),
        (90, {}, "num_stages", {2, 3, 4, 5}),
        ("gfx950", {}, "num_stages", {2, 3}),
        ("gfx950", {}, "waves_per_eu", {0, 1, 2, 4}),
    ],
)
def test_candidates(arch: int | str, changes: dict[str, Any], key: str, legal: set[int]) -> None:
    target = datasheet_target(arch)
    p = problem(gfx=target.gfx, **{"model_dim": 7168, "inter_dim": 2048, **changes})
    space = MoeSource("", H200).space(p, target)
    found = space.candidates([tile_config(config_values())], 400)
    assert {c.values[key] for c in space.candidates()} == legal
    assert len({c.name for c in found}) == len(found) <= 400
    twice = [
        tile_config(config_values(k=128)),
        tile_config(config_values(k=256)),
        tile_config({**config_values(k=128), "SPLIT_K": 1}),
    ]
    assert len(space.distinct(twice)) == (1 if p.scale == "block" else 2), "vLLM cuts a step to the block"


def test_large_m_share_their_kernels_and_the_weights_to_compile_with_are_few() -> None:
    def alike(m: int, **changes: Any) -> MoeProblem:
        return MoeSource("", H200).compile_problem(problem("zipf1", **{"token": m, "expert": 64, **changes}))

    assert {alike(m).m for m in (512, 1024, 4096)} == {256}
    assert [alike(m).m for m in (1, 64, 515, 1537)] == [1, 64, 259, 257]
    assert {alike(m).label for m in (1, 512)} == {"uniform"}
    large = alike(512, model_dim=7168, inter_dim=2048, expert=256)
    assert 256 > large.stored > 1
    assert large.stored * 7168 * 2048 >= 1 << 31


class Two:
    """A kernel source of calls that make two products, of which the second is much larger."""

    bytes = 1

    def output(self) -> Any:
        return torch.full((2 * 4 + 100 * 4,), float("nan"), dtype=torch.bfloat16)

    def reference(self) -> Any:
        return torch.ones(4, 2), torch.full((4, 100), 3.0)

    def launch(self, problem: Any, candidate: tuple[float, float], operands: Any, out: Any) -> list[Any]:
        return [lambda: (out[:8].fill_(candidate[0]), out[8:].fill_(candidate[1]))] * len(operands)

    def inputs(self, *_: Any) -> Two:
        return self

    enter = operands = inputs

    def needed_bytes(self, _: Any) -> int:
        return 1


@pytest.mark.parametrize(("made", "err"), [((1.0, 3.0), 0.0), ((2.0, 3.0), 1.0), ((1.0, 1.0), 1.0)])
def test_a_wrong_product_is_not_made_up_for_by_a_larger_one(made: tuple[float, float], err: float) -> None:
    from worker.tuners.search.device_bench import DeviceBench

    source: Any = Two()
    bench = DeviceBench(source, interpreted=True)
    assert bench.prepare(problem(), 0, 0, lambda: None) == ""
    candidate: Any = made
    assert bench.check(bench.load(candidate)) == err


CODE = """
import json, sys
from dataclasses import replace
import torch
from worker.triton_configs.engine_package import EngineDevice
from worker.tuners.common.operands import error_ratio, poison
from worker.tuners.search.compiling import compile_candidate
from worker.tuners.search.target import datasheet_target
from worker.tuners.search.tile_config import tile_config
from worker.tuners.engines.moe import MoeSource
what, root, jobs = sys.argv[1:]
for name, arch, key, values, dtype in json.loads(jobs):
    target = datasheet_target(arch)
    source = MoeSource(root, EngineDevice(name, arch))
    p = source.problem("fmoe", key, target.gfx)
    p = replace(p, dtype=dtype or p.dtype, label="zipf1")
    if what == "compile":
        status, detail, f = compile_candidate(source, target, source.job(p, tile_config(values)))
        print(json.dumps([status, detail, f and [f.shared_bytes, f.vgprs, f.spills, repr(f.same_as)]]))
        continue
    sets = [source.inputs(p, torch.device("cpu"), 0, draw) for draw in (0, 1)]
    sets.append(sets[1].copy())
    out, errs = sets[0].output(), []
    for call, made in zip(source.launch(p, tile_config(values), [source.operands(s) for s in sets], out), sets):
        poison([out])
        call()
        one, two = made.reference()
        errs += [error_ratio(out[: one.numel()].view_as(one), one), error_ratio(out[one.numel() :].view_as(two), two)]
    print(json.dumps(errs))
"""
AMD = {"waves_per_eu": 2, "matrix_instr_nonkdim": 16}


def asked(what: str, folder: Path, *jobs: tuple[EngineDevice, dict[str, Any], dict[str, int], str]) -> list[Any]:
    """Run the code above: an answer for each (device, key, config, dtype), all in one process."""
    documents = [(device.name, device.arch, *job) for device, *job in jobs]
    words = (what, str(tree("vllm")), json.dumps(documents))
    return answers_of(CODE, *words, cache=folder / "cache", interpreted=what == "run")


def test_both_products_of_the_engines_kernel_are_right_for_each_copy(tmp_path: Path) -> None:
    """The interpreter takes bfloat16 for integers: the path without scales is run in float32."""
    jobs: list[tuple[EngineDevice, dict[str, Any], dict[str, int], str]] = []
    for quant, dtype, device in ((BF16, "float32", H200), (TENSOR, "", H200), (BLOCK, "", H200), (BLOCK, "", MI355X)):
        more = AMD if device is MI355X else {}
        jobs.append((device, {**KEY, **quant, "token": 1}, config_values(**more), dtype))
        jobs.append((device, {**KEY, **quant, "token": 3}, config_values(8, 128, 64, GROUP_SIZE_M=16, **more), dtype))
    assert asked("run", tmp_path, *jobs) == [[0.0] * 6] * len(jobs)


def test_one_job_compiles_both_products_for_a_chip_that_is_not_here(tmp_path: Path) -> None:
    def job(device: EngineDevice, quant: dict[str, str], config: dict[str, int]) -> Any:
        key = {**KEY, **quant, "model_dim": 2048, "inter_dim": 768, "expert": 128, "topk": 8, "token": 512}
        return device, key, config | (AMD if device is MI355X else {}), ""

    jobs: list[Any] = []
    for device, quant in ((H200, BF16), (MI355X, BLOCK)):
        configs = (config_values(), config_values(GROUP_SIZE_M=16), config_values(64, 128, 64, num_stages=3))
        jobs += [job(device, quant, config) for config in configs]
    found = asked("compile", tmp_path, *jobs, job(H200, BLOCK, config_values()), job(MI355X, BF16, config_values()))
    assert [status for status, _, _ in found] == ["ok"] * 8, found
    for first in (0, 3):
        plain, grouped, large = (facts for _, _, facts in found[first : first + 3])
        assert plain[3] != grouped[3]
        assert large[0] > 3 * (64 + 128) * 64
    kernels = list(tmp_path.glob("cache/**/fused_moe_kernel.json"))
    assert len(kernels) == 16


def test_a_file_is_tuned_over_all_routings(tmp_path: Path) -> None:
    root = tmp_path / "engine"
    shutil.copytree(tree("vllm"), root, ignore=shutil.ignore_patterns("*.json"))
    key = {**KEY, "token": 1, "model_dim": 128, "expert": 4, "topk": 1}
    name = "E=4,N=128,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
    folder = root / "vllm" / "model_executor" / "layers" / "fused_moe" / "configs"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps({"1": config_values(), "24": config_values(32, 128)}))
    options = {"root": str(root), "captured": "[[3, 0, 1, 0]]"}
    code, output, records = run_group(tmp_path, "vllm", "fmoe", [key, {**key, "topk": 9}], options)
    assert code == 1, f"a shape failed: {output}"
    (failed,) = of_type(records, "shape_failed")
    assert failed["shape"] == 2
    assert "topk is 9, of 4 experts" in failed["detail"]
    (tuned,) = [r["row"] for r in of_type(records, "shape_tuned")]
    assert tuned["errRatio"] == 0.0
    points = [PointRecord.from_document(r["point"]) for r in records if r["type"] == "point_timed"]
    assert [(point.m, point.label) for point in points] == [(1, label) for label in (*EXPONENTS, "captured")]
    assert {point.file["file"] for point in points} == {name}
    assert points[0].file["layer"] == {
        "op": "moe", "n": 128, "k": 128, "e": 4, "topk": 1, "dtype": "fp8_w8a8", "block": [128, 128]
    }  # fmt: skip
    assert all(point.today.values == config_values() and point.today.us > 0 for point in points)
    assert {time.err_ratio for point in points for time in point.times} == {0.0}
    assert set(json.loads(tuned["triton_config"])) == {"values"}
    rows = Counter(r["row"]["kernelName"] for r in of_type(records, "row") if r["shape"] == 1)
    assert set(rows.values()) == {1}, "rows are of one routing"
