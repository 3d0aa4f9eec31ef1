"""A tree of AITER in a folder of its own, and a Python that runs it on the CPU (fakes/sitecustomize.py).

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

from tests.aiter.checkout import commit_of, git, take_out

FAKES = Path(__file__).parent / "fakes"
FOLDERS = ("aiter", "csrc", "hsa", "gradlib", "setup.py", "op_tests/test_opus_a8w8_bmm.py")
LEFT_OUT = ":(exclude)*.co"
"""The kernels themselves, which only a GPU can load."""
GFX, CU_NUM = "gfx950", 256

ROCMINFO = f"""#!/bin/sh
cat <<'END'
ROCk module is loaded
Agent 1
  Name:                    a CPU
  Device Type:             CPU
  Compute Unit:            128
Agent 2
  Name:                    {GFX}
  Device Type:             GPU
  Compute Unit:            {CU_NUM}
END
"""
TOOLS = {"rocminfo": ROCMINFO, "hipconfig": "#!/bin/sh\necho 7.1.0\n", "hipcc": "#!/bin/sh\nexit 0\n"}


@dataclass(frozen=True, slots=True)
class RealTree:
    """`root`: the tree of the version; `python`: one that runs it without ROCm; `tools`: what it finds on its PATH."""

    root: Path
    python: Path
    tools: Path

    def inventory(self, family: str, faults: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """One node, this machine, whose one slot believes in a gfx950."""
        env = {"REAL_AITER_ROOT": str(self.root), "REAL_AITER_FAULTS": json.dumps(list(faults)), "OMP_NUM_THREADS": "1"}
        defaults = {
            "transport": "local", "engine": "process", "python": str(self.python), "family": family,
            "tuner": "aiter", "aiter": {"root": str(self.root)}, "env": env,
        }  # fmt: skip
        return {"defaults": defaults, "nodes": {"local": {"gpus": [0]}}}


def make(folder: Path, version: str) -> RealTree:
    """Take the version's files out of the clone."""
    root = folder / "aiter"
    root.mkdir(parents=True)
    there = git("ls-tree", "--name-only", commit_of(version), *FOLDERS).decode().split()
    take_out(version, root, *there, LEFT_OUT)
    tools = folder / "bin"
    tools.mkdir()
    for name, text in TOOLS.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    python = folder / "python3"
    python.write_text(
        f'#!/bin/sh\nPATH="{tools}:$PATH" '
        f'PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}{FAKES}{os.pathsep}{root}" exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    return RealTree(root, python, tools)
