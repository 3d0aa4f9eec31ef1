"""Conditions of attempts: from real agents into the records, and from the records into the ledger."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.health_kit import put, unfold
from tests.support.ledger_kit import Run, ended, started
from tests.support.workernode import fault, node
from worker.device.health import ROOT_ENV
from worker.protocol import ProtocolError, record

UMC = "sys/devices/pci0000:00/0000:05:00.0/ras/umc_err_count"


def test_an_agent_records_conditions_before_and_after(tmp_path: Path) -> None:
    root = unfold("mi355x", tmp_path / "sysfs")
    with node(tmp_path, idle_exit_s=0.5) as n:
        n.put("g1-1")
        n.start(env={**os.environ, ROOT_ENV: str(root), "HIP_VISIBLE_DEVICES": "1"})
        end = n.wait_record("attempt_ended")
        begin = n.records("0", "attempt_started")[0]
    assert begin["conditions"]["pci"] == end["conditions"]["pci"] == "0000:85:00.0"
    assert end["conditions"]["temperature_c"] == {"junction": 41.0, "mem": 38.0}
    assert end["detail"] == ""


@pytest.mark.parametrize("outcome", ["done", "fault"])
def test_errors_that_rise_during_an_attempt_are_said_in_its_detail(tmp_path: Path, outcome: str) -> None:
    root = unfold("mi355x", tmp_path / "sysfs")
    options: dict[str, Any] = {"seconds_per_shape": 0.5}
    if outcome == "fault":
        options |= fault("abort", match={"group": "g1"}, after_rows=3)
    with node(tmp_path, idle_exit_s=0.5, options=options) as n:
        n.put("g1-1")
        n.put("g2-1")
        n.start(env={**os.environ, ROOT_ENV: str(root), "HIP_VISIBLE_DEVICES": "0"})
        n.wait_record("shape_started")
        put(root / UMC, "ue: 2\\nce: 9")
        first, second = n.wait_record("attempt_ended"), n.wait_record("attempt_ended", count=2)
    assert first["outcome"] == outcome
    assert first["detail"].startswith("uncorrectable hardware errors rose during the attempt: umc +2")
    assert ("SIGABRT" in first["detail"]) is (outcome == "fault")
    assert second["detail"] == ""  # what was there before is not told again


def test_an_agent_works_where_nothing_can_be_read(tmp_path: Path) -> None:
    with node(tmp_path, idle_exit_s=0.5) as n:
        n.put("g1-1")
        n.start(env={**os.environ, ROOT_ENV: str(tmp_path / "none"), "HIP_VISIBLE_DEVICES": ""})
        assert n.wait_record("attempt_ended")["conditions"] == {"source": "cpu"}


def test_conditions_are_optional_in_just_these_records() -> None:
    assert record("attempt_started", 1.0, attempt="a-1", group="g", device={}, conditions={"x": 1})["conditions"] == {
        "x": 1
    }
    with pytest.raises(ProtocolError):
        record("worker_stopped", 1.0, why="", conditions={})
    with pytest.raises(ProtocolError):
        record("attempt_started", 1.0, attempt="a-1", conditions={})


# --- ledger -------------------------------------------------------------------------------------------------------


def test_the_ledger_keeps_both_readings(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        run.send("g0001-1")
        run.says({**started("g0001-1"), "conditions": {"source": "sysfs", "power_w": 240.5}})
        half = run.ledger.report("g0001-1")
        run.says({**ended("g0001-1"), "conditions": {"source": "sysfs", "power_w": 900}})
        whole = run.ledger.report("g0001-1")
        run.send("g0002-1")
        run.says(started("g0002-1"), ended("g0002-1"))
        none = run.ledger.report("g0002-1")
    assert half.conditions == {"before": {"source": "sysfs", "power_w": 240.5}}
    assert whole.conditions == {**half.conditions, "after": {"source": "sysfs", "power_w": 900}}
    assert none.conditions == {}


def test_a_repeated_reading_changes_nothing(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        run.send("g0001-1")
        run.says({**started("g0001-1"), "conditions": {"power_w": 1}})
        run.says({**started("g0001-1"), "conditions": {"power_w": 2}})
        attempt = run.ledger.report("g0001-1")
    assert attempt.conditions == {"before": {"power_w": 1}}


@pytest.mark.parametrize("hostile", ["\x1b[31mred", ["x"], 7, None, {}, True])
def test_conditions_that_are_none_are_dropped(tmp_path: Path, hostile: Any) -> None:
    with Run(tmp_path) as run:
        run.send("g0001-1")
        run.says({**started("g0001-1"), "conditions": hostile})
        report = run.ledger.report("g0001-1")
    assert run.state.attempts["g0001-1"].started_at is not None
    assert report.conditions == {}


def test_conditions_are_cleaned_and_capped(tmp_path: Path) -> None:
    hostile = {"source": "\x1b]0;owned\x07sysfs", "power_w": 10**400, "deep": {"a": {"b": {"c": {"d": {"e": 1}}}}}}
    huge = {f"k{i}": "x" * 1000 for i in range(60)}
    with Run(tmp_path) as run:
        run.send("g0001-1")
        line = json.dumps({**started("g0001-1"), "conditions": hostile}).encode()
        run.says(line, {**ended("g0001-1"), "conditions": huge})
        attempt = run.ledger.report("g0001-1")
    assert attempt.conditions["before"]["source"] == "sysfs"
    assert attempt.conditions["before"]["power_w"] is None
    assert len(json.dumps(attempt.conditions)) < 17 * 1024
