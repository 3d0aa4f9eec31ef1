"""The wheel and the sdist carry everything the program needs, and install into an empty environment."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from orchestrator import __version__
from tests.paths import ROOT

pytestmark = [pytest.mark.full, pytest.mark.xdist_group("package")]  # what is built is built once
WHEEL, SDIST = f"gemmfleet-{__version__}-py3-none-any.whl", f"gemmfleet-{__version__}.tar.gz"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the wheel and the sdist that `make wheel` builds in a copy of this tree."""
    copy = tmp_path_factory.mktemp("copy") / "gemmfleet"
    left_out = shutil.ignore_patterns(".git", ".venv", "runs", "dist", ".*_cache", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=left_out)
    subprocess.run(["make", "wheel", f"PYTHON={sys.executable}"], cwd=copy, check=True)
    return copy / "dist"


def test_the_wheel_has_what_the_program_needs_and_no_tests(dist: Path) -> None:
    with zipfile.ZipFile(dist / WHEEL) as z:
        names = set(z.namelist())
    templates = [p.relative_to(ROOT) for p in (ROOT / "templates").rglob("*") if p.is_file()]
    assert {f"orchestrator/_data/{p.as_posix()}" for p in templates} <= names
    assert "orchestrator/_data/inventories/local.yaml" in names
    assert not {n for n in names if n.startswith(("tests/", "benchmarks/"))}


@pytest.fixture(scope="module")
def environment(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an empty environment into which the wheel was installed with all that it depends on."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    install(folder / "bin", dist / WHEEL)
    return folder / "bin"


def install(bin_: Path, *words: str | Path) -> None:
    # by the pip of this Python; compiling every module that it depends on takes longer than all the rest
    argv: list[str | Path] = [sys.executable, "-m", "pip", "--python", bin_ / "python", "install", "--no-compile"]
    argv += ["--quiet", "--disable-pip-version-check", *words]
    subprocess.run(argv, check=True)


@pytest.mark.parametrize("name", [WHEEL, SDIST])
def test_a_run_from_an_empty_environment(dist: Path, environment: Path, tmp_path: Path, name: str) -> None:
    install(environment, "--force-reinstall", "--no-deps", dist / name)
    gemmfleet = str(environment / "gemmfleet")
    version = subprocess.run([gemmfleet, "--version"], cwd=tmp_path, capture_output=True, text=True)
    assert version.stdout.split()[-1] == __version__
    where = [str(environment / "python"), "-c", "import orchestrator; print(orchestrator.__file__)"]
    found = subprocess.run(where, cwd=tmp_path, capture_output=True, text=True).stdout
    assert found.startswith(str(environment.parent))
    (tmp_path / "s.csv").write_text("M,N,K\n1,16,64\n2,16,64\n")
    argv = [gemmfleet, "tune", "s.csv", "--tuner", "replay"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 shapes: 2 tuned" in done.stdout
