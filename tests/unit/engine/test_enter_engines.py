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


@pytest.mark.parametrize(
    ("engine", "program", "options"), [("pyxis", "srun", PYXIS), ("apptainer", "apptainer", APPTAINER)]
)
def test_the_worker_goes_into_the_image_with_its_folders(
    tmp_path: Path, engine: str, program: str, options: set[str]
) -> None:
    """With a stand-in for the program that prints its arguments."""
    inventory, cache = tmp_path / "i.yaml", tmp_path / "cache"
    inventory.write_text(
        f"nodes:\n  n: {{lease: slurm, engine: {engine}, image: 'rocm/pytorch:latest', gpus: 2, cache: {cache}}}\n"
    )
    plan, _ = plan_lease(load_inventory(inventory).nodes["n"], "run-1", NodeFacts({"end": "1"}), {})
    for name, file in node_files(plan, "run-1", "aiter", {}, 60.0).items():
        if name in ("launch.sh", "follow.sh", "tune.sh"):
            (tmp_path / name).write_bytes(file.data)
            subprocess.run(["sh", "-n", tmp_path / name], check=True)
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", "-S", "warning", "tune.sh"], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
    tool = tmp_path / "bin" / program
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    tool.chmod(0o755)
    done = subprocess.run(
        ["sh", tmp_path / "tune.sh", "agent", "--slot", "1"], capture_output=True, text=True, check=True,
        env={"PATH": f"{tool.parent}:/usr/bin:/bin", "SLURM_JOB_ID": "7"},
    )  # fmt: skip
    words = done.stdout.splitlines()
    assert options <= {w.partition("=")[0] for w in words}
    assert words[-5:] == ["sh", "./tune.sh", "agent", "--slot", "1"]
    assert any(f"{tmp_path}:{tmp_path},{cache}:{cache}" in w for w in words), words


def test_pyxis_without_slurm_and_an_engine_without_an_image(tmp_path: Path) -> None:
    path = tmp_path / "i.yaml"
    path.write_text("nodes:\n  a: {engine: pyxis, image: i}\n  b: {lease: slurm, engine: apptainer}\n")
    with pytest.raises(InventoryError) as e:
        load_inventory(path)
    first, second = e.value.faults
    assert "nodes.a.engine: pyxis is a plugin of Slurm: add lease: slurm" in first
    assert "nodes.b: engine: apptainer needs an image" in second
