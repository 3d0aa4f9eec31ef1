"""`gemmfleet compare`: what it reads, says and writes, and what it refuses."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.errors import InputError
from orchestrator.families import get_family
from orchestrator.results.comparison import FORMAT, read_record

HEADER = "kernel,B,M,N,K,us,run"
SHAPES = [(16, m, 512, 128) for m in (16, 64, 128, 256)]


def results(path: Path, scale: float = 1.0, *, slower: dict[int, float] | None = None, runs: int = 3,
            header: str = HEADER) -> Path:  # fmt: skip
    """Four shapes of one kernel at 100, 200, 300 and 400 us; `slower` multiplies those of some M."""
    lines = [header]
    for run in range(1, runs + 1):
        for i, (b, m, n, k) in enumerate(SHAPES, 1):
            us = 100 * i * scale * (slower or {}).get(m, 1.0) * (1 + 0.0005 * run)
            lines.append(f"batched_gemm_bf16,{b},{m},{n},{k},{us:.4f},{run}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def compare(*args: object) -> tuple[int, str, str]:
    """(exit code, stdout, stderr); a user's fault raises."""
    result = CliRunner().invoke(app, ["compare", *map(str, args)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def document(*args: object) -> dict[str, Any]:
    found = json.loads(compare(*args, "--json")[1])
    assert isinstance(found, dict)
    return found


def verdicts(*args: object) -> dict[str, str]:
    """M to verdict."""
    return {r["key"]["M"]: r["verdict"] for r in document(*args)["rows"]}


def test_a_regression_ends_with_1_and_the_worst_comes_first(tmp_path: Path) -> None:
    golden = results(tmp_path / "golden.csv")
    tot = results(tmp_path / "tot.csv", slower={64: 1.1, 256: 1.2, 16: 0.8})
    code, out, err = compare(golden, tot, "--out", tmp_path / "joined.csv", "--markdown", tmp_path / "pr.md")
    assert code == 1
    assert out.index("+20.0 %") < out.index("+10.0 %") < out.index("-20.0 %")
    assert "4 rows: 2 regression, 1 improved, 1 ok." in out
    assert "Unpaired" in out
    assert "written:" in err
    with (tmp_path / "joined.csv").open() as f:
        rows = list(csv.DictReader(f))
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
    assert first["golden_us"] == pytest.approx(400.4)
    assert 0 < first["p"] < found["threshold"]
    assert compare(golden, golden)[0] == 0


def test_new_missing_ignored_and_unstable(tmp_path: Path) -> None:
    golden, tot = results(tmp_path / "a.csv"), results(tmp_path / "b.csv")
    lines = golden.read_text().splitlines()
    golden.write_text("\n".join(x for x in lines if ",64,512" not in x) + "\n")
    tot.write_text("\n".join(x for x in lines if ",128,512" not in x and not x.endswith(",3")) + "\n")
    assert verdicts(golden, tot) == {"16": "unstable", "64": "new", "128": "missing", "256": "unstable"}
    a, b = results(tmp_path / "c.csv", 0.03), results(tmp_path / "d.csv", 0.06)
    assert verdicts(a, b)["16"] == "ignored"
    assert verdicts(a, b, "--ignore-below", "1")["16"] == "regression"


def test_other_numbers_in_the_rule(tmp_path: Path) -> None:
    golden, tot = results(tmp_path / "a.csv"), results(tmp_path / "b.csv", 1.08)
    assert set(verdicts(golden, tot, "--rule", "1.1,0").values()) == {"ok"}
    for bad in ("1.005", "a,b", "0.5,1", "nan,1", "1,-1"):
        with pytest.raises(InputError, match="--rule"):
            compare(golden, tot, "--rule", bad)


def test_the_rule_alone_judges_what_has_no_repeats(tmp_path: Path) -> None:
    golden = results(tmp_path / "golden.csv", runs=1)
    tot = results(tmp_path / "tot.csv", slower={64: 1.02, 256: 0.98}, runs=1)
    assert set(verdicts(golden, tot).values()) == {"unstable"}
    assert verdicts(golden, tot, "--rule-only") == {"16": "ok", "64": "regression", "128": "ok", "256": "improved"}
    code, out, _ = compare(golden, tot, "--rule-only")
    assert code == 1
    assert "Judged by the rule alone" in out
    assert not any(words in out for words in ("by chance", "drift", "seen from"))
    found = document(golden, tot, "--rule-only")
    assert not {"threshold", "table_shift", "expected_false_regressions"} & set(found)
    assert not {"p", "seen_from"} & set(found["rows"][0])


def test_repeats_as_files_and_folders_and_spellings(tmp_path: Path) -> None:
    """One repeat a file, `time_us`, another order of columns, CRLF, a BOM, 128.0 for 128."""
    for run in (1, 2, 3):
        results(tmp_path / "g" / f"{run}.csv", 1 + run / 1000, runs=1)
        text = results(tmp_path / "t" / f"{run}.csv", 1.1 + run / 1000, runs=1).read_text()
        rows = [line.split(",") for line in text.splitlines()]
        rows[0][5] = "time_us"
        swapped = [[r[2] if i else "M", r[5], r[0], r[1], r[3], r[4] + (".0" if i else "")] for i, r in enumerate(rows)]
        (tmp_path / "t" / f"{run}.csv").write_bytes(("\ufeff" + "\r\n".join(map(",".join, swapped)) + "\r\n").encode())
    (tmp_path / "t" / "compare.csv").write_text("kernel,M,golden_us,tot_us,verdict\n")
    assert set(verdicts(tmp_path / "g", tmp_path / "t").values()) == {"regression"}
    files = [("--golden" if s == "g" else "--tot", tmp_path / s / f"{n}.csv") for s in "gt" for n in (1, 2, 3)]
    assert set(verdicts(*(x for f in files for x in f)).values()) == {"regression"}


def test_the_profile_of_a_run(tmp_path: Path) -> None:
    of = get_family("a4w4_blockscale")
    for side, us in (("a", 50), ("b", 60)):
        run = tmp_path / f"run-{side}"
        run.mkdir()
        (run / "run.yaml").write_text("")
        cells = {"gfx": "gfx950", "cu_num": 256, "M": 64, "N": 512, "K": 128, "us": us, "kernelName": "k"}
        row, dead = (",".join(str(c.get(n, 0)) for n in of.tuned_header) for c in (cells, {**cells, "us": -1}))
        (run / "profile.csv").write_text("\n".join([",".join(of.tuned_header), row, dead, row, row]) + "\n")
    found = document("run-a", "run-b", "--runs", tmp_path)
    assert [(r["key"]["kernel"], r["verdict"]) for r in found["rows"]] == [("k", "regression")]
    assert any("left out 1 row without a time" in w for w in found["warnings"])
    assert found["environment"]["golden"]["gfx"] == "gfx950"


def test_two_benches_are_compared_run_by_run(tmp_path: Path) -> None:
    for side, scale in (("a", 1.0), ("b", 1.2)):
        run = tmp_path / "runs" / f"run-{side}"
        run.mkdir(parents=True)
        (run / "run.yaml").write_text("")
        lines = ["M,N,K,backend,us,tflops,node,run,env,status,op,kernelName,errRatio,timer,slot,detail"]
        lines += [
            f"64,512,128,aiter-triton,{scale * 50 + r / 100},1,n,{r},,unstable,mm,triton_{side},0,events,0,"
            for r in (1, 2, 3)
        ]
        lines += ["64,512,128,aiter,0.0000,0,n,0,,unavailable,,,,events,0,no aiter"]
        (run / "bench_runs.csv").write_text("\n".join(lines) + "\n")
        (run / "bench.csv").write_text("M,N,K,aiter-triton_us,aiter-triton_spread\n64,512,128,5,0.1\n")
    found = document("run-a", "run-b", "--runs", tmp_path / "runs")
    assert [(r["key"]["kernel"], r["verdict"]) for r in found["rows"]] == [("aiter-triton + mm", "regression")]


def record(csv_file: Path, **fields: object) -> None:
    record = {"format": FORMAT, "gpu": "MI355X", "triton_version": "3.4.0", "order": "interleaved", **fields}
    csv_file.with_suffix(".env.json").write_text(json.dumps(record))


def test_environments_are_shown_and_compared(tmp_path: Path) -> None:
    golden, tot = results(tmp_path / "a.csv"), results(tmp_path / "b.csv")
    record(golden, env="golden", aiter_commit="226c", switches={"ASYNC": "0"}, timer="events")
    record(tot, env="tot", aiter_commit="1a7f", switches={"ASYNC": "1"}, timer="rocprof", triton_version="3.7.0")
    assert read_record(tmp_path / "a.env.json")["switches.ASYNC"] == "0"
    found = document(golden, tot)
    kinds = {d["field"]: d["kind"] for d in found["environment"]["differences"]}
    assert kinds == {"timer": "method", "aiter_commit": "other", "switches.ASYNC": "other", "triton_version": "test",
                     "env": "name"}  # fmt: skip
    assert any("not measured in the same way (timer: events and rocprof)" in w for w in found["warnings"])
    out = compare(golden, tot)[1]
    assert "aiter_commit, switches.ASYNC differ too: a change may come from there" in out
    assert "differ too" not in compare(golden, tot, "--under-test", "aiter_commit", "--under-test", "switches.ASYNC")[1]
    record(tot, gpu="MI300X")
    with pytest.raises(InputError, match=r"different machines \(gpu: MI355X and MI300X\)"):
        compare(golden, tot)
    code, _, err = compare(golden, tot, "--other-gpu")
    assert code == 0
    assert "different machines" in err


def test_in_turn_only_if_the_records_say_so(tmp_path: Path) -> None:
    golden, tot = results(tmp_path / "a.csv"), results(tmp_path / "b.csv")
    assert document(golden, tot)["paired"] is False
    record(golden, session="s1")
    for session, order, paired in (("s1", "interleaved", True), ("s2", "interleaved", False), ("s1", "one", False)):
        record(tot, session=session, order=order)
        assert document(golden, tot)["paired"] is paired


def test_rows_for_a_second_look(tmp_path: Path) -> None:
    golden, tot = results(tmp_path / "a.csv"), results(tmp_path / "b.csv", slower={256: 1.017})
    code, out, _ = compare(golden, tot, "--again", tmp_path / "again.csv")
    assert code == 4
    assert "boundary" in out
    assert "1 row could not be judged." in out
    assert "--repeats 7" in out
    record(golden, env="golden (/opt/golden/bin/python)", order="one")
    record(tot, env="tot (/opt/tot/bin/python)", order="one")
    assert "--env golden=/opt/golden/bin/python --env tot=/opt/tot/bin/python" in compare(golden, tot)[1]
    assert "--bound 0.002" in out
    assert (tmp_path / "again.csv").read_text() == "kernel,B,M,N,K\nbatched_gemm_bf16,16,256,512,128\n"


def test_a_table_of_means_is_not_judged(tmp_path: Path) -> None:
    golden, tot = results(tmp_path / "a.csv", runs=1), results(tmp_path / "b.csv", 10.0, runs=1)
    code, out, _ = compare(golden, tot)
    assert code == 4
    assert "No row has repeats" in out
    found = document(golden, tot)
    assert (found["counts"]["unstable"], found["averaged"], found["table_slower"]) == (4, True, False)


def test_what_cannot_be_judged_is_not_green(tmp_path: Path) -> None:
    """A row that went missing, one whose repeats disagree, one that chance may explain: each ends with 4."""
    golden = results(tmp_path / "a.csv")
    assert compare(golden, golden)[0] == 0
    lines = golden.read_text().splitlines()
    missing, noisy = tmp_path / "missing.csv", tmp_path / "noisy.csv"
    missing.write_text("\n".join(x for x in lines if ",64,512" not in x) + "\n")
    noisy.write_text("\n".join(x.replace(",100.0500,", ",140.0000,") for x in lines) + "\n")
    for tot in (missing, noisy):
        code, out, _ = compare(golden, tot)
        assert code == 4
        assert "1 row could not be judged." in out
        assert "--again again.csv" in out
        assert str(tot) in out
    assert compare(golden, noisy, "--markdown", "-")[1].startswith("### Not all could be judged")
    assert compare(golden, results(tmp_path / "b.csv", slower={64: 1.2}), "--json")[0] == 1


def test_a_key_is_never_cut(tmp_path: Path) -> None:
    long = "batched_gemm_a8w8_a_per_token_group_prequant_w_per_batched_tensor_quant_" + "x" * 300
    for side in "ab":
        rows = [f"{long},{m},{100 * m + r / 100}" for m in (1, 2) for r in range(3)]
        (tmp_path / f"{side}.csv").write_text("\n".join(["kernel,M,us", *rows]) + "\n")
    _, out, _ = compare(tmp_path / "a.csv", tmp_path / "b.csv")
    assert "".join(out.split()).count("x" * 30) >= 2
    assert out.count("x") >= 600
    _, page, _ = compare(tmp_path / "a.csv", tmp_path / "b.csv", "--markdown", "-")
    assert page.count("x" * 300) == 2


# fmt: off
BAD = [
    ("", r"bad\.csv: is empty"),
    ("\n\n", r"bad\.csv: is empty"),
    (HEADER + "\n", r"bad\.csv:1: no row follows"),
    ("M,N,K\n1,2,3\n", r"bad\.csv:1: has no column us or time_us"),
    ("M,N,K,us\n1,2,3,4\n", r"bad\.csv:1: has no column kernel"),
    ("kernel,us\nk,4\n", r"bad\.csv:1: has no column of a shape"),
    ("kernel,M,M,us\nk,1,1,4\n", r"bad\.csv:1: column 'M' is there 2 times"),
    ("kernel,M,,us\nk,1,1,4\n", r"bad\.csv:1: a column has no name"),
    (HEADER + "\nk,1,2,3,4,5.0,1\nk,1,2,3", r"bad\.csv:3: has 4 cells, the header 7; was the file cut short"),
    (HEADER + "\nk,1,2,3,4,nan,1\n", r"bad\.csv:2:us: 'nan' is no time"),
    (HEADER + "\nk,1,2,3,4,inf,1\n", r"bad\.csv:2:us: 'inf' is no time"),
    (HEADER + "\nk,1,2,3,4,-1,1\n", r"bad\.csv:2:us: '-1' is no time"),
    (HEADER + "\nk,1,2,3,4,fast,1\n", r"bad\.csv:2:us: 'fast' is no time"),
    (HEADER + "\nk,1,2,3,4,5,1\nk,1,2,3,4,6,1\n", r"bad\.csv:3: this run of its kernel and shape is in line 2"),
    (HEADER + "\n,1,2,3,4,5,1\n", r"bad\.csv:2: names no kernel"),
    (HEADER + "\nk,1,2,3,4,5,\0\n", r"bad\.csv:2: holds a NUL byte"),
    (HEADER + "\nk\xff,1,2,3,4,5,1\n", r"bad\.csv:2: holds bytes that are not UTF-8"),
    (HEADER + ",colour\nk,1,2,3,4,5,1,red\n", r"bad\.csv:1: the columns of its shape differ .* by 'colour'"),
    (HEADER.replace(",", ";") + "\nk;1;2;3;4;5;1\n", r"bad\.csv:1: has no column us"),
    (HEADER + "\n" + '"' * 3 + "k" * 200_000 + "\n", r"bad\.csv:\d+: is no CSV"),
    ("kernel,M,us\n" + "k,1,5\n" * 101, r"bad\.csv:102: more than 100 repeats"),
    ("gfx," + HEADER + "\ngfx950,k,1,2,3,4,5,1\ngfx942,k,1,2,3,4,5,2\n", r"bad\.csv: holds rows of several chips"),
]
# fmt: on


@pytest.mark.parametrize(("text", "message"), BAD, ids=range(len(BAD)))
def test_bad_files_are_named_with_their_line_and_nothing_is_written(tmp_path: Path, text: str, message: str) -> None:
    golden, bad, out = results(tmp_path / "a.csv"), tmp_path / "bad.csv", tmp_path / "out.csv"
    bad.write_bytes(text.encode("latin-1"))
    out.write_text("mine")
    with pytest.raises(InputError, match=message):
        compare(golden, bad, "--out", out)
    assert out.read_text() == "mine"


def test_a_foreign_column_can_be_left_out(tmp_path: Path) -> None:
    golden, tot = results(tmp_path / "a.csv"), tmp_path / "b.csv"
    lines = golden.read_text().splitlines()
    tot.write_text("\n".join([lines[0] + ",colour", *(f"{x},c{i}" for i, x in enumerate(lines[1:]))]) + "\n")
    assert set(verdicts(golden, tot, "--ignore-column", "colour").values()) == {"ok"}


BAD_RECORDS = [
    ("{", r"b\.env\.json:1: is no JSON"),
    ("[1]", "one JSON object"),
    ('{"format": 9}', "of format 1"),
    ("x" * 300_000, "larger than"),
]


@pytest.mark.parametrize(("text", "message"), BAD_RECORDS, ids=range(len(BAD_RECORDS)))
def test_bad_environment_records(tmp_path: Path, text: str, message: str) -> None:
    golden, tot = results(tmp_path / "a.csv"), results(tmp_path / "b.csv")
    tot.with_suffix(".env.json").write_text(text)
    with pytest.raises(InputError, match=message):
        compare(golden, tot)


def test_what_is_typed_wrong(tmp_path: Path) -> None:
    golden, tot = results(tmp_path / "a.csv"), results(tmp_path / "b.csv")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "none").mkdir()
    for args, message in (
        ((golden,), "two sides"), ((golden, tot, "--tot", tot), "either as"), ((), "two sides"),
        (("--golden", golden), "two sides"), ((golden, tmp_path / "nope.csv"), "no such file"),
        ((golden, tmp_path / "pipe"), "not a regular file"), ((golden, tmp_path / "none"), "holds no CSV of timings"),
        ((golden, tot, "--out", golden), "one of the inputs"),
        ((golden, tot, "--out", tmp_path / "x" / "y.csv"), "its folder is not there"),
        ((golden, tot, "--out", "z.csv", "--again", "z.csv"), "name the same file"),
        ((golden, tot, "--bound", "0"), "--bound"), ((golden, tot, "--json", "--markdown", "-"), "both want"),
        (("--golden", golden, "--golden", golden, "--tot", tot), "is given twice"),
        ((golden, "no-such-run", "--runs", tmp_path), "there is no run"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            compare(*args)


def test_text_of_files_reaches_no_terminal_or_page_raw(tmp_path: Path) -> None:
    nasty = "k\x1b[31m|<img src=x>@team"
    for side in "ab":
        rows = [f"{nasty},{m},{100 * m + r / 100 + (50 * m if side == 'b' else 0)}" for m in (1, 2) for r in range(3)]
        (tmp_path / f"{side}.csv").write_text("\n".join(["kernel,M,us", *rows]) + "\n")
        (tmp_path / f"{side}.env.json").write_text(json.dumps({"env": f"{side}\x1b]0;x\x07<b>"}))
    _, out, _ = compare(tmp_path / "a.csv", tmp_path / "b.csv")
    assert "\x1b" not in out
    _, page, _ = compare(tmp_path / "a.csv", tmp_path / "b.csv", "--markdown", "-")
    assert "\x1b" not in page
    assert "<img" not in page
    assert "@team" not in page
    assert "\\|&lt;img" in page
