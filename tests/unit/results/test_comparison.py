"""`gemmfleet compare`: what it reads, says, writes and refuses; on simulated tables, how often it accuses and finds."""

from __future__ import annotations

import csv
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.compare import Simulated, rates
from orchestrator.results.verdicts import Floats, judge
from tests.kits.fleet import Done, command

HEADER = "kernel,B,M,N,K,us,run"


def results(path: Path, scale: float = 1.0, *, slower: dict[int, float] | None = None, runs: int = 3) -> Path:
    """Four shapes of one kernel at 100, 200, 300 and 400 us; `slower` multiplies those of some M."""
    lines = [HEADER]
    for run in range(1, runs + 1):
        for i, m in enumerate((16, 64, 128, 256), 1):
            us = 100 * i * scale * (slower or {}).get(m, 1.0) * (1 + 0.0005 * run)
            lines.append(f"batched_gemm_bf16,16,{m},512,128,{us:.4f},{run}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    return results(tmp_path / "golden.csv")


def compare(*args: object) -> Done:
    return command("compare", *args)


def document(*args: object) -> dict[str, Any]:
    found: dict[str, Any] = compare(*args, "--json").json()
    return found


def verdicts(*args: object) -> dict[str, str]:
    """M to verdict."""
    return {r["key"]["M"]: r["verdict"] for r in document(*args)["rows"]}


def test_a_regression_ends_with_1_and_the_worst_comes_first(golden: Path, tmp_path: Path) -> None:
    tot = results(tmp_path / "tot.csv", slower={64: 1.1, 256: 1.2, 16: 0.8})
    code, out, err = compare(golden, tot, "--out", tmp_path / "joined.csv", "--markdown", tmp_path / "pr.md")
    assert code == 1
    assert out.index("+20.0 %") < out.index("+10.0 %") < out.index("-20.0 %")
    assert "4 rows: 2 regression, 1 improved, 1 ok." in out
    assert "written:" in err
    rows = list(csv.DictReader((tmp_path / "joined.csv").read_text().splitlines()))
    assert [(r["M"], r["verdict"]) for r in rows[:2]] == [("256", "regression"), ("64", "regression")]
    assert rows[0]["beyond_rule"] == "True"
    assert float(rows[0]["tot_us"]) == pytest.approx(480.48)
    text = (tmp_path / "pr.md").read_text()
    assert text.startswith("### Regression")
    assert "| batched_gemm_bf16 | 16 | 256 | 512 | 128 | 400.40 | 480.48 | +20.0 % | **regression** |" in text
    found = document(golden, tot)
    assert (found["counts"]["regression"], found["counts"]["ok"], found["counts"]["missing"]) == (2, 1, 0)
    first = found["rows"][0]
    assert first["key"] == {"kernel": "batched_gemm_bf16", "B": "16", "M": "256", "N": "512", "K": "128"}
    assert 0 < first["p"] < found["threshold"]
    compare(golden, golden).ok()


def test_new_missing_ignored_and_unstable(golden: Path, tmp_path: Path) -> None:
    lines, tot = golden.read_text().splitlines(), tmp_path / "b.csv"
    golden.write_text("\n".join(x for x in lines if ",64,512" not in x) + "\n")
    tot.write_text("\n".join(x for x in lines if ",128,512" not in x and not x.endswith(",3")) + "\n")
    assert verdicts(golden, tot) == {"16": "unstable", "64": "new", "128": "missing", "256": "unstable"}
    a, b = results(tmp_path / "c.csv", 0.03), results(tmp_path / "d.csv", 0.06)
    assert verdicts(a, b)["16"] == "ignored"
    assert verdicts(a, b, "--ignore-below", "1")["16"] == "regression"
    assert set(verdicts(a, results(tmp_path / "e.csv", 0.031), "--rule", "1.1,0").values()) == {"ok", "ignored"}


def test_the_rule_alone_judges_what_has_no_repeats(tmp_path: Path) -> None:
    golden = results(tmp_path / "golden.csv", runs=1)
    tot = results(tmp_path / "tot.csv", slower={64: 1.02, 256: 0.98}, runs=1)
    assert set(verdicts(golden, tot).values()) == {"unstable"}
    code, out, _ = compare(golden, tot)
    assert (code, "No row has repeats" in out) == (4, True)
    assert "--rule-only judges by the rule alone, but it knows no noise and accuses most unchanged tables" in out
    assert verdicts(golden, tot, "--rule-only") == {"16": "ok", "64": "regression", "128": "ok", "256": "improved"}
    code, out, _ = compare(golden, tot, "--rule-only")
    assert (code, "Judged by the rule alone" in out) == (1, True)
    assert not any(words in out for words in ("by chance", "drift", "seen from"))
    assert not {"threshold", "table_shift", "expected_false_regressions"} & set(document(golden, tot, "--rule-only"))


def test_repeats_as_files_and_folders_and_spellings(tmp_path: Path) -> None:
    """One repeat a file, `time_us`, CRLF, a BOM, 128.0 for 128."""
    for run in (1, 2, 3):
        results(tmp_path / "g" / f"{run}.csv", 1 + run / 1000, runs=1)
        tot = results(tmp_path / "t" / f"{run}.csv", 1.1 + run / 1000, runs=1)
        text = tot.read_text().replace(",us,", ",time_us,").replace(",128,", ",128.0,").replace("\n", "\r\n")
        tot.write_text("\ufeff" + text, newline="")
    (tmp_path / "t" / "compare.csv").write_text("kernel,M,golden_us,tot_us,verdict\n")
    assert set(verdicts(tmp_path / "g", tmp_path / "t").values()) == {"regression"}
    files = [("--golden" if s == "g" else "--tot", tmp_path / s / f"{n}.csv") for s in "gt" for n in (1, 2, 3)]
    assert set(verdicts(*(x for f in files for x in f)).values()) == {"regression"}


@pytest.mark.parametrize(
    ("file", "header", "row", "kernel"),
    [
        ("profile.csv", "gfx,cu_num,M,N,K,kernelId,us,kernelName", "gfx950,256,64,512,128,1,{us},k", "k"),
        ("bench_runs.csv", "M,N,K,backend,us,run,status,op", "64,512,128,triton,{us},{run},unstable,mm", "triton + mm"),
    ],
)
def test_the_profiles_and_the_benches_of_runs(tmp_path: Path, file: str, header: str, row: str, kernel: str) -> None:
    for side, us in (("a", 50), ("b", 60)):
        (tmp_path / side).mkdir()
        (tmp_path / side / "run.yaml").write_text("")
        rows = [row.format(us=us + run / 100, run=run) for run in (1, 2, 3)] + [row.format(us=-1, run=4)]
        (tmp_path / side / file).write_text("\n".join([header, *rows]) + "\n")
    found = document("a", "b", "--runs", tmp_path)
    assert [(r["key"]["kernel"], r["verdict"]) for r in found["rows"]] == [(kernel, "regression")]
    assert any("left out 1 row without a time" in w for w in found["warnings"])


def record(csv_file: Path, **fields: object) -> None:
    record = {"format": 1, "gpu": "MI355X", "triton_version": "3.4.0", "order": "interleaved", **fields}
    csv_file.with_suffix(".env.json").write_text(json.dumps(record))


def test_environments_are_shown_and_compared(golden: Path, tmp_path: Path) -> None:
    tot = results(tmp_path / "tot.csv")
    record(golden, env="golden", aiter_commit="226c", switches={"ASYNC": "0"}, timer="events")
    record(tot, env="tot", aiter_commit="1a7f", switches={"ASYNC": "1"}, timer="rocprof", triton_version="3.7.0")
    found = document(golden, tot)
    assert {d["field"]: d["kind"] for d in found["environment"]["differences"]} == {
        "timer": "method", "aiter_commit": "other", "switches.ASYNC": "other", "triton_version": "test", "env": "name",
    }  # fmt: skip
    assert any("not measured in the same way (timer: events and rocprof)" in w for w in found["warnings"])
    assert "aiter_commit, switches.ASYNC differ too, and may cause a change" in compare(golden, tot).out
    assert (
        "differ too" not in compare(golden, tot, "--under-test", "aiter_commit", "--under-test", "switches.ASYNC").out
    )
    record(tot, gpu="MI300X")
    compare(golden, tot).failed_with(2, "different machines (gpu: MI355X and MI300X)")
    code, _, err = compare(golden, tot, "--other-gpu")
    assert (code, "different machines" in err) == (0, True)


def test_rows_for_a_second_look(golden: Path, tmp_path: Path) -> None:
    """A row that chance may explain, one that went missing, one whose repeats disagree: each ends with 4."""
    tot = results(tmp_path / "tot.csv", slower={256: 1.017})
    code, out, _ = compare(golden, tot, "--again", tmp_path / "again.csv")
    assert code == 4
    for words in ("boundary", "1 row could not be judged.", "--repeats 7", "--bound 0.002"):
        assert words in out
    assert (tmp_path / "again.csv").read_text() == "kernel,B,M,N,K\nbatched_gemm_bf16,16,256,512,128\n"
    record(golden, env="golden (/opt/golden/bin/python)", order="one")
    record(tot, env="tot (/opt/tot/bin/python)", order="one")
    assert "--env golden=/opt/golden/bin/python --env tot=/opt/tot/bin/python" in compare(golden, tot).out
    lines = golden.read_text().splitlines()
    for text in ([x for x in lines if ",64,512" not in x], [x.replace(",100.0500,", ",140.0000,") for x in lines]):
        tot.write_text("\n".join(text) + "\n")
        code, out, _ = compare(golden, tot)
        assert (code, "1 row could not be judged." in out, str(tot) in out) == (4, True, True)
    assert compare(golden, tot, "--markdown", "-").out.startswith("### Not all could be judged")


@pytest.mark.parametrize(
    ("header", "rows", "apart", "option"),
    [
        ("kernel,M,N,K,us,run,Bandwidth (GB/s)", ("k,1,8,16,15.{},{},10{}", "k,1,8,16,17.{},{},9{}"),
         "'Bandwidth (GB/s)'", "Bandwidth (GB/s)"),
        ("kernelName,M,N,K,us,run", ("_gemm_BLOCK_16,1,8,16,15.{},{}", "_gemm_BLOCK_32,1,8,16,17.{},{}"),
         "'kernel'", "kernel"),
    ],
)  # fmt: skip
def test_a_column_that_keeps_the_sides_apart_is_named(
    header: str, rows: tuple[str, str], apart: str, option: str, tmp_path: Path
) -> None:
    for name, row in zip(("golden.csv", "tot.csv"), rows, strict=True):
        lines = [row.format(repeat, repeat, repeat) for repeat in range(3)]
        (tmp_path / name).write_text("\n".join([header, *lines]) + "\n")
    sides = (tmp_path / "golden.csv", tmp_path / "tot.csv")
    compare(*sides).failed_with(2, "no kernel and shape in common: column ", apart, " keeps their rows apart")
    compare(*sides, "--ignore-column", option).failed_with(1)


STATS = '"Name","Calls","TotalDurationNs","AverageNs","Percentage","MinNs","MaxNs","StdDev"'
TRACE = '"Kind","Dispatch_Id","Kernel_Name","Start_Timestamp","End_Timestamp","Grid_Size_X","Grid_Size_Y","Grid_Size_Z"'


def test_the_files_of_rocprofv3_are_read(tmp_path: Path) -> None:
    sides = [tmp_path / name for name in ("golden_kernel_stats.csv", "tot_kernel_stats.csv")]
    for path, ns in zip(sides, (5673, 7891), strict=True):
        path.write_text(f'{STATS}\n"_gemm.kd",84,476600,{ns},65.22,5400,6100,102.1\n')
    code, out, _ = compare(*sides)
    assert (code, "No row has repeats" in out) == (4, True)
    assert "rocprofv3 --kernel-trace" in out
    assert "gemmfleet bench" not in out, "a profile names no shapes that could be measured again"
    (row,) = document(*sides, "--rule-only")["rows"]
    assert (row["key"], row["golden_us"], row["verdict"]) == ({"kernel": "_gemm.kd"}, 5.673, "regression")

    sides = [tmp_path / name for name in ("golden_kernel_trace.csv", "tot_kernel_trace.csv")]
    for path, ns in zip(sides, (8000, 9000), strict=True):
        times = [ns * 10, *(ns + i % 7 for i in range(120))]  # the first one warms up
        lines = [f'"KERNEL_DISPATCH",{i},"_gemm.kd",{i * 10**6},{i * 10**6 + t},256,1,1' for i, t in enumerate(times)]
        path.write_text("\n".join([TRACE, '"MEMORY_COPY",0,"x",1,2,0,0,0', *lines]) + "\n")
    (row,) = document(*sides)["rows"]
    assert row["key"] == {"kernel": "_gemm.kd", "Grid_Size_X": "256", "Grid_Size_Y": "1", "Grid_Size_Z": "1"}
    assert (row["verdict"], row["golden_repeats"]) == ("regression", "100/100")
    assert row["golden_us"] == pytest.approx(8.0, rel=0.001)


# fmt: off
BAD = [
    ("\n\n", r"bad\.csv:1: is empty"),
    ("M,N,K\n1,2,3\n", r"bad\.csv:1: has no column us or time_us"),
    ("kernel,M,M,us\nk,1,1,4\n", r"bad\.csv:1: column 'M' is there 2 times"),
    (HEADER + "\nk,1,2,3,4,5.0,1\nk,1,2,3", r"bad\.csv:3: has 4 cells, the header 7; was the file cut short"),
    (HEADER + "\nk,1,2,3,4,fast,1\n", r"bad\.csv:2:us: 'fast' is not a time"),
    (HEADER + "\nk,1,2,3,4,5,1\nk,1,2,3,4,6,1\n", r"bad\.csv:3: this run of its kernel and shape is in line 2"),
    (HEADER + "\nk\xff,1,2,3,4,5,1\n", r"bad\.csv:2: holds bytes that are not UTF-8"),
    (STATS + '\n"k",84,476600,fast,1,2,3,4\n', r"bad\.csv:2: is not a row of rocprofv3: .*'fast'"),
    (STATS + '\n"k",84\n', r"bad\.csv:2: has 2 cells, the header 8"),
    (HEADER + ",colour\nk,1,2,3,4,5,1,red\n", r"bad\.csv:1: the columns of its shape differ .* by 'colour'"),
    ("kernel,M,us\n" + "k,1,5\n" * 101, r"bad\.csv:102: more than 100 repeats"),
    ("gfx," + HEADER + "\ngfx950,k,1,2,3,4,5,1\ngfx942,k,1,2,3,4,5,2\n", r"bad\.csv: holds rows of several chips"),
]
# fmt: on


@pytest.mark.parametrize(("text", "message"), BAD, ids=range(len(BAD)))
def test_bad_files_are_named_with_their_line_and_nothing_is_written(
    golden: Path, tmp_path: Path, text: str, message: str
) -> None:
    bad, out = tmp_path / "bad.csv", tmp_path / "out.csv"
    bad.write_bytes(text.encode("latin-1"))
    out.write_text("mine")
    assert re.search(message, compare(golden, bad, "--out", out).failed_with(2).err)
    assert out.read_text() == "mine"


def test_what_is_typed_wrong(golden: Path, tmp_path: Path) -> None:
    tot = results(tmp_path / "tot.csv")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "none").mkdir()
    for args, message in (
        ((golden,), "two sides"), ((golden, tot, "--tot", tot), "either as"), (("--golden", golden), "two sides"),
        ((golden, tmp_path / "nope.csv"), "no such file"), ((golden, tmp_path / "pipe"), "not a regular file"),
        ((golden, tmp_path / "none"), "holds no CSV of timings"), ((golden, tot, "--out", golden), "one of the inputs"),
        ((golden, tot, "--out", tmp_path / "x" / "y.csv"), "cannot be written"),
        ((golden, tot, "--out", "z.csv", "--again", "z.csv"), "named twice"),
        ((golden, tot, "--bound", "0"), "--bound"), ((golden, tot, "--json", "--markdown", "-"), "both want"),
        ((golden, "no-such-run", "--runs", tmp_path), "there is no run"),
        *(((golden, tot, "--rule", bad), "--rule") for bad in ("1.005", "a,b", "0.5,1", "nan,1", "1,-1")),
    ):  # fmt: skip
        compare(*args).failed_with(2, message)


