"""A git repository with the fake AITER's kernel lists, tables and checks, as a person has who publishes rows."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.standins.aiter.kernel_lists import CORE, tree
from tests.support.files import write_files
from tests.support.tuned_tables import A4W4, BLOCKSCALE, text, untuned

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


def checkout(folder: Path, files: Mapping[str, str] | None = None, *, guard: str = CHECK) -> Path:
    """A repository whose branch main holds a tree, the families' tables and lists (empty but for `files`, which are
    named below aiter/configs), and checks named as AITER's are."""
    tree(folder, core=CORE)
    configs = {
        A4W4.tuned_csv: text(A4W4), A4W4.untuned_csv: untuned(A4W4),
        BLOCKSCALE.tuned_csv: text(BLOCKSCALE), BLOCKSCALE.untuned_csv: untuned(BLOCKSCALE), **(files or {}),
    }  # fmt: skip
    checks = {"test_csv_validation.py": CHECK, "test_config_shape_collision.py": guard, "__init__.py": ""}
    write_files(folder, {f"aiter/configs/{name}": content for name, content in configs.items()})
    write_files(folder, {f"op_tests/tuning_tests/{name}": content for name, content in checks.items()})
    write_files(folder, {".gitattributes": "*.csv text eol=lf\n"})
    git(folder, "init", "-q", "-b", "main")
    git(folder, "config", "user.name", "A Person")
    git(folder, "config", "user.email", "a@person")
    commit(folder, "base")
    return folder


def commit(folder: Path, message: str, files: Mapping[str, str] | None = None) -> str:
    """Commit everything, with these files (named below the checkout) changed; the commit."""
    write_files(folder, files or {})
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
