"""`gemmfleet gain` of a run of an engine's tuner: both times are the run's own, and one step of a server runs one M."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.cli.app import app
from tests.support.engine_runs import engine_run
from tests.support.engines import H200
from tests.support.marks import WITH_ENGINE
from worker.triton_configs.engine_package import Layer

pytestmark = WITH_ENGINE
LINEAR = Layer("linear", 2112, 7168, dtype="fp8_w8a8", block=(128, 128))
MOE = Layer("moe", 256, 7168, 256, 8, "fp8_w8a8", (128, 128))


def gain(*words: object) -> str:
    done = CliRunner().invoke(app, ["gain", *map(str, words)])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_step_wins_at_most_what_the_calls_of_its_m_win(tmp_path: Path) -> None:
    times = {(64, ""): (20.0, 15.0), (96, ""): (20.0, 16.0), (512, ""): (30.0, None)}
    run = engine_run(tmp_path / "runs" / "r1", LINEAR, H200, times, {64: 61, 512: 61})
    document = json.loads(gain(run, "--seconds", "0.0123", "--json"))
    assert document["by_m"] == {
        "64": {"before_us": pytest.approx(61 * 20.0), "won_us": pytest.approx(61 * 5.0)},
        "512": {"before_us": pytest.approx(61 * 30.0), "won_us": 0.0},
    }
    text = gain(run, "--seconds", "0.0123")
    assert "2.48%" in text  # 61 times 5 us of 12.3 ms
    assert "add up to that of a step within 3 %" in text
    text = gain(run, "--seconds", "0.0013")
    assert "23.46%" in text
    assert "no share for M 512: the GEMMs of such a step take longer than 0.0013 s" in text
    step = tmp_path / "step.csv"
    step.write_text("M,N,K,count\n64,2112,7168,61\n65,2112,7168,1\n")
    text = gain(run, "--workload", step, "--seconds", "0.0123")
    assert "left out, without a time before: 1 shape: 65x2112x7168" in text
    assert "end to end at most that: 2.48% of 0.0123 s" in text
    other = tmp_path / "other.csv"
    other.write_text("M,N,K,count\n64,512,7168,61\n")
    for words, fault in (
        (("--before", "typo.csv"), "--before: leave it out, because the tuner vllm measured the times before"),
        (("--seconds", "0.001"), "--seconds 0.001: a step of 1 ms cannot hold these calls, which alone took"),
        (("--workload", step, "--seconds", "0.001"), "took 1.220 ms; give the seconds in which all of them ran"),
        (("--workload", other), "has a time before the run; give a list of layers and M that it measured"),
    ):
        done = CliRunner().invoke(app, ["gain", *map(str, (run, *words))])
        assert fault in str(done.exception)


def test_of_several_routings_the_mean_counts(tmp_path: Path) -> None:
    times = {(8, "uniform"): (40.0, 30.0), (8, "zipf1"): (50.0, 30.0)}
    run = engine_run(tmp_path / "runs" / "r1", MOE, H200, times)
    document = json.loads(gain(run, "--json"))
    assert [(row["before_us"], row["after_us"]) for row in document["rows"]] == [(45.0, 30.0)]
