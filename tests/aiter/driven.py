"""Runs of gemmfleet over a version's own tuner scripts on the CPU (fakes/sitecustomize.py), with faults planted.

The version's files are taken out of the clone for the length of a test, and stay as they are.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.aiter.checkout import commit_of, git, take_out
from tests.paths import ROOT
from worker.families import FAMILIES

FAKES = Path(__file__).parent / "fakes"
FOLDERS = ("aiter", "csrc", "hsa", "gradlib", "setup.py", "op_tests/test_opus_a8w8_bmm.py")
LEFT_OUT = ":(exclude)*.co"
"""The kernels themselves, which only a GPU can load."""
AGENT = "Agent {n}\n  Name:  {name}\n  Device Type:  {kind}\n  Compute Unit:  {units}\n"
ROCMINFO = "ROCk module is loaded\n" + AGENT.format(n=1, name="a CPU", kind="CPU", units=128)
ROCMINFO += AGENT.format(n=2, name="gfx950", kind="GPU", units=256)
TOOLS = {"rocminfo": f"cat <<'END'\n{ROCMINFO}END\n", "hipconfig": "echo 7.1.0\n", "hipcc": "exit 0\n"}

N, K = 256, 512
HURT, WRONG, NONE = 96, 112, 160
"""M of the shape whose candidates are hurt one by one, of one whose candidates are all wrong, and of one
that no candidate takes. None is the tiny shape's, which opens a tuner."""
SEGV, FAULT, HANG, OFF, FAR, REFUSED, PARTIAL = "2", "3", "4", "5", "6", "7", "9"
"""Numbers of the candidates that are hurt: the three that end a process, one a little wrong, one wrong beyond all
measure (whose comparison raises since v0.1.15), one that refuses, one that writes the half of its output."""
DOES = {
    SEGV: "segv", FAULT: "memory_fault", HANG: "hang", OFF: "off", FAR: "wrong", REFUSED: "unsupported",
    PARTIAL: "partial",
}  # fmt: skip
UNSPLIT = "1"
ENDS = {SEGV: "Segmentation", FAULT: "Memory access", HANG: "hang"}
"""Faults that end their process, and a word from the message for each."""
TIMEOUT_S = 90
COLUMNS = {
    "a16w16": {
        "bias": "False", "dtype": "torch.bfloat16", "outdtype": "torch.bfloat16", "scaleAB": "False",
        "bpreshuffle": "False",
    },
}  # fmt: skip
TYPES = {"a16w16": "asm"}
"""The backend whose candidates are hurt, where one number is of several: those that do not split K."""


def make(folder: Path, version: str) -> tuple[Path, Path]:
    """Take the version's files out of the clone: (their root, a Python that runs them without ROCm)."""
    root, tools, python = folder / "aiter", folder / "bin", folder / "python3"
    root.mkdir(parents=True)
    take_out(version, root, *git("ls-tree", "--name-only", commit_of(version), *FOLDERS).decode().split(), LEFT_OUT)
    tools.mkdir()
    # a check of AITER's gets no variable of ours, so the script has what our fakes need
    environment = f'REAL_AITER_ROOT="{root}" PATH="{tools}:$PATH"'
    environment += f' PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}{FAKES}{os.pathsep}{root}"'
    scripts = {tools / name: text for name, text in TOOLS.items()}
    scripts[python] = f'{environment} exec {sys.executable} "$@"\n'
    for file, text in scripts.items():
        file.write_text(f"#!/bin/sh\n{text}")
        file.chmod(0o755)
    return root, python


@dataclass(frozen=True, slots=True)
class Driven:
    """A run: `root` and `python` are the tree's, `run` is its folder, `said` what the command printed."""

    version: str
    family: str
    root: Path
    python: Path
    run: Path
    said: str

    def rows(self, name: str) -> list[dict[str, str]]:
        header, *rows = csv.reader((self.run / name).read_text().splitlines())
        return [dict(zip(FAMILIES[self.family].from_aiter(header), row, strict=True)) for row in rows]

    def candidates(self, number: str = "") -> list[dict[str, str]]:
        """Profile rows of the hurt shape's candidates; with a number, only of the one that was hurt."""
        kind = TYPES.get(self.family, "")
        rows = [r for r in self.rows("profile.csv") if (r["M"], r["winner"]) == (str(HURT), "0")]
        mine = [r for r in rows if not kind or r.get("libtype", kind) in (kind, "")]
        return [r for r in mine if _number(r) == number] if number else rows


def _number(row: dict[str, str]) -> str:
    number = row.get("kernelId") or row.get("solidx") or ""
    return number if "kernelId" in row or row["splitK"] == UNSPLIT else f"{number}/{row['splitK']}"


def planted(version: str, family: str) -> list[dict[str, Any]]:
    """The faults of a run."""
    kind = [TYPES[family], UNSPLIT] if family in TYPES else []
    hurt = [{"m": str(HURT), "candidate": [n, *kind], "do": do} for n, do in DOES.items()]
    all_of = [{"m": str(m), "candidate": [], "do": do} for m, do in ((WRONG, "wrong"), (NONE, "unsupported"))]
    return [*hurt, *all_of]


def drive(version: str, family: str, folder: Path) -> Driven:
    """Tune the shapes on this machine, whose one slot believes in a gfx950: those that end no process first."""
    root, python = make(folder, version)
    more = COLUMNS.get(family, {})
    lines = [",".join((*more, "M,N,K")), *(",".join((*more.values(), f"{m},{N},{K}")) for m in (WRONG, NONE, HURT))]
    (folder / "shapes.csv").write_text("\n".join(lines) + "\n")
    faults = json.dumps(planted(version, family))
    env = {"REAL_AITER_ROOT": str(root), "REAL_AITER_FAULTS": faults, "OMP_NUM_THREADS": "1"}
    defaults = {
        "transport": "local", "engine": "process", "python": str(python), "family": family, "tuner": "aiter",
        "aiter": {"root": str(root)}, "env": env,
    }  # fmt: skip
    (folder / "inv.yaml").write_text(yaml.safe_dump({"defaults": defaults, "nodes": {"local": {"gpus": 0}}}))
    argv = [sys.executable, "-m", "orchestrator", "tune", "shapes.csv", "-i", "inv.yaml", "--runs", "runs"]
    argv += ["--tuner-timeout", str(TIMEOUT_S), "--busy", "share"]  # the runs are at work side by side
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=1500, check=False)
    (run,) = (p for p in (folder / "runs").iterdir() if not p.name.startswith("."))
    return Driven(version, family, root, python, run, f"{done.stdout}\n{done.stderr}")
