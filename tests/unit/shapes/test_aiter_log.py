# ruff: noqa: E501 - the lines are AITER's
"""`shapes from-log` and `--pad-m`: AITER's lines of every date and family."""

from __future__ import annotations

import gzip
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import InputError
from orchestrator.families import get_family, grid_point, padded
from orchestrator.machines.workload_capture import WorkloadLog
from orchestrator.shapes.aiter_log import MXSCALE, Misses, count_misses, read_calls
from orchestrator.shapes.model import pad_calls
from orchestrator.shapes.reader import read_shapes
from tests.kits.fleet import Done, command
from worker.capture import MARK
from worker.families import FAMILIES

BF16 = "torch.bfloat16"
T = "/tmp/aiter_configs"
# fmt: off
LINES = [
    # (the line as AITER writes it, family, key)
    ("[aiter] shape is M:1, N:2, K:64, not found tuned config in CKGEMM or asmGEMM, will use default config!",  # v0.1.7
     "a4w4_blockscale", (1, 2, 64)),
    (f"[aiter] shape is M:1, N:2, K:64, not found tuned config in {T}/a4w4_blockscale_tuned_gemm.csv, will use default config!",
     "a4w4_blockscale", (1, 2, 64)),
    (f"shape is M:16, N:1536, K:7168, not found tuned config in {T}/a8w8_blockscale_tuned_gemm.csv, will use default config!",
     "a8w8_blockscale", (16, 1536, 7168)),
    (f"(Worker_TP0 pid=7) shape is M:16, N:1536, K:7168, not found tuned config in {T}/a8w8_blockscale_bpreshuffle_tuned_gemm.csv, will use default config!",
     "a8w8_blockscale_bpreshuffle", (16, 1536, 7168)),
    (f"shape is M:4, N:5, K:6, not found tuned config in {T}/a8w8_tuned_gemm.csv, will use default config!",
     "a8w8", (4, 5, 6, "torch.int8")),
    (f"shape is M:4, N:5, K:6, q_dtype_w:torch.float8_e4m3fn, not found tuned config in {T}/a8w8_tuned_gemm.csv, will use default config!",
     "a8w8", (4, 5, 6, "torch.float8_e4m3fn")),
    (f"shape is M:4, N:5, K:6, q_dtype_w:torch.float8_e4m3fnuz, not found tuned config in {T}/a8w8_bpreshuffle_tuned_gemm.csv, will use default config!",
     "a8w8_bpreshuffle", (4, 5, 6, "torch.float8_e4m3fnuz")),
    ("shape is B:16, M:4, N:5, K:6, not found tuned config in CKGEMM, will use default config!",
     "batched_a8w8", (16, 4, 5, 6)),
    ("shape is B:16, M:4, N:5, K:6 dtype is bf16, not found tuned config in CKGEMM, will use default config!",
     "batched_bf16", (16, 4, 5, 6)),
    ("[aiter] shape is B:16, M:3, N:1024, K:4096, not found tuned/padded config in /x/my.csv, the caller will fall back!",
     MXSCALE, (16, 3, 1024, 4096)),
    ("using torch solution:0 for m=3 n=4 k=5 dtype=torch.float16 bias=True, scaleAB=False",  # v0.1.5
     "a16w16", (3, 4, 5, "True", "torch.float16", BF16, "False", "False")),
    (f"shape is M:3, N:4, K:5, not found tuned config in {T}/bf16_tuned_gemm.csv, will use default config!",  # v0.1.7
     "a16w16", (3, 4, 5, "False", BF16, BF16, "False", "False")),
    (f"shape is M:3, N:4, K:5 dtype='torch.bfloat16' otype='torch.float32' bias=True, scaleAB=False, bpreshuffle=True , not found tuned config in {T}/bf16_tuned_gemm.csv, will use default config!",  # v0.1.8
     "a16w16", (3, 4, 5, "True", BF16, "torch.float32", "False", "True")),
    ("\x1b[32m[aiter]\x1b[0m shape is M:3, N:4, K:5 dtype=torch.float16 otype=torch.float16 bias=False, scaleAB=True, bpreshuffle=False, not found tuned config in /x/my.csv, will use default config! using torch solution:0",
     "a16w16", (3, 4, 5, "False", "torch.float16", "torch.float16", "True", "False")),
    ("[fused_moe] using 2stage default for (256, 16, 7168, 256, 257, 9, 'ActivationType.Silu', 'torch.bfloat16', 'torch.float4_e2m1fn_x2', 'torch.float4_e2m1fn_x2', 'QuantType.per_1x32', True, False) ",
     "fmoe", (16, 7168, 256, 257, 9, "ActivationType.Silu", BF16, "torch.float4_e2m1fn_x2", "torch.float4_e2m1fn_x2", "QuantType.per_1x32", 1, 0)),
    ("[fused_moe] using 1stage xbf16 default for ('gfx950', 256, 16, 7168, 256, 257, 9, <ActivationType.Swiglu: 2>, 'torch.bfloat16', 'torch.bfloat16', 'torch.uint32', 'QuantType.No', 1, 0) ",
     "fmoe", (16, 7168, 256, 257, 9, "ActivationType.Swiglu", BF16, BF16, "torch.int4", "QuantType.No", 1, 0)),
]
SILENT = [
    "",
    "shape is M:1, N:2, K:64, found padded_M: 16, N:2, K:64 is tuned on cu_num = 256 in x.csv, kernel name is k, splitK is 0!",
    "[fused_moe] using 2stage (kernelName1='a', kernelName2='b') for (256, 16)",
    "using hipblaslt solution:77 for m=3 n=4 k=5 dtype=torch.bfloat16 bias=False, scaleAB=False",
]
# fmt: on


