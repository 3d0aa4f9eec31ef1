"""Follows the page for contributors: adds its examples to a copy of the tree and runs them."""

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

from tests.kits.fleet import read_csv
from tests.paths import ROOT
from tests.support.files import write_program
from tests.waiting import PATIENCE_S

PAGE = ROOT / "docs" / "contributing" / "adding.md"
EXAMPLES = ROOT / "examples" / "adding"
TUNER, ENGINE = "worker/tuners/plain.py", "orchestrator/engine/nice.py"
TUNE = ("tune", "s.csv", "-i", "inv.yaml", "--runs", "runs")


def files() -> dict[str, str]:
    """The files that the page links as its examples, by their path in the tree."""
    links = re.findall(r"^ *\[([\w/]+\.py)\]\(../../examples/adding/\1\) ", PAGE.read_text(), re.MULTILINE)
    there = [str(p.relative_to(EXAMPLES)) for p in EXAMPLES.rglob("*.py")]
    assert sorted(there) == sorted(links)
    return {path: (EXAMPLES / path).read_text() for path in links}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the tree with the page's files, and nothing else changed."""
    tree = tmp_path / "tree"
    for folder in ("orchestrator", "worker", "templates", "inventories"):
        shutil.copytree(ROOT / folder, tree / folder)  # with what is compiled, so that no program compiles all anew
    for path, text in files().items():
        assert not (tree / path).exists()
        (tree / path).write_text(text)
    return tree


def run(tree: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(tree)}
    argv = [sys.executable, "-m", "orchestrator", *words]
    return subprocess.run(argv, cwd=tree, env=env, capture_output=True, text=True, timeout=PATIENCE_S)


def block(after: str) -> str:
    """The first code below some words of the page, without its indentation."""
    code = PAGE.read_text().partition(after)[2].partition("```python\n")[2].partition("```")[0]
    assert code
    return textwrap.dedent(code)


def change(tree: Path, name: str, before: str, after: str) -> None:
    """Replace a text that a file of the tree has exactly once."""
    text = (tree / name).read_text()
    assert text.count(before) == 1, (name, before)
    (tree / name).write_text(text.replace(before, after))


def tuned(tree: Path, shapes: str, *words: str, defaults: str = "tuner: plain", node: str = "", code: int = 0) -> Path:
    """The folder of a run on this machine."""
    (tree / "s.csv").write_text(shapes)
    options = f"{{gpus: 0, workdir: {tree}/nodes{node}}}"
    (tree / "inv.yaml").write_text(f"defaults: {{{defaults}}}\nnodes: {{here: {options}}}\n")
    done = run(tree, *TUNE, *words)
    assert done.returncode == code, done.stdout + done.stderr
    (folder,) = tree.glob("runs/*")
    return folder


def test_a_tuner_and_an_engine_are_one_module_each(tree: Path) -> None:
    """With a page and a test of its own each, an addition is three files."""
    assert list(files()) == [TUNER, ENGINE]
    python = write_program(tree / "python", f'#!/bin/sh\nnice >>{tree}/levels\nexec {sys.executable} "$@"\n')
    node = f", engine: nice, engine_options: {{level: 7}}, python: {python}"
    folder = tuned(tree, "M,N,K\n1,16,64\n2,16,64\n4,32,64\n", "--rounds", "2", node=node)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert str(min(19, own + 7)) in (tree / "levels").read_text().splitlines()
    assert {r["kernelName"] for r in read_csv(folder / "profile.csv")} == {"plain_rows", "plain_columns"}

    wrong = "error: the tuner plain has one option, rounds: a whole number from 1 on\n"
    assert run(tree, *TUNE, "-O", "rounds=none").stderr == wrong
    other = run(tree, *TUNE, "--tuner", "torch", "--rounds", "2")
    assert other.stderr == "error: --rounds: for the tuner plain only, and this is torch\n"
    change(tree, "inv.yaml", "level: 7", "level: 70")
    bad = run(tree, *TUNE)
    assert bad.returncode == 2
    assert "engine_options: the engine nice has one option, level: a whole number from 0 to 19" in bad.stderr
    shown = run(tree, "tune", "--help").stdout
    assert re.search(r"^Tuner plain:\n +--rounds N +Timed runs of a candidate", shown, re.MULTILINE)


