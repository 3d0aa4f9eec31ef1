"""The registry of engines, and engines that enter an image by a program of the cluster (their documented options)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator import engines
from orchestrator.engine.process import ProcessEngine
from orchestrator.errors import InventoryError
from orchestrator.inventory.load import load_inventory
from orchestrator.machines.facts import NodeFacts
from orchestrator.machines.node_files import node_files
from orchestrator.machines.node_link import engine_of, transport_of
from orchestrator.machines.node_plan import plan_lease, plan_nodes
from tests.support.files import write_files, write_program
from tests.support.shells import check

SPEC = """from pathlib import Path
from orchestrator.engine.process import SPEC as PROCESS, ProcessEngine
from orchestrator.engines import EngineSpec

def parse(options):
    if set(options) - {"queue"}:
        raise ValueError("queue is its only option")

def create(plan, transport, progress):
    return ProcessEngine(transport, plan.folder)

SPEC = EngineSpec(
    name="mine", create=create, parse_options=parse,
    scripts={**PROCESS.scripts, "launch.sh": Path(__file__).with_name("launch.sh.j2")},
)
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package `their_engine` with an entry point is installed."""
    write_files(tmp_path, {
        "their_engine/__init__.py": SPEC,
        "their_engine/launch.sh.j2": "#!/bin/sh\necho {{ engine_options.queue | quote }} {{ run | quote }}\n",
        "their_engine-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: their_engine\nVersion: 1\n",
        "their_engine-1.dist-info/entry_points.txt": "[gemmfleet.engines]\nmine = their_engine:SPEC\n",
    })  # fmt: skip
    monkeypatch.syspath_prepend(str(tmp_path))
    engines.find_engine.cache_clear()
    yield
    sys.modules.pop("their_engine", None)
    engines.find_engine.cache_clear()


def write(tmp_path: Path, node: str) -> Path:
    path = tmp_path / "inv.yaml"
    path.write_text(f"nodes: {{here: {{gpus: 0, {node}}}}}\n")
    return path


def test_a_package_brings_an_engine_with_templates_of_its_own(mine: None, tmp_path: Path) -> None:
    assert engines.names() == ("apptainer", "docker", "process", "pyxis", "mine")
    found = load_inventory(write(tmp_path, "engine: mine, engine_options: {queue: it's night}"))
    (plan,) = plan_nodes(found, "run-1", tmp_path)
    assert isinstance(engine_of(plan, transport_of(plan)), ProcessEngine)
    files = node_files(plan, "run-1", "torch", {}, 60.0)
    assert files["launch.sh"].data == b"#!/bin/sh\necho 'it'\"'\"'s night' run-1\n"
    assert files["tune.sh"].data.startswith(b"#!/bin/sh")


@pytest.mark.parametrize(
    ("node", "says"),
    [
        ("engine: mine, engine_options: {speed: 1}", "engine_options: queue is its only option"),
        ("engine: mine, image: x", "image: is for engine: apptainer, docker, pyxis, and this node's is mine"),
        ("engine_options: {queue: a}", r"engine_options: unknown option 'queue' \(this engine has no options\)"),
        ("engine: min", r"'min' is not legal; did you mean mine\? \(legal: apptainer, docker, process, pyxis, mine\)"),
    ],
)
def test_options_that_do_not_fit_are_named_with_their_line(mine: None, tmp_path: Path, node: str, says: str) -> None:
    with pytest.raises(InventoryError, match=rf"inv.yaml:1: .*{says}"):
        load_inventory(write(tmp_path, node))


PYXIS = {"--container-image", "--container-mounts", "--container-workdir", "--no-container-mount-home"}
"""The options in the README of github.com/NVIDIA/pyxis."""
APPTAINER = {"--rocm", "--no-home", "--bind", "--pwd"}
"""The options of `apptainer exec` (apptainer.org/docs/user/main/cli/apptainer_exec.html)."""


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
    tool = write_program(tmp_path / "bin" / program, '#!/bin/sh\nprintf "%s\\n" "$@"\n')
    done = subprocess.run(
        ["sh", tmp_path / "tune.sh", "agent", "--slot", "1"], capture_output=True, text=True, check=True,
        env={"PATH": f"{tool.parent}:/usr/bin:/bin", "SLURM_JOB_ID": "7"},
    )  # fmt: skip
    words = done.stdout.splitlines()
    assert options <= {w.partition("=")[0] for w in words}
    assert words[-5:] == ["sh", "./tune.sh", "agent", "--slot", "1"]
    assert any(f"{tmp_path}:{tmp_path},{cache}:{cache}" in w for w in words), words
    check(*tmp_path.glob("*.sh"))


def test_pyxis_without_slurm_and_an_engine_without_an_image(tmp_path: Path) -> None:
    path = tmp_path / "i.yaml"
    path.write_text("nodes:\n  a: {engine: pyxis, image: i}\n  b: {lease: slurm, engine: apptainer}\n")
    with pytest.raises(InventoryError) as e:
        load_inventory(path)
    first, second = e.value.faults
    assert "nodes.a.engine: pyxis is a plugin of Slurm: add lease: slurm" in first
    assert "nodes.b: engine: apptainer needs an image" in second
