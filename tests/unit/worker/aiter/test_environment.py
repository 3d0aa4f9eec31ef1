"""The command line and environment of AITER's processes, and the cells that are safe to write for it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from orchestrator.inventory.load import load_inventory
from orchestrator.machines.node_files import node_files
from orchestrator.machines.node_plan import NodePlan, plan_nodes
from worker.families import FAMILIES, backend_of, legal_cells
from worker.tuners.aiter.environment import (
    cleared_names,
    environment,
    inventory_switches,
    switch_record,
    switch_warnings,
)
from worker.tuners.aiter.launch import batch_size
from worker.tuners.aiter.script import TunerScript
from worker.tuners.aiter.spec import AiterOptions, risk, tuner_arg_flags
from worker.tuners.aiter.tuner import tiny_key

BASE = dict.fromkeys(("--untune_file", "--tune_file", "--mp", "--errRatio", "--profile_file"), "value")
NEWEST = BASE | dict.fromkeys(("--batch", "--timeout", "--warmup", "--iters", "--libtype", "--run_config"), "value")
A4W4, BLOCKSCALE = FAMILIES["a4w4_blockscale"], FAMILIES["a8w8_blockscale"]
SLOT = {"gfx": "gfx950", "cu_num": 256}


def script(flags: dict[str, str]) -> TunerScript:
    return TunerScript(Path("/t/tune.py"), flags, ("M", "N", "K"))


def test_a_version_with_the_topk_fault_gets_one_shape_a_batch() -> None:
    """And a family that may have no candidate, unless it is asked for."""
    assert [batch_size(A4W4, script(flags), AiterOptions()) for flags in (BASE, NEWEST)] == [1, 4]
    assert [batch_size(BLOCKSCALE, script(NEWEST), AiterOptions(batch=n)) for n in (0, 9)] == [1, 9]


@pytest.mark.parametrize(
    "words",
    [("-o", "x"), ("--tune_file=/etc/x",), ("--all",), ("asm",), ("-z",), ("--grouped-gemm",), ("--mxfp4-flydsl",)],
)
def test_arguments_that_are_ours_or_tune_something_else_are_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="--tuner-arg"):
        tuner_arg_flags(words)


def test_what_the_inventory_names_wins_with_a_warning() -> None:
    named = "GPU_ARCHS TUNE_MOE_ROUTING_SEED AITER_REBUILD HOME"
    base = {
        "GPU_ARCHS": "gfx950;gfx942", "CU_NUM": "80", "TUNE_MOE_ROUTING_SEED": "1", "AITER_KSPLIT": "2", "HOME": "/h",
        "AITER_REBUILD": "1", "GEMMFLEET_INVENTORY_ENV": named,
    }  # fmt: skip
    env = environment(base, Path("/a"), Path("/slot"), SLOT)
    assert (env["GPU_ARCHS"], env["CU_NUM"], env["TUNE_MOE_ROUTING_SEED"]) == ("gfx950;gfx942", "256", "1")
    assert not {"AITER_REBUILD", "AITER_KSPLIT"} & set(env), "tables and builds are never the user's to choose here"
    assert inventory_switches(base) == {"GPU_ARCHS": "gfx950;gfx942", "TUNE_MOE_ROUTING_SEED": "1"}
    first, second = switch_warnings(SLOT, base)
    assert "GPU_ARCHS=gfx950;gfx942 of the inventory is kept" in first
    assert "TUNE_MOE_ROUTING_SEED=1" in second
    assert switch_warnings(SLOT, {"GEMMFLEET_INVENTORY_ENV": "GPU_ARCHS", "GPU_ARCHS": "gfx942;gfx950"}) == []
    for gfx, archs in (("gfx90a", "native"), ("cpu-x86_64", None)):
        assert environment({}, Path("/a"), None, {"gfx": gfx, "cu_num": 8}).get("GPU_ARCHS") == archs


def test_tune_sh_takes_away_what_the_inventory_does_not_name(tmp_path: Path) -> None:
    """The real script up to where it looks for Python."""
    plan = NodePlan(
        "n", str(tmp_path), ("0",), "local", "process", None, {"TUNE_MOE_ROUTING_SEED": "7"}, {},
        switches=("CU_NUM", "TUNE_MOE_ROUTING_SEED"),
    )  # fmt: skip
    text = node_files(plan, "run", "torch", {}, 60.0)["tune.sh"].data.decode()
    (tmp_path / "tune.sh").write_text(text[: text.index("good() {")] + "env\n")
    env = {"PATH": os.environ["PATH"], "GPU_ARCHS": "gfx950; gfx942", "CU_NUM": "304", "TUNE_MOE_EXPERT_BALANCE": "1"}
    said = subprocess.run(["sh", "tune.sh"], cwd=tmp_path, env=env, capture_output=True, text=True, check=True).stdout
    lines = dict(line.split("=", 1) for line in said.splitlines() if "=" in line)
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


@pytest.mark.parametrize("evil", ["__import__('os').system('true')", "torch.int8 ", "torch.int9", "", "1\n2"])
def test_nothing_else_reaches_a_file_that_aiter_evaluates(evil: str) -> None:
    key = tiny_key(FAMILIES["a8w8"], "gfx950")
    for column in ("q_dtype_w", "M"):
        with pytest.raises(ValueError, match=f"{column} is"):
            legal_cells(FAMILIES["a8w8"], {**key, column: evil})


@pytest.mark.parametrize(
    ("family", "row", "backend"),
    [
        ("a4w4_blockscale", {"kernelName": "_ZN5aiter42f4gemm_bf16_per1x32Fp4_BpreShuffle_192x256E"}, "asm"),
        ("a4w4_blockscale", {"kernelName": "a4w4_blockscale_256x128x128x128"}, "ck"),
        ("a4w4_blockscale", {"kernelName": "Null", "kernelId": "23"}, "asm"),
        ("a8w8_blockscale", {"libtype": "triton", "kernelName": "x"}, "triton"),
        ("a8w8", {"kernelName": ""}, "ck"),
        ("a16w16", {"kernelName": "Cijk_Alik_Bljk_BBS"}, "hipblaslt"),
        ("fmoe", {"kernelName1": "moe_ck2stages_gemm1"}, "ck"),
        ("a16w16", {"kernelName": "what is this"}, ""),
    ],
)
def test_the_backend_of_a_row(family: str, row: dict[str, str], backend: str) -> None:
    assert backend_of(family, row) == backend


def test_shapes_that_run_alone() -> None:
    assert risk("a4w4_blockscale", {"M": 1, "N": 512, "K": 29568}) == "K is not a multiple of 256"
    assert "N is not a multiple of 128" in risk("a4w4_blockscale", {"M": 1, "N": 576, "K": 7168})
    assert not risk("a4w4_blockscale", {"M": 1, "N": 512, "K": 7168})
    assert "64 GiB" in risk("a8w8", {"M": 65536, "N": 131072, "K": 131072})
