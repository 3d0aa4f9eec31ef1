"""Configs meant for a default file of AITER's, end to end on one GPU.

    python -m benchmarks.aiter_configs TREE --only default [--out FILE]

gfx950's default of a16w16 stands in for this chip's where the tree has none, without the keys that only AMD's compiler
takes. A config that a search finds and a harmful one are measured against it by `tune -O default=...`, through the
wrapper and the fused operator that reads the same file, at buckets with one M and with two. Then the merge must refuse
the harmful one and what was not measured, and the file be as before after `undo`.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.figure import Figure, LeftOutError
from worker.triton_configs.kinds import BY_NAME, ConfigKind
from worker.triton_configs.resolve import CONFIGS, ResolveError, Resolver, folder_name
from worker.tuners.aiter_triton.space import portable

KIND = BY_NAME["a16w16"]
PARTS = ("__init__.py", "ops", "jit/core.py", "jit/utils", "utility")
ALONE, BOTH = ((64, 1280, 8192), (64, 7168, 2048)), ((40, 2112, 7168), (64, 2112, 7168))
"""M, N, K: M = 64 is its bucket's bound, so that it is measured alone; with 40 there are two."""
HARMFUL = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 16, "BLOCK_SIZE_K": 64, "num_warps": 1}


def tree_for(source: Path, folder: Path, arch: str, kinds: Sequence[ConfigKind] = (KIND,)) -> Path:
    """A copy of a tree's Triton parts that has a default of each kind for the chip."""
    for part in PARTS:
        path = source / "aiter" / part
        if path.is_dir():
            shutil.copytree(path, folder / "aiter" / part, ignore=shutil.ignore_patterns("*.so", "*.co", "*.hsaco"))
        else:
            (folder / "aiter" / part).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder / "aiter" / part)
    for kind in kinds:
        try:
            Resolver(folder, arch).place(kind.config)
        except ResolveError:
            theirs = Resolver(folder, "gfx950")
            buckets = theirs.read(theirs.place(kind.config).default).buckets
            text = json.dumps({name: portable(values, kind, arch) for name, values in buckets.items()}, indent=4)
            path = folder / CONFIGS / arch / "triton" / "gemm" / folder_name(kind.config) / "DEFAULT.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
    return folder


class Proof:
    """The steps, in a folder of their own."""

    def __init__(self, source: Path, folder: Path) -> None:
        import torch
        import triton

        if not torch.cuda.is_available():
            raise LeftOutError("needs a GPU that torch sees")
        self.arch = str(triton.runtime.driver.active.get_current_target().arch)
        self.root = tree_for(source, folder / "tree", self.arch)
        self.runs = folder / "runs"
        self.kept: dict[str, Any] = {"arch": self.arch, "device": torch.cuda.get_device_name()}

    def gemmfleet(self, *args: str) -> tuple[int, str]:
        """Exit code and output of a command."""
        argv = [sys.executable, "-m", "orchestrator", *args]
        done = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, "NO_COLOR": "1"})
        return done.returncode, done.stdout + done.stderr

    def tuned(self, name: str, shapes: Sequence[tuple[int, int, int]], *options: str) -> Path:
        """The folder of a run over these shapes. Raises RuntimeError where it fails."""
        listed = self.runs.parent / f"{name}.csv"
        listed.write_text("".join(f"{m},{n},{k}\n" for m, n, k in (("M", "N", "K"), *shapes)))
        more = [word for option in (f"root={self.root}", *options) for word in ("-O", option)]
        runs = self.runs / name
        code, text = self.gemmfleet(
            "tune", str(listed), "--tuner", "aiter-triton", "--family", "a16w16", "--runs", str(runs), *more
        )
        if code:
            raise RuntimeError(f"{name}: exit code {code}: {text[-2000:]}")
        return next(p.parent for p in sorted(runs.glob("*/ledger.db")))

    def for_default(self, name: str, shapes: Sequence[tuple[int, int, int]], values: dict[str, Any]) -> Path:
        """The run that measures a config for the default's M_LEQ_64."""
        run = self.tuned(name, shapes, "default=" + json.dumps({"M_LEQ_64": values}))
        self.kept[name] = {"values": values, "rows": rows_of(run)}
        return run

    def merged(self, name: str, run: Path, *options: str) -> tuple[int, str]:
        """Exit code and output of the merge, kept."""
        code, text = self.gemmfleet("configs", "merge", str(run), "--into", str(self.root), *options)
        self.kept[f"merge {name}"] = {"code": code, "text": text[-3000:]}
        print(f"merge {name}: {code}\n{text}", flush=True)
        return code, text


