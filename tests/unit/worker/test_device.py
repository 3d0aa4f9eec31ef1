"""Identity and conditions of machines, from files of the kernel and of nvidia-smi, into records and the ledger.

The AMD trees are written by hand after the kernel's documented formats, the NVIDIA lines were recorded on an H200
(names changed, the second line altered); nothing here was recorded on an MI355X.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kits.worker import fault, interpreters, node
from tests.paths import ROOT
from tests.standins.sysfs import DATA, put, unfold
from worker import conditions, device

UMC = "sys/devices/pci0000:00/0000:05:00.0/ras/umc_err_count"
HIP, ROCR = "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("machine", "text", "gfx"),
    [
        ("x86_64", "flags\t\t: fpu sse2 avx avx2 avx512f amx_tile\n", "cpu-x86_64-amx"),
        ("x86_64", "flags\t\t: fpu sse2 avx avx2 avx512f avx512_bf16\n", "cpu-x86_64-avx512"),
        ("aarch64", "Features\t: fp asimd sve\n", "cpu-aarch64-sve"),
        ("riscv64", "isa\t: rv64imafdc\n", "cpu-riscv64"),
        ("x86_64", "", "cpu-x86_64"),
    ],
)
def test_a_cpu_is_named_as_one(tmp_path: Path, machine: str, text: str, gfx: str) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n{text}\nprocessor\t: 1\nflags\t\t: amx_tile\n")
    assert (device.cpu_gfx(info, machine), device.cpu_model(info)) == (gfx, "Some CPU @ 2 GHz")
    assert device.cpu_gfx(tmp_path / "none", machine) == f"cpu-{machine}"


def test_gpus_are_read_from_the_kernel_and_the_environment_hides_some(tmp_path: Path) -> None:
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    for number, name, properties in (
        ("0", "", "cpu_cores_count 128\\nsimd_count 0\\nsimd_per_cu 0\\ngfx_target_version 0"),
        ("10", "b", "simd_count 1024\\nsimd_per_cu 4\\ngfx_target_version 90500\\nlocal_mem_size -1"),
        ("2", "a", "simd_count 1216\\nsimd_per_cu 4\\ngfx_target_version 90402"),
        ("3", "broken", "simd_count many"),
    ):
        put(nodes / number / "properties", properties)
        put(nodes / number / "name", name)
    put(nodes / "2/mem_banks/0/properties", f"heap_type 2\\nsize_in_bytes {192 * 2**30}\\nflags 0")
    gpus = device.find_gpus(tmp_path)
    assert gpus == [
        {"vendor": "amd", "gfx": "gfx942", "cu_num": 304, "device": "a", "memory": 192 * 2**30},
        {"vendor": "amd", "gfx": "gfx950", "cu_num": 256, "device": "b", "memory": None},
    ]
    assert [device.gfx_of_target(v) for v in (90010, 110000, 120001)] == ["gfx90a", "gfx1100", "gfx1201"]
    for env, left in (
        ({}, gpus), ({HIP: "1"}, gpus[1:]), ({ROCR: "1,0", HIP: "0"}, gpus[1:]), ({HIP: ""}, []), ({HIP: "-1"}, []),
        ({HIP: "GPU-abc"}, gpus), ({"CUDA_VISIBLE_DEVICES": ""}, gpus),
    ):  # fmt: skip
        assert device.visible_gpus(gpus, env) == left, env


def test_the_verb_prints_this_machine_as_json_under_every_python() -> None:
    here = device.identify({})
    assert here["cores"] == len(os.sched_getaffinity(0))
    assert here["gpus"] or (here["gfx"].startswith("cpu-") and here["cu_num"] == here["cores"])
    for python in interpreters().values() or [sys.executable]:
        argv = [python, "-m", "worker", "probe", "--json"]
        text = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert json.loads(text)["gfx"] == here["gfx"]


def survey(root: Path) -> list[dict[str, Any]]:
    return [conditions.amd_gpu(d) for d in conditions.amd_devices(root)]


def test_amd_gpus_whole_partitioned_and_with_sensors_that_fail(tmp_path: Path) -> None:
    root = unfold("mi355x", tmp_path / "whole")
    first, second = survey(root)
    assert first == {
        "pci": "0000:05:00.0", "id": "7ab4e1c02d9f3361", "temperature_c": {"junction": 68.0, "mem": 61.0},
        "power_w": 987.0, "power_cap_w": 1400.0, "clock_mhz": 2395.0, "memory_clock_mhz": 900.0,
        "errors": {"uncorrectable": {"total": 0}},
    }  # fmt: skip
    assert (second["pci"], second["errors"]["uncorrectable"]) == ("0000:85:00.0", {"total": 2, "umc": 2})
    (gpu := root / UMC).write_bytes(b"\xff\xfe ue one")
    (gpu.parents[1] / "hwmon/hwmon6/freq1_input").write_text("nonsense\n")
    (gpu.parents[1] / "hwmon/hwmon6/temp2_input").unlink()
    damaged = survey(root)[0]
    assert {n: v for n, v in damaged.items() if first[n] != v} == {"temperature_c": {"mem": 61.0}}
    assert set(first) - set(damaged) == {"clock_mhz"}
    put(root / "sys/class/kfd/kfd/topology/nodes/2/properties", "")  # one that a container may not open
    assert [r["pci"] for r in survey(root)] == ["0000:85:00.0"]
    one, other = survey(unfold("partitioned", tmp_path / "partitioned"))
    assert (one["pci"], one) == ("0000:05:00.0", other)


@pytest.mark.parametrize(("said", "version"), [("580.95.05\n580.95.05\n", "580.95.05"), ("", "6.14.14")])
def test_the_drivers_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, version: str) -> None:
    put(tmp_path / "sys/module/amdgpu/version", "6.14.14\n")
    monkeypatch.setattr(device, "nvidia_smi", lambda fields: said)
    assert device.driver_version(tmp_path) == version


def test_other_machines(tmp_path: Path) -> None:
    reading = {"source": "cpu", "clock_mhz": 3000.0, "temperature_c": {"coretemp": 63.5}}
    assert conditions.Gauge({}, unfold("cpu", tmp_path)).read() == reading
    (gpu,) = device.parse_nvidia_smi("NVIDIA H200, 9.0, 143771\nFailed to initialize\n")
    assert (gpu["gfx"], gpu["cu_num"], gpu["device"], gpu["memory"]) == ("sm_90", None, "NVIDIA H200", 143771 * 2**20)
    first, second = conditions.parse_nvidia((DATA / "nvidia-smi.csv").read_text())
    assert first == {
        "pci": "0000:1b:06.0", "id": "GPU-00000000-1111-2222-3333-444444444444",
        "temperature_c": {"gpu": 33, "memory": 37}, "power_w": 125.23, "power_cap_w": 700, "clock_mhz": 1980,
        "memory_clock_mhz": 3201, "errors": {"uncorrectable": {"total": 0}},
    }  # fmt: skip
    assert (second["temperature_c"], second["errors"]) == ({"gpu": 71}, {"uncorrectable": {"total": 2}})
    assert conditions.parse_nvidia("No devices were found\n0, 1, 2\n,,,,,,,,") == []


def test_an_agent_records_conditions_and_says_which_errors_rose(tmp_path: Path) -> None:
    root = unfold("mi355x", tmp_path / "sysfs")
    options = {"seconds_per_shape": 0.5, **fault("abort", match={"group": "g1"}, after_rows=3)}
    with node(tmp_path, idle_exit_s=0.5, options=options) as n:
        n.put("g1-1")
        n.put("g2-1")
        n.start(env={**os.environ, conditions.ROOT_ENV: str(root), HIP: "0"})
        n.wait_record("shape_started")
        put(root / UMC, "ue: 2\\nce: 9")
        first, second = n.wait_record("attempt_ended"), n.wait_record("attempt_ended", count=2)
    begun = n.records("0", "attempt_started")[0]
    assert begun["conditions"]["pci"] == first["conditions"]["pci"] == "0000:05:00.0"
    assert first["detail"].startswith(
        "uncorrectable hardware errors rose during the attempt: umc +2; the tuner's process"
    )
    assert second["detail"] == "", "earlier errors are not reported again"
