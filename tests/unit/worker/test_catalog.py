"""The registry of tuners: built-in ones by their files, others by entry points, and what is shipped of them."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.errors import InputError
from orchestrator.families import get_tuner
from orchestrator.machines import node_files
from tests.paths import ROOT
from worker.tuners import catalog

SPEC = """from worker.tuners.catalog import TunerSpec
SPEC = TunerSpec(name="{name}", tuner_class="their_tuner:object", worker_package="{package}")
"""
Installer = Callable[..., None]


def forget() -> None:
    for cached in (catalog.find_tuner, catalog.recorded_tuner, node_files.worker_code):
        cached.cache_clear()


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installer]:
    """Installs a package `their_tuner` with an entry point."""
    monkeypatch.syspath_prepend(str(tmp_path))
    forget()

    def install(code: str | None = None, more: str = "") -> None:
        package = tmp_path / "their_tuner"
        package.mkdir()
        (package / "__init__.py").write_text(SPEC.format(name="mine", package="their_tuner") if code is None else code)
        facts = tmp_path / "their_tuner-1.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: their_tuner\nVersion: 1\n")
        (facts / "entry_points.txt").write_text(f"[gemmfleet.tuners]\nmine = their_tuner:SPEC\n{more}")
        importlib.invalidate_caches()

    yield install
    sys.modules.pop("their_tuner", None)
    forget()


def test_a_tuner_imports_nothing_heavy_before_it_is_opened() -> None:
    assert {"aiter", "aiter-triton", "bench", "replay", "torch", "vllm"} <= set(catalog.built_in())
    code = (
        "import sys\nfrom worker.tuners import catalog\n"
        "for name in catalog.built_in():\n    catalog.make_tuner(name)\n"
        "print(*{'torch', 'triton', 'numpy', 'pandas'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == ""


def test_bench_has_a_command_of_its_own() -> None:
    with pytest.raises(InputError, match=r"the tuner bench has a command of its own: .*gemmfleet bench"):
        get_tuner("bench")
    assert get_tuner("bench", for_tune=False).side_by_side


@pytest.mark.parametrize("name", ["", "base", "nonesuch", "../replay", "os.path", "Replay"])
def test_an_unknown_tuner_is_not_found(name: str) -> None:
    with pytest.raises(catalog.TunerNotFoundError):
        catalog.find_tuner(name)


def test_a_package_brings_a_tuner_and_never_replaces_a_built_in_one(put: Installer) -> None:
    put(more="torch = their_tuner:NONE\n")
    assert "mine" in catalog.names()
    assert catalog.names().count("torch") == 1
    assert catalog.find_tuner("torch").worker_package == ""
    assert "their_tuner" not in sys.modules, "its name is known without an import"
    assert get_tuner("mine").worker_package == "their_tuner"


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import no_such_module", r"the tuner mine \(their_tuner:SPEC\) cannot be imported: No module named"),
        ("SPEC = 3", "their_tuner:SPEC is not the TunerSpec of a tuner mine"),
        (SPEC.format(name="other", package="their_tuner"), "is not the TunerSpec of a tuner mine"),
        (SPEC.format(name="mine", package=""), "worker_package is not its package"),
    ],
)
def test_a_broken_package_is_named(put: Installer, code: str, says: str) -> None:
    put(code=code)
    with pytest.raises(InputError, match=says):
        get_tuner("mine")
    assert catalog.recorded_tuner("mine").name == "mine", "an old run of it can be read all the same"


def test_the_package_is_part_of_the_codes_hash(put: Installer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put()
    package = tmp_path / "their_tuner"
    (package / "kernel.cl").write_text("one")
    hashes = {node_files.worker_code()[0], node_files.worker_code("their_tuner")[0]}
    (package / "kernel.cl").write_text("two")
    forget()
    assert len({*hashes, node_files.worker_code("their_tuner")[0]}) == 3
