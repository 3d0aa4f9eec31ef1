"""`collect`: what a fetched file is, what is taken from broken ones, and how rows of many files are merged."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.collect.merging import Content, family_of, fastest_bench_rows, merge, read
from orchestrator.collect.node_folder import Fetched
from orchestrator.families import get_family
from orchestrator.reasons import Reason

A4W4 = get_family("a4w4_blockscale")
HEADER = "cu_num,M,N,K,kernelId,splitK,us,kernelName,tflops,bw,errRatio"
"""As the runbook's image writes it, from before gfx was a column."""
ASM, CK = "_ZN5aiter42f4gemm_bf16_per1x32Fp4_X", "a4w4_blockscale_256x64x128"


def file(name: str, *rows: str, node: str = "a", header: str = HEADER, end: str = "\n") -> Content:
    return read(Fetched(node, name, ("\n".join((header, *rows)) + end).encode()))


def row(m: int, us: object, kernel: str = ASM, err: object = 0.0, cu_num: int = 256) -> str:
    return f"{cu_num},{m},64,64,1,0,{us},{kernel},9.9,8.8,{err}"


def test_kinds_and_families() -> None:
    assert file("fp4_tuned_n1.csv", row(1, 2)).kind == "tuned"
    assert file("fp4_profile_n1.csv", row(1, 2)).kind == "profile"
    assert (
        file("fp4_triton_gluon_bench.csv", header="M,N,K,triton_tflops,triton_us,gluon_tflops,gluon_us").kind == "bench"
    )
    assert file("fp4_tune_shapes_n1.csv", "1,2,3", header="M,N,K").kind == "other"
    assert read(Fetched("a", "run_n1.log", b"x")).kind == "log"
    assert read(Fetched("a", "x.csv", b"")).kind == read(Fetched("a", "x.csv", b"\0\1")).kind == "other"
    assert family_of(file("fp4_tuned_n1.csv", row(1, 2))) is A4W4
    assert family_of(file("a8w8_blockscale_tuned_gemm.csv", row(1, 2))) is get_family("a8w8_blockscale")
    assert family_of(file("mine.csv", row(1, 2))) is A4W4  # by its kernels
    assert family_of(file("mine.csv", row(1, 2, "k"))) is None


def test_broken_files() -> None:
    found = file("fp4_profile_x.csv", row(1, 2), "256,1,64", HEADER, "", row(2, 3), row(3, 4), end="")
    assert [r["M"] for r in found.rows] == ["1", "2", "3"]
    assert sorted(found.notes) == [
        "dropped 1 row cut short or too long",
        "dropped 1 row repeating the header",
    ]
    cut = file("fp4_profile_x.csv", row(1, 2), row(2, 3), end="")  # the last cell may have lost digits
    assert [r["M"] for r in cut.rows] == ["1"]
    assert cut.notes == ["dropped 1 row ending where the file was cut"]


@given(st.binary(max_size=400))
def test_nothing_falls_over_a_file(data: bytes) -> None:
    for name in ("fp4_profile_x.csv", "x.log"):
        content = read(Fetched("a", name, data))
        merge([content], A4W4, 0.05, {})
        fastest_bench_rows([content])
    merge([read(Fetched("a", "fp4_tuned_x.csv", HEADER.encode() + b"\n" + data + b"\n"))], A4W4, 0.05, {})


def test_merged_by_key() -> None:
    files = [
        file("fp4_tuned_n1.csv", row(1, 5.0), row(2, 7.0)),
        file(
            "fp4_profile_n1.csv",
            row(1, 5.0),
            row(1, 4.0, CK),
            row(1, -1, CK),
            row(3, 9.0, CK),
            row(3, 8.0),
            row(3, "inf"),
        ),
        file("fp4_tuned_n2.csv", row(2, 6.0, CK), row(4, 3.0, ASM, 0.9), node="b"),
        file("fp4_profile_n2.csv", row(5, "Null"), row(5, -1), row(6, 3.0, ASM, 0.5), row(6, -1), node="b"),
    ]
    found = merge(files, A4W4, 0.05, {})
    won = {int(k[2]): (new.us, new.kernel, where) for k, (new, where) in found.winners.items()}
    assert won == {
        1: (5.0, ASM, "a:fp4_tuned_n1.csv"),  # AITER's own choice, though its profile has a faster row
        2: (6.0, CK, "b:fp4_tuned_n2.csv"),
        3: (8.0, ASM, "a:fp4_profile_n1.csv"),  # no tuned table has it
    }
    assert found.rebuilt == 1
    assert {k[0] for k in found.winners} == {"gfx950"}  # 256 compute units
    assert {(k[2], reason, why) for k, reason, why, _ in found.failed} == {
        (4, Reason.WRONG_RESULT, "the row of the tuned table is not valid (us, error above 0.05, or no gfx)"),
        (5, Reason.NO_CANDIDATE, "2 candidates: 1 error, 1 unsupported"),
        (6, Reason.WRONG_RESULT, "2 candidates: 1 unsupported, 1 wrong"),
    }
    assert len(found.candidates) == 10


def test_chips_never_mix() -> None:
    files = [file("fp4_tuned_a.csv", row(1, 5.0), row(1, 3.0, cu_num=304), row(1, 2.0, cu_num=128))]
    found = merge(files, A4W4, 0.05, {})
    assert sorted(k[:2] for k in found.winners) == [("gfx942", 304), ("gfx950", 256)]
    assert "several chips" in found.notes[0]
    assert len(found.failed) == 1  # 128 compute units could be any chip
    known = merge(files, A4W4, 0.05, {"a": ("gfx950", 128)})
    assert ("gfx950", 128) in {k[:2] for k in known.winners}


def test_benchmarks() -> None:
    header = "M,N,K,triton_tflops,triton_us,gluon_tflops,gluon_us"
    found = fastest_bench_rows(
        [
            file("fp4_triton_gluon_bench.csv", "1,2,3,9.0,10.0,0.0,0.0", "x,2,3,1,1,1,1", header=header),
            file("fp4_triton_gluon_bench.csv", "1,2,3,8.0,12.0,7.0,11.0", header=header, node="b"),
        ]
    )
    assert [(m.backend, m.us, m.tflops, m.node) for m in found] == [
        ("aiter-gluon", 11.0, 7.0, "b"),
        ("aiter-triton", 10.0, 9.0, "a"),
    ]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_order_of_files_changes_nothing(order: tuple[int, int]) -> None:
    files = [file("fp4_tuned_a.csv", row(1, 5.0, "b")), file("fp4_tuned_b.csv", row(1, 5.0, "a"), node="b")]
    found = merge([files[i] for i in order], A4W4, 0.05, {})
    assert [new.kernel for new, _ in found.winners.values()] == ["a"]
