"""Reading profiles of any date and keeping the best of each backend."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from orchestrator.errors import InputError
from tests.support.analysis_kit import A4W4, AITER_TABLES, ASM, CK, NO_TABLES, a4w4, analyse, only, times, write
from tests.support.ledger_kit import Run


def test_the_fastest_valid_row_of_each_backend_counts_and_the_rest_is_counted(tmp_path: Path) -> None:
    rows = [a4w4(9.5), a4w4(8.0), a4w4(12, CK, number=3), a4w4(4.0, err=0.051), a4w4(-1), a4w4(0, CK), a4w4("inf", CK),
            a4w4("nan"), a4w4("Null", "Null"), a4w4(5.0, err=""), a4w4(3, shape="64,512.5,1024"),
            a4w4("fast")]  # fmt: skip
    table = analyse(write(tmp_path / "fp4_profile_a.csv", A4W4, rows))
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
    folder = tmp_path / "r"
    folder.mkdir()
    rest = "512,1024"
    write(folder / "fp4_profile_0.csv", "cu_num,M,N,K,kernelId,splitK,us,kernelName", [f"256,1,{rest},30,0,5.0,{ASM}"])
    write(folder / "fp4_profile_1.csv", "gfx," + A4W4, ["gfx950," + a4w4(6.0, shape=f"2,{rest}")])
    write(folder / "fp4_profile_2.csv", "errRatio,kernelName,K,us,M,N,cu_num,extra", [f"0.0,{CK},1024,7.0,3,512,256,x"])
    write(folder / "fp4_profile_3.csv", "\ufeff" + A4W4, [a4w4(8.0, shape=f"4,{rest}")], end="\r\n")
    write(folder / "fp4_profile_4.csv", A4W4, [a4w4(" 9.0 ", shape=f" 5, {rest}")], end="\r")
    table = analyse(folder)
    assert times(table) == [{"asm": 5.0}, {"asm": 6.0}, {"ck": 7.0}, {"asm": 8.0}, {"asm": 9.0}]
    assert {(r["key"]["M"], r["gfx"], r["cu_num"]) for r in table["rows"]} == {(m, "gfx950", 256) for m in range(1, 6)}
    assert any("no column of errors" in n and "fp4_profile_0.csv" in n for n in table["notes"])


def test_a_failed_candidate_without_a_name_is_told_by_its_number(tmp_path: Path) -> None:
    rows = [a4w4(5.0, "Null", number=19), a4w4(6.0, "None", number=20)]
    found = analyse(write(tmp_path / "fp4_profile_a.csv", A4W4, rows))
    assert times(found) == [{"ck": 5.0, "asm": 6.0}]
    assert {b: x["kernel"] for b, x in only(found)["backends"].items()} == {"ck": "kernelId 19", "asm": "kernelId 20"}


def test_the_four_ways_of_the_runbook(tmp_path: Path) -> None:
    write(tmp_path / "fp4_profile_a.csv", A4W4, [a4w4(8.0), a4w4(10.0, CK)])
    write(tmp_path / "fp4_tuned_a.csv", A4W4, [a4w4(8.0)])
    wide = "M,N,K,triton_tflops,triton_us,gluon_tflops,gluon_us"
    write(
        tmp_path / "fp4_triton_gluon_bench.csv", wide, ["64,512,1024,5.6,12.0,0.0,0.0", "1,512,1024,0.1,10.5,0.1,9.9"]
    )
    write(tmp_path / "fp4_suite.csv", "M,N,K", ["1,2,3"])
    table = analyse(tmp_path)
    assert table["backends"] == ["asm", "ck", "aiter-gluon", "aiter-triton"]
    assert [set(t) for t in times(table)] == [{"aiter-triton", "aiter-gluon"}, {"asm", "ck", "aiter-triton"}]
    assert table["left_out"]["by_backend"]["aiter-gluon"] == {"no_time": 1}
    assert any("fp4_suite.csv" in n for n in table["notes"])
    assert any("taken as gfx950 with 256 CUs" in n for n in table["notes"])


def test_a_long_benchmark_and_any_backend(tmp_path: Path) -> None:
    rows = ["64,512,1024,triton,9,7.46,n1", "64,512,1024,gluon,8,8.39,n1", "64,512,1024,mine,7,9.59,n1"]
    path = write(tmp_path / "bench.csv", "M,N,K,backend,us,tflops,node", rows)
    table = analyse(path, family="a4w4_blockscale")
    assert table["backends"] == ["aiter-gluon", "aiter-triton", "unknown"]
    assert table["family"] == "a4w4_blockscale"
    assert analyse(path)["family"] == "gemm"


def test_the_result_does_not_depend_on_the_order_of_rows_files_and_threads(tmp_path: Path) -> None:
    rows = [a4w4(8.0, f"_ZN{i}E", number=30 + i) for i in range(6)]
    seen = set()
    for i, order in enumerate(itertools.permutations(rows, 6)):
        if i % 61 == 0:
            folder = tmp_path / str(i)
            folder.mkdir()
            split = i % 7
            write(folder / "fp4_profile_a.csv", A4W4, order[:split])
            write(folder / "fp4_profile_b.csv", A4W4, order[split:])
            seen.add(only(analyse(folder))["backends"]["asm"]["kernel"])
    assert len(seen) == 1


def test_devices_stay_apart(tmp_path: Path) -> None:
    header = "gfx," + A4W4
    rows = ["gfx950," + a4w4(8.0), "gfx942," + a4w4(9.0).replace("256,", "304,", 1), "Null," + a4w4(7.0)]
    table = analyse(write(tmp_path / "fp4_profile_a.csv", header, rows))
    assert [(r["gfx"], r["cu_num"]) for r in table["rows"]] == [("gfx942", 304), ("gfx950", 256)]
    assert times(table) == [{"asm": 9.0}, {"asm": 7.0}]
    write(tmp_path / "fp4_bench.csv", "M,N,K,triton_us", ["64,512,1024,6.0"])
    both = analyse(tmp_path)
    assert ("", None) in {(r["gfx"], r["cu_num"]) for r in both["rows"]}
    assert any("kept apart" in n for n in both["notes"])


def test_a_tflops_column_that_is_wrong_is_said_and_not_used(tmp_path: Path) -> None:
    right = 2 * 64 * 512 * 1024 / 8.0 / 1e6
    for said, bad in ((right, False), (right * 1.04, False), (right * 1.06, True), (right / 1000, True)):
        row = f"256,64,512,1024,30,0,8.0,{ASM},{said:.4f},1.0,0.0"
        table = analyse(write(tmp_path / "fp4_profile_a.csv", A4W4, [row]))
        assert only(table)["backends"]["asm"]["tflops"] == pytest.approx(right)
        assert any("tflops column" in n for n in table["notes"]) is bad


def test_keys_beyond_sizes_and_their_spelling(tmp_path: Path) -> None:
    header = (
        "M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw,cu_num"
    )
    rows = ["1,2,3,FALSE,torch.bfloat16,torch.bfloat16,False,False,hipblaslt,7,0,2.0,x,0.0,0,0,256",
            "1,2,3,False,torch.bfloat16,torch.bfloat16,False,False,torch,0,0,3.0,native,0.0,0,0,256",
            "1,2,3,True,torch.bfloat16,torch.bfloat16,False,False,,0,0,4.0,native,0.0,0,0,256"]  # fmt: skip
    table = analyse(write(tmp_path / "bf16_tuned_gemm.csv", header, rows))
    assert [set(t) for t in times(table)] == [{"hipblaslt", "torch"}, {"torch"}]
    assert [r["shape"] for r in table["rows"]] == ["1x2x3 bias=False", "1x2x3 bias=True"]


def test_families_do_not_mix(tmp_path: Path) -> None:
    write(tmp_path / "fp4_profile_a.csv", A4W4, [a4w4(8.0)])
    write(
        tmp_path / "a8w8_tuned_gemm.csv",
        A4W4.replace("N,K,", "N,K,q_dtype_w,"),
        ["256,1,2,3,torch.int8,1,0,9.0,a8w8_x,0,0,0"],
    )
    with pytest.raises(InputError, match=r"several families.*--family"):
        analyse(tmp_path)
    table = analyse(tmp_path, family="a8w8")
    assert table["backends"] == ["ck"]
    assert any("other families: fp4_profile_a.csv" in n for n in table["notes"])


def test_a_run_is_read_from_its_ledger_while_it_has_not_ended(tmp_path: Path) -> None:
    root = tmp_path / "runs" / "20260101-000000-abcd"
    root.mkdir(parents=True)
    (root / "run.yaml").write_text("run: x\n")
    with Run(root) as run:
        run.send("g0001-1")
        run.tune("g0001-1", 1, 2, us=10.0)
    table = analyse(root)
    assert times(table) == [{"ck": 10.0}] * 2
    assert any("has not ended" in n for n in table["notes"])


@pytest.mark.skipif(AITER_TABLES is None, reason=NO_TABLES)
@pytest.mark.parametrize(
    ("name", "shapes", "backends"),
    [("a4w4_blockscale_tuned_gemm", 1470, {"asm", "ck"}), ("bf16_tuned_batched_gemm", 26, {"ck"}),
     ("bf16_tuned_gemm", 232, {"asm", "aiter-triton", "flydsl", "opus"}),
     ("a8w8_blockscale_tuned_gemm", 6630, {"ck", "cktile"}),
     ("a8w8_bpreshuffle_tuned_gemm", 598, {"asm", "ck", "cktile", "flydsl"}), ("tuned_fmoe", 617, {"asm", "ck"})],
)  # fmt: skip
def test_every_table_that_aiter_ships_is_read(name: str, shapes: int, backends: set[str]) -> None:
    assert AITER_TABLES is not None
    table = analyse(AITER_TABLES / f"{name}.csv")
    assert (len(table["rows"]), set(table["backends"])) == (shapes, backends)
    assert sum(map(bool, times(table))) + table["left_out"]["error_ratio"] == shapes
