"""The registry of engines: built-in ones by their files, others by entry points."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator import engines
from orchestrator.controller.node_plan import engine_of, node_files, plan_nodes, transport_of
from orchestrator.engine.process import ProcessEngine
from orchestrator.errors import InventoryError
from orchestrator.inventory.load import load_inventory

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
Installer = Callable[..., None]


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installer]:
    """Installs a package `their_engine` with an entry point."""
    monkeypatch.syspath_prepend(str(tmp_path))
    engines.find_engine.cache_clear()

    def install(name: str = "mine", code: str = SPEC) -> None:
        package = tmp_path / "their_engine"
        package.mkdir()
        (package / "__init__.py").write_text(code)
        (package / "launch.sh.j2").write_text("#!/bin/sh\necho {{ engine_options.queue | quote }} {{ run | quote }}\n")
        facts = tmp_path / "their_engine-1.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: their_engine\nVersion: 1\n")
        (facts / "entry_points.txt").write_text(f"[gemmfleet.engines]\n{name} = their_engine:SPEC\n")
        importlib.invalidate_caches()

    yield install
    sys.modules.pop("their_engine", None)
    engines.find_engine.cache_clear()


def write(tmp_path: Path, node: str) -> Path:
    path = tmp_path / "inv.yaml"
    path.write_text(f"nodes: {{here: {{gpus: 0, {node}}}}}\n")
    return path


def test_built_in_engines_have_a_spec_of_their_name() -> None:
    assert engines.built_in() == ("apptainer", "docker", "process", "pyxis")
    for name in engines.built_in():
        spec = engines.find_engine(name)
        assert spec.name == name
        assert {"launch.sh", "tune.sh", "follow.sh"} <= set(spec.scripts)
    assert [engines.find_engine(n).runs_images for n in engines.built_in()] == [False, True, False, False]


def test_a_package_brings_an_engine_with_templates_of_its_own(put: Installer, tmp_path: Path) -> None:
    put()
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
        ("engine_options: {queue: a}", r"engine_options: unknown option 'queue' \(there are none\)"),
        ("engine: min", r"'min' is not legal; did you mean mine\? \(legal: apptainer, docker, process, pyxis, mine\)"),
    ],
)
def test_options_that_do_not_fit_are_named_with_their_line(
    put: Installer, tmp_path: Path, node: str, says: str
) -> None:
    put()
    with pytest.raises(InventoryError, match=rf"inv.yaml:1: .*{says}"):
        load_inventory(write(tmp_path, node))


def test_an_entry_point_never_replaces_a_built_in_engine(put: Installer) -> None:
    put(name="process", code="raise RuntimeError")
    assert engines.find_engine("process").create.__module__ == "orchestrator.engine.process"


@pytest.mark.parametrize("code", ["import no_such_module", "SPEC = 3"])
def test_a_broken_package_is_named(put: Installer, tmp_path: Path, code: str) -> None:
    put(code=code)
    with pytest.raises(InventoryError, match="their_engine:SPEC"):
        load_inventory(write(tmp_path, "engine: mine"))