def rows_of(run: Path) -> list[dict[str, str]]:
    """Rows of a run's configs/aiter/tuned.csv."""
    with (run / "configs/aiter" / "tuned.csv").open(newline="") as f:
        return [
            {k: row[k] for k in ("N", "K", "M", "bucket", "caller", "old_us", "new_us")} for row in csv.DictReader(f)
        ]


def prove(source: Path, folder: Path, out: Path | None) -> list[Figure]:
    """All steps; what was measured goes to `out`. Raises LeftOutError without a GPU."""
    proof = Proof(source, folder)
    resolver = Resolver(proof.root, proof.arch)
    default = resolver.place(KIND.config).default
    before, today = default.read_bytes(), resolver.config_for(KIND, *ALONE[0]).values
    found = proof.tuned("searched", ALONE[:1])
    files = list((found / "configs/aiter").glob("*.json"))
    better = next(iter(json.loads(files[0].read_text()).values())) if files else today
    every = (*ALONE, *BOTH)
    helpful = proof.for_default("helpful", every, better)
    harmful = proof.for_default("harmful", every, {**today, **HARMFUL})
    (proof.runs.parent / "mine.csv").write_text("M,N,K\n48,1280,8192\n")
    mine = str(proof.runs.parent / "mine.csv")
    on_request = proof.merged("without --allow-default", helpful)
    incomplete = proof.merged("of an unmeasured shape", helpful, "--allow-default", "--shapes", mine)
    slower = proof.merged("harmful", harmful, "--allow-default")
    refused = [
        on_request[0] and "give --allow-default" in on_request[1],
        incomplete[0] and "not measured again: 48x1280x8192" in incomplete[1],
        slower[0] and "would become slower" in slower[1],
    ]
    unchanged = default.read_bytes() == before
    code, text = proof.merged("helpful", helpful, "--allow-default")
    whole = ("lookups as planned" if code == 0 else "would become slower") in text
    if code == 0:
        proof.gemmfleet("configs", "undo", str(proof.root))
    for name in ("helpful", "harmful"):
        for row in proof.kept[name]["rows"]:
            print(name, row, flush=True)
    if out is not None:
        out.write_text(json.dumps(proof.kept, indent=1) + "\n")
    measured = [r for name in ("helpful", "harmful") for r in proof.kept[name]["rows"]]
    timed = [r for r in measured if float(r["old_us"]) > 0 and float(r["new_us"]) > 0]
    fused = [r for r in timed if r["caller"]]
    how = "two configs at four shapes, buckets of one M and of two"
    return [
        Figure("rows with both times", len(timed) / max(1, len(measured)), 1, "of all", f"{len(measured)} rows", True),
        Figure("rows of two operators", len(timed), 16, "rows", how, True),
        Figure("of them through the fused operator", len(fused), 8, "rows", KIND.callers[0].function, True),
        Figure("refused", sum(map(bool, refused)), 3, "merges", "without the flag, a shape unmeasured, harmful", True),
        Figure("default changed by what was refused", float(not unchanged), 0, "files", "byte by byte"),
        Figure("merged with proof, or refused for its times", float(whole), 1, "merges", f"exit code {code}", True),
        Figure("default as before after undo", float(default.read_bytes() == before), 1, "files", "", True),
    ]
