"""`gemmfleet analyze` as it is typed, and what it says as a whole."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.errors import InputError
from orchestrator.families import get_family
from orchestrator.planning.roofline import CHIPS, chip_of, roof_of
from orchestrator.results.analyze import published
from orchestrator.results.output import show_analysis
from tests.support.analysis_kit import A4W4, AITER_TABLES, CK, NO_TABLES, a4w4, analyse, write

FP4 = get_family("a4w4_blockscale")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [a4w4(8.0), a4w4(10.0, CK), a4w4(9.0, shape="1,512,1024"), a4w4(6.0, CK, shape="1,512,1024"),
            a4w4(-1, shape="7,512,1024"), a4w4(5.0, err=0.3)]  # fmt: skip
    write(tmp_path / "fp4_profile_a.csv", A4W4, rows)
    write(tmp_path / "fp4_triton_gluon_bench.csv", "M,N,K,triton_us,gluon_us", ["64,512,1024,16.0,20.0"])
    return tmp_path


def run(*args: object) -> str:
    done = CliRunner().invoke(app, ["analyze", *map(str, args)])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


def test_json_is_one_document(folder: Path) -> None:
    doc = json.loads(run(folder, "--json"))
    assert [r["shape"] for r in doc["rows"]] == ["1x512x1024", "7x512x1024", "64x512x1024"]
    last = doc["rows"][-1]
    assert (last["best"], last["asm_over_best_other"]) == ("asm", 1.25)
    assert set(last["backends"]) == {"asm", "ck", "aiter-triton", "aiter-gluon"}
    assert doc["left_out"]["no_time"] == doc["left_out"]["error_ratio"] == 1
    summary = doc["summary"]
    assert summary["asm_loses"] == ["1x512x1024"]
    assert summary["no_backend"] == ["7x512x1024"]
    assert summary["beyond_err_ratio"] == ["64x512x1024"]
    pair = next(p for p in summary["pairs"] if (p["first"], p["second"]) == ("asm", "ck"))
    assert (pair["least"], pair["most"], pair["wins"]) == (pytest.approx(2 / 3), 1.25, 1)
    ratio = next(p for p in summary["pairs"] if p["first"] == "aiter-gluon")
    assert (ratio["second"], ratio["mean"]) == ("aiter-triton", 0.8)  # Gluon over Triton, as the guide has it
    (wrong,) = last["beyond_err_ratio"]
    assert (wrong["backend"], wrong["err_ratio"], wrong["us"]) == ("asm", 0.3, 5.0)
    assert wrong["kernel"]
    assert pair["geomean"] == pytest.approx((2 / 3 * 1.25) ** 0.5)
    assert pair["mean"] == pytest.approx((2 / 3 + 1.25) / 2)
    assert {f["name"]: f["bytes"] for f in doc["inputs"]} == {p.name: p.stat().st_size for p in folder.iterdir()}


def test_markdown_has_the_winner_in_bold_and_is_escaped(folder: Path) -> None:
    write(folder / "fp4_profile_b.csv", "gfx," + A4W4, ["a|b<i>," + a4w4(1.0, shape="2,512,1024")])
    text = run(folder, "--format", "markdown")
    assert "| 1x512x1024 gfx950/256 | 0.12 | **0.17** | - | - | CK | 0.67x |" in text
    assert "a\\|b&lt;i>" in text


def test_rows_beyond_the_error_ratio_are_listed(folder: Path) -> None:
    text = run(folder)
    assert "1 row of 1 shape above 0.05, faster than any valid row on 64x512x1024: listed below" in text
    (line,) = [x for x in text.splitlines() if x.startswith("64x512x1024") and "0.3" in x]
    assert "ASM" in line
    assert "5.00" in line
    assert "errRatio" in run(folder, "--format", "markdown")


def test_csv_can_be_read_again(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "best" / "x.csv"
    out.parent.mkdir()
    assert run(folder, "-o", out) == ""
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert rows[2]["best"] == "asm"
    again = analyse(out, family="a4w4_blockscale")
    assert again["backends"] == ["asm", "ck", "aiter-gluon", "aiter-triton"]
    assert again["rows"][0]["backends"]["ck"]["us"] == 6.0


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_the_terminal_is_never_overrun_and_no_figure_is_cut(folder: Path, width: int) -> None:
    found, out = analyse(folder), io.StringIO()
    show_analysis(Console(file=out, width=width), found, found["rows"])
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= width
    for shown in ("64x512x1024", "8.39", "6.71", "4.19", "3.36"):
        assert shown in text


def test_mistakes_are_told(folder: Path) -> None:
    for args, says in (
        (["nothing/there.csv"], "no such file"),
        (["--family", "a4w5", folder], "did you mean"), (["--chip", "x", folder], "MI3"),
        (["--reference", "h100", folder], "mi355x, mi350x"),
        (["--json", "--format", "csv", folder], "contradict each other"),
        (["--runs", folder / "no"], "there are no runs"),
    ):  # fmt: skip
        done = CliRunner().invoke(app, ["analyze", *map(str, args)])
        assert isinstance(done.exception, InputError), args
        assert says in str(done.exception)


def test_rooflines_are_the_data_sheets() -> None:
    mi355x = CHIPS["mi355x"]
    assert mi355x.peaks["fp4"] == pytest.approx(10_066, abs=1)
    big = roof_of(FP4, (16384, 16384, 32768), mi355x)
    thin = roof_of(FP4, (1, 16384, 16384), mi355x)
    assert big is not None
    assert (big.bound, big.tflops) == ("compute", mi355x.peaks["fp4"])
    assert thin is not None
    assert thin.bound == "memory"
    moved = (16384 + 16384 * 16384) / 2 + 2 * 16384
    assert thin.tflops == pytest.approx(2 * 16384 * 16384 / moved * 8)
    assert roof_of(FP4, (1, 1, 32), CHIPS["h200"]) is None


def test_chips_are_told_by_name_then_by_what_is_like_them() -> None:
    assert chip_of(("gfx950", 256), ["AMD Instinct MI350X"]) == (CHIPS["mi350x"], "")
    chip, said = chip_of(("gfx950", 256))
    assert chip is CHIPS["mi355x"]
    assert "may be MI355X or MI350X" in said
    assert chip_of(("sm_90", 132), ["NVIDIA H200"])[0] is CHIPS["h200"]
    chip, said = chip_of(("cpu-x86_64-avx2", 8))
    assert chip is None
    assert "no data sheet is known" in said


def test_times_that_no_chip_reaches_are_pointed_out(tmp_path: Path) -> None:
    big, thin = 2 * 16384 * 16384 * 32768 / 10_066e6, 16384 * 16384 / 2 / 8e6
    rows = [a4w4(big / 1.5, shape="16384,16384,32768"), a4w4(2 * big, shape="16384,16384,16384")]
    rows += [a4w4(thin / 2, shape="1,16384,16384"), a4w4(thin / 4, shape="2,16384,16384")]
    found = analyse(write(tmp_path / "fp4_profile_a.csv", A4W4, rows))
    compute, memory = (n for n in found["notes"] if "above" in n)
    assert "1 shape is above the compute roofline (most: 16384x16384x32768 at 150%)" in compute
    assert "2 shapes are above the memory roofline (most: 2x16384x16384 at 40" in memory
    assert "cache" in memory
    assert "cache" not in compute


def test_published_figures_are_consistent_and_deviations_marked(tmp_path: Path) -> None:
    us = 3047 / 1.06
    rows = [a4w4(us, shape="16384,16384,32768"), a4w4(1538, shape="16384,8192,32768")]
    found = analyse(write(tmp_path / "fp4_profile_a.csv", A4W4, rows), reference="MI355X")["reference"]
    assert (len(found["rows"]), [r["off"] for r in found["rows"][:3]]) == (18, [True, False, False])
    assert found["rows"][2]["deviation"] is None
    source, figures = published()
    assert "guide" in source
    assert list(figures.chip.unique()) == ["mi355x", "mi350x"]
    made = 2 * figures.M * figures.N * figures.K / figures.us / 1e6
    assert list(made) == pytest.approx(list(figures.tflops), rel=0.005)


@pytest.mark.skipif(AITER_TABLES is None, reason=NO_TABLES)
def test_nothing_that_aiter_ships_is_above_the_roofline() -> None:
    assert AITER_TABLES is not None
    for name in ("a4w4_blockscale", "a8w8_blockscale", "bf16"):
        rows = analyse(AITER_TABLES / f"{name}_tuned_gemm.csv")["rows"]
        shares = [r["roofline"]["share"] for r in rows if r["roofline"] and r["best"]]
        assert shares
        assert max(shares) < 1