DEFAULT = "gemm/gfx950-BATCHED_GEMM-A16WFP4.json"
OLD = ((64, 512, 128, 20.0), (128, 512, 128, 40.0), (64, 128, 512, 30.0), (1, 512, 128, 2.0), (16, 512, 128, 12.0))


def config_side(folder: Path, name: str, rows: dict[int, float], **more: Any) -> Path:
    """A noisy side as a bench of config sets writes it: OLD, but for the times and values of `rows` by number."""
    lines = ["kernel,B,M,N,K,us,run,aiter_config"]
    for i, (m, n, k, us) in enumerate(OLD):
        config = f"{DEFAULT} M_LEQ_{m} {'64x128x256_g1' if i in rows else '16x64x128_g1'}"
        key = f"aiter-bmm-a16wfp4/batched_gemm_a16wfp4,16,{m},{n},{k}"
        lines += [f"{key},{rows.get(i, us) * (1 + 0.02 * (run * 5 % 3)):.4f},{run},{config}" for run in (1, 2, 3)]
    path = folder / f"{name}.csv"
    path.write_text("\n".join(lines) + "\n")
    usual = {"env": name, "order": "interleaved", "session": "r1", "configs": f"/sets/{name} (2 files, sha256 1)"}
    (folder / f"{name}.env.json").write_text(json.dumps(usual | more))
    return path


