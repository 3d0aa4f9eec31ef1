"""The files that a run leaves behind."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from orchestrator import events as ev
from orchestrator.cli.ending import add_winners
from orchestrator.cli.printer import Page
from orchestrator.errors import InputError
from orchestrator.families import get_family
from orchestrator.paths import RunPaths, find_run, list_runs, new_run_id
from orchestrator.reasons import Reason
from orchestrator.report.measured import Measurements
from orchestrator.results.export import Request, export, provenance
from orchestrator.results.gain import gains, noise_note
from orchestrator.shapes.model import Shape
from orchestrator.tables.merge import merge
from orchestrator.tables.write import write_atomic
from tests.support.ledger_kit import A8W8, DEVICE, Run, ended, row, started
from tests.support.tables_kit import read_newcomers, winners
from worker.protocol import FIELDS, record


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Shapes 1 and 2 tuned, 3 failed, 4 pending; shape 1 also has a late row of another node."""
    with Run(tmp_path, groups=((1, 2), (3,), (4,))) as r:
        r.says(
            record("worker_started", 0.5, info={"pid": 7, "python": "3.11"}),
            record("tuner_ready", 0.6, tuner="replay", device=DEVICE, seconds=0.1),
        )
        r.send("g0001-1", node="n1")
        r.send("g0001-2", node="n2")
        r.tune("g0001-1", 1, 2)
        r.tune("g0001-2", 1, node="n2", us=3.0)
        r.says(ended("g0001-1"))
        r.send("g0002-1")
        r.says(
            started("g0002-1"),
            row("row", "g0002-1", 3, us=-1, errRatio=1.0, status="error", kernelName="", detail="=1+1"),
            ended("g0002-1", "fault", in_flight=3),
        )
        r.journal(ev.FailShape(3, Reason.FAULT, "-SIGABRT, twice", "g0002-1", confirmed=False))
        yield r


def write(run: Run, folder: Path) -> RunPaths:
    paths = RunPaths(folder)
    request = Request(
        run="r1", created=0.0, argv=("tune", "s.csv"), options={"env": {"TOKEN": "${env:TOKEN}"}},
        shapes="s.csv", shapes_sha256="ab", inventory="i.yaml", inventory_sha256="cd", code_sha="ef",
    )  # fmt: skip
    export(run.ledger, paths, provenance(run.ledger, request))
    return paths


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as f:
        return list(csv.DictReader(f))


def test_the_tuned_table_is_exactly_the_shapes_tuned_in_aiters_columns(run: Run, tmp_path: Path) -> None:
    paths = write(run, tmp_path)
    assert paths.tuned.read_text() == (
        "gfx,cu_num,M,N,K,libtype,kernelId,splitK,us,kernelName,tflops,bw,errRatio\n"
        "gfx950,256,1,64,128,ck,7,0,10.0,kernel_a,0.5,12.25,0.0\n"
        "gfx950,256,2,64,128,ck,7,0,10.0,kernel_a,0.5,12.25,0.0\n"
    )
    assert len(pd.read_csv(paths.tuned)) == 2


def test_the_profile_holds_every_candidate_and_who_measured_it(run: Run, tmp_path: Path) -> None:
    profile = rows(write(run, tmp_path).profile)
    assert len(profile) == 10
    assert [(r["M"], r["attempt"]) for r in profile if r["winner"] == "1"] == [("1", "g0001-1"), ("2", "g0001-1")]
    failed = profile[-1]
    assert (failed["us"], failed["status"], failed["kernelName"], failed["detail"]) == ("-1.0", "error", "", "'=1+1")
    assert {r["node"] for r in profile} == {"n1", "n2"}
    assert profile[0]["spread"] == "0.01"


def test_the_failures_say_why_and_where(run: Run, tmp_path: Path) -> None:
    assert rows(write(run, tmp_path).failed) == [
        {
            "M": "3", "N": "64", "K": "128", "reason": "fault", "detail": "'-SIGABRT, twice", "node": "n1",
            "attempts": "1",
        }
    ]  # fmt: skip


def test_the_provenance_says_where_it_all_comes_from(run: Run, tmp_path: Path) -> None:
    document = json.loads(write(run, tmp_path).provenance.read_text())
    assert document["argv"] == ["tune", "s.csv"]
    assert document["options"]["env"]["TOKEN"] == "${env:TOKEN}"
    assert (document["family"], document["tuner"], document["state"]) == ("a8w8_blockscale", "replay", "planned")
    assert document["created"] == "1970-01-01T00:00:00Z"
    assert document["measured_on"] == [{"gfx": "gfx950", "cu_num": 256, "node": "n1", "tuned": 2}]
    assert document["devices"][0]["device"] == DEVICE
    assert document["devices"][0]["worker"]["python"] == "3.11"
    counts = document["counts"]
    assert (counts["total"], counts["tuned"], counts["failed"], counts["pending"]) == (4, 2, 1, 1)
    assert document["failures"] == {"fault": 1}


def test_files_are_written_again_as_the_run_goes_on_and_none_is_left_half(run: Run, tmp_path: Path) -> None:
    paths = write(run, tmp_path)
    run.send("g0003-1")
    run.tune("g0003-1", 4)
    write(run, tmp_path)
    assert len(rows(paths.tuned)) == 3
    there = {p.name for p in tmp_path.iterdir() if not p.name.startswith("ledger.db")}
    assert there == {"tuned.csv", "profile.csv", "failed.csv", "provenance.json"}