def counted(*lines: str, family: str | None = None) -> Misses:
    counting = Misses(family)
    for line in lines:
        counting.read(line.encode("utf-8", "surrogateescape") + b"\n")
    return counting.close()


@pytest.mark.parametrize(("line", "family", "key"), LINES, ids=[f"{f}-{i}" for i, (_, f, _) in enumerate(LINES)])
def test_every_line(line: str, family: str, key: tuple[int | str, ...]) -> None:
    found = counted(line)
    assert {f: dict(c) for f, c in found.counts.items()} == {family: {key: 1}}
    assert not found.odd


def test_every_family_has_a_line_and_other_lines_say_nothing() -> None:
    assert {family for _, family, _ in LINES} == set(FAMILIES)
    found = counted(*SILENT)
    assert (found.counts, dict(found.odd), found.unknown) == ({}, {}, 0)


@pytest.mark.parametrize(
    "line",
    [
        "shape is M:2, N:3, K:4, not found tuned/padded config in x.csv, the caller will fall back!",
        f"shape is M:1, N:2, K:99999999999999999999, not found tuned config in {T}/a4w4_blockscale_tuned_gemm.csv, will use default config!",
        f"shape is M:1, N:2, K:3, q_dtype_w:torch.load, not found tuned config in {T}/a8w8_tuned_gemm.csv, will use default config!",
        "[fused_moe] using 2stage default for (256, 16, 7168)",
    ],
)
def test_what_cannot_be_read_is_counted_and_never_becomes_a_shape(line: str) -> None:
    found = counted(line)
    assert (found.odd.total(), found.counts) == (1, {})


@given(st.text(max_size=300))
def test_no_line_makes_it_fall(text: str) -> None:
    for line in (text, f"shape is M:1, N:2, K:3{text}not found tuned config in {text}, will use default config!"):
        counted(line.replace("\n", " "))


