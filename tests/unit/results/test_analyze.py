"""`gemmfleet analyze`: profiles of any date read, the best of each backend kept, and what it says as a whole."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import InputError
from orchestrator.families import get_family
from orchestrator.planning.roofline import CHIPS, chip_of, roofline
from orchestrator.results.analyze import analyze
from orchestrator.results.measurements import find_sources
from tests.kits.fleet import command
from tests.kits.results import Run
from tests.paths import ROOT

TABLES = Path(os.environ.get("AITER_TABLES", ROOT.parent / "shared" / "data" / "aiter"))
"""The tables that AITER ships, if they are there."""
needs_tables = pytest.mark.skipif(
    not (TABLES / "a4w4_blockscale_tuned_gemm.csv").is_file(),
    reason="AITER's shipped tables are not here (AITER_TABLES names their folder)",
)

A4W4 = "cu_num,M,N,K,kernelId,splitK,us,kernelName,tflops,bw,errRatio"
ASM = "_ZN5aiter41f4gemm_bf16_per1x32Fp4_BpreShuffle_32x128E"
CK = "a4w4_blockscale_256x64x128x128_v3"


def a4w4(us: object, kernel: str = ASM, shape: str = "64,512,1024", err: object = 0.0, number: int = 30) -> str:
    """A profile row of a4w4 as the runbook's image writes it."""
    return f"256,{shape},{number},0,{us},{kernel},0.0,1.0,{err}"


def write(path: Path, header: str, rows: Iterable[str], end: str = "\n") -> Path:
    """A CSV, its lines ended by `end`."""
    path.write_bytes((end.join([header, *rows]) + end).encode())
    return path


def analyse(path: Path, family: str | None = None, **more: Any) -> dict[str, Any]:
    """The document of a file or folder."""
    with find_sources([str(path)], runs=path / "runs", family=get_family(family) if family else None) as sources:
        return analyze(sources, **more)


def only(document: dict[str, Any]) -> dict[str, Any]:
    """The document's only shape."""
    (shape,) = document["rows"]
    assert isinstance(shape, dict)
    return shape


def times(document: dict[str, Any]) -> list[dict[str, float]]:
    """The times of each shape by backend."""
    return [{b: x["us"] for b, x in row["backends"].items()} for row in document["rows"]]


def profile(folder: Path, *rows: str, header: str = A4W4) -> Path:
    return write(folder / "fp4_profile_a.csv", header, rows)


def run(*args: object) -> str:
    return command("analyze", *args).ok().out


def test_the_fastest_valid_row_of_each_backend_counts_and_the_rest_is_counted(tmp_path: Path) -> None:
    rows = [a4w4(9.5), a4w4(8.0), a4w4(12, CK, number=3), a4w4(4.0, err=0.051), a4w4(-1), a4w4(0, CK), a4w4("inf", CK),
            a4w4("nan"), a4w4("Null", "Null"), a4w4(5.0, err=""), a4w4(3, shape="64,512.5,1024"),
            a4w4("fast")]  # fmt: skip
    table = analyse(profile(tmp_path, *rows))
    shape = only(table)
    assert (shape["gfx"], shape["cu_num"], list(shape["key"].values())) == ("gfx950", 256, [64, 512, 1024])
    assert times(table) == [{"asm": 8.0, "ck": 12.0}]
    assert shape["backends"]["asm"]["tflops"] == pytest.approx(2 * 64 * 512 * 1024 / 8.0 / 1e6)
    assert (shape["best"], shape["asm_over_best_other"]) == ("asm", pytest.approx(1.5))
    by_backend = table["left_out"].pop("by_backend")
    assert table["left_out"] == {"no_time": 5, "not_finite": 1, "error_ratio": 2, "no_shape": 1, "malformed": 0}
    assert by_backend["ck"] == {"no_time": 1, "not_finite": 1}
    assert [(w["err_ratio"], w["us"]) for w in shape["beyond_err_ratio"]] == [(None, 5.0), (0.051, 4.0)]
    assert shape["wrong_was_faster"]
    assert table["inputs"][0]["rows"] == len(rows)


