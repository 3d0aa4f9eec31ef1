"""A git checkout of AITER's layout with tables and two checks of its own, all of our making, to publish onto."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.aiterbuild import CORE, tree
from worker.families import FAMILIES, Family

A4W4 = FAMILIES["a4w4_blockscale"]
BLOCKSCALE = FAMILIES["a8w8_blockscale"]
TILE = "a8w8_blockscale_cktile_192"
"""A kernel of the list of `aiterbuild.tree`."""
CHECK = """
import csv, glob, os, unittest

CONFIGS = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "aiter", "configs")


class Test(unittest.TestCase):
    def test_tables(self):
        keys = set()
        for path in sorted(glob.glob(CONFIGS + "/**/*tuned_gemm*.csv", recursive=True)):
            with open(path, newline="") as f:
                for row in csv.DictReader(f) if "untuned" not in path else ():
                    self.assertGreater(float(row["us"]), 0)
                    key = (row["gfx"], row["cu_num"], row["M"], row["N"], row["K"], "libtype" in row)
                    self.assertNotIn(key, keys)
                    keys.add(key)
"""
SKIPPED = """
import unittest


@unittest.skip("aiter.jit.core not importable: No module named 'torch'")
class Test(unittest.TestCase):
    def test_merge(self):
        pass
"""


def line(of: Family, **cells: Any) -> str:
    """A row of a tuned table; what is not named is taken as something plain."""
    plain = {"gfx": "gfx950", "cu_num": 256, "N": 64, "K": 128, "us": 10.0, "splitK": 0, of.err_column: 0.0}
    full = {**{c.name: c.default or 64 for c in of.columns}, **plain, **cells}
    us = float(full["us"])
    full.setdefault(
        "tflops", round(of.flops({k: v for k, v in full.items() if k in of.key_names}) / us / 1e6, 6) if us > 0 else 0
    )
    return ",".join(str(full.get(n, 0)) for n in of.tuned_header)


def text(of: Family, *lines: str) -> str:
    """A tuned table."""
    return "\n".join((",".join(of.aiter_header), *lines)) + "\n"


def untuned(of: Family, *lines: str) -> str:
    """A list of shapes."""
    return "\n".join((",".join(of.key_names), *lines)) + "\n"


def checkout(folder: Path, files: Mapping[str, str] | None = None, *, guard: str = CHECK) -> Path:
    """A repository whose branch main holds a tree, the families' tables and lists (empty but for `files`, which are
    named below aiter/configs), and checks named as AITER's are."""
    tree(folder, core=CORE)
    configs = {
        A4W4.tuned_csv: text(A4W4), A4W4.untuned_csv: untuned(A4W4),
        BLOCKSCALE.tuned_csv: text(BLOCKSCALE), BLOCKSCALE.untuned_csv: untuned(BLOCKSCALE), **(files or {}),
    }  # fmt: skip
    checks = {"test_csv_validation.py": CHECK, "test_config_shape_collision.py": guard, "__init__.py": ""}
    for name, content in (
        *((f"aiter/configs/{n}", t) for n, t in configs.items()),
        *((f"op_tests/tuning_tests/{n}", t) for n, t in checks.items()),
        (".gitattributes", "*.csv text eol=lf\n"),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    git(folder, "init", "-q", "-b", "main")
    git(folder, "config", "user.name", "A Person")
    git(folder, "config", "user.email", "a@person")
    commit(folder, "base")
    return folder


def commit(folder: Path, message: str, files: Mapping[str, str] | None = None) -> str:
    """Commit everything, with these files (named below the checkout) changed; the commit."""
    for name, content in (files or {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    git(folder, "add", "-A", "-f")
    git(folder, "commit", "-q", "-m", message)
    return git(folder, "rev-parse", "HEAD").strip()


def git(folder: Path, *words: str) -> str:
    """Output of git in a repository, whatever this machine's own configuration is."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | {"GIT_CONFIG_GLOBAL": os.devnull}
    argv: Sequence[str] = ["git", "-C", str(folder), *words]
    return subprocess.run(argv, check=True, capture_output=True, text=True, env=env).stdout


def show(folder: Path, ref: str, name: str) -> str:
    """A file at a ref."""
    return git(folder, "show", f"{ref}:{name}")