@pytest.mark.parametrize(
    "line",
    [
        LINES[2][0].replace("M:16", "M:{}"),
        LINES[2][0].replace("M:16", "M:{}" + 20 * "9"),  # cannot be read
        LINES[11][0].replace("M:3", "M:{}"),  # its types are left out
        "Using default MoE config. Performance might be sub-optimal! Config file not found at"
        " /x/E={},N=512,device_name=AMD_Instinct_MI355X,dtype=fp8_w8a8.json",
    ],
)
def test_a_log_without_an_end_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.setattr("orchestrator.shapes.aiter_log.MAX_SHAPES", 9)
    counted(*(line.format(m) for m in (*range(1, 10), 1, 2, 3)), family="fmoe")
    with pytest.raises(InputError, match="more than 9 shapes: give the logs of one workload only"):
        counted(*(line.format(m) for m in range(1, 11)), family="fmoe")


def test_a_record_of_a_workload_that_cannot_be_read_is_none() -> None:
    log = WorkloadLog(None, lambda text: None)
    for record in ('{"code": 3', "[" * 40_000, "[3]"):
        log.line(MARK + record)
    assert log.done()[1] is None


def test_ranked_over_files_plain_packed_and_cut(tmp_path: Path) -> None:
    def line(m: int) -> str:
        return LINES[2][0].replace("M:16", f"M:{m}") + "\n"

    (tmp_path / "a.log").write_text(line(1) + "noise\n" + line(2) * 5)
    (tmp_path / "b.log.gz").write_bytes(gzip.compress((line(3) * 3 + line(1) * 3).encode()))
    found = count_misses([tmp_path / "a.log", tmp_path / "b.log.gz"])
    assert [(k[0], n) for k, n in found.ranked("a8w8_blockscale")] == [(2, 5), (1, 4), (3, 3)]
    assert [k[0] for k, _ in found.ranked("a8w8_blockscale", top=1)] == [2]
    assert [k[0] for k, _ in found.ranked("a8w8_blockscale", least=4)] == [2, 1]
    (tmp_path / "cut.gz").write_bytes((tmp_path / "b.log.gz").read_bytes()[:-4])
    assert "breaks off" in count_misses([tmp_path / "cut.gz"]).notes[0]
    for path in (tmp_path, tmp_path / "none", Path("/dev/zero")):
        with pytest.raises(InputError, match=str(path)):
            count_misses([path])


