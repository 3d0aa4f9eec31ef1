"""Our Triton kernels compile for sm_90 and gfx950 without a device, and take no more than legality assumed."""

from __future__ import annotations

import importlib
import pickle
import random
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from tests.support.triton_interpreted import A8, A16, BATCHED, BATCHED8, BLOCKS, MX
from worker.families.triton_config import KernelConfig, from_name
from worker.tuners.common.problem import Problem
from worker.tuners.search.target import Target, known
from worker.tuners.triton import launch, space
from worker.tuners.triton.model import shared_bytes

NVIDIA, AMD = known(90), known("gfx950")
Compile = Callable[[Problem, KernelConfig, Target], Any]


def large(p: Problem) -> Problem:
    return replace(p, m=512, n=4096, k=4096)


FAMILIES = {
    "a16w16": (large(A16), KernelConfig(128, 256, 64, num_warps=8, persistent=True)),
    "a8w8": (replace(A8, n=4096, k=4096), KernelConfig(16, 64, 256, split_k=4, swap=True)),
    "a8w8_blockscale": (large(BLOCKS), KernelConfig(64, 128, 128)),
    "a4w4_blockscale": (large(MX), KernelConfig(64, 128, 128, num_stages=2)),
    "batched_bf16": (BATCHED, KernelConfig(32, 64, 64, split_k=2)),
    "batched_a8w8": (BATCHED8, KernelConfig(64, 64, 64)),
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """Compiles through a plan that went through pickle, as on its way to a compile process."""
    cache = tmp_path_factory.mktemp("triton")

    def go(p: Problem, c: KernelConfig, target: Target) -> Any:
        assert space.why_illegal(p, c, target) is None
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_CACHE_DIR", str(cache))
            return launch.compile_plan(pickle.loads(pickle.dumps(launch.plan(p, c, target))), target)

    return go


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_compiles_for_hopper(compiled: Compile, family: str) -> None:
    p, c = FAMILIES[family]
    direct = replace(c, descriptor=space.why_illegal(p, replace(c, descriptor=True), NVIDIA) is None)
    kernel = compiled(p, direct, NVIDIA)
    assert kernel.metadata.shared <= shared_bytes(p, direct, NVIDIA)
    text = kernel.asm["ptx"]
    assert ("cp.async.bulk.tensor" in text) == direct.descriptor
    if p.m > 32 or c.swap or p.dtype == "int8":
        assert "wgmma.mma_async" in text
    if p.scale == "row" and c.swap:
        assert re.search(r"wgmma\.\S+e4m3\.e4m3", text)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_compiles_for_mi355x(compiled: Compile, family: str) -> None:
    p, c = FAMILIES[family]
    c = replace(c, num_stages=2)
    kernel = compiled(p, c, AMD)
    assert kernel.metadata.shared <= shared_bytes(p, c, AMD)
    text = kernel.asm["amdgcn"]
    assert "v_mfma_" in text
    if p.scale == "mx":
        assert re.search(r"v_mfma_scale_f32_\d+x\d+x\d+_f8f6f4", text)
    assert not re.search(r"\.vgpr_spill_count:\s*[1-9]", text)


SAMPLED = (A16, large(A16), replace(large(A16), outdtype="float32"), large(A8), BLOCKS, MX)


@pytest.mark.full
@pytest.mark.parametrize("target", [NVIDIA, AMD], ids=lambda t: t.gfx)
def test_no_candidate_takes_more_shared_memory_than_was_assumed(compiled: Compile, target: Target) -> None:
    for i, p in enumerate(SAMPLED):
        c = random.Random(i).choice(space.candidates(p, target))
        assert compiled(p, c, target).metadata.shared <= shared_bytes(p, c, target), (p, c.name)


def test_one_kernel_serves_all_m_splits_and_orders() -> None:
    c = KernelConfig(32, 64, 64, split_k=2)
    others = [launch.plan(replace(A16, m=m), replace(c, split_k=s, group_m=g), NVIDIA) for m, s, g in
              ((1, 2, 1), (19, 2, 8), (4000, 3, 4))]  # fmt: skip
    assert len({p.compile_key for p in others}) == 1
    assert launch.plan(A16, replace(c, num_stages=2), NVIDIA).compile_key != others[0].compile_key


def test_what_takes_too_much_is_a_resource_error(compiled: Compile) -> None:
    small = replace(NVIDIA, shared_bytes=16384)
    p, c = large(A16), KernelConfig(64, 64, 64)
    made = launch.plan(p, c, NVIDIA)
    compiled(p, c, NVIDIA)
    with pytest.raises(launch.CompileError, match="shared memory") as e:
        launch.compile_plan(made, small)
    assert e.value.kind == "resource"


def test_what_the_compiler_refuses_is_an_error_with_its_reason() -> None:
    made = launch.plan(A16, KernelConfig(32, 64, 48), NVIDIA)
    with pytest.raises(launch.CompileError, match="power of 2") as e:
        launch.compile_plan(made, NVIDIA)
    assert e.value.kind == "error"


@pytest.mark.parametrize(
    "name",
    [
        "128x256x64_g8_k1_w8_s4_tma",
        "128x128x64_g8_k3_w8_s3_tma",
        "64x256x64_g8_k1_w8_s4_tma",
        "64x128+32x64_g8_k2_w4_s4_tma",
    ],
)
def test_matrix_instructions_are_not_serialized(compiled: Compile, tmp_path: Path, name: str) -> None:
    """ptxas says so (C7515) where the loop over K can be passed by; with Triton 3.6 it did, 3.9 finds out by itself."""
    kernel = compiled(large(A16), from_name(f"triton_{name}"), NVIDIA)
    text, out = tmp_path / "kernel.ptx", tmp_path / "kernel.cubin"
    text.write_text(re.sub(r"\.version [\d.]+", ".version 8.6", kernel.asm["ptx"]))  # any ptxas that is there takes it
    ptxas = str(importlib.import_module("triton").knobs.nvidia.ptxas.path)
    told = subprocess.run([ptxas, "-v", "--gpu-name=sm_90a", str(text), "-o", str(out)], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert "registers" in told.stdout + told.stderr
    assert "serialized" not in told.stdout + told.stderr