def test_headers_of_every_date_are_read_by_name(tmp_path: Path) -> None:
    rest = "512,1024"
    for n, (header, row, end) in enumerate((
        ("cu_num,M,N,K,kernelId,splitK,us,kernelName", f"256,1,{rest},30,0,5.0,{ASM}", "\n"),
        ("gfx," + A4W4, "gfx950," + a4w4(6.0, shape=f"2,{rest}"), "\n"),
        ("errRatio,kernelName,K,us,M,N,cu_num,extra", f"0.0,{CK},1024,7.0,3,512,256,x", "\n"),
        ("\ufeff" + A4W4, a4w4(8.0, shape=f"4,{rest}"), "\r\n"),
        (A4W4, a4w4(" 9.0 ", shape=f" 5, {rest}"), "\r"),
        (A4W4, a4w4(10.0, "Null", shape=f"6,{rest}", number=19), "\n"),  # without a name, told by its number
    )):  # fmt: skip
        write(tmp_path / f"fp4_profile_{n}.csv", header, [row], end)
    table = analyse(tmp_path)
    assert times(table) == [{"asm": 5.0}, {"asm": 6.0}, {"ck": 7.0}, {"asm": 8.0}, {"asm": 9.0}, {"ck": 10.0}]
    assert {(r["gfx"], r["cu_num"]) for r in table["rows"]} == {("gfx950", 256)}
    assert any("no column of errors" in n and "fp4_profile_0.csv" in n for n in table["notes"])


def test_the_four_ways_of_the_runbook_and_a_long_benchmark(tmp_path: Path) -> None:
    profile(tmp_path, a4w4(8.0), a4w4(10.0, CK))
    write(tmp_path / "fp4_tuned_a.csv", A4W4, [a4w4(8.0)])
    rows = ["64,512,1024,5.6,12.0,0.0,0.0", "1,512,1024,0.1,10.5,0.1,9.9"]
    wide = "M,N,K,triton_tflops,triton_us,gluon_tflops,gluon_us"
    write(tmp_path / "fp4_triton_gluon_bench.csv", wide, rows)
    write(tmp_path / "fp4_suite.csv", "M,N,K", ["1,2,3"])
    table = analyse(tmp_path)
    assert table["backends"] == ["asm", "ck", "aiter-gluon", "aiter-triton"]
    assert [set(t) for t in times(table)] == [{"aiter-triton", "aiter-gluon"}, {"asm", "ck", "aiter-triton"}]
    assert table["left_out"]["by_backend"]["aiter-gluon"] == {"no_time": 1}
    for words in ("fp4_suite.csv", "taken as gfx950 with 256 CUs"):
        assert any(words in n for n in table["notes"])
    rows = ["64,512,1024,triton,9,7.46,n1", "64,512,1024,gluon,8,8.39,n1", "64,512,1024,mine,7,9.59,n1"]
    long = analyse(write(tmp_path / "bench.csv", "M,N,K,backend,us,tflops,node", rows))
    assert (long["family"], long["backends"]) == ("gemm", ["aiter-gluon", "aiter-triton", "unknown"])


