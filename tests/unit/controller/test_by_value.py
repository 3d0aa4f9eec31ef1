"""A run by value with a replay: what comes first, where it stops, how it goes on, and what it won."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.events import Send, StopAsked, WorkAdded
from orchestrator.ledger.reader import reconcile
from orchestrator.paths import RunConfig, list_runs
from tests.kits.fleet import Bench, Done, records

HEADER = "gfx,cu_num,M,N,K,libtype,kernelId,splitK,us,kernelName,tflops,bw,errRatio"
ROWS = [(m, n, 512, calls) for n in (512, 1024) for m, calls in ((1, 10_000), (16, 500), (256, 20), (4096, 1))]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    bench.inventory.write_text(
        "defaults: {family: a8w8_blockscale, tuner: replay, gfx: gfx950, cu_num: 256}\n"
        f"nodes:\n  here: {{gpus: [0], workdir: {bench.workdir}}}\n"
    )
    lines = [f"{m},{n},{k},{calls},50\n" for m, n, k, calls in ROWS]
    bench.shapes_csv.write_text("M,N,K,count,now_us\n" + "".join(lines))
    yield bench
    bench.close()


def tune(bench: Bench, *words: object) -> Done:
    """Tune the shapes as if they were on an MI355X."""
    return bench.tune(seconds=0.2, more=["-O", "gfx=gfx950", "-O", "cu_num=256", *words])


def table(folder: Path, *rows: tuple[str, int, int, int, int, float]) -> Path:
    """A tuned table of (gfx, cu_num, M, N, K, us)."""
    path = folder / "a8w8_blockscale_tuned_gemm.csv"
    lines = [f"{gfx},{cu},{m},{n},{k},ck,0,0,{us},kernel,1,1,0.0\n" for gfx, cu, m, n, k, us in rows]
    path.write_text(f"{HEADER}\n{''.join(lines)}")
    return path


def test_what_wins_most_is_tuned_first_and_the_rest_is_left_out_until_the_limit_is_raised(bench: Bench) -> None:
    done = tune(bench, "--by-value", "--until-gain", "60%", "--json").ok()
    value = done.json()["value"]
    assert (value["share_of_expected"] >= 0.6, value["guessed_us"]) == (True, 0)
    with bench.ledger() as ledger:
        left = list(ledger.shapes("skipped"))
        assert {s.reason for s in left} == {"not_worth_it"}
        assert all("of the expected gain is won (--until-gain 0.6)" in (s.detail or "") for s in left)
        assert 1 in {s.key[0] for s in ledger.shapes("tuned")}
        assert 4096 in {s.key[0] for s in left}
        kept = [r for _, r in records(ledger)]
        tier = {i: r.tier for r in kept if isinstance(r, WorkAdded) for unit in r.units for i in unit}
        sent = [tier[r.shapes[0]] for r in kept if isinstance(r, Send)]
        assert sent == sorted(sent), "the most valuable first"
        assert len(set(sent)) > 1
        assert [r.why != "" for r in kept if isinstance(r, StopAsked)] == [True]
    bench.run("resume", bench.paths.run).ok()
    with bench.ledger() as ledger:
        assert [s.id for s in ledger.shapes("skipped")] == [s.id for s in left], "the limit is still reached"
    more = bench.run("resume", bench.paths.run, "--until-gain", "1").ok()
    assert RunConfig.read(bench.paths.config).until_gain == 1.0
    assert "of the workload's GEMM time" in more.out
    with bench.ledger() as ledger:
        assert (ledger.counts().tuned, ledger.state, reconcile(ledger)) == (len(ROWS), "finished", [])


def test_gpu_hours_end_the_claims(bench: Bench) -> None:
    done = tune(bench, "--by-value", "--gpu-hours", "0", "--json")
    assert (done.code, done.json()["shapes"]["skipped"]) == (0, len(ROWS))
    told = bench.run("explain", bench.paths.run, "4096x512x512")
    assert "skipped (not_worth_it): 0 of 0 GPU hours are used (--gpu-hours)" in told.out


def test_rows_of_the_db_are_the_time_now_and_those_that_stay_have_no_value(bench: Bench) -> None:
    db = table(bench.root, ("gfx950", 256, 1, 512, 512, 90), ("gfx950", 256, 16, 512, 512, 2))
    plan: Any = ["--by-value", "--db", db, "--plan", "--json"]
    work = tune(bench, *plan).json()["work"]
    assert sorted(i for w in work for unit in w["units"] for i in unit) == [3, 4, 5, 6, 7, 8]
    (first,) = (w for w in tune(bench, *plan, "--retune").json()["work"] if [1] in w["units"])
    assert first["tier"] == 0, "10,000 calls of 90 us"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--by-value --until-gain 120%", "--until-gain: '120%' is not a share such as 95%"),
        ("--by-value", "--by-value needs a column count"),
        ("--gpu-hours 1", "belong to --by-value"),
    ],
)
def test_mistakes_of_the_user(bench: Bench, words: str, says: str) -> None:
    bench.shapes_csv.write_text("M,N,K\n1,512,512\n")
    done = tune(bench, *words.split())
    assert (done.code, says in done.err) == (2, True), done.err
    assert not list_runs(bench.runs)


def test_the_gain_over_a_workload(bench: Bench) -> None:
    tune(bench).ok()
    gain: Any = ["gain", bench.paths.root, "--workload", bench.root / "calls.csv"]
    (bench.root / "calls.csv").write_text("M,N,K,count\n1,512,512,1000\n3,512,512,10\n1,4096,512,7\n")
    document = bench.run_plain(*gain, "--json", "--seconds", "1").json()
    with bench.ledger() as ledger:
        after = {w.key[:2]: w.us for w in ledger.winners()}
    # AITER looks up the padded M
    assert {r["shape"]: r["after_us"] for r in document["rows"]} == {
        "1x512x512": after[1, 512], "3x512x512": after[16, 512],
    }  # fmt: skip
    assert document["left_out"] == ["1x4096x512"]
    won = 1000 * (50 - after[1, 512]) + 10 * (50 - after[16, 512])
    assert document["won_us"] == pytest.approx(won)
    assert document["share"] == pytest.approx(won / (1010 * 50))
    assert document["end_to_end"] == pytest.approx(won / 1e6)
    assert document["sigma_us"] > 0
    assert "left out, without a time before: 1 shape: 1x4096x512" in bench.run_plain(*gain).out
    own = bench.run_plain("gain", bench.paths.root, "--json").json()
    assert {r["shape"]: r["calls"] for r in own["rows"]} == {f"{m}x{n}x{k}": calls for m, n, k, calls in ROWS}
    before = table(bench.root, ("gfx950", 256, 1, 512, 512, 77.0), ("gfx942", 304, 1, 512, 512, 5.0))
    assert bench.run_plain(*gain, "--before", before, "--json").json()["rows"][0]["before_us"] == 77.0
