"""Environment of AITER's processes and its precedence."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from orchestrator.controller.deploy import NodePlan, node_files
from orchestrator.controller.node_plan import plan_nodes
from orchestrator.inventory.load import load_inventory
from worker.bench.tuner import _variables
from worker.protocol.bench import Options, Side
from worker.tuners.aiter.launch import (
    Chip,
    cleared_names,
    environment,
    inventory_switches,
    switch_record,
    switch_warnings,
)

SLOT = Chip("gfx950", 256)
IMAGE = {"GPU_ARCHS": "gfx950;gfx942", "CU_NUM": "80", "TUNE_MOE_ROUTING_SEED": "1", "AITER_KSPLIT": "2", "HOME": "/h"}


def of(base: dict[str, str], chip: Chip = SLOT) -> dict[str, str]:
    return environment(base, Path("/a"), Path("/slot"), chip=chip)


def test_what_the_inventory_names_wins_with_a_warning() -> None:
    base = {
        **IMAGE,
        "GEMMFLEET_INVENTORY_ENV": "GPU_ARCHS TUNE_MOE_ROUTING_SEED AITER_REBUILD HOME",
        "AITER_REBUILD": "1",
    }
    env = of(base)
    assert (env["GPU_ARCHS"], env["CU_NUM"], env["TUNE_MOE_ROUTING_SEED"]) == ("gfx950;gfx942", "256", "1")
    assert "AITER_REBUILD" not in env, "tables and builds are never the user's to choose here"
    assert inventory_switches(base) == {"GPU_ARCHS": "gfx950;gfx942", "TUNE_MOE_ROUTING_SEED": "1"}
    first, second = switch_warnings(SLOT, base)
    assert "kernels of gfx942, and this slot is gfx950" in first
    assert "TUNE_MOE_ROUTING_SEED" in second
    assert switch_warnings(SLOT, {"GEMMFLEET_INVENTORY_ENV": "GPU_ARCHS", "GPU_ARCHS": "gfx942;gfx950"}) == []


def test_a_chip_that_aiters_build_does_not_name_is_asked_for() -> None:
    assert of(IMAGE, Chip("gfx90a", 104))["GPU_ARCHS"] == "native"
    assert "GPU_ARCHS" not in of(IMAGE, Chip("cpu-x86_64", 8))


def test_tune_sh_takes_away_what_the_inventory_does_not_name(tmp_path: Path) -> None:
    """The real script up to where it looks for Python."""
    plan = NodePlan(
        "n", str(tmp_path), ("0",), "local", "process", None, {"TUNE_MOE_ROUTING_SEED": "7"}, {},
        switches=("CU_NUM", "TUNE_MOE_ROUTING_SEED"),
    )  # fmt: skip
    files = node_files(plan, "run", "torch", {}, 60.0)
    script = files["tune.sh"].data.decode()
    head = script[: script.index("good() {")]
    (tmp_path / "tune.sh").write_text(head + "env\n")
    env = {"PATH": os.environ["PATH"], "GPU_ARCHS": "gfx950; gfx942", "CU_NUM": "304", "TUNE_MOE_EXPERT_BALANCE": "1"}
    said = subprocess.run(["sh", "tune.sh"], cwd=tmp_path, env=env, capture_output=True, text=True, check=True).stdout
    lines = dict(line.split("=", 1) for line in said.splitlines() if "=" in line)
    assert set(lines["GEMMFLEET_CLEARED_ENV"].split()) == {"GPU_ARCHS=gfx950;gfx942", "TUNE_MOE_EXPERT_BALANCE"}
    assert lines["GEMMFLEET_INVENTORY_ENV"] == "CU_NUM TUNE_MOE_ROUTING_SEED"
    assert (lines["CU_NUM"], lines["TUNE_MOE_ROUTING_SEED"]) == ("304", "7")
    assert not {"GPU_ARCHS", "TUNE_MOE_EXPERT_BALANCE"} & set(lines)
    assert switch_record(SLOT, lines)["overridden"] == {"GPU_ARCHS": "gfx950;gfx942"}
    assert cleared_names(lines) == ["GPU_ARCHS", "TUNE_MOE_EXPERT_BALANCE"]


def test_the_section_aiter_wins_over_env(tmp_path: Path) -> None:
    path = tmp_path / "inv.yaml"
    path.write_text(
        "nodes:\n  n:\n    transport: local\n    gpus: [0]\n    aiter: {gpu_archs: gfx950, cu_num: 128}\n"
        "    env: {GPU_ARCHS: gfx942, CU_NUM: '${env:NUMBER}', OTHER: x}\n"
    )
    (plan,) = plan_nodes(load_inventory(path), "r", tmp_path)
    assert (plan.env["GPU_ARCHS"], plan.env["CU_NUM"]) == ("gfx950", "128")
    assert plan.switches == ("CU_NUM", "GPU_ARCHS")


def test_benchs_backends_of_aiter_get_the_slots_own_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_ARCHS", "gfx950;gfx942")
    env = Side("stack", "python3")  # another interpreter, so that nothing is looked for here
    for name in ("aiter", "aiter-triton"):
        found = _variables(name, tmp_path, Options(), "a8w8", env, SLOT)
        assert (found["GPU_ARCHS"], found["CU_NUM"]) == ("gfx950", "256")
    assert "GPU_ARCHS" not in _variables("torch", tmp_path, Options(), "a8w8", env, SLOT)
    monkeypatch.setenv("GEMMFLEET_INVENTORY_ENV", "GPU_ARCHS")
    assert _variables("aiter", tmp_path, Options(), "a8w8", env, SLOT)["GPU_ARCHS"] == "gfx950;gfx942"
