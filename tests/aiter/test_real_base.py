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
FAULTS = (
    {"m": SEGV, "kernel": "3", "do": "segv"},
    {"m": FAULT, "kernel": "7", "do": "memory_fault"},
    {"m": HANG, "kernel": "5", "do": "hang"},
    {"m": WRONG, "kernel": "19", "do": "wrong"},
    {"m": GOOD, "kernel": "2", "do": "unsupported"},
)


@pytest.fixture(scope="module", params=VERSIONS)
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, RealTree, Path, str]:
    """One run over all shapes: version, tree, run folder, what was said."""
    folder = tmp_path_factory.mktemp("real")
    version = str(request.param)
    tree = make(folder, version)
    shapes = folder / "shapes.csv"
    shapes.write_text("M,N,K\n" + "".join(f"{m},{N + 128 * i},{K}\n" for i, m in enumerate(_ms())))
    inventory = folder / "inv.yaml"
    inventory.write_text(yaml.safe_dump(tree.inventory(FAULTS)))
    argv = ["tune", str(shapes), "-i", str(inventory), "--runs", str(folder / "runs"), "--tuner-timeout", "40"]
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
    print(f"{version}: exit {done.returncode} after {time.monotonic() - began:.0f} s\n{said[-6000:]}")
    _report(version, run, time.monotonic() - began)
    print((run / "logs/local.log").read_text()[-6000:] if (run / "logs/local.log").exists() else "no log")
    return version, tree, run, said


def _report(version: str, run: Path, seconds: float) -> None:
    """A row of the table in docs/aiter-proof.md, appended to the file that AITER_REPORT names."""
    if not (path := os.environ.get("AITER_REPORT")):
        return
    profile, tuned = _rows(run / "profile.csv"), _rows(run / "tuned.csv")
    counts = [sum(r["status"] == s for r in profile) for s in ("ok", "wrong", "error", "unsupported")]
    processes = len(list(run.rglob("attempts/*/aiter-*/tuned.csv"))) or len(list(run.rglob("aiter-*")))
    cells = (version, f"{len(tuned)} of {len(_ms())}", *counts, processes, f"{seconds:.0f}")
    with open(path, "a") as f:
        f.write("| " + " | ".join(map(str, cells)) + " |\n")


def _ms() -> tuple[int, ...]:
    return SEGV, FAULT, HANG, WRONG, GOOD


def _rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def test_every_shape_is_tuned_whatever_its_kernels_did(ran: tuple[str, RealTree, Path, str]) -> None:
    _, _, run, said = ran
    assert {int(r["M"]) for r in _rows(run / "tuned.csv")} == set(_ms()), said[-3000:]


def test_the_guilty_candidate_is_named_and_the_others_are_measured(ran: tuple[str, RealTree, Path, str]) -> None:
    _, _, run, _ = ran
    for m, kernel in ((SEGV, 3), (FAULT, 7), (HANG, 5)):
        mine = [r for r in _rows(run / "profile.csv") if r["M"] == str(m)]
        good = {int(r["kernelId"]) for r in mine if r["status"] == "ok"}
        guilty = [r for r in mine if r["kernelId"] == str(kernel) and r["status"] != "ok"]
        assert guilty, f"M={m}"
        assert kernel not in good
        assert {0, 1, 2} - {kernel} <= good
        assert len(good) >= 20


def test_wrong_values_never_win(ran: tuple[str, RealTree, Path, str]) -> None:
    _, _, run, _ = ran
    mine = [r for r in _rows(run / "profile.csv") if r["M"] == str(WRONG) and r["kernelId"] == "19"]
    assert mine
    assert all(float(r["errRatio"]) > 0.05 and r["status"] == "wrong" for r in mine)
    (winner,) = [r for r in _rows(run / "tuned.csv") if r["M"] == str(WRONG)]
    assert winner["kernelId"] != "19"
    assert float(winner["errRatio"]) <= 0.05


def test_what_a_kernel_cannot_take_is_a_row_and_no_fault(ran: tuple[str, RealTree, Path, str]) -> None:
    _, _, run, _ = ran
    mine = [r for r in _rows(run / "profile.csv") if r["M"] == str(GOOD) and r["kernelId"] == "2"]
    assert [float(r["us"]) <= 0 for r in mine] == [True]


def test_the_winner_is_the_fastest_right_candidate(ran: tuple[str, RealTree, Path, str]) -> None:
    _, _, run, _ = ran
    profile = _rows(run / "profile.csv")
    for row in _rows(run / "tuned.csv"):
        same = [r for r in profile if r["M"] == row["M"] and r["status"] == "ok"]
        assert float(row["us"]) == min(float(r["us"]) for r in same)


def test_the_real_files_were_not_changed(ran: tuple[str, RealTree, Path, str], tmp_path: Path) -> None:
    version, tree, _, _ = ran
    fresh = make(tmp_path, version)
    for path in fresh.root.rglob("*.py"):
        assert path.read_bytes() == (tree.root / path.relative_to(fresh.root)).read_bytes(), path


def test_provenance_names_the_tree(ran: tuple[str, RealTree, Path, str]) -> None:
    _, tree, run, _ = ran
    text = (run / "provenance.json").read_text()
    assert str(tree.root) in text
    assert re.search(r"gfx950", json.dumps(json.loads(text)))
