"""Runs of gemmfleet over a version's own tuner scripts, with faults planted: what is planted, and what came of it."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.aiter import experts
from tests.aiter.realbase import RealTree, make
from worker.families import FAMILIES

ROOT = Path(__file__).parents[2]
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
ENDS = (SEGV, FAULT, HANG)
TIMEOUT_S = 90
COLUMNS = {
    "a8w8": {"q_dtype_w": "torch.int8"},
    "a8w8_bpreshuffle": {"q_dtype_w": "torch.float8_e4m3fn"},
    "a16w16": {
        "bias": "False", "dtype": "torch.bfloat16", "outdtype": "torch.bfloat16", "scaleAB": "False",
        "bpreshuffle": "False",
    },
    "batched_a8w8": {"B": "2"},
    "batched_bf16": {"B": "2"},
    "batched_gemm_a8w8_blockscale_mxscale": {"B": "2"},
}  # fmt: skip
KIDS = ("100", "149", "150", "151", "152", "158", "325")
"""Numbers of candidates that split nothing and take every M, of the family whose numbers are no row of their own."""
NUMBERS = {"batched_gemm_a8w8_blockscale_mxscale": dict(zip(DOES, KIDS, strict=True))}
TYPES = {
    "a8w8_blockscale": "ck", "a8w8_blockscale_bpreshuffle": "ck", "a8w8_bpreshuffle": "ck", "a16w16": "asm",
}  # fmt: skip
"""The backend whose candidates are hurt, where one number is of several. Of a16w16's, those that do not split K."""


@dataclass(frozen=True, slots=True)
class Driven:
    """A run: `run` is its folder, `said` what the command printed."""

    version: str
    family: str
    tree: RealTree
    run: Path
    said: str
    status: int
    seconds: float

    def rows(self, name: str) -> list[dict[str, str]]:
        path = self.run / name
        header, *rows = csv.reader(path.read_text().splitlines()) if path.is_file() else [[]]
        return [dict(zip(FAMILIES[self.family].from_aiter(header), row, strict=True)) for row in rows]

    def of(self, name: str, m: int) -> list[dict[str, str]]:
        """The rows of the shape with this M, or so many tokens."""
        return [r for r in self.rows(name) if (r.get("M") or r["token"]) == str(m)]

    def candidates(self, m: int, number: str = "") -> list[dict[str, str]]:
        """Profile rows of the shape's candidates; with a number, only of the one that was hurt."""
        if self.family == "fmoe":
            hurt = experts.HURT[DOES[number]][1] if number else ""
            last = max(r["attempt"] for r in self.of("profile.csv", m) if r["winner"] == "0")
            rows = [r for r in self.of("profile.csv", m) if r["winner"] == "0" and r["attempt"] == last]
            return [r for r in rows if not hurt or hurt in (r["kernelName1"], r["kernelName2"])]
        kind = TYPES.get(self.family, "")
        number = NUMBERS.get(self.family, {}).get(number, number)
        rows = [r for r in self.of("profile.csv", m) if r["winner"] == "0"]
        mine = [r for r in rows if not kind or r.get("libtype", kind) in (kind, "")]
        return [r for r in mine if _number(r) == number] if number else rows


def _number(row: dict[str, str]) -> str:
    number = row.get("kernelId") or row.get("solidx") or ""
    return number if "kernelId" in row or row["splitK"] == UNSPLIT else f"{number}/{row['splitK']}"


def planted(version: str, family: str) -> list[dict[str, Any]]:
    """The faults of a run."""
    kind = [TYPES[family]] if family in TYPES and not (version == "v0.1.9" and "blockscale" in family) else []
    kind += [UNSPLIT] if family == "a16w16" else []
    if family == "fmoe":
        hurt = [{"m": str(HURT), "candidate": list(candidate), "do": do} for do, candidate in experts.HURT.items()]
    else:
        mine = NUMBERS.get(family, {})
        hurt = [{"m": str(HURT), "candidate": [mine.get(n, n), *kind], "do": do} for n, do in DOES.items()]
    all_of = [{"m": str(m), "candidate": [], "do": do} for m, do in ((WRONG, "wrong"), (NONE, "unsupported"))]
    return [*hurt, *all_of]


def drive(version: str, family: str, folder: Path) -> Driven:
    """Tune the shapes: those that end no process first."""
    tree = make(folder, version)
    more = COLUMNS.get(family, {})
    rows: list[dict[str, Any]] = [{**more, "M": m, "N": N, "K": K} for m in (WRONG, NONE, HURT)]
    if family == "fmoe":
        rows = experts.shapes((WRONG, NONE, HURT))
    shapes = folder / "shapes.csv"
    with open(shapes, "w", newline="") as f:
        out = csv.DictWriter(f, rows[0])
        out.writeheader()
        out.writerows(rows)
    inventory = folder / "inv.yaml"
    inventory.write_text(yaml.safe_dump(tree.inventory(family, planted(version, family))))
    argv = [
        sys.executable, "-m", "orchestrator", "tune", str(shapes), "-i", str(inventory), "--runs", str(folder / "runs"),
        "--tuner-timeout", str(TIMEOUT_S),
    ]  # fmt: skip
    began = time.monotonic()
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=1500, check=False)
    (run,) = (p for p in (folder / "runs").iterdir() if not p.name.startswith("."))
    said = f"{done.stdout}\n{done.stderr}"
    driven = Driven(version, family, tree, run, said, done.returncode, time.monotonic() - began)
    _report(driven)
    return driven


def _report(driven: Driven) -> None:
    """A row of the table in benchmarks/results/aiter.md, appended to the file that AITER_REPORT names."""
    if not (path := os.environ.get("AITER_REPORT")):
        return
    profile = driven.candidates(HURT)
    ends = [r["status"] for r in profile]
    counts = [ends.count(s) for s in ("ok", "wrong", "error", "unsupported")]
    processes = sum(p.is_dir() for p in driven.run.rglob("attempts/*/aiter-*"))
    cells = (driven.version, driven.family, len(profile), *counts, processes, f"{driven.seconds:.0f}")
    with open(path, "a") as f:
        f.write("| " + " | ".join(map(str, cells)) + " |\n")
