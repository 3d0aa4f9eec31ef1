"""Everything that can go wrong in AITER's processes, through the whole job on this machine, on both stand-ins.

Each shape has a fault of its own; the others of its run must not notice.
"""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.analysis.report.collector import Collector
from orchestrator.paths import RunPaths, list_runs
from tests.integration.kit import Bench
from tests.standins.aiter import Tree, make_tree

pytestmark = [pytest.mark.xdist_group("aiter_faults"), pytest.mark.full]

DATES = ("runbook", "newest")
GOOD, SEGV, FAULT, HANG, KILLED, ILLEGAL, WRONG, NONE, OOM, DEAF = (16 * i + 8 for i in range(1, 11))
"""M of the shape with each fault; its N is 128 * M, so each is a group of its own. None is the tiny shape."""
ONE = {
    SEGV: (1, "segv"), FAULT: (8, "memory_fault"), HANG: (3, "hang"), KILLED: (2, "kill"),
    ILLEGAL: (7, "accelerator_error"),
}  # fmt: skip
HOPELESS = {
    "no_device": "No HIP GPUs are available", "missing_module": "No module named", "parent_segv": "Segmentation fault",
}  # fmt: skip
"""Faults of a whole image, and the words that the output must have."""
ALL = {WRONG: "wrong", NONE: "unsupported", OOM: "oom"}


def faults(date: str) -> dict[str, Any]:
    one = [{"when": {"M": m}, "kernels": [k], "do": do} for m, (k, do) in ONE.items()]
    deaf = {"when": {"M": DEAF}, "kernels": "parent", "do": "deaf"}
    more = [deaf] if DEAF in hopeless(date) else []
    return {"shapes": [*one, *more, *({"when": {"M": m}, "do": do} for m, do in ALL.items())]}


def hopeless(date: str) -> set[int]:
    """Shapes that cannot be tuned; one that stops the whole tuner takes its time, and is for one date."""
    return {*ALL, DEAF} if date == "newest" else set(ALL)


@dataclass
class Ran:
    """Exit code and output of a run, and its folder (None where it never began)."""

    code: int
    said: str
    paths: RunPaths | None

    def rows(self, name: str) -> list[dict[str, str]]:
        assert self.paths is not None, self.said
        return list(csv.DictReader((self.paths.root / name).read_text().splitlines()))

    def tuned(self) -> set[int]:
        return {int(r["M"]) for r in self.rows("tuned.csv")}

    def failed(self) -> dict[int, dict[str, str]]:
        return {int(r["M"]): r for r in self.rows("failed.csv")}

    def log(self) -> str:
        assert self.paths is not None
        return (self.paths.root / "logs/local.log").read_text()


def tune(
    folder: Path,
    tree: Tree,
    shapes: list[tuple[int, int, int]],
    *more: str,
    family: str = "a4w4_blockscale",
    **env: str,
) -> Ran:
    bench = Bench(folder)
    bench.shapes_csv.write_text("M,N,K\n" + "".join(f"{m},{n},{k}\n" for m, n, k in shapes))
    defaults = {
        "transport": "local", "engine": "process", "python": str(tree.python), "family": family, "tuner": "aiter",
        "aiter": {"root": str(tree.root)}, "env": env,
    }  # fmt: skip
    bench.inventory.write_text(yaml.safe_dump({"defaults": defaults, "nodes": {"local": {"gpus": [0]}}}))
    argv = bench.argv("tune", str(bench.shapes_csv), "-i", str(bench.inventory), *more)
    done = subprocess.run(argv, capture_output=True, text=True, env=bench.env(), check=False)
    said = done.stdout + done.stderr
    print(f"--- exit {done.returncode}\n{said[-5000:]}")
    runs = list_runs(bench.runs) if bench.runs.exists() else []
    return Ran(done.returncode, said, runs[-1] if runs else None)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Ran]]:
    """One run a date and one an image that cannot tune, all at once: they mostly wait."""
    folder = tmp_path_factory.mktemp("faults")

    def one(date: str) -> Ran:
        shapes = [(m, 128 * m, 512) for m in (GOOD, *ONE, *sorted(hopeless(date)))]
        tree = make_tree(folder / date, date, faults(date))
        return tune(folder / date, tree, shapes, "--tuner-timeout", "8")

    def none(start: str) -> Ran:
        return tune(folder / start, make_tree(folder / start, "newest", {"start": start}), [(16, 512, 512)])

    with ThreadPoolExecutor(len(DATES) + len(HOPELESS)) as pool:
        done = {name: pool.submit(one, name) for name in DATES} | {name: pool.submit(none, name) for name in HOPELESS}
        yield {name: d.result() for name, d in done.items()}


