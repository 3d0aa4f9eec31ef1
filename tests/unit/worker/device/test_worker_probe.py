"""Probe of a machine: CPUs and GPUs from the kernel's files, and this one for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.workernode import REPO, interpreters
from worker.device.probe import cpu_gfx, cpu_model, find_gpus, gfx_of_target, identify, parse_nvidia_smi, visible


@pytest.mark.parametrize(
    ("machine", "text", "gfx"),
    [
        ("x86_64", "flags\t\t: fpu sse2 avx avx2 avx512f amx_tile\n", "cpu-x86_64-amx"),
        ("x86_64", "flags\t\t: fpu sse2 avx avx2 avx512f avx512_bf16\n", "cpu-x86_64-avx512"),
        ("x86_64", "flags\t\t: fpu sse2 avx avx2\n", "cpu-x86_64-avx2"),
        ("x86_64", "flags\t\t: fpu sse2\n", "cpu-x86_64-sse2"),
        ("aarch64", "Features\t: fp asimd sve\n", "cpu-aarch64-sve"),
        ("aarch64", "Features\t: fp asimd\n", "cpu-aarch64-neon"),
        ("riscv64", "isa\t: rv64imafdc\n", "cpu-riscv64"),
        ("x86_64", "", "cpu-x86_64"),
    ],
)
def test_a_cpu_is_named_as_one(tmp_path: Path, machine: str, text: str, gfx: str) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n{text}\nprocessor\t: 1\nflags\t\t: amx_tile\n")
    assert cpu_gfx(info, machine) == gfx
    assert cpu_model(info) == "Some CPU @ 2 GHz"
    assert cpu_gfx(tmp_path / "none", machine) == f"cpu-{machine}"


@pytest.mark.parametrize(
    ("version", "gfx"),
    [(90500, "gfx950"), (90402, "gfx942"), (90010, "gfx90a"), (110000, "gfx1100"), (120001, "gfx1201")],
)
def test_targets_have_names(version: int, gfx: str) -> None:
    assert gfx_of_target(version) == gfx


def kfd(root: Path) -> Path:
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    for node, name, properties in (
        ("0", "", "cpu_cores_count 128\nsimd_count 0\nsimd_per_cu 0\ngfx_target_version 0\n"),
        ("10", "b", "simd_count 1024\nsimd_per_cu 4\ngfx_target_version 90500\nlocal_mem_size -1\n"),
        ("2", "a", "simd_count 1216\nsimd_per_cu 4\ngfx_target_version 90402\n"),
        ("3", "broken", "simd_count many\n"),
    ):
        (nodes / node).mkdir(parents=True)
        (nodes / node / "properties").write_text(properties)
        (nodes / node / "name").write_text(f"{name}\n")
    bank = nodes / "2" / "mem_banks" / "0"
    bank.mkdir(parents=True)
    (bank / "properties").write_text(f"heap_type 2\nsize_in_bytes {192 * 2**30}\nflags 0\n")
    (nodes / "4").mkdir()
    return root


def test_amd_gpus_are_read_from_the_kernel(tmp_path: Path) -> None:
    gpus = find_gpus(kfd(tmp_path))
    assert gpus == [
        {"vendor": "amd", "gfx": "gfx942", "cu_num": 304, "device": "a", "memory": 192 * 2**30},
        {"vendor": "amd", "gfx": "gfx950", "cu_num": 256, "device": "b", "memory": None},
    ]


def test_nvidia_gpus_are_read_from_its_tool() -> None:
    text = "NVIDIA H200, 9.0, 143771\nNVIDIA A100-SXM4-80GB, 8.0, 81920\nFailed to initialize\n"
    assert parse_nvidia_smi(text) == [
        {"vendor": "nvidia", "gfx": "sm_90", "cu_num": None, "device": "NVIDIA H200", "memory": 143771 * 2**20},
        {
            "vendor": "nvidia", "gfx": "sm_80", "cu_num": None, "device": "NVIDIA A100-SXM4-80GB",
            "memory": 81920 * 2**20,
        },
    ]  # fmt: skip


def test_the_environment_hides_gpus(tmp_path: Path) -> None:
    gpus = find_gpus(kfd(tmp_path))
    assert visible(gpus, {}) == gpus
    assert visible(gpus, {"HIP_VISIBLE_DEVICES": "1"}) == gpus[1:]
    assert visible(gpus, {"ROCR_VISIBLE_DEVICES": "1,0", "HIP_VISIBLE_DEVICES": "0"}) == gpus[1:]
    assert visible(gpus, {"HIP_VISIBLE_DEVICES": ""}) == []
    assert visible(gpus, {"HIP_VISIBLE_DEVICES": "-1"}) == []
    assert visible(gpus, {"HIP_VISIBLE_DEVICES": "GPU-abc"}) == gpus
    assert visible(gpus, {"CUDA_VISIBLE_DEVICES": ""}) == gpus


def test_this_machine() -> None:
    facts = identify({})
    assert facts["cores"] == len(os.sched_getaffinity(0))
    assert facts["memory"] > 2**28
    assert len(facts["gpus"]) == len(find_gpus())
    if not facts["gpus"]:
        assert facts["gfx"].startswith("cpu-")
        assert facts["cu_num"] == facts["cores"]
    assert facts["device"]
    assert len(json.dumps(facts)) < 16_000


def test_the_verb_prints_json() -> None:
    for python in interpreters().values() or [sys.executable]:
        argv = [python, "-m", "worker", "probe"]
        text = subprocess.run([*argv, "--json"], cwd=REPO, capture_output=True, text=True, check=True).stdout
        assert json.loads(text)["gfx"] == identify({})["gfx"]