def test_a_config_file_that_cannot_be_judged_is_measured_again_with_the_same_sets(tmp_path: Path) -> None:
    switches = {"under_test": "switches.X", "switches": {"X": "1"}}
    golden = config_side(tmp_path, "golden", {}, configs="/my sets/a (2 files, sha256 1)", **switches)
    tot = config_side(tmp_path, "tot", {0: 20.8}, configs="the tree's own", **switches)
    code, out, _ = compare(golden, tot)
    words = " ".join(out.split())
    assert (code, f"open: {DEFAULT} (default file, 1 row changed, 0 slower, 0 faster)" in words) == (4, True)
    assert "--env stack=,X=1 --config-set 'golden=/my sets/a' --config-set tot= --repeats 7" in words


def table(*rows: list[float]) -> Floats:
    width = max(map(len, rows))
    return np.array([[*r, *[np.nan] * (width - len(r))] for r in rows])


@pytest.mark.parametrize(
    ("of", "tables"), [(Simulated(61), 500), (Simulated(61, paired=True), 500), (Simulated(12, noisy=0.1), 1500)]
)
def test_unchanged_tables_do_not_end_with_1(of: Simulated, tables: int) -> None:
    """Held at 1 %; the seeds are fixed, and the benchmark measures the rates on more tables, and what is found."""
    assert rates(of, tables, seed=of.rows).accused <= 0.01


