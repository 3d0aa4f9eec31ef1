"""A checkout's own tuner base in a folder of its own, and a Python that runs it on the CPU (fakes/sitecustomize.py).

The files are taken out of the clone for the length of a test, and stay as they are.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.aiter.checkout import git, take_out

FAKES = Path(__file__).parent / "fakes"
FILES = (
    "aiter/__init__.py", "aiter/jit", "aiter/utility", "aiter/ops/gemm_op_a4w4.py", "aiter/configs", "setup.py",
    "csrc/ck_gemm_a4w4_blockscale", "hsa/gfx950/f4gemm/f4gemm_bf16_per1x32Fp4.csv",
)  # fmt: skip
NEWER_FILES = ("csrc/include/aiter_enum.h",)


@dataclass(frozen=True, slots=True)
class RealTree:
    """`root`: the tree of the version; `python`: has the served modules on its path."""

    root: Path
    python: Path

    def inventory(self, faults: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """One node, this machine, whose one slot believes in a gfx950."""
        env = {"REAL_AITER_ROOT": str(self.root), "REAL_AITER_FAULTS": json.dumps(list(faults)), "OMP_NUM_THREADS": "1"}
        defaults = {
            "transport": "local", "engine": "process", "python": str(self.python), "family": "a4w4_blockscale",
            "tuner": "aiter", "aiter": {"root": str(self.root)}, "env": env,
        }  # fmt: skip
        return {"defaults": defaults, "nodes": {"local": {"gpus": [0]}}}


def make(folder: Path, version: str) -> RealTree:
    """Take the version's files out of the clone."""
    root = folder / "aiter"
    root.mkdir(parents=True)
    here = {line.split("\t")[-1] for line in git("ls-tree", "-r", version, *NEWER_FILES).decode().splitlines()}
    take_out(version, root, *FILES, *(f for f in NEWER_FILES if f in here))
    python = folder / "python3"
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}{FAKES}{os.pathsep}{root}" exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    return RealTree(root, python)
