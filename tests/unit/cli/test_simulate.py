"""`gemmfleet simulate` on a shape list and on a run: text, JSON, two settings side by side, mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.cli.output.simulation import WIDTH, bars
from orchestrator.errors import InputError
from tests.paths import ROOT
from tests.support.report_kit import simulated_run

NIGHT = str(ROOT / "examples" / "faults.yaml")


def simulate(*words: object) -> tuple[str, InputError | None]:
    """Standard output, and the error that main would print."""
    result = CliRunner().invoke(app, ["simulate", *map(str, words)])
    error = result.exception
    assert error is None or isinstance(error, InputError), error
    return result.stdout, error


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    path = tmp_path / "s.csv"
    path.write_text("M,N,K\n" + "".join(f"{m},{128 * n},4096\n" for n in range(1, 21) for m in (1, 16, 64, 256)))
    return path


def test_a_list_in_text(shapes: Path, tmp_path: Path) -> None:
    out, error = simulate(shapes, "--tuner", "aiter", "--nodes", 2, "--slots", 2, "--runs", tmp_path)
    assert error is None
    lines = out.splitlines()
    assert lines[0].startswith("s.csv (a16w16, tuner aiter; cost: a first guess for tuner aiter")
    assert "80 shapes in " in lines[0]
    assert "4 slots on 2 nodes" in lines[0]
    assert [line.split()[0] for line in lines[1:6]] == ["makespan", "lower", "idle", "repeated", "shapes"]
    assert lines[5].split()[1:] == ["80", "tuned,", "0", "failed"]
    chart = [line for line in lines if line.endswith("|")]
    assert [line[:9] for line in chart] == ["n1 slot 0", "n1 slot 1", "n2 slot 0", "n2 slot 1"]
    assert all(line.index("|") == 25 and len(line) == 25 + WIDTH + 2 for line in chart)


def test_json_has_every_number_and_the_time_line(shapes: Path, tmp_path: Path) -> None:
    words = (shapes, "--tuner", "aiter", "--nodes", 4, "--faults", NIGHT, "--seeds", 2, "--runs", tmp_path, "--json")
    found = json.loads(simulate(*words)[0])
    (setting,) = found["settings"]
    assert (setting["nodes"], len(setting["faults"]), found["took_s"]) == (4, 14, None)
    assert [r["seed"] for r in setting["runs"]] == [1, 2]
    first = setting["runs"][0]
    assert first["tuned"] + first["failed"] + first["pending"] == 80
    assert first["over_bound"] == pytest.approx(first["makespan_s"] / first["bound_s"])
    assert first["repeated"] > 0
    lanes = first["timeline"]["lanes"]
    assert len(lanes) == 32
    assert "timeline" not in setting["runs"][1]
    assert json.loads(simulate(*words)[0]) == found, "equal seeds, equal runs"


def test_two_settings_side_by_side(shapes: Path, tmp_path: Path) -> None:
    out, error = simulate(shapes, "--tuner", "aiter", "--nodes", 1, "--compare", "nodes=3 batch=2", "--runs", tmp_path)
    assert error is None
    assert "medians of 5 seeds" in out
    assert "8 on 1" in out
    assert "24 on 3" in out
    assert "B is faster with 5 of 5 seeds" in out
    words = ("--compare", "nodes=3 faults=none", "--faults", NIGHT, "--seeds", "1", "--json")
    pair = json.loads(simulate(shapes, *words, "--runs", tmp_path)[0])["settings"]
    assert [len(s["faults"]) for s in pair] == [14, 0]
    assert [s["nodes"] for s in pair] == [1, 3]


def test_a_run_is_replayed_and_without_a_node(tmp_path: Path) -> None:
    paths = simulated_run(tmp_path, 120)
    out, error = simulate(paths.run[:8], "--runs", tmp_path)
    assert error is None
    assert out.startswith(f"run {paths.run}: 120 shapes in 10 groups, 12 slots on 3 nodes, simulated\n")
    assert "(the run itself took " in out
    without = json.loads(simulate("--without", "n2", "--runs", tmp_path, "--json")[0])
    assert {lane[0] for lane in without["settings"][0]["runs"][0]["timeline"]["lanes"]} == {"n1", "n3"}
    assert without["took_s"] > 0


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (
            ("--nodes", "2", "--compare", "knodes=3"),
            "--compare knodes=3: is no setting; did you mean nodes? (write NAME=",
        ),
        (("--compare", "nodes=many"), "--compare nodes=many: many is no number, as in nodes=8"),
        (("--without", "n9"), "--without n9: there is no such node"),
        (("--faults", "none.yaml"), "none.yaml: no such file"),
        (("--tuner", "aitr"), "aitr"),
    ],
)
def test_a_mistake_is_one_clear_error(shapes: Path, tmp_path: Path, words: tuple[str, ...], fault: str) -> None:
    _, error = simulate(shapes, *words, "--runs", tmp_path)
    assert error is not None
    assert fault in str(error)
    assert error.exit_code == 2


def test_options_of_a_list_are_refused_for_a_run(tmp_path: Path) -> None:
    _, error = simulate("--family", "a8w8", "--runs", tmp_path)
    assert str(error) == "--family, --tuner and --gfx belong to a shape list: a run knows its own"
    _, error = simulate("--runs", tmp_path)
    assert "there are no runs" in str(error)


def segment(start: float, end: float | None, kind: str, tuned: int = 0) -> list[object]:
    return [start, end, kind, "g0001-1", "g0001", tuned, "", "", ""]


def test_bars_of_many_slots_are_taken_together() -> None:
    both = [segment(0.0, 50.0, "done", 3), segment(50.0, None, "fault")]
    found = bars([[f"n{i // 8}", str(i % 8), both] for i in range(400)], 100.0)
    assert len(found) == 40
    assert found[0][0] == "n0 slot 0 to n1 slot 1"
    assert {bar for _, bar in found} == {"#" * (WIDTH // 2) + "x" * (WIDTH // 2)}


def test_a_bar_is_idle_where_nothing_runs_and_in_vain_where_nothing_was_tuned() -> None:
    one, other = segment(0.0, 25.0, "done", 1), segment(0.0, 100.0, "fault", 3)
    lanes: list[list[object]] = [["n1", "0", [one]], ["n1", "1", [other]], ["n1", "2", []]]
    quarter = WIDTH // 4
    assert [bar for _, bar in bars(lanes, 100.0)] == [
        "#" * quarter + " " * 3 * quarter,
        "#" * 3 * quarter + "x" * quarter,
        " " * WIDTH,
    ]
