"""The page for contributors, done: its tuner, engine, family and option are put into a copy of the tree, which runs."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import subprocess
import sys
import textwrap
from contextlib import closing
from pathlib import Path

import pytest

from tests.integration.kit import ROOT, read_csv
from tests.waiting import PATIENCE_S

PAGE = ROOT / "docs" / "contributing" / "adding.md"
BLOCK = re.compile(r"^ *`(?P<path>[\w/]+\.py)`:\n\n(?P<code> *```python\n.*?\n) *```$", re.MULTILINE | re.DOTALL)
FAMILY = re.compile(
    r"At the end of `_ALL` in `worker/families\.py`:\n\n(?P<code> *```python\n.*?\n) *```$", re.M | re.S
)
OPTION = re.compile(r"After the last option of `NodeOptions`:\n\n(?P<code> *```python\n.*?\n) *```$", re.M | re.S)
COLUMN = re.compile(r"^ *(?P<code>Field\(.*\))$", re.M)
TUNER, ENGINE = "worker/tuners/plain.py", "orchestrator/engine/nice.py"


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


def test_a_tuner_and_an_engine_are_one_module_each() -> None:
    """With a page and a test of its own each, an addition is three files."""
    assert list(files()) == [TUNER, ENGINE]


def test_they_tune_shapes(tree: Path) -> None:
    (tree / "s.csv").write_text("M,N,K\n1,16,64\n2,16,64\n4,32,64\n")
    python = tree / "python"
    python.write_text(f'#!/bin/sh\nnice >>{tree}/levels\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    inventory = tree / "inv.yaml"
    node = f"{{gpus: 0, engine: nice, engine_options: {{level: 7}}, python: {python}, workdir: {tree}/nodes}}"
    inventory.write_text(f"defaults: {{family: a16w16, tuner: plain}}\nnodes: {{here: {node}}}\n")
    words = ("tune", "s.csv", "-i", "inv.yaml", "--runs", "runs")
    done = run(tree, *words, "--rounds", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 shapes: 3 tuned" in done.stdout
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert str(min(19, own + 7)) in (tree / "levels").read_text().splitlines()
    (profile,) = tree.glob("runs/*/profile.csv")
    assert {r["kernelName"] for r in read_csv(profile)} == {"plain_rows", "plain_columns"}

    bad = run(tree, *words, "-O", "rounds=none")
    assert (bad.returncode, bad.stderr) == (
        2, "error: the tuner plain has one option, rounds: a whole number from 1 on\n"
    )  # fmt: skip
    other = run(tree, *words, "--tuner", "torch", "--rounds", "2")
    assert other.stderr == "error: --rounds: for the tuner plain only, and this is torch\n"
    inventory.write_text(inventory.read_text().replace("level: 7", "level: 70"))
    bad = run(tree, *words)
    assert bad.returncode == 2
    assert "engine_options: the engine nice has one option, level: a whole number from 0 to 19" in bad.stderr


@pytest.mark.full
def test_a_family_is_one_entry(tree: Path) -> None:
    found = FAMILY.search(PAGE.read_text())
    assert found
    entry = textwrap.dedent(found["code"]).removeprefix("```python\n")
    table = tree / "worker" / "families.py"
    text = table.read_text()
    end = text.index(")\n# fmt: on")
    table.write_text(text[:end] + textwrap.indent(entry.rstrip() + ",\n", "    ") + text[end:])
    (tree / "s.csv").write_text("M,N,K,bias\n1,16,64,True\n2,16,64,False\n")
    inventory = f"defaults: {{family: a6w6, tuner: plain}}\nnodes: {{here: {{gpus: 0, workdir: {tree}/nodes}}}}\n"
    (tree / "inv.yaml").write_text(inventory)
    words = ("tune", "s.csv", "-i", "inv.yaml", "--runs", "runs")
    done = run(tree, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    (tuned,) = tree.glob("runs/*/tuned.csv")
    header = tuned.read_text().splitlines()[0]
    assert header == "gfx,cu_num,M,N,K,bias,libtype,kernelId,splitK,us,kernelName,tflops,bw,errRatio"
    assert {(r["M"], r["bias"]) for r in read_csv(tuned)} == {("1", "True"), ("2", "False")}
    merged = run(tree, "db", "merge", str(tuned.parent), "--into", "db.csv")
    assert merged.returncode == 0, merged.stderr
    assert run(tree, "db", "check", "db.csv", "--family", "a6w6").returncode == 0

    (tree / "s.csv").write_text("M,N,K\n1,16,60\n")
    bad = run(tree, *words)
    assert bad.returncode == 2
    assert "six bits are packed by sixteen" in bad.stderr


def test_an_option_of_the_inventory_is_one_field(tree: Path) -> None:
    """Four files, one of them a test of its own: the field, and two that are written from it."""
    for name in ("docs", "tests/support", "tests/paths.py", "tests/__init__.py"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        (tree / name).parent.mkdir(exist_ok=True)
        copy(ROOT / name, tree / name)
    found = OPTION.search(PAGE.read_text())
    assert found
    field = textwrap.indent(textwrap.dedent(found["code"]).removeprefix("```python\n"), "    ")
    model = tree / "orchestrator/inventory/model.py"
    end = "\n    @property\n    def time_s"
    model.write_text(model.read_text().replace(end, field + end))
    argv = [sys.executable, "-m", "tests.support.inventory_page"]
    subprocess.run(argv, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, check=True, timeout=PATIENCE_S)
    changed = {
        str(path.relative_to(tree)) for path in tree.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and (ROOT / path.relative_to(tree)).exists()
        and path.read_bytes() != (ROOT / path.relative_to(tree)).read_bytes()
    }  # fmt: skip
    assert changed == {
        "orchestrator/inventory/model.py", "inventories/inventory.schema.json", "docs/reference/inventory.md",
    }  # fmt: skip
    row = "| `threads` | number (the libraries' own) | threads of a worker's math libraries |\n"
    assert row in (tree / "docs/reference/inventory.md").read_text()

    inventory = tree / "inv.yaml"
    inventory.write_text(
        f"defaults: {{family: a16w16, tuner: plain}}\nnodes: {{here: {{gpus: 0, workdir: {tree}/nodes, threads: 3}}}}\n"
    )
    (tree / "s.csv").write_text("M,N,K\n1,16,64\n")
    done = run(tree, "tune", "s.csv", "-i", "inv.yaml", "--runs", "runs")
    assert done.returncode == 0, done.stdout + done.stderr
    (script,) = tree.glob("runs/*/nodes/here/tune.sh")
    assert "OMP_NUM_THREADS=3" in script.read_text()
    for wrong, says in (("threads: many", "threads: Input should be a valid integer"), ("thread: 3", "threads?")):
        inventory.write_text(inventory.read_text().replace("threads: 3", wrong))
        bad = run(tree, "inventory", "check", "inv.yaml")
        assert (bad.returncode, says in bad.stderr) == (2, True), bad.stderr
        inventory.write_text(inventory.read_text().replace(wrong, "threads: 3"))


def test_a_column_is_one_entry(tree: Path) -> None:
    """With the tuner, its test, the page of files and the ledger's version, a column is five files."""
    found = COLUMN.search(PAGE.read_text())
    assert found
    for name, before, after in (
        (
            "worker/protocol/records.py",
            "\n)  # fmt: skip\n\n_BY_NAME",
            f"\n    {found['code']}\n)  # fmt: skip\n\n_BY_NAME",
        ),
        (TUNER, '"status": "ok",', '"status": "ok", "rounds": self._rounds,'),
    ):
        text = (tree / name).read_text()
        assert text.count(before) == 1
        (tree / name).write_text(text.replace(before, after))
    (tree / "s.csv").write_text("M,N,K\n1,16,64\n")
    node = f"{{gpus: 0, workdir: {tree}/nodes}}"
    (tree / "inv.yaml").write_text(f"defaults: {{family: a16w16, tuner: plain}}\nnodes: {{here: {node}}}\n")
    done = run(tree, "tune", "s.csv", "-i", "inv.yaml", "--runs", "runs", "--rounds", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    (profile,) = tree.glob("runs/*/profile.csv")
    assert [r["rounds"] for r in read_csv(profile)] == ["2", "2", "2"]
    (path,) = tree.glob("runs/*/ledger.db")
    with closing(sqlite3.connect(path)) as ledger:
        assert ledger.execute("SELECT rounds FROM rows").fetchall() == [(2,)] * 3


def test_help_has_the_tuners_flags_under_its_heading(tree: Path) -> None:
    shown = run(tree, "tune", "--help").stdout
    assert re.search(r"^Tuner plain:\n +--rounds N +Timed runs of a candidate", shown, re.MULTILINE)
