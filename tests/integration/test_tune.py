"""The main job through the real command line."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess

from orchestrator.ledger.writer import Ledger
from tests.kits.fleet import Bench, read_csv
from tests.waiting import PATIENCE_S, wait_until


def test_every_shape_is_tuned_and_all_that_looks_at_a_run_says_so(bench: Bench) -> None:
    n = bench.shapes(groups=3, per_group=2)
    done = bench.tune().ok()
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
    log = bench.run("logs", "--lines", "0").out
    assert re.search(r"^here \[[01]\] .*attempt g0001 of g0001", log, re.M)
    for words in (" begun", r": winner \S+, \S+ us, (?:\S+ TFLOPS, )?after \d+\.\d s"):
        assert len(re.findall(rf"^here \[[01]\] \[worker \S+ shape \d+x\d+x\d+{words}$", log, re.M)) == n
    assert bench.run("logs", "--follow").out.splitlines()[-1] == f"run {bench.paths.run} is finished"
    assert "sent to here slot " in bench.run("explain", "g0001").out
    as_data = bench.run("explain", "g0001", "--json").json()
    assert {"sent", "begun", "settled", "done"} == {s["kind"] for s in as_data["stories"][0]["steps"]}
    listed = bench.run("runs list", "--json").json()
    assert [(r["run"], r["state"], r["shapes"]["tuned"]) for r in listed] == [(bench.paths.run, "finished", n)]
    folder = bench.folder()
    assert "would remove" in bench.run("runs prune", "--keep", "0").out
    assert folder.exists()
    assert "removed" in bench.run("runs prune", "--keep", "0", "--yes").out
    assert not folder.parent.exists()
    assert bench.run("runs list", "--json").json() == []


def test_following_the_log_tells_that_the_controller_died(bench: Bench) -> None:
    bench.shapes(groups=3)
    run = bench.begun(1)
    follower = bench.start("logs", "--follow")
    assert follower.stdout is not None
    assert "shape " in follower.stdout.readline() + follower.stdout.readline() + follower.stdout.readline()
    run.kill()
    out, _ = follower.communicate(timeout=PATIENCE_S)
    last = f"the controller of run {bench.paths.run} died; its workers finish what they have. Go on with: "
    assert out.splitlines()[-1].startswith(last)
    bench.release()
    assert bench.run("resume").code == 0


def test_a_run_whose_folder_is_removed_ends_with_one_error(bench: Bench) -> None:
    bench.shapes(groups=2, per_group=2)
    run = bench.start("tune", *bench.tune_args([bench.held(1)]))
    wait_until(lambda: bench.tuned() == 2, "the first group is tuned")
    shutil.rmtree(bench.paths.root)
    out, _ = run.communicate(timeout=PATIENCE_S)
    assert (run.returncode, "Traceback" in out, out.count("error: ")) == (2, False, 1), out


def test_plan_touches_nothing(bench: Bench) -> None:
    bench.shapes(groups=4, per_group=3)
    before = sorted(p for p in bench.root.rglob("*"))
    done = bench.run("tune", *bench.tune_args(more=["--plan"])).ok()
    assert "N=16" in done.out
    assert "no node was probed; nothing was started" in done.out
    plan = bench.run("tune", *bench.tune_args(more=["--plan", "--json"])).json()
    assert (plan["todo"], sum(len(w["units"]) for w in plan["work"])) == (12, 12)
    assert sorted(p for p in bench.root.rglob("*")) == before


def test_what_is_rendered_is_what_a_run_deploys(bench: Bench) -> None:
    bench.shapes(groups=2)
    to = bench.root / "scripts"
    done = bench.run("tune", *bench.tune_args(more=["--render", to]))
    assert (done.code, bench.runs.exists(), bench.workdir.exists()) == (0, False, False), done.err
    assert f"written: {to}/here: follow.sh, launch.sh, node.json, tune.sh" in done.out
    rendered = {p.name: (p.read_text(), p.stat().st_mode) for p in (to / "here").iterdir() if p.is_file()}
    (run,) = {json.loads(rendered["node.json"][0])["run"]}
    assert bench.tune().code == 0
    for folder in (bench.paths.nodes / "here", bench.folder()):
        there = {n: (folder / n).read_text().replace(bench.paths.run, run) for n in rendered}
        assert {n: (text, (folder / n).stat().st_mode) for n, text in there.items()} == rendered


def test_lists_of_two_families_are_two_runs_of_one_command(bench: Bench) -> None:
    linear, moe, other = (bench.root / f"{name}.csv" for name in ("log-a8w8_blockscale", "log-fmoe", "other"))
    linear.write_text("M,N,K,count\n16,256,256,3\n32,256,256,1\n")
    other.write_text("M,N,K\n32,256,256\n64,256,256\n")
    moe.write_text("token,model_dim,inter_dim,expert,topk\n16,256,128,8,2\n")
    options = [*map(str, (linear, moe, other)), *bench.tune_args()[1:], "--family", "a8w8_blockscale"]
    planned = bench.run("tune", *options, "--plan", "--json").json()
    assert [(p["family"], p["todo"]) for p in planned["runs"]] == [("a8w8_blockscale", 3), ("fmoe", 1)]
    assert (planned["exit_code"], bench.runs.exists()) == (0, False)
    rendered = bench.run("tune", *options, "--render", bench.root / "out", "--json").json()
    assert list(rendered["nodes"]) == ["a8w8_blockscale/here", "fmoe/here"]

    done = bench.run("tune", *options).ok()
    first, second = (p.parent for p in sorted(bench.runs.glob("*/run.yaml"), key=lambda p: p.stat().st_mtime_ns))
    summary = done.out.splitlines()[-2:]
    assert re.match(rf"a8w8_blockscale: run {first.name} finished: 3 of 3 shapes tuned; next: .*{first}", summary[0])
    assert re.match(rf"fmoe: run {second.name} finished: 1 of 1 shape tuned; next: .*{second}", summary[1])
    assert [len(read_csv(run / "tuned.csv")) for run in (first, second)] == [3, 1]
    assert read_csv(first / "annotations.csv")[2]["count"] == "", "the list that has this shape has no such column"
    assert bench.run("explain", first.name).code == 0


def two_lists(bench: Bench) -> list[str]:
    linear, moe = (bench.root / f"log-{family}.csv" for family in ("a8w8_blockscale", "fmoe"))
    linear.write_text("M,N,K\n16,256,256\n")
    moe.write_text("token,model_dim,inter_dim,expert,topk\n16,256,128,8,2\n")
    return [str(linear), str(moe)]


def test_the_worst_exit_code_of_several_runs_counts(bench: Bench) -> None:
    args = bench.tune_args([{"kind": "no_candidate", "match": {"N": "256"}}])[1:]
    done = bench.run("tune", *two_lists(bench), *args, "--json")
    found = done.json()
    assert (done.code, found["exit_code"], [r["exit_code"] for r in found["runs"]]) == (1, 1, [1, 0])
    assert ["explain" in r["next"][0] for r in found["runs"]] == [True, False]
    for words, says in (
        (["--detach"], "--detach: several families are runs one after another; leave it out"),
        (["--db", "t.csv"], "--db and --gpu-hours are for one family, and these lists are of a8w8_blockscale, fmoe"),
    ):
        refused = bench.run("tune", *two_lists(bench), *args, *words)
        assert (refused.code, says in refused.err) == (2, True), refused.err


def test_an_interrupted_run_is_the_last_one(bench: Bench) -> None:
    args = bench.tune_args([{"kind": "hold", "match": {"N": "256"}}])[1:]
    run = bench.start("tune", *two_lists(bench), *args, "--grace", "0")
    wait_until(lambda: list(bench.workdir.glob("**/node.json")) and bench.tuners(), "the shape is held")
    run.send_signal(signal.SIGINT)
    out, _ = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 130, out
    first, rest = out.splitlines()[-2:]
    assert re.search(rf"{bench.paths.run} interrupted: 0 of 1 shape tuned; next: .*resume {bench.paths.run}", first)
    assert rest == f"fmoe: not started ({bench.root}/log-fmoe.csv)"


def test_a_finished_run_leaves_its_nodes_alone_and_cancel_stops_a_worker_that_came_back(bench: Bench) -> None:
    """A kept container does the same when its Docker restarts."""
    bench.shapes(groups=2)
    assert bench.tune().code == 0
    stop, epoch = bench.folder() / "control/stop", bench.folder() / "epoch"
    kept = [path.read_bytes() for path in (stop, epoch, bench.paths.tuned, bench.paths.profile)]
    bench.paths.tuned.write_text("")  # by a user who had it open
    bench.paths.profile.unlink()
    assert "every shape of this run is settled: nothing was started" in bench.run("resume").out
    assert [path.read_bytes() for path in (stop, epoch, bench.paths.tuned, bench.paths.profile)] == kept
    assert bench.run("cancel").out == f"run {bench.paths.run} is finished\nno worker ran on here\n"
    stop.unlink()
    subprocess.run(["sh", bench.folder() / "launch.sh", "start"], stdin=subprocess.DEVNULL, check=True)
    assert bench.run("cancel").out == f"run {bench.paths.run} is finished\nstopped 2 workers on here\n"
    wait_until(lambda: not bench.processes(), "no worker is left")


def test_the_db_is_made_then_skipped_then_retuned(bench: Bench) -> None:
    n = bench.shapes(groups=3)
    db = bench.root / "db.csv"
    bench.tune(more=["--db", str(db)]).ok()
    assert len(read_csv(db)) == n
    bench.shapes(groups=4)
    second = bench.run("tune", *bench.tune_args(more=["--db", db, "--json"]))
    assert second.json()["shapes"] == {"total": 4, "tuned": 1, "skipped": 3, "failed": 0, "running": 0, "pending": 0}
    before = db.read_bytes()
    third = bench.tune(more=["--db", str(db)]).ok()
    assert "4 skipped" in third.out
    assert not bench.folder().exists(), "where all is skipped no node is started"

    def state() -> tuple[object, ...]:
        with bench.ledger() as ledger:
            return ledger.state, ledger.meta("epoch"), ledger.meta("ended"), ledger.replayed.sessions

    kept = state()
    run = bench.paths.run
    assert bench.run("cancel", run).out == f"run {run} is finished\nnothing was started on here\n"
    assert state() == kept, "a finished run stays as it is"
    assert bench.run("report", "--json").json()["run"] == second.json()["run"], "the third run did nothing"
    assert "was cancelled" not in bench.run("resume", run).err
    with Ledger.open(bench.paths.ledger) as ledger, ledger.transaction():
        ledger.set_meta("state", "cancelled")
    assert f"run {run} was cancelled; it goes on" in bench.run("resume", run).err
    fourth = bench.tune(more=["--db", str(db), "--retune"])
    assert "4 tuned" in fourth.out
    assert db.read_bytes() == before, "the same times do not beat themselves"


def test_nodes_join_and_leave_a_run_while_it_goes_on_and_not_afterwards(bench: Bench) -> None:
    n = bench.shapes(groups=6)
    out = f"  out: {{gpus: [3], workdir: {bench.workdir}}}\n  here:\n    labels: [mine]\n"
    alone = bench.inventory.read_text().replace("  here:\n", out)
    bench.inventory.write_text(alone)
    run = bench.begun(1, more=["--limit", "mine"])
    bench.inventory.write_text(
        f"{alone}  far: {{gpus: [4], workdir: {bench.workdir}}}\n"
        f"  too: {{gpus: [2], labels: [mine], workdir: {bench.workdir}}}\n"
    )
    added = bench.run("nodes add", "-i", bench.inventory)
    said = f"joining run {bench.paths.run}: too\nnot in the run's --limit mine: far\n"
    assert (added.code, added.out) == (0, said), added.err
    wait_until(lambda: bench.has_joined("too"), "it joins")
    unknown, drained = bench.run("nodes drain", "no"), bench.run("nodes drain", "here")
    assert (unknown.code, "has no node 'no' (there: here, too)" in unknown.err) == (2, True)
    assert (drained.code, drained.out) == (0, "here finishes its running groups and gets no more\n")
    bench.release()
    said = bench.finish(run)
    assert "here drains by request" in said
    assert "too joins" in said
    assert "out joins" not in said
    assert "far joins" not in said
    bench.check_books(tuned=n, failed={})
    before = bench.paths.inventory.read_bytes()
    bench.inventory.write_text(alone)
    for words in (("nodes add", "-i", str(bench.inventory)), ("nodes drain", "too")):
        refused = bench.run(*words)
        assert refused.code == 2
        assert refused.err == f"error: no controller drives run {bench.paths.run}, which is finished\n"
    assert bench.paths.inventory.read_bytes() == before


def test_detach_prints_the_run_and_goes_on(bench: Bench) -> None:
    n = bench.shapes(groups=4)
    done = bench.run("tune", *bench.tune_args([bench.held(2)], more=["--detach"])).ok()
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