def test_a_large_log_is_streamed(tmp_path: Path) -> None:
    path = tmp_path / "big.log.gz"
    with gzip.open(path, "wb", compresslevel=1) as f:
        for _ in range(64):
            f.write(b"x" * 1_000_000)  # one endless line, then good ones
        f.write(b"\n" + (LINES[1][0] + "\n").encode() * 1000)
    # in a process of its own: tracemalloc counts what other threads of this one do as well
    code = (
        "import sys, tracemalloc\n"
        "from orchestrator.shapes.aiter_log import count_misses\n"
        "count_misses(sys.argv[1:])\n"  # imports and caches of the first call do not count
        "tracemalloc.start()\n"
        "found = count_misses(sys.argv[1:])\n"
        "print(found.counts['a4w4_blockscale'].total(), tracemalloc.get_traced_memory()[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    lines, peak = map(int, done.stdout.split())
    assert lines == 1000
    assert peak < 8_000_000


def from_log(*words: object, stdin: str = "") -> Done:
    return command("shapes", "from-log", *words, stdin=stdin)


def test_the_command(tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    log.write_text("\n".join(line for line, _, _ in LINES))
    from_log(log).failed_with(2, "name one with --family")
    document = from_log(log, "-o", tmp_path / "miss.csv", "--json").json()
    assert {f["family"] for f in document["families"]} == set(FAMILIES)
    for family in document["families"]:
        assert len(read_shapes(family["file"], get_family(family["family"])).shapes) == family["shapes"]
    one = from_log(log, "--family", "batched_bf16")
    assert one.out == from_log("-", stdin=LINES[8][0] + "\n").out == "B,M,N,K,count\n16,4,5,6,1\n"
    assert "left out, of other families" in one.err
    from_log(log, "--family", "a8w8", "-o", tmp_path).failed_with(2)
    rarely, often = LINES[5][0], LINES[8][0]
    done = from_log("-", "--min-count", 2, "-o", tmp_path / "often.csv", stdin="\n".join([rarely, often, often])).ok()
    assert "left out a8w8: its most frequent shape has 1 line (--min-count)" in done.out
    assert [path.name for path in tmp_path.glob("often*")] == ["often.csv"]
    none = from_log(log, "--min-count", 50, "-o", tmp_path / "none.csv")
    none.failed_with(2, "no shape without a tuned row or config file with at least 50 lines in")
    assert not list(tmp_path.glob("none*"))
    from_log("-", stdin="nothing\n").failed_with(2, "no shape without a tuned row or config file in 1 line")


def test_the_list_has_the_calls_of_each_shape_also_of_a_padded_one(tmp_path: Path) -> None:
    log, out = tmp_path / "serve.log", tmp_path / "missed.csv"
    log.write_text("".join(LINES[2][0].replace("M:16", f"M:{m}") + "\n" for m in (1, 2, 2, 17)))
    exact = {2: 2.0, 1: 1.0, 17: 1.0}
    for words, rows in (((), exact), (("--pad-m",), {16: 3.0, 32: 1.0})):
        from_log(log, "-o", out, "--force", *words).ok()
        assert {key[0]: n for key, n in read_calls(out, get_family("a8w8_blockscale")).items()} == rows
    assert {key[0]: n for key, n in read_calls(log, get_family("a8w8_blockscale")).items()} == exact


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("M,N,K\n1,64,128\n", "neither a list of shapes with a column count"),
        ("M,N,K,count\n1,64,128,0\n", "count of the shape 1x64x128 is '0', not a number above 0"),
        ("nothing of AITER\n", "nor a log of AITER with shapes of a8w8_blockscale"),
    ],
)
def test_a_workload_without_calls_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "workload"
    path.write_text(text)
    with pytest.raises(InputError, match=re.escape(says)):
        read_calls(path, get_family("a8w8_blockscale"))


@pytest.mark.parametrize(
    ("m", "n", "fine", "coarse"),
    [
        (1, 64, 16, 1), (3, 64, 16, 4), (16, 64, 16, 16), (17, 64, 32, 32), (256, 64, 256, 256), (257, 64, 288, 512),
        (1024, 64, 1024, 1024), (1025, 64, 1088, 2048), (4096, 64, 4096, 4096), (4097, 64, 4224, 8192),
        (9000, 4096, 9088, 16384), (9000, 4097, 9088, 8192),
    ],
)  # fmt: skip
def test_the_grid(m: int, n: int, fine: int, coarse: int) -> None:
    """Worked by hand from getPaddedM."""
    assert (padded(m, n, "fine"), padded(m, n, "coarse")) == (fine, coarse)


def test_padding_counts_and_leaves_batched_alone() -> None:
    calls, notes = pad_calls({(m, 64, 64): 1 for m in range(1, 33)}, get_family("a8w8_blockscale"), "fine")
    assert calls == {(16, 64, 64): 16, (32, 64, 64): 16}
    assert notes == ["padding M (fine): 32 shapes became 2 (94% less to tune)"]
    assert grid_point((4, 3, 64, 64), get_family("batched_bf16"), "fine") == (4, 3, 64, 64)
    assert grid_point((4, 3, 128, 128), get_family(MXSCALE), "fine") == (4, 16, 128, 128)
    moe = (3, 1, 1, 1, 1, "a", "b", "c", "d", "e", 1, 0)
    assert [grid_point((t, *moe[1:]), get_family("fmoe"), "fine")[0] for t in (3, 32767, 40000, 200000)] == [
        4, 32768, 32768, 131072,
    ]  # fmt: skip
