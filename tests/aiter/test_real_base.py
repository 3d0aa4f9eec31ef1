"""AITER's real base_tuner.py, mp_tuner.py and a4w4 script, unchanged, driven by gemmfleet with kernels on the CPU.

Of three dates: one whose pool waits for ever, one that counts time-outs from submission, the newest. Shapes are small,
kernels compute for real (so right and wrong results are the comparison's own finding), times follow from their names.
"""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.aiter.checkout import needs_checkout
from tests.aiter.realbase import RealTree, make

pytestmark = [needs_checkout, pytest.mark.timeout(900)]

VERSIONS = ("v0.1.9", "v0.1.13", "e4048607a5")
ROOT = Path(__file__).parents[2]
N, K = 256, 512
SEGV, FAULT, HANG, WRONG, GOOD = 40, 48, 72, 80, 96
"""What becomes of the shape with this M (none is that of the tiny shape, which opens a tuner)."""
MS = (SEGV, FAULT, HANG, WRONG, GOOD)
FAULTS = (
    {"m": SEGV, "kernel": "3", "do": "segv"},
    {"m": FAULT, "kernel": "7", "do": "memory_fault"},
    {"m": HANG, "kernel": "5", "do": "hang"},
    {"m": WRONG, "kernel": "19", "do": "wrong"},
    {"m": GOOD, "kernel": "2", "do": "unsupported"},
)


@dataclass(frozen=True, slots=True)
class Ran:
    """A run: `run` is its folder, `said` what the command printed."""

    version: str
    tree: RealTree
    run: Path
    said: str


@pytest.fixture(scope="module")
def all_ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    """One run a version over all shapes; the versions at once, for they mostly wait."""
    folders = [tmp_path_factory.mktemp("real") for _ in VERSIONS]
    with ThreadPoolExecutor(len(VERSIONS)) as pool:
        return dict(zip(VERSIONS, pool.map(_tune, VERSIONS, folders), strict=True))


@pytest.fixture(params=VERSIONS)
def ran(request: pytest.FixtureRequest, all_ran: dict[str, Ran]) -> Ran:
    return all_ran[request.param]


def _tune(version: str, folder: Path) -> Ran:
    tree = make(folder, version)
    shapes = folder / "shapes.csv"
    shapes.write_text("M,N,K\n" + "".join(f"{m},{N + 128 * i},{K}\n" for i, m in enumerate(MS)))
    inventory = folder / "inv.yaml"
    inventory.write_text(yaml.safe_dump(tree.inventory(FAULTS)))
    argv = ["tune", str(shapes), "-i", str(inventory), "--runs", str(folder / "runs"), "--tuner-timeout", "60"]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", *argv],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    said = f"{done.stdout}\n{done.stderr}"
    (run,) = (p for p in (folder / "runs").iterdir() if not p.name.startswith("."))
    _report(version, run, time.monotonic() - began)
    return Ran(version, tree, run, said)


def _report(version: str, run: Path, seconds: float) -> None:
    """A row of the table in docs/aiter-proof.md, appended to the file that AITER_REPORT names."""
    if not (path := os.environ.get("AITER_REPORT")):
        return
    profile, tuned = _rows(run / "profile.csv"), _rows(run / "tuned.csv")
    ends = [r["status"] for r in profile if r["winner"] == "0"]
    counts = [ends.count(s) for s in ("ok", "wrong", "error", "unsupported")]
    processes = sum(p.is_dir() for p in run.rglob("attempts/*/aiter-*"))
    cells = (version, f"{len(tuned)} of {len(MS)}", *counts, processes, f"{seconds:.0f}")
    with open(path, "a") as f:
        f.write("| " + " | ".join(map(str, cells)) + " |\n")


def _rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def test_every_shape_is_tuned_whatever_its_kernels_did(ran: Ran) -> None:
    assert {int(r["M"]) for r in _rows(ran.run / "tuned.csv")} == set(MS), ran.said[-3000:]


def test_the_guilty_candidate_is_named_and_the_others_are_measured(ran: Ran) -> None:
    for m, kernel in ((SEGV, 3), (FAULT, 7), (HANG, 5)):
        mine = [r for r in _rows(ran.run / "profile.csv") if r["M"] == str(m)]
        good = {int(r["kernelId"]) for r in mine if r["status"] == "ok"}
        guilty = [r for r in mine if r["kernelId"] == str(kernel) and r["status"] != "ok"]
        assert guilty, f"M={m}"
        assert kernel not in good
        assert {0, 1, 2} - {kernel} <= good
        assert len(good) >= 20


def test_wrong_values_never_win(ran: Ran) -> None:
    mine = [r for r in _rows(ran.run / "profile.csv") if r["M"] == str(WRONG) and r["kernelId"] == "19"]
    assert mine
    assert all(float(r["errRatio"]) > 0.05 and r["status"] == "wrong" for r in mine)
    (winner,) = [r for r in _rows(ran.run / "tuned.csv") if r["M"] == str(WRONG)]
    assert winner["kernelId"] != "19"
    assert float(winner["errRatio"]) <= 0.05


def test_what_a_kernel_cannot_take_is_a_row_and_no_fault(ran: Ran) -> None:
    mine = [r for r in _rows(ran.run / "profile.csv") if r["M"] == str(GOOD) and r["kernelId"] == "2"]
    assert [float(r["us"]) <= 0 for r in mine] == [True]


def test_the_winner_is_the_fastest_right_candidate(ran: Ran) -> None:
    profile = _rows(ran.run / "profile.csv")
    for row in _rows(ran.run / "tuned.csv"):
        same = [r for r in profile if r["M"] == row["M"] and r["status"] == "ok"]
        assert float(row["us"]) == min(float(r["us"]) for r in same)


def test_the_real_files_were_not_changed(ran: Ran, tmp_path: Path) -> None:
    fresh = make(tmp_path, ran.version)
    for path in fresh.root.rglob("*.py"):
        assert path.read_bytes() == (ran.tree.root / path.relative_to(fresh.root)).read_bytes(), path


def test_provenance_names_the_tree(ran: Ran) -> None:
    text = (ran.run / "provenance.json").read_text()
    assert str(ran.tree.root) in text
    assert re.search(r"gfx950", json.dumps(json.loads(text)))
