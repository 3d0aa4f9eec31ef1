"""Readings of GPUs and CPUs from fixtures of sysfs and the vendors' tools, and what two of them testify.

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

from tests.support.health_kit import DATA, put, unfold
from worker.device import health, sensors

PCI = "sys/devices/pci0000:00"


def test_whole_gpus(tmp_path: Path) -> None:
    first, second = health.survey(unfold("mi355x", tmp_path))
    assert first == {
        "source": "sysfs",
        "pci": "0000:05:00.0",
        "id": "7ab4e1c02d9f3361",
        "use_pct": 97,
        "memory_use_pct": 0,
        "memory_used": 12884901888,
        "memory_total": 309220868096,
        "temperature_c": {"junction": 68.0, "mem": 61.0},
        "power_w": 987.0,
        "power_cap_w": 1400.0,
        "clock_mhz": 2395.0,
        "memory_clock_mhz": 900.0,
        "partition": "SPX",
        "memory_partition": "NPS1",
        "errors": {
            "uncorrectable": {"total": 0}, "correctable": {"total": 3, "xgmi_wafl": 3}, "deferred": {"total": 0},
        },
    }  # fmt: skip
    assert second["errors"]["uncorrectable"] == {"total": 2, "umc": 2}
    assert (second["pci"], second["clock_mhz"]) == ("0000:85:00.0", 132.0)


def test_partitions_share_their_gpu(tmp_path: Path) -> None:
    first, second = health.survey(unfold("partitioned", tmp_path))
    assert first == second
    assert (first["partition"], first["memory_partition"], first["pci"]) == ("CPX", "NPS4", "0000:05:00.0")


def test_a_host_without_a_gpu_is_read_as_a_cpu(tmp_path: Path) -> None:
    assert health.survey(unfold("cpu", tmp_path)) == [
        {
            "source": "cpu", "load": [3.1, 2.2, 1.0], "clock_mhz": 3000.0, "temperature_c": {"coretemp": 63.5},
            "throttled": {"core": 5, "package": 8, "quota": 7}, "memory_used": (65536000 - 49152000) * 1024,
            "memory_total": 65536000 * 1024,
        }
    ]  # fmt: skip


def test_thermal_zones_where_there_is_no_cpu_sensor(tmp_path: Path) -> None:
    put(tmp_path / "sys/class/thermal/thermal_zone0/type", "x86_pkg_temp")
    put(tmp_path / "sys/class/thermal/thermal_zone0/temp", "55000")
    put(tmp_path / "sys/class/thermal/cooling_device0/temp", "99000")
    assert sensors.cpu(tmp_path) == {"temperature_c": {"x86_pkg_temp": 55.0}}


def test_procfs_clocks_of_few_cores(tmp_path: Path) -> None:
    put(tmp_path / "proc/cpuinfo", "processor : 0\\ncpu MHz : 2000.0\\n\\nprocessor : 1\\ncpu MHz : 3000.0")
    assert sensors.cpu(tmp_path) == {"clock_mhz": 2500.0}


def test_sensors_that_fail_are_left_out(tmp_path: Path) -> None:
    root = unfold("mi355x", tmp_path)
    device = root / PCI / "0000:05:00.0"
    (device / "gpu_busy_percent").write_text("nonsense\n")
    (device / "hwmon/hwmon6/temp2_input").unlink()
    (device / "ras/umc_err_count").write_bytes(b"\xff\xfe ue one")
    (device / "current_compute_partition").unlink()
    os.rename(device / "hwmon/hwmon6/power1_input", device / "hwmon/hwmon6/power1_average")
    first = health.survey(root)[0]
    assert not {"use_pct", "partition"} & set(first)
    assert (first["temperature_c"], first["power_w"]) == ({"mem": 61.0}, 987.0)
    assert first["errors"]["uncorrectable"] == {"total": 0}


def test_a_gpu_that_a_container_may_not_open_is_passed_over(tmp_path: Path) -> None:
    root = unfold("mi355x", tmp_path)
    (root / "sys/class/kfd/kfd/topology/nodes/2/properties").write_text("")
    assert [r["pci"] for r in health.survey(root)] == ["0000:85:00.0"]


# --- tools --------------------------------------------------------------------------------------------------------


def test_nvidia_smi() -> None:
    first, second = sensors.parse_nvidia((DATA / "nvidia-smi.csv").read_text())
    assert first == {
        "pci": "0000:1b:06.0",
        "id": "GPU-00000000-1111-2222-3333-444444444444",
        "use_pct": 0,
        "memory_use_pct": 0,
        "memory_used": 0,
        "memory_total": 143771 * 2**20,
        "temperature_c": {"gpu": 33, "memory": 37},
        "power_w": 125.23,
        "power_cap_w": 700,
        "clock_mhz": 1980,
        "memory_clock_mhz": 3201,
        "errors": {"uncorrectable": {"total": 0}, "correctable": {"total": 0}},
    }
    assert second["temperature_c"] == {"gpu": 71}
    assert second["errors"] == {"uncorrectable": {"total": 2}}


def test_amd_smi_in_both_forms() -> None:
    text = (DATA / "amd-smi.json").read_text()
    found = sensors.parse_amd(text)
    assert found[0] == {
        "use_pct": 96,
        "memory_use_pct": 31,
        "memory_used": 283 * 2**20,
        "memory_total": 196592 * 2**20,
        "temperature_c": {"junction": 71, "mem": 58},
        "power_w": 742,
        "clock_mhz": 2107,
        "memory_clock_mhz": 1300,
        "errors": {"uncorrectable": {"total": 1}, "correctable": {"total": 4}},
    }
    assert found[1] == {}
    assert sensors.parse_amd(json.dumps({"gpu_data": json.loads(text)})) == found


@pytest.mark.parametrize("text", ["", "No devices were found", "[", "{}", "[1, null]", '"x"', "0, 1, 2\n", "\x00"])
def test_tools_that_print_something_else(text: str) -> None:
    assert sensors.parse_nvidia(text) == []
    assert sensors.parse_amd(text) == []


def tool(folder: Path, name: str, body: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\necho x >>{folder}/calls\n{body}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if sensors.amd_devices(Path("/")):
        pytest.skip("this machine has AMD GPUs: sysfs comes before the tools")
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_gpu")
def test_a_tool_is_asked_rarely_and_its_answer_carries_its_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tmp_path / "bin", "amd-smi", "exit 1")
    tool(tmp_path / "bin", "nvidia-smi", f"cat {DATA}/nvidia-smi.csv")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    gauge = health.Gauge({"CUDA_VISIBLE_DEVICES": "1"})
    readings = [gauge.read() for _ in range(5)]
    assert {(r["source"], r["use_pct"], r["age_s"] < 5) for r in readings} == {("nvidia-smi", 98, True)}
    assert len((tmp_path / "bin/calls").read_text().split()) == 2  # each tool once
    assert "age_s" not in gauge.read(fresh=True)
    monkeypatch.setattr(health, "TOOL_EVERY_S", -1.0)
    assert "age_s" not in gauge.read()


@pytest.mark.usefixtures("no_gpu")
def test_a_slot_that_sees_no_gpu_is_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tmp_path / "bin", "nvidia-smi", f"cat {DATA}/nvidia-smi.csv")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    assert health.Gauge({"CUDA_VISIBLE_DEVICES": ""}).read()["source"] == "cpu"


# --- a slot's gauge -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "pci"),
    [
        ({}, "0000:05:00.0"),
        ({"HIP_VISIBLE_DEVICES": "1"}, "0000:85:00.0"),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, "0000:85:00.0"),
    ],
)
def test_a_slot_reads_its_own_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env: dict[str, str], pci: str
) -> None:
    for name in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    gauge = health.Gauge(env, unfold("mi355x", tmp_path))
    assert gauge.read()["pci"] == pci


# --- evidence -----------------------------------------------------------------------------------------------------


def reading(uncorrectable: dict[str, int] | None, **rest: Any) -> dict[str, Any]:
    return {"source": "sysfs", "id": "a", **rest} | (
        {"errors": {"uncorrectable": uncorrectable}} if uncorrectable else {}
    )


@pytest.mark.parametrize(
    ("before", "after", "rises"),
    [
        ({"total": 0}, {"total": 0}, {}),
        ({"total": 0}, {"total": 2, "umc": 2}, {"umc": 2}),
        ({"total": 3, "gfx": 1, "umc": 2}, {"total": 5, "gfx": 1, "umc": 4}, {"umc": 2}),
        ({"total": 5}, {"total": 7}, {"": 2}),
        ({"total": 5, "umc": 5}, {"total": 0}, {}),
        (None, {"total": 5, "umc": 5}, {}),
        ({"total": 0}, None, {}),
    ],
)
def test_what_rose(before: dict[str, int] | None, after: dict[str, int] | None, rises: dict[str, int]) -> None:
    assert health.new_errors(reading(before), reading(after)) == rises


def test_readings_of_two_gpus_say_nothing() -> None:
    assert health.new_errors(reading({"total": 0}), reading({"total": 1}, id="b")) == {}


def test_evidence_in_words() -> None:
    before, after = reading({"total": 0}), reading({"total": 3, "umc": 2, "gfx": 1})
    assert health.evidence(before, after) == "uncorrectable hardware errors rose during the attempt: gfx +1, umc +2"
    aged = health.evidence({**before, "age_s": 31.4}, reading({"total": 1}))
    assert aged == "uncorrectable hardware errors rose during the attempt or the 31 s before it: +1"
    assert health.evidence(before, before) == ""


# --- the verb -----------------------------------------------------------------------------------------------------


def verb(*args: str) -> str:
    argv = [sys.executable, "-m", "worker", "health", *args]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def test_worker_health(tmp_path: Path) -> None:
    root = unfold("mi355x", tmp_path)
    assert [r["pci"] for r in json.loads(verb("--json", "--root", str(root)))] == ["0000:05:00.0", "0000:85:00.0"]
    assert len(verb("--root", str(root)).splitlines()) > 20, "for people"
    (here,) = json.loads(verb("--json"))[:1]
    assert here["source"] in ("cpu", "sysfs", "amd-smi", "nvidia-smi")