@pytest.mark.parametrize("date", DATES)
def test_a_candidate_that_faults_costs_itself_and_nothing_else(ran: dict[str, Ran], date: str) -> None:
    mine = ran[date]
    assert mine.tuned() == {GOOD, *ONE}, mine.said[-3000:]
    profile = mine.rows("profile.csv")
    for m, (kernel, do) in ONE.items():
        rows = [r for r in profile if int(r["M"]) == m]
        ok = {int(r["kernelId"]) for r in rows if r["status"] == "ok"}
        assert kernel not in ok, do
        assert len(ok) >= 8, (do, ok)
        assert [r for r in rows if int(r["kernelId"]) == kernel and r["status"] != "ok"], do


@pytest.mark.parametrize("date", DATES)
def test_a_shape_that_nothing_can_do_is_explained(ran: dict[str, Ran], date: str) -> None:
    mine = ran[date]
    failed = mine.failed()
    assert set(failed) == hopeless(date), mine.said[-3000:]
    if DEAF in failed:
        assert failed[DEAF]["reason"] == "hang"
        assert "did not come back" in failed[DEAF]["detail"]
    assert mine.code == 1
    assert failed[WRONG]["reason"] == "wrong_result"
    assert "the least error is 0.37" in failed[WRONG]["detail"]
    assert failed[NONE]["reason"] == "no_candidate"
    assert failed[OOM]["reason"] in ("oom", "no_candidate")
    assert "Traceback" not in mine.said


@pytest.mark.parametrize("date", DATES)
def test_a_candidate_that_ended_its_process_comes_with_a_reproduction(ran: dict[str, Ran], date: str) -> None:
    """One for each; the one of the memory fault is run by hand, and faults again."""
    paths = ran[date].paths
    assert paths is not None
    scripts = {int(p.parent.name.split("-")[-5]): p for p in paths.attempts.rglob("repro/*/reproduce.sh")}
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


def test_a_kind_that_the_environment_took_away_is_pointed_out(tmp_path: Path) -> None:
    """The inventory insists on another chip's name, with which AITER finds no ASM kernel."""
    mine = tune(tmp_path, make_tree(tmp_path, "newest"), [(16, 512, 512)], GPU_ARCHS="gfx950;gfx942")
    assert mine.tuned() == {16}, mine.said
    assert not [r for r in mine.rows("profile.csv") if "_ZN" in r["kernelName"]]
    assert "no asm candidate was tried in 1 shape on local" in mine.said
    assert "GPU_ARCHS=gfx950;gfx942 of the inventory is kept" in mine.log()
    assert mine.paths is not None
    assert "no asm candidate" in (mine.paths.root / "provenance.json").read_text()
    assert any(s.startswith("No asm candidate") for s in Collector(mine.paths).document()["sentences"])


def test_a_bad_candidate_of_the_warm_up_costs_itself(tmp_path: Path) -> None:
    """It was 0 tuned and exit 3 with the slot in quarantine."""
    tiny = {"when": {"M": 64, "N": 512, "K": 512}, "kernels": [2], "do": "segv"}
    mine = tune(tmp_path, make_tree(tmp_path, "newest", {"shapes": [tiny]}), [(16, 512, 512)])
    assert mine.code == 0, mine.said
    assert mine.tuned() == {16}


def test_a_lock_of_a_dead_process_does_not_stop_it(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, "runbook")
    build = tree.root / "aiter/jit/build"
    build.mkdir(parents=True)
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    (build / "lock_module_gemm_a4w4_blockscale_tune").write_text(f"{gone.stdout.strip()}\n{os.uname().nodename}\n")
    mine = tune(tmp_path, tree, [(16, 512, 512)])
    assert mine.tuned() == {16}, mine.said


