"""Files of rocprofv3, written by hand in the documented format with made-up times; none is from a run of ours."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.paths import TEST_DATA
from worker.bench.runner import RocprofError, parse_trace, per_call_us, profiler_argv, select

DATA = TEST_DATA / "bench"
GEMM, REDUCE = "_gemm_afp4wfp4_kernel_BLOCK_SIZE_M_256.kd", "_gemm_afp4wfp4_reduce_kernel.kd"


def put(folder: Path, name: str) -> Path:
    (folder / "host" / "17").mkdir(parents=True)
    shutil.copy(DATA / name, folder / "host" / "17" / name)
    return folder


def test_a_trace_leaves_the_warm_up_out_whatever_the_order_of_its_lines(tmp_path: Path) -> None:
    us, kernels = per_call_us(put(tmp_path, "one_kernel_trace.csv"), warmup=1, calls=2)
    assert us == pytest.approx((10 + 12 + 2 + 4) / 2)
    assert kernels == f"{GEMM} + {REDUCE}"


def test_kernels_are_selected_by_name() -> None:
    found = parse_trace(DATA / "one_kernel_trace.csv")
    us, kernels = select(found, "reduce", 1, 2)
    assert us == pytest.approx(3.0)
    assert kernels == REDUCE
    with pytest.raises(RocprofError, match=r"no kernel matching 'flash' ran .* there were: .*_gemm_afp4wfp4_kernel"):
        select(found, "flash", 1, 2)


def test_what_ran_a_broken_number_of_times_belongs_to_no_call() -> None:
    with pytest.raises(RocprofError, match="whole number of times in each of 7 calls"):
        select(parse_trace(DATA / "one_kernel_trace.csv"), "", 2, 5)


def test_fills_of_the_runtime_count_only_where_asked_for() -> None:
    found = {GEMM: [5, 5], "__amd_rocclr_fillBufferAligned.kd": [800, 800]}
    assert select(found, "", 1, 1) == (0.005, GEMM)
    assert select(found, "__amd_rocclr", 1, 1)[0] == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no column Kernel_Name"),
        ('"Kind","Name"\n', "no column Kernel_Name"),
        ('"Kernel_Name","Start_Timestamp","End_Timestamp"\n"k",1\n', ":2: its cells are not the 3 of the header"),
        ('"Kernel_Name","Start_Timestamp","End_Timestamp"\n"k",1,x\n', ":2: invalid literal for int"),
        ('"Kernel_Name","Start_Timestamp","End_Timestamp"\n"k",9,1\n', ":2: a kernel ends before it starts"),
    ],
)
def test_a_broken_trace_is_an_error_with_file_and_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "x_kernel_trace.csv"
    path.write_text(text)
    with pytest.raises(RocprofError, match=words):
        parse_trace(path)


def test_without_files_or_tool_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RocprofError, match=r"left no kernel_trace\.csv"):
        per_call_us(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RocprofError, match="rocprofv3 is neither in PATH"):
        profiler_argv(["python"], tmp_path)
