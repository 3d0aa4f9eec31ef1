"""Everything that can go wrong in AITER's processes, through the whole job on this machine, on both stand-ins.

Each shape has a fault of its own; the others of its run must not notice. One by one the same faults are in
tests/unit/worker/aiter/test_aiter_driver.py.
"""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.paths import RunPaths, list_runs
from tests.integration.kit import Bench
from tests.standins.aiter import Tree, make_tree

pytestmark = pytest.mark.full

GOOD, SEGV, FAULT, HANG, ILLEGAL, WRONG, NONE, OOM = (16 * i + 8 for i in range(1, 9))
"""M of the shape with each fault; its N is 128 * M, so each is a group of its own. None is the tiny shape."""
ONE = {SEGV: (1, "segv"), FAULT: (8, "memory_fault"), HANG: (3, "hang"), ILLEGAL: (7, "accelerator_error")}
ALL = {WRONG: "wrong", NONE: "unsupported", OOM: "oom"}
ASM, EVERY = (2048, 512, 1024), (4096, 1024, 1024)
"""Shapes of which a sick GPU runs no ASM kernel, or none at all. Their K is not that of the tiny shape, 512."""
SICK = {"shapes": [
    {"kernels": "asm", "when": {"M": ASM[0]}, "do": "segv"}, {"kernels": "all", "when": {"M": EVERY[0]}, "do": "segv"},
]}  # fmt: skip
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


def tune(
    folder: Path,
    tree: Tree,
    shapes: Sequence[tuple[int, int, int]],
    *more: str,
    nodes: Mapping[str, Any] = {"local": None},
) -> Ran:
    """`nodes`: each name with the faults of its GPU, None for those of the tree. Runs in one folder share a cache."""
    folder.mkdir(exist_ok=True)
    bench = Bench(folder)
    bench.shapes_csv.write_text("M,N,K\n" + "".join(f"{m},{n},{k}\n" for m, n, k in shapes))
    defaults = {
        "transport": "local", "engine": "process", "python": str(tree.python), "family": "a4w4_blockscale",
        "tuner": "aiter", "aiter": {"root": str(tree.root)},
    }  # fmt: skip
    made = {
        name: {"gpus": [i], "env": {} if f is None else {"STANDIN_FAULTS": json.dumps(f)}}
        for i, (name, f) in enumerate(nodes.items())
    }
    bench.inventory.write_text(yaml.safe_dump({"defaults": defaults, "nodes": made}))
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


def test_an_image_that_cannot_tune_at_all_says_so(tmp_path: Path) -> None:
    ran = tune(tmp_path / "run", make_tree(tmp_path, "newest", {"start": "no_device"}), [(16, 512, 512)])
    assert ran.code in (1, 3)
    assert "No HIP GPUs are available" in ran.said


def test_a_gpu_on_which_kernels_fault_while_its_canary_passes(tmp_path: Path) -> None:
    """Beside a healthy one the winners are the healthy one's; alone they are unconfirmed; once mended it is as before.

    The nodes are one machine, and keep one blocklist; its entries are the sick slot's alone.
    """
    tree = make_tree(tmp_path, "newest")
    both = tune(tmp_path / "runs", tree, [ASM, EVERY], nodes={"sick": SICK, "well": {}})
    assert both.code == 0
    assert "unconfirmed" not in both.said
    best = both.by_m("tuned.csv")
    assert "_ZN" in best[ASM[0]]["kernelName"], "ASM wins, or nothing is shown here"
    for m, winner in best.items():
        times = [float(r["us"]) for r in both.rows("profile.csv") if (int(r["M"]), r["status"]) == (m, "ok")]
        assert float(winner["us"]) == min(times)
    one = tune(tmp_path / "runs", tree, [ASM, EVERY], "--limit", "sick", nodes={"sick": SICK, "well": {}})
    assert one.code == 1
    assert "_ZN" not in one.by_m("tuned.csv")[ASM[0]]["kernelName"]
    assert "unconfirmed" in one.said
    assert one.repros()
    (failed,) = one.rows("failed.csv")
    assert failed["reason"] == "no_candidate"
    # they ran on the other node, and so the sick one's blocklist has them no more: they were tried again
    assert "10 crashed" in failed["detail"], failed
    mended = tune(tmp_path / "runs", tree, [ASM, EVERY], "--limit", "well", nodes={"sick": {}, "well": {}})
    assert mended.code == 0
    assert {m: r["kernelName"] for m, r in mended.by_m("tuned.csv").items()} == {
        m: r["kernelName"] for m, r in best.items()
    }
    assert "unconfirmed" not in mended.said
