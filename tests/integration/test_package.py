"""The wheel carries everything the program needs, and runs outside the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.full
def test_a_run_from_the_wheel(tmp_path: Path) -> None:
    """Built with the packages' own back end, unpacked aside, run from another folder."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--quiet", "--no-deps", "-w", tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("gemmfleet-*.whl")
    with zipfile.ZipFile(wheel) as z:
        names = set(z.namelist())
        z.extractall(tmp_path / "site")
    templates = [p.relative_to(ROOT) for p in (ROOT / "templates").rglob("*") if p.is_file()]
    assert {f"orchestrator/_data/{p.as_posix()}" for p in templates} <= names
    assert "orchestrator/_data/inventories/local.yaml" in names
    assert not {n for n in names if n.startswith(("tests/", "benchmarks/"))}
    (tmp_path / "s.csv").write_text("M,N,K\n1,16,64\n2,16,64\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    where = [sys.executable, "-c", "import orchestrator; print(orchestrator.__file__)"]
    assert subprocess.run(where, cwd=tmp_path, env=env, capture_output=True, text=True).stdout.startswith(str(tmp_path))
    argv = [sys.executable, "-m", "orchestrator", "tune", "s.csv", "--tuner", "replay"]
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 shapes: 2 tuned" in done.stdout
