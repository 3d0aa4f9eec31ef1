"""Everything that can go wrong in AITER's processes, through the whole job on this machine, on both stand-ins.

Each shape has a fault of its own; the others of its run must not notice. One by one the same faults are in
tests/unit/worker/aiter/test_tuner.py.
"""

from __future__ import annotations

import csv
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from orchestrator.paths import RunPaths, list_runs
from tests.kits.fleet import Bench
from tests.standins.aiter import Tree, make_tree

pytestmark = pytest.mark.full

GOOD, SEGV, FAULT, HANG, ILLEGAL, WRONG, NONE, OOM = (16 * i + 8 for i in range(1, 9))
"""M of the shape with each fault; its N is 128 * M, so each is a group of its own. None is the tiny shape."""
ONE = {SEGV: (1, "segv"), FAULT: (8, "memory_fault"), HANG: (3, "hang"), ILLEGAL: (7, "accelerator_error")}
ALL = {WRONG: "wrong", NONE: "unsupported", OOM: "oom"}
FAULTS = {"shapes": [
    *({"when": {"M": m}, "kernels": [k], "do": do} for m, (k, do) in ONE.items()),
    *({"when": {"M": m}, "do": do} for m, do in ALL.items()),
]}  # fmt: skip


@dataclass
class Ran:
    """Exit code and output of a run, and its folder (None where it never began)."""

    code: int
    said: str
    paths: RunPaths | None

    def rows(self, name: str) -> list[dict[str, str]]:
        assert self.paths is not None, self.said
        return list(csv.DictReader((self.paths.root / name).read_text().splitlines()))

    def by_m(self, name: str) -> dict[int, dict[str, str]]:
        return {int(r["M"]): r for r in self.rows(name)}

    def repros(self) -> list[Path]:
        assert self.paths is not None
        return list(self.paths.attempts.rglob("repro/*/reproduce.sh"))


def tune(folder: Path, tree: Tree, shapes: Sequence[tuple[int, int, int]], *more: str) -> Ran:
    folder.mkdir(exist_ok=True)
    bench = Bench(folder)
    bench.shapes_csv.write_text("M,N,K\n" + "".join(f"{m},{n},{k}\n" for m, n, k in shapes))
    defaults = {
        "transport": "local", "engine": "process", "python": str(tree.python), "family": "a4w4_blockscale",
        "tuner": "aiter", "aiter": {"root": str(tree.root)},
    }  # fmt: skip
    bench.inventory.write_text(yaml.safe_dump({"defaults": defaults, "nodes": {"local": {"gpus": 0}}}))
    argv = bench.argv("tune", str(bench.shapes_csv), "-i", str(bench.inventory), *more)
    done = subprocess.run(argv, capture_output=True, text=True, env=bench.env(), check=False)
    said = done.stdout + done.stderr
    assert "Traceback" not in said
    runs = list_runs(bench.runs) if bench.runs.exists() else []
    return Ran(done.returncode, said, runs[-1] if runs else None)


@pytest.mark.parametrize("date", ["runbook", "newest"])
def test_a_candidate_that_faults_costs_itself_and_a_shape_that_nothing_can_do_is_explained(
    tmp_path: Path, date: str
) -> None:
    """Each that ended its process comes with a reproduction; that of the memory fault is run by hand, and faults."""
    shapes = [(m, 128 * m, 512) for m in (GOOD, *ONE, *ALL)]
    mine = tune(tmp_path / date, make_tree(tmp_path / date, date, FAULTS), shapes, "--tuner-timeout", "8")
    assert set(mine.by_m("tuned.csv")) == {GOOD, *ONE}, mine.said[-3000:]
    profile = mine.rows("profile.csv")
    for m, (kernel, do) in ONE.items():
        rows = [r for r in profile if int(r["M"]) == m]
        ok = {int(r["kernelId"]) for r in rows if r["status"] == "ok"}
        assert (kernel in ok, len(ok) >= 8) == (False, True), (do, ok)
        assert [r for r in rows if int(r["kernelId"]) == kernel], do
    scripts = {int(p.parent.name.split("-")[-5]): p for p in mine.repros()}
    assert set(scripts) == set(ONE)
    again = subprocess.Popen(
        ["sh", str(scripts[FAULT])], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        assert again.stdout is not None
        assert any("Memory access fault by GPU" in line for line in again.stdout)
    finally:
        os.killpg(again.pid, signal.SIGKILL)
        again.communicate()
    failed = mine.by_m("failed.csv")
    assert (set(failed), mine.code) == (set(ALL), 1), mine.said[-3000:]
    assert (failed[WRONG]["reason"], "the least error is 0.37" in failed[WRONG]["detail"]) == ("wrong_result", True)
    assert failed[NONE]["reason"] == "no_candidate"
    assert failed[OOM]["reason"] in ("oom", "no_candidate")
