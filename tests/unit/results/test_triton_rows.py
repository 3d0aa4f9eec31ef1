"""Rows that route shapes to AITER's Triton kernel, from the ledger of a bench."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.errors import InputError
from orchestrator.families import get_family
from orchestrator.paths import RunPaths
from orchestrator.results.triton_rows import triton_rows
from orchestrator.shapes import Shape
from orchestrator.tables.tuned import read_table
from tests.support.ledger_kit import Run, ended, row, started
from worker.families import Family

SHUFFLED = get_family("a8w8_blockscale_bpreshuffle")
OP = "gemm_a8w8_blockscale_preshuffle"
Times = dict[str, tuple[float, ...]]


def bench(folder: Path, shapes: list[Times], family: Family = SHUFFLED, *, env: str = "", op: str = OP) -> RunPaths:
    """A run's folder with a bench: for each shape the times of each backend, run by run."""
    folder.mkdir(parents=True)
    asked = [Shape(i, (16 * i, 512, 1024)) for i in range(1, len(shapes) + 1)]
    with Run(folder, groups=[tuple(s.id for s in asked)], family=family, asked=asked) as r:
        r.send("g0001-1")
        r.says(started("g0001-1"))
        for shape, times in zip(asked, shapes, strict=True):
            about = {b: {"libtype": b, "env": env, "op": op if b == "aiter-triton" else "op"} for b in times}
            for backend, runs in times.items():
                for number, us in enumerate(runs, 1):
                    r.says(row("row", "g0001-1", shape.id, us=us, run=number, **about[backend]))
            best = min(times, key=lambda b: min(times[b]))
            r.says(row("shape_tuned", "g0001-1", shape.id, us=min(times[best]), **about[best]))
        r.says(ended("g0001-1"))
    (folder / "run.yaml").touch()
    return RunPaths(folder)


FASTER: Times = {"aiter": (20.0, 20.2, 20.1), "aiter-triton": (15.0, 15.2, 15.1), "torch": (30.0, 30.0, 30.0)}
AS_FAST: Times = {**FASTER, "torch": (15.1, 30.0, 30.0)}


def test_a_row_where_every_run_is_faster_than_all_others(tmp_path: Path) -> None:
    paths = bench(tmp_path / "runs" / "b1", [FASTER, AS_FAST, {"aiter-triton": (1.0, 1.0, 1.0)}])
    out = tmp_path / SHUFFLED.tuned_csv
    done = CliRunner().invoke(
        app, ["configs", "rows", "b1", "--runs", str(tmp_path / "runs"), "--out", str(out)]
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "note: 1 shape without a row: another backend was as fast in some run" in done.output
    assert "note: 1 shape without a row: AITER's dispatch has no time to compare with" in done.output
    assert f"{out}: 1 row; " in done.output
    table = read_table(out, SHUFFLED)
    (only,) = table.rows
    cells = table.cells(only)
    assert only.key == ("gfx950", 256, 16, 512, 1024)
    assert (cells["libtype"], cells["kernelName"], cells["us"]) == ("triton", "triton", "15.1")
    assert paths.run == "b1"


def test_without_any_the_table_is_not_written(tmp_path: Path) -> None:
    bench(tmp_path / "runs" / "b1", [AS_FAST])
    out = tmp_path / "rows.csv"
    done = CliRunner().invoke(app, ["configs", "rows", "b1", "--runs", str(tmp_path / "runs"), "-o", str(out)])
    assert done.exit_code == 0
    assert "no row: AITER's Triton kernel beat the others nowhere" in done.output
    assert not out.exists()


def test_the_kernel_must_be_the_one_that_the_dispatch_calls(tmp_path: Path) -> None:
    _, rows, notes = triton_rows(bench(tmp_path / "b1", [FASTER], op="gemm_a8w8_blockscale"))
    assert not rows
    assert notes == [f"1 shape without a row: aiter-triton has no result of {OP} that agrees with itself"]


def test_what_is_no_such_bench_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is of a8w8_blockscale; shapes are routed to Triton in a8w8_blockscale_bpre"):
        triton_rows(bench(tmp_path / "b1", [FASTER], get_family("a8w8_blockscale")))
    with pytest.raises(InputError, match=r"no bench of one stack with AITER's dispatch in it: .*-b aiter,aiter-triton"):
        triton_rows(bench(tmp_path / "b2", [{"aiter-triton": (1.0,)}]))