def test_verdicts_one_by_one() -> None:
    quiet = [100.0, 100.1, 100.2]
    golden = table(quiet, quiet, quiet, quiet, [3.0, 3.0, 3.01], quiet[:2], [], quiet, [10.0, 10.01, 10.02])
    tot = table([110, 110.1, 110.2], [100, 100.1, 100.3], [90, 90.1, 90.2], [101.2, 101.3, 101.4], [9, 9.1, 9.2],
                [120, 120, 120], quiet, [], [10.3, 10.31, 10.32])  # fmt: skip
    j, _ = judge(golden, tot)
    assert j["verdict"].tolist() == [
        "regression", "ok", "improved", "boundary", "ignored", "regression", "new", "missing", "ok",
    ]  # fmt: skip
    assert j["seen_from"][0] < 0.1
    assert j["seen_from"][8] == pytest.approx(0.005 + 0.5 / 10.01)  # the rule alone: 0.5 % and 0.5 us of 10 us


def test_a_long_table_of_averages_is_judged_without_a_warning_of_numpy() -> None:
    averages = np.full((1000, 1), 100.0)
    rows, _ = judge(averages, 1.2 * averages)  # pytest makes a warning an error
    assert set(rows["verdict"]) == {"unstable"}
    assert np.isnan(rows["seen_from"]).all()


def sides(rows: int, shift: float, noise: float = 0.003, seed: int = 1) -> tuple[Floats, Floats]:
    rng = np.random.default_rng(seed)
    base = rng.uniform(100, 1000, (rows, 1))
    golden, tot = (base * np.exp(s + noise * rng.standard_normal((rows, 3))) for s in (0, shift))
    return golden, tot


def test_drift_of_a_session_is_removed_and_a_slow_down_of_all_is_not() -> None:
    j, table = judge(*sides(60, 0.01))
    assert table["shift_removed"] == pytest.approx(0.01, abs=0.002)
    assert not (j["verdict"] == "regression").any()
    j, table = judge(*sides(60, 0.06))  # up to 2 % may be drift
    assert table["shift_removed"] == pytest.approx(np.expm1(0.02))
    assert table["table_slower"]
    assert (j["verdict"] == "regression").mean() > 0.5
    _, table = judge(*sides(60, 0.03, 0.002), paired=True)
    assert (table["shift_removed"], table["table_slower"]) == (0, True)
    j, table = judge(*sides(5, 0.01))
    assert (table["shift_removed"], table["table_slower"]) == (0, False)
    assert not (j["verdict"] == "regression").any()