def test_the_table_that_the_guides_script_prints_is_read_from_its_log(tmp_path: Path) -> None:
    def ok(m: int, n: int, k: int, us: float) -> str:
        return f"{m:8d} {n:8d} {k:8d} {us:10.1f} {2 * m * n * k / us / 1e6:10.2f} {'ok':>8s}"

    log, half = tmp_path / "bench_fp4.log", f"{6528:8d} {7040:8d} {5632:8d} {'':>10s} {'':>10s} {'ERR':>8s}"
    lines = [
        "[aiter] import [module_aiter_enum] under /app/aiter-test/aiter/jit/module_aiter_enum.so",
        f"{'M':>8s} {'N':>8s} {'K':>8s} {'us':>10s} {'TFLOPS':>10s} {'status':>8s}",
        "=" * 62,
        ok(16384, 16384, 32768, 3047.2),
        "[aiter] shape is M:4736, N:44416, K:17920 9 9 ok, not found tuned config",
        ok(4736, 44416, 17920, 1412.0),
        f"{half}  This GEMM is not supported! 1 2 3 4.0 5.00 ok",
    ]
    log.write_text("\n".join(lines) + "\n")
    before = log.read_bytes()
    table = analyse(log, reference="mi355x")
    assert (table["family"], table["inputs"][0]["name"]) == ("a4w4_blockscale", "bench_fp4.log")
    assert times(table) == [{"aiter": 1412.0}, {}, {"aiter": 3047.2}]
    assert table["rows"][2]["backends"]["aiter"]["tflops"] == pytest.approx(5773.2, abs=0.1)
    assert table["summary"]["no_backend"] == ["6528x7040x5632"]
    assert [r["off"] for r in table["reference"]["rows"][:1]] == [False]
    assert "fastest: aiter on 2 of 3 shapes" in run(log)
    command("analyze", log, "-o", log).failed_with(2, "one of the inputs")
    assert log.read_bytes() == before


def test_devices_and_families_do_not_mix(tmp_path: Path) -> None:
    rows = ["gfx950," + a4w4(8.0), "gfx942," + a4w4(9.0).replace("256,", "304,", 1), "Null," + a4w4(7.0)]
    table = analyse(profile(tmp_path, *rows, header="gfx," + A4W4))
    assert [(r["gfx"], r["cu_num"]) for r in table["rows"]] == [("gfx942", 304), ("gfx950", 256)]
    assert times(table) == [{"asm": 9.0}, {"asm": 7.0}]
    write(tmp_path / "fp4_bench.csv", "M,N,K,triton_us", ["64,512,1024,6.0"])
    assert any("kept apart" in n for n in analyse(tmp_path)["notes"])
    other = "256,1,2,3,torch.int8,1,0,9.0,a8w8_x,0,0,0"
    write(tmp_path / "a8w8_tuned_gemm.csv", A4W4.replace("N,K,", "N,K,q_dtype_w,"), [other])
    with pytest.raises(InputError, match=r"several families.*--family"):
        analyse(tmp_path)
    assert analyse(tmp_path, family="a8w8")["backends"] == ["ck"]


def test_a_run_is_read_from_its_ledger_while_it_has_not_ended(tmp_path: Path) -> None:
    root = tmp_path / "runs" / "20260101-000000-abcd"
    root.mkdir(parents=True)
    (root / "run.yaml").write_text("run: x\n")
    with Run(root) as r:
        r.send("g0001-1")
        r.tune("g0001-1", 1, 2, us=10.0)
    table = analyse(root)
    assert times(table) == [{"ck": 10.0}] * 2
    assert any("has not ended" in n for n in table["notes"])


@needs_tables
@pytest.mark.parametrize(
    ("name", "shapes", "backends"),
    [("a4w4_blockscale_tuned_gemm", 1470, {"asm", "ck"}), ("bf16_tuned_batched_gemm", 26, {"ck"}),
     ("bf16_tuned_gemm", 232, {"asm", "aiter-triton", "flydsl", "opus"}),
     ("a8w8_blockscale_tuned_gemm", 6630, {"ck", "cktile"}),
     ("a8w8_bpreshuffle_tuned_gemm", 598, {"asm", "ck", "cktile", "flydsl"}), ("tuned_fmoe", 617, {"asm", "ck"})],
)  # fmt: skip
def test_every_table_that_aiter_ships_is_read(name: str, shapes: int, backends: set[str]) -> None:
    table = analyse(TABLES / f"{name}.csv")
    assert (len(table["rows"]), set(table["backends"])) == (shapes, backends)
    assert sum(map(bool, times(table))) + table["left_out"]["error_ratio"] == shapes
    assert all(r["roofline"]["share"] < 1 for r in table["rows"] if r["roofline"] and r["best"])


