"""Problems, candidates, legality, the analytic model and the operands of the Triton tuner. No kernel is compiled."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from worker.families import computed_by
from worker.families.triton_config import KernelConfig, from_name
from worker.tuners.common.formats import E2M1
from worker.tuners.common.operands import widen
from worker.tuners.common.problem import Problem, UnsupportedError, parse
from worker.tuners.search.target import Target, known
from worker.tuners.triton import launch, model, operands, space
from worker.tuners.triton.model import MAX_REGISTERS, occupancy, registers, shared_bytes

CPU = torch.device("cpu")
NVIDIA, AMD, OLDER_AMD = known(90), known("gfx950"), known("gfx942")
BF16 = Problem("a16w16", 1, 64, 4096, 4096, "bfloat16")
FP8 = Problem("a8w8", 1, 64, 4096, 4096, "float8_e4m3fn", scale="row")
FAMILIES = computed_by("triton")
KEYS: dict[str, dict[str, int | str]] = {f: {"B": 3, "M": 19, "N": 160, "K": 320} for f in FAMILIES}
POWERS = st.sampled_from([16, 32, 64, 128, 256])
CANDIDATES = st.builds(
    KernelConfig, POWERS, POWERS, POWERS, st.integers(1, 64), st.integers(1, 64), st.booleans(), st.booleans(),
    st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 9), st.integers(0, 4), st.sampled_from([0, 16, 32]),
    st.sampled_from([1, 2]), st.booleans(),
)  # fmt: skip


@given(CANDIDATES)
def test_a_name_says_all_of_a_candidate(c: KernelConfig) -> None:
    assert from_name(c.name) == c
    assert c.name.isascii()
    assert "," not in c.name


@pytest.mark.parametrize("text", ["", "triton_", "triton_16x16x16", "triton_16x16x16_g8_k1_w4_s3_", "torch_mm_wnk"])
def test_another_text_is_no_name(text: str) -> None:
    with pytest.raises(ValueError, match="no name"):
        from_name(text)


def test_each_family_has_its_formats() -> None:
    found = {f: parse("triton", f, KEYS[f]) for f in FAMILIES}
    assert {f: (p.b, p.dtype, p.scale, p.outdtype) for f, p in found.items()} == {
        "a16w16": (1, "bfloat16", "none", "bfloat16"),
        "a8w8": (1, "int8", "row", "bfloat16"),
        "a8w8_blockscale": (1, "float8_e4m3fn", "block", "bfloat16"),
        "a4w4_blockscale": (1, "float4_e2m1fn_x2", "mx", "bfloat16"),
        "batched_bf16": (3, "bfloat16", "none", "bfloat16"),
        "batched_a8w8": (3, "int8", "row", "bfloat16"),
    }
    assert parse("triton", "a8w8_blockscale", KEYS["a8w8"], OLDER_AMD.fp8).dtype == "float8_e4m3fnuz"
    assert found["batched_bf16"].flops == 2 * 3 * 19 * 160 * 320
    assert found["a4w4_blockscale"].moved_bytes == (19 + 160) * 320 // 2 + 19 * 160 * 2
    assert found["a8w8_blockscale"].scale_bytes == 4 * 3 * (19 + 2)


@pytest.mark.parametrize(
    ("family", "change", "says"),
    [
        ("fmoe", {}, "no candidates for family fmoe"),
        ("a16w16", {"M": 0}, "M is 0"),
        ("a16w16", {"K": 2**31}, "K is 2147483648"),
        ("a16w16", {"N": "many"}, "no whole number N"),
        ("batched_bf16", {"B": "x"}, "no whole number B"),
        ("a16w16", {"dtype": "torch.float32"}, "dtype is 'torch.float32'"),
        ("a16w16", {"bpreshuffle": "True"}, "bpreshuffle is True"),
        ("a16w16", {"bias": "maybe"}, "neither True nor False"),
        ("a8w8", {"q_dtype_w": "torch.int4"}, "q_dtype_w is 'torch.int4'"),
        ("a4w4_blockscale", {"K": 48}, "multiple of 32"),
    ],
)
def test_what_our_kernels_do_not_compute_says_so(family: str, change: dict[str, int | str], says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        parse("triton", family, {"M": 8, "N": 8, "K": 64, "B": 2} | change)


@pytest.mark.parametrize("target", [NVIDIA, AMD, OLDER_AMD], ids=lambda t: t.gfx)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_shape_has_legal_candidates(family: str, target: Target) -> None:
    for m, n, k in ((1, 1, 32), (7, 33, 96), (64, 7168, 2048), (300, 1000, 4096), (8192, 8192, 8192)):
        p = parse("triton", family, {"B": 2, "M": m, "N": n, "K": k, "q_dtype_w": f"torch.{target.fp8}"}, target.fp8)
        found = space.candidates(p, target)
        assert found, (p, target.gfx)
        assert len(found) == len(set(found)) <= 400
        assert len({c.name for c in found}) == len(found)
        for c in found:
            assert space.why_illegal(p, c, target) is None
            assert shared_bytes(p, c, target) <= target.shared_bytes
            assert registers(p, c, target) <= MAX_REGISTERS[target.backend]
            assert occupancy(p, c, target) >= 1


@pytest.mark.parametrize(
    ("p", "change", "target", "says"),
    [
        (BF16, {"block_m": 48}, NVIDIA, "powers of two"),
        (BF16, {"block_m": 256, "block_n": 256, "num_stages": 4}, NVIDIA, "shared memory"),
        (BF16, {"block_m": 256, "block_n": 256, "block_k": 32, "num_stages": 2}, NVIDIA, "registers"),
        (BF16, {"split_k": 65}, NVIDIA, "K has 64 blocks"),
        (BF16, {"split_k": 2, "persistent": True}, NVIDIA, "persistent"),
        (BF16, {"descriptor": True}, AMD, "no tensor descriptors"),
        (replace(BF16, k=4097), {"descriptor": True}, NVIDIA, "no multiple of 16"),
        (replace(BF16, m=1 << 20, n=1 << 20), {"split_k": 2}, NVIDIA, "counts 65536 tiles"),
        (FP8, {"block_k": 16}, NVIDIA, "32 bytes"),
        (FP8, {}, OLDER_AMD, "gfx942 does not multiply"),
        (replace(FP8, dtype="float8_e4m3fnuz"), {}, NVIDIA, "gfx942's"),
        (FP8, {}, replace(NVIDIA, arch=80), "sm_80 does not multiply"),
        (replace(FP8, scale="block"), {"block_k": 64}, NVIDIA, "block_k 128"),
        (replace(BF16, b=70000), {}, NVIDIA, "B is 70000"),
    ],
)
def test_what_cannot_run_says_why(p: Problem, change: dict[str, int | bool], target: Target, says: str) -> None:
    assert says in (space.why_illegal(p, replace(KernelConfig(64, 64, 64), **change), target) or "")  # type: ignore[arg-type]


def test_order_is_by_estimate() -> None:
    listed = space.candidates(BF16, NVIDIA)
    shuffled = random.Random(0).sample(listed, len(listed))
    plain = model.order(BF16, NVIDIA, shuffled)
    assert plain == model.order(BF16, NVIDIA, listed)
    estimates = [model.estimate_us(BF16, c, NVIDIA) for c in plain]
    assert estimates == sorted(estimates)


def test_the_model_knows_what_costs() -> None:
    def best(p: Problem) -> KernelConfig:
        return model.order(p, NVIDIA, space.candidates(p, NVIDIA))[0]

    decode, large = replace(BF16, m=16, n=1536, k=7168), replace(BF16, m=8192, n=8192, k=8192)
    assert best(decode).split_k > 1  # 24 tiles of 64 would leave 108 of 132 multiprocessors idle
    assert best(large).persistent
    assert best(large).block_m * best(large).block_n >= 128 * 128
    for p in (decode, large):  # never below what memory or the matrix units take
        floor = max(p.moved_bytes / (NVIDIA.memory_gbs * 1e3), p.flops / (NVIDIA.peak(p.dtype) * 1e6))
        assert model.estimate_us(p, best(p), NVIDIA) > floor


@given(st.integers(1, 300), st.integers(1, 5000), st.integers(1, 5000), st.integers(0, 10_000))
def test_a_plan_covers_the_output(m: int, n: int, k: int, pick: int) -> None:
    p = replace(BF16, m=m, n=n, k=k)
    listed = space.candidates(p, NVIDIA)
    c = listed[pick % len(listed)]
    made = launch.plan(p, c, NVIDIA)
    tiles = -(-m // c.block_m) * -(-n // c.width)
    assert made.grid == ((min(made.grid[0], tiles), 1, 1) if c.persistent else (tiles, c.split_k, 1))
    assert (made.workspace_bytes > 0) == (c.split_k > 1)
    assert made.constexprs["EVEN_K"] == (k % c.block_k == 0)
    assert ("K" in made.aligned) == (k % 16 == 0)


def test_block_scales_mean_what_they_say() -> None:
    p = Problem("a8w8_blockscale", 1, 3, 130, 200, "float8_e4m3fn", scale="block")
    o = operands.make(p, CPU, 1)
    assert o.x_scale is not None
    assert o.w_scale is not None
    assert (o.x_scale.shape, o.w_scale.shape) == ((3, 2), (2, 2))
    got = operands.reference(o)
    for m, n in ((0, 0), (2, 127), (1, 128), (2, 129)):
        parts = [float(o.x[m, i].float() * o.x_scale[m, i // 128] * o.w[n, i].float() * o.w_scale[n // 128, i // 128])
                 for i in range(p.k)]  # fmt: skip
        assert float(got[m, n]) == pytest.approx(sum(parts), rel=1e-4, abs=1e-5)


def test_mxfp4_and_rows_mean_what_they_say() -> None:
    o = operands.make(Problem("a4w4_blockscale", 1, 2, 3, 64, "float4_e2m1fn_x2", scale="mx"), CPU, 1)
    assert o.x_scale is not None
    wide = widen(o.problem, o.x, o.x_scale, blocked=False)
    for i in range(64):
        code = int(o.x[1, i // 2]) >> (4 * (i % 2)) & 15
        assert float(wide[1, i]) == E2M1[code] * 2.0 ** (int(o.x_scale[1, i // 32]) - 127)
    p = Problem("batched_a8w8", 2, 3, 4, 32, "int8", scale="row")
    o = operands.make(p, CPU, 1)
    assert o.x_scale is not None
    assert o.w_scale is not None
    exact = o.x[1, 2].long() @ o.w[1, 3].long()
    got = float(operands.reference(o)[1, 2, 3])
    assert got == pytest.approx(float(exact * o.x_scale[1, 2] * o.w_scale[1, 3]), rel=1e-5)


def test_a_group_shares_w_and_the_checked_x_is_not_timed() -> None:
    one = operands.make(BF16, CPU, 1)
    other = operands.make(replace(BF16, m=3), CPU, 1)
    assert torch.equal(one.w, other.w)
    assert operands.make(replace(BF16, m=3), CPU, 1, weights=one).w is one.w
    assert not torch.equal(one.x, operands.make(BF16, CPU, 1, draw=1).x)
    assert not torch.equal(one.w, operands.make(BF16, CPU, 2).w)


def test_copies_span_what_was_asked_within_what_there_is() -> None:
    o = operands.make(replace(BF16, n=64, k=64), CPU, 1)
    assert o.nbytes == 2 * 64 * 64 * 2
    assert len(operands.rotation(o, 10 * o.nbytes, 1 << 30)) == 10
    few = operands.rotation(o, 10 * o.nbytes, 6 * o.nbytes)
    assert len(few) == 3
    assert len({t.data_ptr() for copy in few for t in copy.tensors}) == 6
    assert all(torch.equal(c.w, o.w) for c in few)


def test_a_call_needs_its_workspace_and_alignment() -> None:
    o = operands.make(BF16, CPU, 1)
    out = operands.out_like(BF16, CPU)
    assert bool(torch.isnan(out).all())
    made = launch.plan(BF16, KernelConfig(64, 64, 64, split_k=2), NVIDIA)
    with pytest.raises(ValueError, match=f"{made.workspace_bytes} bytes"):
        launch.bind(made, None, o, out, torch.zeros(100, dtype=torch.uint8))
    made = launch.plan(BF16, KernelConfig(64, 64, 64), NVIDIA)
    shifted = torch.zeros(64 * 4096 + 1, dtype=torch.bfloat16)[1:].view(64, 4096)
    with pytest.raises(ValueError, match="x is not contiguous and aligned"):
        launch.bind(made, None, replace(o, x=shifted), out)