def test_an_empty_run_leaves_headers(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        paths = write(run, tmp_path)
        assert [len(p.read_text().splitlines()) for p in (paths.tuned, paths.profile, paths.failed)] == [1, 1, 1]


def test_the_winners_go_into_a_tuned_db_and_come_back_from_the_csv(run: Run, tmp_path: Path) -> None:
    paths = write(run, tmp_path)
    db = tmp_path / "db.csv"
    assert merge(winners(run.ledger), db, A8W8, err_ratio=0.05).count("added") == 2
    assert not merge(read_newcomers(paths.tuned, A8W8), db, A8W8).changed
    from_profile = merge(read_newcomers(paths.profile, A8W8), tmp_path / "best.csv", A8W8, err_ratio=0.05)
    assert [(r.action, r.new_us) for r in from_profile.rows if r.action == "added"] == [("added", 3.0), ("added", 10.0)]
    assert from_profile.notes == ("left out 1 candidate of profiles without a valid time",)


def test_a16w16_columns_are_named_as_aiter_names_them(tmp_path: Path) -> None:
    family = get_family("a16w16")
    shape = Shape(1, (5, 64, 128, "False", "torch.bfloat16", "torch.bfloat16", "False", "False"))
    with Run(tmp_path, groups=((1,),), family=family, asked=[shape]) as run:
        run.send("g0001-1")
        run.tune("g0001-1", 1)
        (tuned,) = rows(write(run, tmp_path).tuned)
        assert tuple(tuned) == family.tuned_header
        assert (tuned["solidx"], tuned["err_ratio"], tuned["bias"]) == ("7", "0.0", "False")


def test_a_winner_alone_has_no_gain_to_show(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        run.send("g0002-1")
        run.says(started("g0002-1"), row("shape_tuned", "g0002-1", 3))
        assert gains(run.ledger, [3]) == {}


def test_a_winner_slower_than_the_median_candidate_when_measured_again_is_noisy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Run(tmp_path) as run:
        run.send("g0001-1")
        run.says(started("g0001-1"))
        for shape, again in ((1, 44.0), (2, 10.0)):
            run.says(
                row("row", "g0001-1", shape, us=10.0),
                row("row", "g0001-1", shape, us=12.0, kernelName="kernel_b"),
                row("shape_tuned", "g0001-1", shape, us=again),
            )
        times = gains(run.ledger, [1, 2])
        assert times == {1: pytest.approx(0.25), 2: pytest.approx(1.1)}
        winners_ = list(run.ledger.winners())
        add_winners(page := Page(), winners_, times)
        page.print()
        out = capsys.readouterr().out
        measured = Measurements(run.ledger.family)
        measured.update(run.ledger)
    assert {i: w.noisy for i, w in measured.winners.items()} == {1: True, 2: False}
    header, first, second, note = out.splitlines()
    assert header.split()[-3:] == ["vs", "median", "note"]
    assert first.split()[-2:] == ["0.25x", "noisy"]
    assert second.split()[-1] == "1.10x"
    assert note.startswith("! 1 winner is noisy, not to be trusted: measured again, slower than the median candidate")
    add_winners(page := Page(), winners_[1:], times)
    page.print()
    assert "note" not in capsys.readouterr().out
    many = noise_note([f"s{i}" for i in range(6)])
    assert many.startswith("6 winners are noisy")
    assert "(s0, s1, s2, s3 and 2 more); tune them again" in many


def test_a_file_is_whole_or_as_before(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("before")

    def fail(f: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_atomic(path, fail)
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
    assert path.read_text() == "before"


def test_runs_are_found_by_id_beginning_or_age(tmp_path: Path) -> None:
    assert list_runs(tmp_path / "none") == []
    with pytest.raises(InputError, match="there are no runs"):
        find_run(tmp_path, None)
    for i, name in enumerate(("b-1", "a-2", "a-3")):
        paths = RunPaths(tmp_path / name)
        for folder in paths.folders():
            folder.mkdir()
        paths.config.write_text("run: x\n")
        os.utime(paths.config, (i, i))
    (tmp_path / "no-run").mkdir()
    assert [r.run for r in list_runs(tmp_path)] == ["b-1", "a-2", "a-3"]
    assert find_run(tmp_path, None).run == "a-3"
    assert find_run(tmp_path, "b").run == "b-1"
    assert find_run(tmp_path, "a-2").run == "a-2"
    with pytest.raises(InputError, match="could be any of a-2, a-3"):
        find_run(tmp_path, "a-")
    for wrong in ("zzz", "../a-2", "*", ""):
        with pytest.raises(InputError, match="there is no run"):
            find_run(tmp_path, wrong)


def test_run_ids_differ_within_a_second_and_are_plain_names() -> None:
    ids = {new_run_id(1_700_000_000.0) for _ in range(20)}
    assert len(ids) > 1
    assert all(i.startswith("2023") and RunPaths(Path("runs") / i).run == i for i in ids)


def test_the_page_of_files_holds_the_fields() -> None:
    text = Path("docs/reference/files.md").read_text()
    for field in FIELDS:
        assert not field.shown or f"| `{field.name}` | {field.meaning} |\n" in text
