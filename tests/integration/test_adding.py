"""The page for contributors, done: its tuner is put into a copy of the tree, and the result is run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.integration.kit import ROOT, read_csv
from tests.waiting import PATIENCE_S

PAGE = ROOT / "docs" / "contributing" / "adding.md"
BLOCK = re.compile(r"^ *`(?P<path>[\w/]+\.py)`:\n\n(?P<code> *```python\n.*?\n) *```$", re.MULTILINE | re.DOTALL)
TUNER = "worker/tuners/plain.py"


def files() -> dict[str, str]:
    """The files of the page, by path."""
    return {m["path"]: textwrap.dedent(m["code"]).removeprefix("```python\n") for m in BLOCK.finditer(PAGE.read_text())}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the tree with the page's files, and nothing else changed."""
    tree = tmp_path / "tree"
    for folder in ("orchestrator", "worker", "templates", "inventories"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for path, text in files().items():
        assert not (tree / path).exists()
        (tree / path).write_text(text)
    return tree


def run(tree: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(tree)}
    argv = [sys.executable, "-m", "orchestrator", *words]
    return subprocess.run(argv, cwd=tree, env=env, capture_output=True, text=True, timeout=PATIENCE_S)


def test_a_tuner_is_one_module() -> None:
    """With its row on a page and a test of its own, it is three files."""
    assert list(files()) == [TUNER]


def test_it_tunes_shapes(tree: Path) -> None:
    (tree / "s.csv").write_text("M,N,K\n1,16,64\n2,16,64\n4,32,64\n")
    (tree / "inv.yaml").write_text(f"nodes: {{here: {{gpus: 0, workdir: {tree}/nodes}}}}\n")
    words = ("tune", "s.csv", "-i", "inv.yaml", "--runs", "runs", "--tuner", "plain")
    done = run(tree, *words, "--rounds", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 shapes: 3 tuned" in done.stdout
    (profile,) = tree.glob("runs/*/profile.csv")
    assert {r["kernelName"] for r in read_csv(profile)} == {"plain_rows", "plain_columns"}

    bad = run(tree, *words, "-O", "rounds=none")
    assert (bad.returncode, bad.stderr) == (
        2, "error: the tuner plain has one option, rounds: a whole number from 1 on\n"
    )  # fmt: skip
    other = run(tree, *words, "--tuner", "torch", "--rounds", "2")
    assert other.stderr == "error: --rounds: for the tuner plain only, and this is torch\n"


def test_help_has_the_tuners_flags_under_its_heading(tree: Path) -> None:
    shown = run(tree, "tune", "--help").stdout
    assert re.search(r"^Tuner plain:\n +--rounds N +Timed runs of a candidate", shown, re.MULTILINE)
