"""Readings of GPUs and CPUs from fixtures of sysfs and nvidia-smi, and what two of them testify.

The AMD trees are written by hand after the kernel's documented formats, the NVIDIA lines were recorded on an H200
(names changed, the second line altered); nothing here was recorded on an MI355X.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.health_kit import DATA, unfold
from worker.device import health

PCI = "sys/devices/pci0000:00"


def survey(root: Path) -> list[dict[str, Any]]:
    return [health.amd_gpu(device) for device in health.amd_devices(root)]


def test_whole_gpus(tmp_path: Path) -> None:
    first, second = survey(unfold("mi355x", tmp_path))
    assert first == {
        "pci": "0000:05:00.0",
        "id": "7ab4e1c02d9f3361",
        "temperature_c": {"junction": 68.0, "mem": 61.0},
        "power_w": 987.0,
        "power_cap_w": 1400.0,
        "clock_mhz": 2395.0,
        "memory_clock_mhz": 900.0,
        "errors": {"uncorrectable": {"total": 0}},
    }
    assert second["errors"]["uncorrectable"] == {"total": 2, "umc": 2}
    assert (second["pci"], second["clock_mhz"]) == ("0000:85:00.0", 132.0)


def test_partitions_share_their_gpu(tmp_path: Path) -> None:
    first, second = survey(unfold("partitioned", tmp_path))
    assert first == second
    assert first["pci"] == "0000:05:00.0"


def test_a_host_without_a_gpu_is_read_as_a_cpu(tmp_path: Path) -> None:
    root = unfold("cpu", tmp_path)
    reading = {"source": "cpu", "clock_mhz": 3000.0, "temperature_c": {"coretemp": 63.5}}
    assert (survey(root), health.Gauge({}, root).read()) == ([], reading)


def test_sensors_that_fail_are_left_out(tmp_path: Path) -> None:
    root = unfold("mi355x", tmp_path)
    device = root / PCI / "0000:05:00.0"
    (device / "hwmon/hwmon6/freq1_input").write_text("nonsense\n")
    (device / "hwmon/hwmon6/temp2_input").unlink()
    (device / "ras/umc_err_count").write_bytes(b"\xff\xfe ue one")
    os.rename(device / "hwmon/hwmon6/power1_input", device / "hwmon/hwmon6/power1_average")
    first = survey(root)[0]
    assert "clock_mhz" not in first
    assert (first["temperature_c"], first["power_w"]) == ({"mem": 61.0}, 987.0)
    assert first["errors"]["uncorrectable"] == {"total": 0}


def test_a_gpu_that_a_container_may_not_open_is_passed_over(tmp_path: Path) -> None:
    root = unfold("mi355x", tmp_path)
    (root / "sys/class/kfd/kfd/topology/nodes/2/properties").write_text("")
    assert [r["pci"] for r in survey(root)] == ["0000:85:00.0"]


# --- tools --------------------------------------------------------------------------------------------------------


def test_nvidia_smi() -> None:
    first, second = health.parse_nvidia((DATA / "nvidia-smi.csv").read_text())
    assert first == {
        "pci": "0000:1b:06.0",
        "id": "GPU-00000000-1111-2222-3333-444444444444",
        "temperature_c": {"gpu": 33, "memory": 37},
        "power_w": 125.23,
        "power_cap_w": 700,
        "clock_mhz": 1980,
        "memory_clock_mhz": 3201,
        "errors": {"uncorrectable": {"total": 0}},
    }
    assert second["temperature_c"] == {"gpu": 71}
    assert second["errors"] == {"uncorrectable": {"total": 2}}


@pytest.mark.parametrize("text", ["", "No devices were found", "0, 1, 2\n", "\x00", ",,,,,,,,"])
def test_a_tool_that_prints_something_else(text: str) -> None:
    assert health.parse_nvidia(text) == []


def tool(folder: Path, name: str, body: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\necho x >>{folder}/calls\n{body}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if health.amd_devices(Path("/")):
        pytest.skip("this machine has AMD GPUs: sysfs comes before the tools")
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_gpu")
def test_a_tool_is_asked_rarely_and_its_answer_carries_its_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tmp_path / "bin", "nvidia-smi", f"cat {DATA}/nvidia-smi.csv")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    gauge = health.Gauge({"CUDA_VISIBLE_DEVICES": "1"})
    readings = [gauge.read() for _ in range(5)]
    assert {(r["source"], r["power_w"]) for r in readings} == {("nvidia-smi", 689.1)}
    assert all(r["age_s"] < 5 for r in readings[1:])
    assert len((tmp_path / "bin/calls").read_text().split()) == 1
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