def test_damaged_lines_are_left_out_counted_and_named(tmp_path: Path) -> None:
    good = (a4w4(8.0), a4w4(9.0))
    foreign = a4w4(1.0).replace(ASM, "@").encode().replace(b"@", b"_ZN\xff") + b"\n"
    for bad, n, says in (
        (b"256,64,512,1024,30,0,3.\n" + (a4w4(2.0) + ",1,2\n").encode(), 2, "a.csv:4: 2 lines are not rows"),
        (foreign, 1, "a.csv:4: 1 line is not a row"),
        (a4w4(4.0, err="0.0").encode(), 1, "no line end"),  # may have been 0.05 or 0.3
        (b"256,64,5", 1, "a.csv:4: 1 line is not a row"),
    ):
        path = profile(tmp_path, *good)
        path.write_bytes(path.read_bytes() + bad)
        table = analyse(path)
        assert (times(table), table["left_out"]["malformed"]) == ([{"asm": 8.0}], n)
        assert any(says in note for note in table["notes"])
    path.write_bytes((A4W4 + "\r\n" + a4w4(8.0) + "\n" + a4w4(7.0) + "\r\n\n" + a4w4(9.0) + "\r").encode())
    assert times(analyse(path)) == [{"asm": 7.0}]
    quoted = only(analyse(profile(tmp_path, a4w4(8.0, '"' + ASM + ',x ""1"""'), a4w4(9.0))))
    assert quoted["backends"]["asm"]["kernel"] == ASM + ',x "1"'


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"), (b"PK\x03\x04....", "workbook"),
        (b"M,N,K\n1,2,3\n", "no column of times"), (b"us,x\n1,2\n", "has no M, N and K"),
        (b"M,N,K,us,us\n1,2,3,4,5\n", "column us is there twice"), (b"M" * 70_000 + b"\n", "longer than"),
        (A4W4.encode() + b"\n", "there are no rows"),
        ("\n".join([A4W4, *[a4w4(8.0)] * 999, a4w4(7.0, '"' + ASM), a4w4(6.0)]).encode(), "a.csv:1001: opens a quote"),
        ("\n".join([A4W4, *[a4w4(8.0)] * 999, a4w4(7.0, "\0"), ""]).encode(), "a.csv:1001: holds a NUL byte"),
        ("\n".join([A4W4, a4w4(8.0), "x" * 200_000]).encode(), "a.csv:3: is longer than 128 KiB"),
    ],
    ids=range(10),
)  # fmt: skip
def test_what_is_no_table_is_refused_by_name(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "fp4_profile_a.csv"
    path.write_bytes(content)
    with pytest.raises(InputError, match=says) as e:
        analyse(path)
    assert path.name in str(e.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [a4w4(8.0), a4w4(10.0, CK), a4w4(9.0, shape="1,512,1024"), a4w4(6.0, CK, shape="1,512,1024"),
            a4w4(-1, shape="7,512,1024"), a4w4(5.0, err=0.3)]  # fmt: skip
    profile(tmp_path, *rows)
    write(tmp_path / "fp4_triton_gluon_bench.csv", "M,N,K,triton_us,gluon_us", ["64,512,1024,16.0,20.0"])
    return tmp_path


def test_json_is_one_document(folder: Path) -> None:
    doc = json.loads(run(folder, "--json"))
    assert [r["shape"] for r in doc["rows"]] == ["1x512x1024", "7x512x1024", "64x512x1024"]
    last, summary = doc["rows"][-1], doc["summary"]
    assert (last["best"], last["asm_over_best_other"]) == ("asm", 1.25)
    assert set(last["backends"]) == {"asm", "ck", "aiter-triton", "aiter-gluon"}
    assert doc["left_out"]["no_time"] == doc["left_out"]["error_ratio"] == 1
    named = [summary[n] for n in ("asm_loses", "no_backend", "beyond_err_ratio")]
    assert named == [["1x512x1024"], ["7x512x1024"], ["64x512x1024"]]
    pairs = {(p.pop("first"), p.pop("second")): p for p in summary["pairs"]}
    assert pairs["asm", "ck"] == pytest.approx({
        "shapes": 2, "wins": 1, "least": 2 / 3, "most": 1.25, "mean": (2 / 3 + 1.25) / 2,
        "geomean": (2 / 3 * 1.25) ** 0.5,
    })  # fmt: skip
    assert pairs["aiter-gluon", "aiter-triton"]["mean"] == 0.8  # Gluon over Triton, as the guide has it


def test_all_pairs_of_eight_backends_are_shown_though_shapes_are_few(tmp_path: Path) -> None:
    names = "abcdefgh"
    header = ",".join(("M,N,K", *(f"{name}_us" for name in names)))
    path = write(tmp_path / "bench.csv", header, ["64,512,1024," + ",".join(str(n + 1.0) for n in range(8))])
    shown = run(path)
    pairs = [f"{a} over {b}" for i, a in enumerate(names) for b in names[i + 1 :]]
    assert len(pairs) == 28
    assert [
        pair for pair in pairs if pair not in shown and " over ".join(reversed(pair.split(" over "))) not in shown
    ] == []
    assert "more pair" not in shown


def test_a_person_reads_the_same_as_text_and_as_markdown(folder: Path) -> None:
    assert "faster than any valid row on 64x512x1024" in run(folder)
    write(folder / "fp4_profile_b.csv", "gfx," + A4W4, ["a|b<i>," + a4w4(1.0, shape="2,512,1024")])
    page = run(folder, "--format", "markdown")
    assert "| 1x512x1024 gfx950/256 | 0.12 | **0.17** | - | - | CK | 0.67x |" in page
    assert "a\\|b&lt;i>" in page


def test_csv_can_be_read_again(folder: Path, tmp_path: Path) -> None:
    (out := tmp_path / "best" / "x.csv").parent.mkdir()
    assert run(folder, "-o", out) == ""
    assert list(csv.DictReader(out.read_text().splitlines()))[2]["best"] == "asm"
    again = analyse(out, family="a4w4_blockscale")
    assert again["backends"] == ["asm", "ck", "aiter-gluon", "aiter-triton"]
    assert again["rows"][0]["backends"]["ck"]["us"] == 6.0


def test_mistakes_are_told(folder: Path) -> None:
    mine = folder / "fp4_profile_a.csv"
    before = mine.read_bytes()
    for args, says in (
        (["nothing/there.csv"], "no such file"),
        (["--family", "a4w5", folder], "did you mean"), (["--chip", "x", folder], "MI3"),
        (["--reference", "h100", folder], "mi355x, mi350x"),
        (["--chip", "mi355", folder], "did you mean mi355x?"),
        (["--reference", "mi355", folder], "did you mean mi355x?"),
        (["--json", "--format", "csv", folder], "contradict each other"),
        (["--runs", folder / "no"], "there are no runs"),
        ([mine, "-o", mine, "--format", "csv"], "one of the inputs"),
    ):  # fmt: skip
        command("analyze", *args).failed_with(2, says)
    assert mine.read_bytes() == before


def test_published_figures_that_a_measurement_does_not_reach_are_marked(tmp_path: Path) -> None:
    rows = [a4w4(3047 / 1.06, shape="16384,16384,32768"), a4w4(1538, shape="16384,8192,32768")]
    found = analyse(profile(tmp_path, *rows), reference="MI355X")["reference"]
    assert (len(found["rows"]), [r["off"] for r in found["rows"][:3]]) == (18, [True, False, False])


def test_rooflines_are_the_data_sheets() -> None:
    fp4, mi355x = get_family("a4w4_blockscale"), CHIPS["mi355x"]
    big, thin = (roofline(fp4, mi355x)(shape) for shape in ((16384, 16384, 32768), (1, 16384, 16384)))
    assert big is not None
    assert thin is not None
    moved = (16384 + 16384 * 16384) / 2 + 2 * 16384
    assert (big.bound, big.tflops, thin.bound) == ("compute", mi355x.peaks["fp4"], "memory")
    assert thin.tflops == pytest.approx(2 * 16384 * 16384 / moved * 8)
    assert "may be MI355X or MI350X" in chip_of(("gfx950", 256))[1]
    assert chip_of(("cpu-x86_64-avx2", 8))[0] is None
