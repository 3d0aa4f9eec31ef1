"""The main job through the real command line."""

from __future__ import annotations

import json
import re

from tests.integration.kit import Bench, read_csv
from tests.waiting import PATIENCE_S, wait_until


def test_every_shape_is_tuned_and_all_that_looks_at_a_run_says_so(bench: Bench) -> None:
    n = bench.shapes(groups=3, per_group=2)
    done = bench.tune()
    assert done.code == 0, done.out + done.err
    bench.check_books(tuned=n, failed={})
    header = bench.paths.tuned.read_text().splitlines()[0].split(",")
    assert header[:5] == ["gfx", "cu_num", "M", "N", "K"]
    assert header[-8:] == ["libtype", "solidx", "splitK", "us", "kernelName", "err_ratio", "tflops", "bw"]
    for words in (f"{n} shapes: {n} tuned", str(bench.paths.tuned), "no --db was given"):
        assert words in done.out
    provenance = json.loads(bench.paths.provenance.read_text())
    assert (provenance["counts"]["tuned"], bool(provenance["devices"])) == (n, True)
    rendered = {p.name for p in (bench.paths.nodes / "here").iterdir()}
    assert rendered == {"launch.sh", "tune.sh", "follow.sh", "node.json"}
    status = bench.run("status", "--json").json()
    assert (status["state"], status["eta_s"]) == ("finished", 0)
    assert status["shapes"] == {"total": n, "tuned": n, "skipped": 0, "failed": 0, "running": 0, "pending": 0}
    assert [(x["name"], x["slots"], x["tuned"], x["failed"]) for x in status["nodes"]] == [("here", 2, n, 0)]
    assert re.search(r"^here \[[01]\] .*attempt g0001 of g0001", bench.run("logs", "--lines", "0").out, re.M)
    assert "sent to here slot " in bench.run("explain", "g0001").out
    as_data = bench.run("explain", "g0001", "--json").json()
    assert {"sent", "begun", "settled", "done"} == {s["kind"] for s in as_data["stories"][0]["steps"]}
    listed = bench.run("runs list", "--json").json()
    assert [(r["run"], r["state"], r["shapes"]["tuned"]) for r in listed] == [(bench.paths.run, "finished", n)]
    folder = bench.folder()
    assert "would remove" in bench.run("runs prune", "--keep", "0").out
    assert folder.exists()
    assert "removed" in bench.run("runs prune", "--keep", "0", "--yes").out
    assert not folder.exists()
    assert bench.run("runs list", "--json").json() == []


def test_plan_touches_nothing(bench: Bench) -> None:
    bench.shapes(groups=4, per_group=3)
    before = sorted(p for p in bench.root.rglob("*"))
    done = bench.run("tune", *bench.tune_args(more=["--plan"]))
    assert done.code == 0
    assert "N=16" in done.out
    assert "no node was probed; nothing was started" in done.out
    plan = bench.run("tune", *bench.tune_args(more=["--plan", "--json"])).json()
    assert (plan["todo"], sum(len(w["units"]) for w in plan["work"])) == (12, 12)
    assert sorted(p for p in bench.root.rglob("*")) == before


def test_what_is_rendered_is_what_a_run_deploys(bench: Bench) -> None:
    bench.shapes(groups=2)
    to = bench.root / "scripts"
    done = bench.run("tune", *bench.tune_args(more=["--render", str(to)]))
    assert (done.code, bench.runs.exists(), bench.workdir.exists()) == (0, False, False), done.err
    assert f"written: {to}/here: follow.sh, launch.sh, node.json, tune.sh" in done.out
    rendered = {p.name: (p.read_text(), p.stat().st_mode) for p in (to / "here").iterdir()}
    (run,) = {json.loads(rendered["node.json"][0])["run"]}
    assert bench.tune().code == 0
    for folder in (bench.paths.nodes / "here", bench.folder()):
        there = {n: (folder / n).read_text().replace(bench.paths.run, run) for n in rendered}
        assert {n: (text, (folder / n).stat().st_mode) for n, text in there.items()} == rendered


def test_the_db_is_made_then_skipped_then_retuned(bench: Bench) -> None:
    n = bench.shapes(groups=3)
    db = bench.root / "db.csv"
    first = bench.tune(more=["--db", str(db)])
    assert first.code == 0
    assert len(read_csv(db)) == n
    bench.shapes(groups=4)
    second = bench.run("tune", *bench.tune_args(more=["--db", str(db), "--json"]))
    assert second.json()["shapes"] == {"total": 4, "tuned": 1, "skipped": 3, "failed": 0, "running": 0, "pending": 0}
    before = db.read_bytes()
    third = bench.tune(more=["--db", str(db)])
    assert third.code == 0
    assert "4 skipped" in third.out
    assert not bench.folder().exists(), "where all is skipped no node is started"
    assert "no worker ran on here" in bench.run("cancel").out
    fourth = bench.tune(more=["--db", str(db), "--retune"])
    assert "4 tuned" in fourth.out
    assert db.read_bytes() == before, "the same times do not beat themselves"


def test_detach_prints_the_run_and_goes_on(bench: Bench) -> None:
    n = bench.shapes(groups=4)
    done = bench.run("tune", *bench.tune_args([bench.held(2)], more=["--detach"]))
    assert done.code == 0
    assert done.out.strip() == bench.paths.run
    busy = bench.run("resume")
    assert busy.code == 2
    assert f"run {bench.paths.run} is driven by process" in busy.err
    watch = bench.start("status", "--watch")
    wait_until(lambda: list(bench.workdir.glob("**/node.json")), "the node is deployed")
    bench.release()
    watched, _ = watch.communicate(timeout=PATIENCE_S)
    assert f"{n}/{n} shapes tuned" in watched
    wait_until(lambda: bench.run("status", "--json").json()["state"] == "finished", "it ends")
    bench.check_books(tuned=n)
