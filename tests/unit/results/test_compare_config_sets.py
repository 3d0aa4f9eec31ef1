"""Two config sets compared: a changed file that slows a shape down is rejected, with shape, times and limit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from orchestrator.cli.app import app

DEFAULT = "gemm/gfx950-BATCHED_GEMM-A16WFP4.json"
OWN = "gemm/gfx950-BATCHED_GEMM-A16WFP4-N=128-K=512.json"
Rows = list[tuple[int, int, int, float, str]]
"""(M, N, K, us, config)."""


def side(folder: Path, name: str, rows: Rows, noise: float = 0.0005, **record: Any) -> Path:
    """A side as a bench writes it."""
    lines = ["kernel,B,M,N,K,us,run,aiter_config"]
    lines += [
        f"aiter-bmm-a16wfp4/batched_gemm_a16wfp4,16,{m},{n},{k},{us * (1 + noise * (run * 5 % 3)):.4f},{run},{config}"
        for m, n, k, us, config in rows
        for run in (1, 2, 3)
    ]
    path = folder / f"{name}.csv"
    path.write_text("\n".join(lines) + "\n")
    usual = {"env": name, "order": "interleaved", "session": "r1", "configs": f"/sets/{name} (2 files, sha256 1)"}
    (folder / f"{name}.env.json").write_text(json.dumps({**usual, **record}))
    return path


def compare(*args: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["compare", *map(str, args)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout


def old(m: int, n: int, k: int, us: float) -> tuple[int, int, int, float, str]:
    return m, n, k, us, f"{DEFAULT} M_LEQ_{m} 16x64x128_g1"


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    rows = [old(64, 512, 128, 20.0), old(128, 512, 128, 40.0), old(64, 128, 512, 30.0), old(1, 512, 128, 2.0),
            old(16, 512, 128, 12.0)]  # fmt: skip
    return side(tmp_path, "golden", rows)


def test_a_harmful_default_change_is_rejected_with_shape_times_and_limit(golden: Path, tmp_path: Path) -> None:
    new = "64x128x256_g1"
    rows = [
        (64, 512, 128, 25.0, f"{DEFAULT} M_LEQ_64 {new}"),
        (128, 512, 128, 40.0, f"{DEFAULT} M_LEQ_128 {new}"),
        (64, 128, 512, 15.0, f"{DEFAULT} M_LEQ_64 {new}"),
        (1, 512, 128, 9.0, f"{DEFAULT} M_LEQ_1 {new}"),
        old(16, 512, 128, 12.0),
    ]
    tot = side(tmp_path, "tot", rows)
    code, out = compare(golden, tot)
    assert code == 1
    words = " ".join(out.split())
    assert f"rejected: {DEFAULT} (default file, 4 rows changed, 1 slower, 1 faster)" in words
    assert "B=16 M=64 N=512 K=128: 20.01 -> 25.01 us, limit 20.61 us (1.005 x old + 0.5 us);" in words
    assert f"M_LEQ_64 16x64x128_g1 -> M_LEQ_64 {new}" in words
    assert "files of their own would keep what B=16 N=128 K=512 gained" in words
    assert "M=1 " not in words.partition("rejected:")[2], "below 4 us nothing counts"
    (file,) = json.loads(compare(golden, tot, "--json")[1])["config_files"]
    assert (file["file"], file["default"], file["verdict"]) == (DEFAULT, True, "rejected")
    (slower,) = file["slower"]
    assert [slower["key"][n] for n in "BMNK"] == ["16", "64", "512", "128"]
    assert slower["limit_us"] == pytest.approx(1.005 * slower["old_us"] + 0.5)
    assert "- rejected: gemm/gfx950-BATCHED" in compare(golden, tot, "--markdown", "-")[1].replace("\\", "")


def test_a_file_of_one_shape_that_gains_is_accepted(golden: Path, tmp_path: Path) -> None:
    kept = [old(64, 512, 128, 20.0), old(128, 512, 128, 40.0), old(1, 512, 128, 2.0), old(16, 512, 128, 12.0)]
    tot = side(tmp_path, "tot", [*kept, (64, 128, 512, 15.0, f"{OWN} M_LEQ_64 64x128x256_g1")])
    code, out = compare(golden, tot)
    assert code == 0
    assert f"accepted: {OWN} (1 row changed, 0 slower, 1 faster)" in " ".join(out.split())
    assert "rejected" not in out


def test_what_cannot_be_judged_is_open_and_measured_again_with_the_same_sets(tmp_path: Path) -> None:
    switches = {"under_test": "switches.X", "switches": {"X": "1"}}
    golden = side(
        tmp_path, "golden", [old(64, 512, 128, 20.0)], 0.02, configs="/my sets/a (2 files, sha256 1)", **switches
    )
    new = [(64, 512, 128, 20.8, f"{DEFAULT} M_LEQ_64 32x64x128_g1")]
    tot = side(tmp_path, "tot", new, 0.02, configs="the tree's own", **switches)
    code, out = compare(golden, tot)
    assert code == 4
    words = " ".join(out.split())
    assert f"open: {DEFAULT} (default file, 1 row changed, 0 slower, 0 faster)" in words
    assert "--env stack=,X=1 --config-set 'golden=/my sets/a' --config-set tot= --repeats 7" in words


def test_a_slower_row_with_the_same_config_is_no_files_fault(golden: Path, tmp_path: Path) -> None:
    rows = [old(64, 512, 128, 25.0), old(128, 512, 128, 40.0), old(64, 128, 512, 30.0), old(16, 512, 128, 12.0),
            old(1, 512, 128, 2.0)]  # fmt: skip
    code, out = compare(golden, side(tmp_path, "tot", rows))
    assert code == 1
    assert "1 row slower with the same config in both sets" in " ".join(out.split())
    assert "rejected" not in out


def test_sides_with_other_column_orders_and_without_configs(golden: Path, tmp_path: Path) -> None:
    tot = side(tmp_path, "tot", [(64, 512, 128, 25.0, f"{DEFAULT} M_LEQ_64 32x64x128_g1")])
    rows = [line.split(",") for line in tot.read_text().splitlines()]
    tot.write_text("\n".join(",".join([r[0], r[4], *r[1:4], *r[5:]]) for r in rows) + "\n")
    assert "rejected: " in compare(golden, tot)[1]
    tot.write_text("\n".join(",".join([r[0], r[4], *r[1:4], *r[5:7]]) for r in rows) + "\n")
    assert "rejected" not in compare(golden, tot)[1]
