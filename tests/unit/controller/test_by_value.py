"""A run by value with a replay: what comes first, where it stops, how it goes on, and what it won."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.errors import InputError
from orchestrator.events import Send, StopAsked, WorkAdded
from orchestrator.ledger.reader import LedgerReader, reconcile
from orchestrator.paths import RunConfig, RunPaths, list_runs

FAMILY = "a8w8_blockscale"
ROWS = [(m, n, 512, calls) for n in (512, 1024) for m, calls in ((1, 10_000), (16, 500), (256, 20), (4096, 1))]


def gemmfleet(*words: object) -> Any:
    return CliRunner().invoke(app, list(map(str, words)))


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    (tmp_path / "inv.yaml").write_text(
        f"defaults: {{family: {FAMILY}, tuner: replay, gfx: gfx950, cu_num: 256}}\n"
        f"nodes:\n  here: {{gpus: [0], workdir: {tmp_path / 'nodes'}}}\n"
    )
    lines = [f"{m},{n},{k},{calls},50" for m, n, k, calls in ROWS]
    (tmp_path / "shapes.csv").write_text("\n".join(["M,N,K,count,now_us", *lines]) + "\n")
    return tmp_path


def tune(fleet: Path, *words: object) -> Any:
    common = ["--by-value", "-i", fleet / "inv.yaml", "--runs", fleet / "runs"]
    replay = ["-O", "gfx=gfx950", "-O", "cu_num=256", "-O", "seconds_per_shape=0.2"]
    return gemmfleet("tune", fleet / "shapes.csv", *common, *replay, *words)


def the_run(fleet: Path) -> RunPaths:
    (found,) = list_runs(fleet / "runs")
    return found


def test_what_wins_most_is_tuned_first_and_the_rest_is_left_out_until_the_limit_is_raised(fleet: Path) -> None:
    done = tune(fleet, "--until-gain", "60%", "--json")
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["shapes"]["skipped"] >= 1
    assert document["value"]["share_of_expected"] >= 0.6
    assert document["value"]["guessed_us"] == 0
    paths = the_run(fleet)
    with LedgerReader.open_readonly(paths.ledger) as ledger:
        left = list(ledger.shapes("skipped"))
        assert {s.reason for s in left} == {"not_worth_it"}
        assert all("of the expected gain is won (--until-gain 0.6)" in (s.detail or "") for s in left)
        assert {s.key[0] for s in ledger.shapes("tuned")} >= {1}
        assert 4096 in {s.key[0] for s in left}
        records = [r for _, r in ledger.journal_records()]
        tier = {i: r.tier for r in records if isinstance(r, WorkAdded) for unit in r.units for i in unit}
        sent = [tier[r.shapes[0]] for r in records if isinstance(r, Send)]
        assert sent == sorted(sent), "the most valuable first"
        assert len(set(sent)) > 1
        assert [r.why != "" for r in records if isinstance(r, StopAsked)] == [True]
        assert reconcile(ledger) == []
    again = gemmfleet("resume", paths.root.name, "--runs", fleet / "runs")
    assert again.exit_code == 0
    with LedgerReader.open_readonly(paths.ledger) as ledger:
        assert [s.id for s in ledger.shapes("skipped")] == [s.id for s in left], "the limit is still reached"
    more = gemmfleet("resume", paths.root.name, "--runs", fleet / "runs", "--until-gain", "1")
    assert more.exit_code == 0, more.stderr
    assert RunConfig.read(paths.config).until_gain == 1.0
    assert "won " in more.stdout
    assert "of the workload's GEMM time" in more.stdout
    with LedgerReader.open_readonly(paths.ledger) as ledger:
        assert ledger.counts().tuned == len(ROWS)
        assert ledger.state == "finished"
        assert reconcile(ledger) == []


def test_gpu_hours_end_the_claims(fleet: Path) -> None:
    done = tune(fleet, "--gpu-hours", "0", "--json")
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["shapes"]["skipped"] == len(ROWS)
    (why,) = {s.detail for s in LedgerReader.open_readonly(the_run(fleet).ledger).shapes("skipped")}
    assert why == "0 of 0 GPU hours are used (--gpu-hours)"
    told = gemmfleet("explain", the_run(fleet).root.name, "4096x512x512", "--runs", fleet / "runs")
    assert "skipped (not_worth_it): 0 of 0 GPU hours are used" in told.stdout


def test_rows_of_the_db_are_the_time_now_and_those_that_stay_have_no_value(fleet: Path) -> None:
    db = fleet / "a8w8_blockscale_tuned_gemm.csv"
    rows = [
        f"gfx950,256,{m},{n},{k},ck,0,0,{us},kernel,1,1,0.0" for m, n, k, us in ((1, 512, 512, 90), (16, 512, 512, 2))
    ]
    header = "gfx,cu_num,M,N,K,libtype,kernelId,splitK,us,kernelName,tflops,bw,errRatio"
    db.write_text("\n".join([header, *rows]) + "\n")
    planned = tune(fleet, "--db", db, "--plan", "--json")
    assert planned.exit_code == 0, planned.exception
    work = json.loads(planned.stdout)["work"]
    assert sorted(i for w in work for unit in w["units"] for i in unit) == [3, 4, 5, 6, 7, 8]
    again = json.loads(tune(fleet, "--db", db, "--retune", "--plan", "--json").stdout)["work"]
    (first,) = (w for w in again if [1] in w["units"])
    assert first["tier"] == 0, "10,000 calls of 90 us"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--until-gain", "120%"), "'120%' is no share such as 95%"),
        (("--until-gain", "most"), "'most' is no share such as 95%"),
    ],
)
def test_limits_that_are_none_are_refused(fleet: Path, words: tuple[str, ...], says: str) -> None:
    result = tune(fleet, *words)
    assert isinstance(result.exception, InputError)
    assert says in str(result.exception)


def test_calls_and_the_order_by_value_are_needed(fleet: Path) -> None:
    no_calls = fleet / "bare.csv"
    no_calls.write_text("M,N,K\n1,512,512\n")
    result = gemmfleet("tune", no_calls, "--by-value", "-i", fleet / "inv.yaml", "--runs", fleet / "runs")
    assert "--by-value needs a column count" in str(result.exception)
    result = gemmfleet("tune", no_calls, "--gpu-hours", "1", "-i", fleet / "inv.yaml", "--runs", fleet / "runs")
    assert "belong to --by-value" in str(result.exception)
    assert not list_runs(fleet / "runs")


def test_the_gain_over_a_workload_with_its_spread(fleet: Path) -> None:
    assert tune(fleet).exit_code == 0
    run, workload = the_run(fleet).root, fleet / "calls.csv"
    workload.write_text("M,N,K,count\n1,512,512,1000\n3,512,512,10\n1,4096,512,7\n")
    found = gemmfleet("gain", run, "--workload", workload, "--json", "--seconds", "1")
    assert found.exit_code == 0, found.exception
    document = json.loads(found.stdout)
    rows = {r["shape"]: r for r in document["rows"]}
    with LedgerReader.open_readonly(run / "ledger.db") as ledger:
        after = {w.key[:2]: w.us for w in ledger.winners()}
    assert rows["1x512x512"]["after_us"] == after[1, 512]
    assert rows["3x512x512"]["after_us"] == after[16, 512], "AITER looks up the padded M"
    assert document["left_out"] == ["1x4096x512"]
    won = 1000 * (50 - after[1, 512]) + 10 * (50 - after[16, 512])
    assert document["won_us"] == pytest.approx(won)
    assert document["share"] == pytest.approx(won / (1010 * 50))
    assert document["end_to_end"] == pytest.approx(won / 1e6)
    assert document["sigma_us"] > 0
    shown = gemmfleet("gain", run, "--workload", workload).stdout
    assert "GEMM time of 2 shapes: 50.500 ms before" in shown
    assert "left out, without a time before: 1 shape: 1x4096x512" in shown


def test_times_before_come_from_a_table_where_one_is_named(fleet: Path) -> None:
    (fleet / "shapes.csv").write_text("M,N,K,count\n1,512,512,1\n")
    assert tune(fleet).exit_code == 0
    run = the_run(fleet).root
    nothing = gemmfleet("gain", run, "--workload", fleet / "shapes.csv")
    assert "name the table of then with --before" in str(nothing.exception)
    before = fleet / "a8w8_blockscale_tuned_gemm.csv"
    before.write_text(
        "gfx,cu_num,M,N,K,libtype,kernelId,splitK,us,kernelName,tflops,bw,errRatio\n"
        "gfx950,256,1,512,512,ck,0,0,77.0,kernel,1,1,0.0\ngfx942,304,1,512,512,ck,0,0,5.0,kernel,1,1,0.0\n"
    )
    found = gemmfleet("gain", run, "--workload", fleet / "shapes.csv", "--before", before, "--json")
    assert json.loads(found.stdout)["rows"][0]["before_us"] == 77.0
