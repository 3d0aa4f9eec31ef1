"""The files that a run leaves behind."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator import events as ev
from orchestrator.cli.ending import add_winners
from orchestrator.cli.printer import page_as_markdown
from orchestrator.errors import InputError
from orchestrator.pages import Page
from orchestrator.paths import RunConfig, RunPaths, find_run, list_runs
from orchestrator.reasons import Reason
from orchestrator.results.export import candidate_rows, export, make_provenance, winner_rows
from orchestrator.results.run_facts import RunFacts
from orchestrator.results.run_results import RunResults
from orchestrator.tables.decision import Time, decide, spread_of_noisy
from orchestrator.tables.merge import merge
from orchestrator.tables.merge_input import open_sources
from orchestrator.tables.provenance import read_records
from tests.kits.results import A8W8, DEVICE, Run, ended, row, started
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
    paths, options = RunPaths(folder), {"env": {"TOKEN": "${env:TOKEN}"}}
    config = RunConfig("r1", 0.0, ["tune", "s.csv"], "", "", "", "", "", "", options=options)
    export(RunResults.read(run.ledger), paths, make_provenance(RunResults.read(run.ledger), config))
    return paths


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as f:
        return list(csv.DictReader(f))


def test_the_files_of_a_run(run: Run, tmp_path: Path) -> None:
    paths = write(run, tmp_path)
    assert paths.tuned.read_text() == (
        "gfx,cu_num,M,N,K,libtype,kernelId,splitK,us,kernelName,tflops,bw,errRatio\n"
        "gfx950,256,1,64,128,ck,7,0,10.0,kernel_a,0.5,12.25,0.0\n"
        "gfx950,256,2,64,128,ck,7,0,10.0,kernel_a,0.5,12.25,0.0\n"
    )
    profile = rows(paths.profile)
    assert len(profile) == 10
    assert [(r["M"], r["attempt"]) for r in profile if r["winner"] == "1"] == [("1", "g0001-1"), ("2", "g0001-1")]
    failed = {n: profile[-1][n] for n in ("us", "status", "kernelName", "detail")}
    assert failed == {"us": "-1.0", "status": "error", "kernelName": "", "detail": "'=1+1"}
    assert ({r["node"] for r in profile}, profile[0]["spread"]) == ({"n1", "n2"}, "0.01")
    why = {"reason": "fault", "detail": "'-SIGABRT, twice", "node": "n1", "attempts": "1"}
    assert rows(paths.failed) == [{"M": "3", "N": "64", "K": "128", **why}]
    document = json.loads(paths.provenance.read_text())
    assert document | {
        "argv": ["tune", "s.csv"], "options": {"env": {"TOKEN": "${env:TOKEN}"}}, "family": "a8w8_blockscale",
        "tuner": "replay", "state": "planned", "created": "1970-01-01T00:00:00Z", "failures": {"fault": 1},
        "measured_on": [{"gfx": "gfx950", "cu_num": 256, "node": "n1", "tuned": 2}],
    } == document  # fmt: skip
    assert (document["devices"][0]["device"], document["devices"][0]["worker"]["python"]) == (DEVICE, "3.11")
    assert [document["counts"][n] for n in ("total", "tuned", "failed", "pending")] == [4, 2, 1, 1]
    run.send("g0003-1")
    run.tune("g0003-1", 4)
    assert len(rows(write(run, tmp_path).tuned)) == 3
    there = {p.name for p in tmp_path.iterdir() if not p.name.startswith("ledger.db")}
    assert there == {"tuned.csv", "profile.csv", "failed.csv", "provenance.json"}


def test_a_merge_takes_the_same_from_the_ledger_as_from_the_files(run: Run, tmp_path: Path) -> None:
    paths, ours, theirs = write(run, tmp_path), tmp_path / "ledger.csv", tmp_path / "files.csv"
    results = RunResults.read(run.ledger)
    report = merge(winner_rows(results), ours, A8W8, profile=candidate_rows(results), facts=RunFacts(tmp_path, results))
    read = open_sources([tmp_path], [], None, None, RunFacts)
    assert report.rows == merge(read.newcomers(), theirs, A8W8, profile=read.beside(), facts=read.facts).rows
    assert (report.count("added"), ours.read_text()) == (2, paths.tuned.read_text())
    records = [[r.document for r in read_records(path).values()] for path in (ours, theirs)]
    assert records[0] == records[1]
    assert (records[0][0]["attempt"], records[0][0]["spread"], records[0][0]["tried"]) == ("g0001-1", 0.01, 2)


KEPT = '{"values": null}'


@pytest.mark.parametrize(
    ("first", "last", "config", "spread"),
    [
        ((10.0, 0.01), (10.9, 0.01), None, 0.0),  # a clock may do that
        ((10.0, 0.01), (44.0, 0.02), None, pytest.approx(1 - 1 / 1.02)),
        ((44.0, 0.01), (10.0, 0.01), None, pytest.approx(1 - 10 / 44.44)),  # the upper bound is of the first time
        ((10.0, 0.40), (14.0, 0.01), None, 0.0),  # the spread explains it
        ((10.0, 0.01), (44.0, 0.02), KEPT, 0.0),
        ((10.0, 0.01), (44.0, 0.02), "bench", 0.0),
        ((10.0, 0.01), (44.0, 0.02), "no JSON", pytest.approx(1 - 1 / 1.02)),
    ],
)
def test_a_winner_is_noisy_if_its_last_time_differs_from_its_first(
    tmp_path: Path, first: tuple[float, float], last: tuple[float, float], config: str | None, spread: float
) -> None:
    with Run(tmp_path, groups=((1,), (2,))) as run:
        run.send("g0001-1")
        more = {"run": 0} if config == "bench" else {"triton_config": config}
        before, after = ({"us": us, "spread": s, **more} for us, s in (first, last))
        events = run.says(
            started("g0001-1"),
            row("row", "g0001-1", 1, us=1.0, kernelName="other"),
            row("row", "g0001-1", 1, **before),
            row("shape_tuned", "g0001-1", 1, **after),
        )
        assert run.ledger.noise("g0001-1", 1) == spread
        (event,) = [e for e in events if isinstance(e, ev.ShapeTuned)]
        assert (event.noisy, event.complete) == (spread != 0.0, True)
        if event.noisy:
            run.journal(ev.SettleShape(1, "g0001-1", True, ""))
        results = RunResults.read(run.ledger)
        (shown,) = [r["spread"] for r in candidate_rows(results) if r["winner"]]
        assert [shown] == [r["spread"] for r in winner_rows(results)] == [spread if event.noisy else last[1]]
        add_winners(page := Page(), results.winners, {}, results.noisy)
    notes = ["noisy"] * event.noisy + ["keeps today's entry"] * (config == KEPT)
    assert re.findall("noisy|keeps today's entry", page_as_markdown(page)) == notes


@pytest.mark.parametrize(("old", "action"), [(None, "added"), (44.5, "replaced"), (44.4, "kept"), (11.0, "kept")])
def test_a_noisy_winner_is_merged_only_if_its_upper_bound_beats_the_table(old: float | None, action: str) -> None:
    first, last = Time(44.0, 0.01), Time(10.0, 0.01)
    noisy = Time(last.us, spread_of_noisy(first, last))
    found, *_ = decide(Time(old) if old else None, noisy, is_key=old is not None, rival=None, policy="noise")
    assert found == action


def test_runs_are_found_by_id_beginning_or_age(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there are no runs"):
        find_run(tmp_path, None)
    for i, name in enumerate(("b-1", "a-2", "a-3")):
        paths = RunPaths(tmp_path / name)
        paths.root.mkdir()
        paths.config.write_text("run: x\n")
        os.utime(paths.config, (i, i))
    counts = {"total": 2, "skipped": 2}  # the table had every shape
    (tmp_path / "b-1" / "provenance.json").write_text(json.dumps({"counts": counts}))
    assert find_run(tmp_path, None).run == "a-3"
    (tmp_path / "a-3" / "provenance.json").write_text(json.dumps({"counts": counts}))
    assert find_run(tmp_path, None).run == "a-2"
    (tmp_path / "a-2" / "provenance.json").write_text(json.dumps({"counts": counts}))
    assert find_run(tmp_path, None).run == "a-3", "all skipped all"
    for name in ("b-1", "a-2", "a-3"):
        (tmp_path / name / "provenance.json").unlink()
    (tmp_path / "no-run").mkdir()
    assert [r.run for r in list_runs(tmp_path)] == ["b-1", "a-2", "a-3"]
    assert [find_run(tmp_path, name).run for name in (None, "b", "a-2")] == ["a-3", "b-1", "a-2"]
    with pytest.raises(InputError, match="there are no runs with tuned rows"):
        find_run(tmp_path, None, tuned=True)
    for name, rows in (("b-1", "1,1\n"), ("a-2", "2,2\n"), ("a-3", "")):
        (tmp_path / name / "tuned.csv").write_text("M,us\n" + rows)
    assert find_run(tmp_path, None, tuned=True).run == "a-2"
    for wrong, says in (("a-", "could be any of a-2, a-3"), *((w, "there is no run") for w in ("../a-2", "*", ""))):
        with pytest.raises(InputError, match=says):
            find_run(tmp_path, wrong)


def test_the_page_of_files_holds_the_fields() -> None:
    text = Path("docs/reference/files.md").read_text()
    for field in FIELDS:
        assert not field.shown or f"| `{field.name}` | {field.meaning} |\n" in text
