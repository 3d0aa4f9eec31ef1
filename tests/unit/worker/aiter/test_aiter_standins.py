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
    for right, args in ((TREES[date].sort_takes_value, ["True"]), (not TREES[date].sort_takes_value, [])):
        done = run(tree, "--sort", *args, shapes=[(128, 512, 1024)])
        assert (done.returncode == 2) == (not right)


def test_v0_1_5_writes_at_the_end_and_knows_no_profile(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, "v0.1.5")
    assert run(tree, shapes=[GOOD]).returncode == 0
    (row,) = rows(tree)
    assert list(row) == ["cu_num", "M", "N", "K", "kernelId", "splitK", "us", "kernelName"]
    assert run(tree, "-o2", "p.csv", shapes=[GOOD]).returncode == 2


def test_the_tile_column_is_missing_at_v0_1_8(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, "v0.1.8")
    done = run(tree, shapes=[GOOD])
    assert done.returncode == 0  # whatever happened, at that date
    assert "KeyError: 'tile_m'" in done.stderr
    assert rows(tree) == []


def test_the_list_of_kernels_is_missing_at_v0_1_10(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, "v0.1.10")
    done = run(tree, shapes=[GOOD])
    assert "ASM kernel list file not exist: " in done.stdout
    assert "hsa//f4gemm" in done.stdout
    (row,) = rows(tree)
    assert row["kernelName"].startswith("a4w4_blockscale_")


@pytest.mark.parametrize(("date", "word"), [("v0.1.5", "ends"), ("v0.1.10", "untuned"), ("v0.1.13", "none")])
def test_k_that_is_no_multiple_of_256(tmp_path: Path, date: str, word: str) -> None:
    tree = make_tree(tmp_path, date)
    done = run(tree, shapes=[ODD_K])
    both = done.stdout + done.stderr
    assert rows(tree) == []
    if word == "none":
        assert "error: no valid candidate found for ('gfx950', 256, 64, 256, 384)" in both
        assert done.returncode == 1
    else:
        assert "The size of tensor a (384) must match the size of tensor b (512)" in both
        assert done.returncode == (1 if word == "ends" else 0)


def test_k_is_sound_at_the_newest(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, "newest")
    assert run(tree, shapes=[ODD_K]).returncode == 0
    assert [r["gfx"] for r in rows(tree)] == ["gfx950"]


def _no_tile_fault(tree: Tree) -> Tree:
    table = tree.root / "hsa/gfx950/f4gemm/f4gemm_bf16_per1x32Fp4.csv"
    table.write_text(table.read_text().replace("tile_M", "tile_m").replace("tile_N", "tile_n"))
    return tree


@pytest.mark.parametrize("date", ["v0.1.8", "v0.1.13"])
def test_a_shape_without_a_kernel_spoils_the_batch_before_v0_1_13(tmp_path: Path, date: str) -> None:
    faults: dict[str, Any] = {"shapes": [{"when": {"M": 16}, "do": "wrong"}]}
    tree = make_tree(tmp_path, date, faults)
    if date == "v0.1.8":
        _no_tile_fault(tree)
    run(tree, "-o2", str(tmp_path / "profile.csv"), shapes=[(16, 512, 512), GOOD])
    assert [int(r["M"]) for r in rows(tree)] == ([] if date == "v0.1.8" else [128])
    good = [r for r in rows(tree, "profile.csv") if r["M"] == "128"]
    assert len(good) == 10
    assert all(float(r["us"]) > 0 for r in good)


@pytest.mark.parametrize(("date", "kept"), [("v0.1.7.post5", {"128"}), ("v0.1.8", {"16", "128"})])
def test_the_profile_keeps_its_last_batch_or_all(tmp_path: Path, date: str, kept: set[str]) -> None:
    tree = _no_tile_fault(make_tree(tmp_path, date))
    run(tree, "-o2", str(tmp_path / "profile.csv"), "--batch", "1", shapes=[(16, 512, 512), GOOD])
    assert {r["M"] for r in rows(tree, "profile.csv")} == kept


def test_a_lost_worker_is_awaited_for_ever_at_v0_1_8(tmp_path: Path) -> None:
    tree = _no_tile_fault(make_tree(tmp_path, "v0.1.8", {"shapes": [{"when": {}, "do": "memory_fault"}]}))
    with pytest.raises(subprocess.TimeoutExpired) as e:
        _timed(tree, 2.0)
    assert b"Memory access fault by GPU node-2" in (e.value.stderr or b"")


@pytest.mark.parametrize("date", ["v0.1.10", "newest"])
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


@pytest.mark.parametrize("date", ["v0.1.10", "newest"])
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
    tree = make_tree(tmp_path, "v0.1.13", faults)
    done = run(tree, "--input_file", "in.csv", "--tuned_file", "t.csv", family="a16w16")
    assert done.returncode == 0
    assert "!Process killed by signal 11, retrying (30/30)" in done.stdout


def test_numbers_follow_from_the_shape(tmp_path: Path) -> None:
    first, second = (make_tree(tmp_path / n, "newest") for n in "ab")
    for tree in (first, second):
        run(tree, shapes=[GOOD])
    assert rows(first) == rows(second)