@pytest.mark.full
def test_a_family_is_one_entry(tree: Path) -> None:
    entry = textwrap.indent(block("At the end of `_ALL` in `worker/families.py`:").rstrip() + ",\n", "    ")
    change(tree, "worker/families.py", ")\n# fmt: on", f"{entry})\n# fmt: on")
    folder = tuned(tree, "M,N,K,bias\n1,16,64,True\n2,16,64,False\n", defaults="family: a6w6, tuner: plain")
    header = (folder / "tuned.csv").read_text().splitlines()[0]
    assert header == "gfx,cu_num,M,N,K,bias,libtype,kernelId,splitK,us,kernelName,tflops,bw,errRatio"
    assert {(r["M"], r["bias"]) for r in read_csv(folder / "tuned.csv")} == {("1", "True"), ("2", "False")}
    assert run(tree, "db", "merge", str(folder), "--into", "db.csv").returncode == 0
    assert run(tree, "db", "check", "db.csv", "--family", "a6w6").returncode == 0
    (tree / "s.csv").write_text("M,N,K\n1,16,60\n")
    assert "six bits are packed by sixteen" in run(tree, *TUNE).stderr


def test_an_option_of_the_inventory_is_one_field(tree: Path) -> None:
    """Four files, one of them a test of its own: the field, and two that are written from it."""
    for name in ("docs", "tests/support", "tests/paths.py", "tests/__init__.py"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        (tree / name).parent.mkdir(exist_ok=True)
        copy(ROOT / name, tree / name)
    field, end = (
        textwrap.indent(block("After the last option of `NodeOptions`:"), "    "),
        "\n    @property\n    def time_s",
    )
    change(tree, "orchestrator/inventory/model.py", end, field + end)
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

    folder = tuned(tree, "M,N,K\n1,16,64\n", node=", threads: 3")
    assert "OMP_NUM_THREADS=3" in (folder / "nodes/here/tune.sh").read_text()
    change(tree, "inv.yaml", "threads: 3", "threads: many")
    bad = run(tree, "inventory", "check", "inv.yaml")
    assert (bad.returncode, "threads: must be a whole number" in bad.stderr) == (2, True), bad.stderr


def test_a_column_is_one_entry(tree: Path) -> None:
    """With the tuner, its test, the page of files and the ledger's version, a column is five files."""
    end = "\n)  # fmt: skip\n\n_BY_NAME"
    change(tree, "worker/protocol/records.py", end, f"\n    {block('At the end of `FIELDS`').strip()}{end}")
    change(tree, TUNER, '"status": "ok",', '"status": "ok", "rounds": self._rounds,')
    folder = tuned(tree, "M,N,K\n1,16,64\n", "--rounds", "2")
    assert [r["rounds"] for r in read_csv(folder / "profile.csv")] == ["2", "2", "2"]
    with closing(sqlite3.connect(folder / "ledger.db")) as ledger:
        assert ledger.execute("SELECT rounds FROM rows").fetchall() == [(2,)] * 3


def test_a_reason_is_a_member_and_its_words(tree: Path) -> None:
    """With the tuner, its test, the page of failures and the protocol's verdicts, a reason is five files."""
    member, words = block("## A reason"), PAGE.read_text().partition('TOO_WIDE = "too_wide"')[2]
    entry = textwrap.dedent(words.partition("```python\n")[2].partition("```")[0])
    change(tree, "orchestrator/reasons.py", "    # a decision of ours", f"    {member}    # a decision of ours")
    change(tree, "orchestrator/reasons.py", "    Reason.KILLS_NODES: (", f"    {entry}    Reason.KILLS_NODES: (")
    change(tree, "worker/protocol/records.py", '"unsupported")', '"unsupported", "too_wide")')
    begins = "            rows: list[Row] = []\n"
    verdict = "if n > 16:\n    emit.failed(shape.id, 'too_wide', f'N is {n}')\n    continue\n"
    change(tree, TUNER, begins, textwrap.indent(verdict, " " * 12) + begins)
    folder = tuned(tree, "M,N,K\n1,16,64\n2,32,64\n", code=1)
    (failed,) = read_csv(folder / "failed.csv")
    assert (failed["N"], failed["reason"], failed["detail"]) == ("32", "too_wide", "N is 32")
    assert "Split the layer, or tune it with another tuner." in run(tree, "explain", "2x32x64").stdout
