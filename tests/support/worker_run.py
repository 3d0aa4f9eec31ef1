"""Runs one group as `worker run GROUP.json` does on a node: real processes, Triton's interpreter in place of a GPU.

code, output, records = run_group(tmp_path, "vllm", "fmoe", [key], {"root": str(tree)})
tuned = of_type(records, "shape_tuned")
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.paths import ROOT

FEW = {"max_candidates": 2, "min_samples": 1, "max_samples": 1, "compilers": 1}
"""Options of a search that takes seconds."""


def run_group(
    folder: Path,
    tuner: str,
    family: str,
    keys: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    *,
    interpreted: bool = True,
) -> tuple[int, str, list[Any]]:
    """Tune shapes 1, 2, ... of these keys with few candidates; exit code, output, records."""
    node = {"run": "r", "node": "n", "tuner": tuner, "options": {**FEW, "family": family, **options}, "protocol": 1}
    spec = {
        "attempt": "a1", "run": "r", "epoch": 1, "group": "g", "family": family, "tuner": tuner, "protocol": 1,
        "shapes": [{"id": i, "key": key} for i, key in enumerate(keys, 1)],
    }  # fmt: skip
    (folder / "node").mkdir(parents=True)
    (folder / "g.json").write_text(json.dumps(spec))
    (folder / "node" / "node.json").write_text(json.dumps(node))
    argv = [sys.executable, "-m", "worker", "run", str(folder / "g.json"), "--node-dir", str(folder / "node")]
    env = {name: value for name, value in os.environ.items() if name != "GEMMFLEET_CACHE"}
    env["TRITON_INTERPRET"] = str(int(interpreted))
    done = subprocess.run(argv, capture_output=True, text=True, env=env)
    records = folder / "node" / "attempts" / "a1" / "records.jsonl"
    lines = records.read_text().splitlines() if records.exists() else []
    return done.returncode, done.stdout + done.stderr, [json.loads(line) for line in lines]


def of_type(records: Sequence[Any], type_: str) -> list[Any]:
    return [record for record in records if record["type"] == type_]


def answers_of(code: str, *words: str, cache: Path, interpreted: bool = False) -> list[Any]:
    """The lists that Python code prints in a fresh process, which keeps what Triton compiles in the folder `cache`."""
    env = {"TRITON_CACHE_DIR": str(cache), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    env["TRITON_INTERPRET"] = str(int(interpreted))
    argv = [sys.executable, "-W", "ignore", "-c", code, *words]
    done = subprocess.run(argv, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
