"""The stand-in trees do what is documented of the dates they stand for."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.standins.aiter import TREES, Tree, make_tree

GOOD = (128, 512, 1024)
ODD_K = (64, 256, 384)


def run(
    tree: Tree, *args: str, shapes: list[tuple[int, ...]] | None = None, family: str = "a4w4_blockscale", **env: str
) -> subprocess.CompletedProcess[str]:
    out = tree.root.parent
    if shapes is not None:
        text = "M,N,K\n" + "".join(",".join(map(str, s)) + "\n" for s in shapes)
        (out / "in.csv").write_text(text)
        args = ("-i", str(out / "in.csv"), "-o", str(out / "tuned.csv"), "--mp", "1", *args)
    return subprocess.run(
        [sys.executable, str(tree.scripts[family]), *args],
        env={**os.environ, **tree.env(), "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1", **env},
        cwd=tree.root,
        capture_output=True,
        text=True,
        check=False,
    )


def rows(tree: Tree, name: str = "tuned.csv") -> list[dict[str, str]]:
    path = tree.root.parent / name
    return list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []


@pytest.mark.parametrize("date", TREES)
def test_every_family_runs_or_says_why_not(tmp_path: Path, date: str) -> None:
    tree = make_tree(tmp_path, date)
    assert all(script.is_file() for script in tree.scripts.values())
    with ThreadPoolExecutor(4) as pool:
        for done in pool.map(lambda family: run(tree, "--help", family=family), tree.scripts):
            assert done.returncode == 0
            assert done.stdout.startswith("usage: ")
    wrong_flag = run(tree, "--nonsense", shapes=[GOOD])
    assert wrong_flag.returncode == 2
    assert "unrecognized arguments: --nonsense" in wrong_flag.stderr


@pytest.mark.parametrize("date", TREES)
def test_sort_is_a_flag_or_takes_a_value(tmp_path: Path, date: str) -> None:
    tree = make_tree(tmp_path, date)
    for right, args in ((TREES[date].new, ["True"]), (not TREES[date].new, [])):
        done = run(tree, "--sort", *args, shapes=[(128, 512, 1024)])
        assert (done.returncode == 2) == (not right)


def test_the_list_of_kernels_is_missing_in_the_runbooks_image(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, "runbook")
    done = run(tree, shapes=[GOOD])
    assert "ASM kernel list file not exist: " in done.stdout
    assert "hsa//f4gemm" in done.stdout
    (row,) = rows(tree)
    assert row["kernelName"].startswith("a4w4_blockscale_")


def test_the_tile_column_is_missing_in_the_runbooks_image(tmp_path: Path) -> None:
    tree = _list_found(make_tree(tmp_path, "runbook"))
    done = run(tree, shapes=[GOOD])
    assert done.returncode == 0  # whatever happened, at that date
    assert "KeyError: 'tile_m'" in done.stderr
    assert rows(tree) == []


def test_k_that_is_no_multiple_of_256(tmp_path: Path) -> None:
    old, new = (make_tree(tmp_path / name, name) for name in ("runbook", "newest"))
    done = run(old, shapes=[ODD_K])
    assert "The size of tensor a (384) must match the size of tensor b (512)" in done.stdout + done.stderr
    assert (rows(old), done.returncode) == ([], 0)
    assert run(new, shapes=[ODD_K]).returncode == 0
    assert [r["gfx"] for r in rows(new)] == ["gfx950"]


def _list_found(tree: Tree) -> Tree:
    (tree.root / "hsa/f4gemm").symlink_to("gfx950/f4gemm")
    return tree


@pytest.mark.parametrize("date", TREES)
def test_a_shape_without_a_kernel_spoils_the_batch_of_the_runbooks_image(tmp_path: Path, date: str) -> None:
    faults: dict[str, Any] = {"shapes": [{"when": {"M": 16}, "do": "wrong"}]}
    tree = make_tree(tmp_path, date, faults)
    run(tree, "-o2", str(tmp_path / "profile.csv"), shapes=[(16, 512, 512), GOOD])
    assert [int(r["M"]) for r in rows(tree)] == ([] if date == "runbook" else [128])
    good = [r for r in rows(tree, "profile.csv") if r["M"] == "128"]
    assert len(good) == (5 if date == "runbook" else 10)
    assert all(float(r["us"]) > 0 for r in good)


@pytest.mark.parametrize("date", TREES)
def test_a_lost_worker_costs_the_shape_where_there_is_a_time_out(tmp_path: Path, date: str) -> None:
    faults = {"shapes": [{"when": {"M": 16}, "kernels": [2], "do": "memory_fault"}]}
    tree = make_tree(tmp_path, date, faults)
    done = run(tree, "--timeout", "1", "-v", "--batch", "1", shapes=[(16, 512, 512), GOOD])
    assert "Memory access fault by GPU node-2" in done.stderr
    assert "[!] Task 0 timed out after" in done.stdout
    assert "Timeouts (GPU hang): 1" in done.stderr
    assert [int(r["M"]) for r in rows(tree)] == [128]


def _timed(tree: Tree, seconds: float) -> None:
    args = ["-i", str(tree.root.parent / "in.csv"), "-o", str(tree.root.parent / "tuned.csv"), "--mp", "1"]
    (tree.root.parent / "in.csv").write_text("M,N,K\n128,512,1024\n")
    process = subprocess.Popen(
        [sys.executable, str(tree.scripts["a4w4_blockscale"]), *args],
        env={**os.environ, **tree.env()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        process.communicate(timeout=seconds)
    finally:
        os.killpg(process.pid, 9)
        process.communicate()


@pytest.mark.parametrize("date", TREES)
def test_a_lock_that_was_left_behind(tmp_path: Path, date: str) -> None:
    tree = make_tree(tmp_path, date)
    lock = tree.root / "aiter/jit/build/lock_module_gemm_a4w4_blockscale_tune"
    lock.parent.mkdir(parents=True)
    # the host's own name and a process that has ended
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    lock.write_text(f"{gone.stdout.strip()}\n{os.uname().nodename}\n")
    if date == "newest":
        assert "broke stale lock at " in run(tree, shapes=[GOOD]).stderr
        assert len(rows(tree)) == 1
    else:
        with pytest.raises(subprocess.TimeoutExpired) as e:
            _timed(tree, 1.5)
        assert b"waiting for baton release at " in (e.value.stderr or b"")


def test_the_wrapper_of_gradlib_always_exits_with_0(tmp_path: Path) -> None:
    faults = {"start": "parent_segv"}
    tree = make_tree(tmp_path, "runbook", faults)
    done = run(tree, "--input_file", "in.csv", "--tuned_file", "t.csv", family="a16w16")
    assert done.returncode == 0
    assert "!Process killed by signal 11, retrying (30/30)" in done.stdout


def test_numbers_follow_from_the_shape(tmp_path: Path) -> None:
    first, second = (make_tree(tmp_path / n, "newest") for n in "ab")
    for tree in (first, second):
        run(tree, shapes=[GOOD])
    assert rows(first) == rows(second)