@pytest.mark.parametrize(("start", "words"), HOPELESS.items())
def test_an_image_that_cannot_tune_at_all_says_so(ran: dict[str, Ran], start: str, words: str) -> None:
    mine = ran[start]
    assert mine.code in (1, 3), mine.said
    assert words in mine.said
    assert "Traceback" not in mine.said


@pytest.mark.parametrize("right", [True, False])
def test_k_that_is_no_multiple_of_256_is_tried_and_not_refused_on_sight(tmp_path: Path, right: bool) -> None:
    """Whatever the files say: a shape whose kernels are right is tuned."""
    mine = tune(tmp_path, make_tree(tmp_path, "runbook", {"k256_right": right}), [(64, 512, 384), (64, 512, 512)])
    assert mine.tuned() == {64}, mine.said
    assert {int(r["K"]) for r in mine.rows("tuned.csv")} == ({384, 512} if right else {512})
    assert {r["reason"] for r in mine.rows("failed.csv")} == (set() if right else {"wrong_result"})


def test_an_aiter_outside_of_the_promise_is_warned_of_once(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, "runbook")
    core = tree.root / "aiter/jit/core.py"
    core.write_text(core.read_text().replace("model_configs", "configs"))
    mine = tune(tmp_path, tree, [(16, 512, 512)])
    assert mine.tuned() == {16}, mine.said
    assert mine.said.count("is not one that gemmfleet promises to drive") == 1


def test_words_for_the_script_that_it_does_not_have_are_left_out_and_told(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, "runbook")
    mine = tune(tmp_path, tree, [(16, 512, 512)], "--tuner-arg=--nonsense")
    assert mine.tuned() == {16}, mine.said
    assert "--nonsense" in mine.log()


FAMILIES = ("a8w8", "a8w8_blockscale", "a8w8_blockscale_bpreshuffle", "a8w8_bpreshuffle", "a16w16")


@pytest.mark.parametrize("date", DATES)
def test_other_families_are_tuned_by_their_own_scripts(tmp_path: Path, date: str) -> None:
    tree = make_tree(tmp_path, date)

    def one(family: str) -> Ran:
        (tmp_path / family).mkdir()
        return tune(tmp_path / family, tree, [(32, 512, 512), (64, 512, 512)], family=family)

    with ThreadPoolExecutor(3) as pool:
        for family, mine in zip(FAMILIES, pool.map(one, FAMILIES), strict=True):
            assert mine.tuned() == {32, 64}, (family, mine.said)
            assert mine.code == 0


@pytest.mark.parametrize("date", DATES)
def test_families_with_other_keys(tmp_path: Path, date: str) -> None:
    tree = make_tree(tmp_path, date)
    for family, text in (
        ("batched_bf16", "B,M,N,K\n16,32,512,512\n"),
        ("fmoe", "token,model_dim,inter_dim,expert,topk\n16,1024,512,8,2\n"),
        ("batched_gemm_a8w8_blockscale_mxscale", "b,m,n,k\n16,32,512,512\n"),
    ):
        if family not in tree.scripts:
            continue
        folder = tmp_path / family
        folder.mkdir()
        bench = Bench(folder)
        bench.shapes_csv.write_text(text)
        defaults = {
            "transport": "local", "engine": "process", "python": str(tree.python), "family": family, "tuner": "aiter",
            "aiter": {"root": str(tree.root)},
        }  # fmt: skip
        bench.inventory.write_text(yaml.safe_dump({"defaults": defaults, "nodes": {"local": {"gpus": [0]}}}))
        done = bench.run("tune", str(bench.shapes_csv), "-i", str(bench.inventory))
        assert done.code == 0, (family, done.out, done.err)
        (row,) = csv.DictReader((bench.paths.root / "tuned.csv").read_text().splitlines())
        assert float(row["us"]) > 0
        if family == "batched_gemm_a8w8_blockscale_mxscale":
            assert list(row)[:6] == ["gfx", "b", "m", "n", "k", "libtype"]
