"""Engines that enter an image by a program of the cluster: what is rendered, against the tools' documented options."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from orchestrator.controller.facts import NodeFacts
from orchestrator.controller.node_plan import node_files, plan_lease
from orchestrator.errors import InventoryError
from orchestrator.inventory.load import load_inventory

PYXIS = {"--container-image", "--container-mounts", "--container-workdir", "--no-container-mount-home"}
"""Of github.com/NVIDIA/pyxis, README."""
APPTAINER = {"--rocm", "--no-home", "--bind", "--pwd"}
"""Of `apptainer exec` (apptainer.org/docs/user/main/cli/apptainer_exec.html)."""


def tune_sh(tmp_path: Path, engine: str) -> str:
    inventory = tmp_path / "i.yaml"
    inventory.write_text(
        f"nodes:\n  n: {{lease: slurm, engine: {engine}, image: 'rocm/pytorch:latest', gpus: 2, cache: /shared/c}}\n"
    )
    plan, _ = plan_lease(load_inventory(inventory).nodes["n"], "run-1", NodeFacts({"end": "1"}), {})
    files = node_files(plan, "run-1", "aiter", {}, 60.0)
    for name in ("launch.sh", "follow.sh", "tune.sh"):
        (tmp_path / name).write_bytes(files[name].data)
    return files["tune.sh"].data.decode()


@pytest.mark.parametrize(
    ("engine", "program", "options"), [("pyxis", "srun", PYXIS), ("apptainer", "apptainer exec", APPTAINER)]
)
def test_the_worker_goes_into_the_image_once(tmp_path: Path, engine: str, program: str, options: set[str]) -> None:
    text = tune_sh(tmp_path, engine)
    (line,) = [x.strip() for x in text.splitlines() if x.strip().startswith(f"exec {program} ")]
    words = {w.partition("=")[0] for w in line.split() if w.startswith("--")}
    assert options <= words
    assert line.endswith('sh ./tune.sh "$@"')
    for name in ("tune.sh", "launch.sh"):
        subprocess.run(["sh", "-n", tmp_path / name], check=True)
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", "-S", "warning", "tune.sh"], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("engine", "program"), [("pyxis", "srun"), ("apptainer", "apptainer")])
def test_the_program_gets_the_folders_and_the_command(tmp_path: Path, engine: str, program: str) -> None:
    """With a stand-in for the program that prints its arguments."""
    tune_sh(tmp_path, engine)
    tool = tmp_path / "bin" / program
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    tool.chmod(0o755)
    home = tmp_path / "tune.sh"
    home.write_text(home.read_text().replace("/shared/c", str(tmp_path / "cache")))
    env = {"PATH": f"{tool.parent}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["sh", home, "agent", "--slot", "1"], env=env, capture_output=True, text=True, check=True)
    words = done.stdout.splitlines()
    assert words[-5:] == ["sh", "./tune.sh", "agent", "--slot", "1"]
    mounts = f"{tmp_path}:{tmp_path},{tmp_path}/cache:{tmp_path}/cache"
    assert any(mounts in w for w in words), words


def test_pyxis_without_slurm_and_an_engine_without_an_image(tmp_path: Path) -> None:
    path = tmp_path / "i.yaml"
    path.write_text("nodes:\n  a: {engine: pyxis, image: i}\n  b: {lease: slurm, engine: apptainer}\n")
    with pytest.raises(InventoryError) as e:
        load_inventory(path)
    first, second = e.value.faults
    assert "nodes.a.engine: pyxis is a plugin of Slurm: add lease: slurm" in first
    assert "nodes.b: engine: apptainer needs an image" in second
