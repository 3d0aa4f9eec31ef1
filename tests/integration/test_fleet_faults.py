"""One fault a test, done for real to a node of a running job, and the books checked afterwards.

What the injector knows itself (when it acted and where, Docker's own events, the replay tuner's counters) is
compared with what `explain --json` tells.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from orchestrator.events import NodeDraining, NodeLost, Quarantine, ShapeStarted
from orchestrator.paths import list_runs
from tests.integration.fleetkit import (
    ESC,
    ON_OTHER_NODES,
    begun,
    by_node,
    containers,
    docker_log,
    faults_told,
    finish,
    finish_released,
    in_trouble,
    joined,
    journal,
    measured,
    node_folder,
    release,
    settled,
    started,
    steps,
    strikes,
    unclaimed,
    write_inventory,
)
from tests.integration.heavy import HeavyFleet, clock_env
from tests.integration.kit import Bench
from tests.waiting import wait_until

pytestmark = ON_OTHER_NODES


def lost_nodes(bench: Bench) -> set[str]:
    """Nodes that were given up."""
    return {r.node for _, r in journal(bench, NodeLost)}


def bad_lines(bench: Bench) -> dict[tuple[str, str], int]:
    """Lines that are no records of ours, by node and stream."""
    with bench.ledger() as ledger:
        return {(o.node, o.stream): o.bad for o in ledger.streams() if o.bad}


# --- nodes and controllers --------------------------------------------------------------------------------------------


def test_a_paused_node_is_given_up_and_comes_back(fleet: HeavyFleet, remote: Bench) -> None:
    n = remote.shapes(groups=18)
    run = begun(remote, 3, "--lost-after", "2", seconds=0.1)
    at = time.time()
    fleet.nodes[1].pause()
    wait_until(lambda: "h2" in lost_nodes(remote), "it is given up")
    back = time.time()
    fleet.nodes[1].unpause()
    wait_until(lambda: joined(remote, "h2", back), "it joined again")
    out = finish_released(fleet, remote, run)
    assert run.returncode == 0, out
    settled(fleet, remote, n)
    assert lost_nodes(remote) == {"h2"}
    # silence is noticed after three beats, and then the patience begins
    assert steps(remote, "h2", "NodeLost")[0]["t"] >= at + 2.0


@pytest.mark.full
def test_a_node_paused_for_a_while_is_no_loss(fleet: HeavyFleet, remote: Bench) -> None:
    n = remote.shapes(groups=18)
    run = begun(remote, 3, seconds=0.1)
    at = time.time()
    fleet.nodes[1].pause()
    wait_until(lambda: in_trouble(remote, "h2", at), "its silence is noticed")
    back = time.time()
    fleet.nodes[1].unpause()
    wait_until(lambda: joined(remote, "h2", back), "it is there again")
    out = finish_released(fleet, remote, run)
    assert run.returncode == 0, out
    settled(fleet, remote, n)
    assert not journal(remote, NodeLost)


def test_a_controller_killed_and_resumed(fleet: HeavyFleet, remote: Bench) -> None:
    n = remote.shapes(groups=18)
    run = begun(remote, 4, seconds=0.1)
    wait_until(lambda: unclaimed(remote, fleet.nodes[0]), "there is work for a node that is alone")
    run.kill()
    run.wait()
    at, known = time.time(), remote.tuned()
    here = by_node(remote).get("h1", 0)
    release(fleet, remote)
    wait_until(lambda: measured(remote, fleet.nodes[0]) > here, "a worker goes on alone")
    done = remote.run("resume")
    assert done.code == 0, done.out + done.err
    settled(fleet, remote, n)
    assert known < n
    starts = Counter(r.shape for _, r in journal(remote, ShapeStarted))
    assert max(starts.values()) == 1, "what the workers did alone was found"
    for node in fleet.nodes:
        assert joined(remote, node.name, 0.0)
        assert joined(remote, node.name, at)


def test_cancel_leaves_no_container(fleet: HeavyFleet, remote: Bench) -> None:
    remote.shapes(groups=9)
    run = remote.start("tune", *remote.tune_args(seconds=30.0))
    wait_until(lambda: len(list_runs(remote.runs)) and len(journal(remote, ShapeStarted)) == 3, "all slots work")
    done = remote.run("cancel")
    assert done.code == 0, done.out + done.err
    out = finish(run)
    assert run.returncode == 130, out
    assert containers(fleet) == []
    assert remote.run("status", "--json").json()["state"] == "cancelled"
    with remote.ledger() as ledger:
        assert ledger.counts().pending == 9


def test_a_node_is_drained_while_the_run_goes_on(fleet: HeavyFleet, remote: Bench) -> None:
    n = remote.shapes(groups=18)
    run = begun(remote, 3, seconds=0.1)
    wait_until(lambda: len(started(remote, "h1")), "it works")
    at = time.time()
    done = remote.run("nodes drain", "h1")
    assert done.code == 0, done.out + done.err
    wait_until(lambda: journal(remote, NodeDraining) and not unclaimed(remote, fleet.nodes[0]), "its inbox is empty")
    before = started(remote, "h1")
    out = finish_released(fleet, remote, run)
    assert run.returncode == 0, out
    settled(fleet, remote, n)
    (drained,) = steps(remote, "h1", "NodeDraining")
    assert at <= drained["t"]
    assert not [s for s in steps(remote, "h1", "Send") if s["t"] > drained["t"]]
    assert started(remote, "h1") == before, "it took nothing more"


@pytest.mark.full
def test_a_node_is_added_while_the_run_goes_on(fleet: HeavyFleet, remote: Bench, tmp_path: Path) -> None:
    n = remote.shapes(groups=18)
    all_nodes = tmp_path / "all.yaml"
    all_nodes.write_text(remote.inventory.read_text())
    write_inventory(remote, fleet, ("h1", "h2"))
    run = begun(remote, 3, seconds=0.1)
    at = time.time()
    done = remote.run("nodes add", "-i", str(all_nodes))
    assert done.code == 0, done.out + done.err
    assert "h3" in done.out
    wait_until(lambda: started(remote, "h3"), "it has work")
    out = finish_released(fleet, remote, run)
    assert run.returncode == 0, out
    settled(fleet, remote, n)
    assert by_node(remote)["h3"] > 0
    assert at <= steps(remote, "h3", "NodeJoined")[0]["t"]


def at_work(bench: Bench, fleet: HeavyFleet) -> bool:
    """Return whether every node has begun a group of the run."""
    return bool(list_runs(bench.runs)) and all(started(bench, node.name) for node in fleet.nodes)


SHARE = ("--busy", "share")


@pytest.mark.full
def test_two_users_on_the_same_nodes(fleet: HeavyFleet, remote: Bench, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Bench(tmp_path / "other")
    try:
        write_inventory(other, fleet, more="  user: tuner\n")
        n, m = remote.shapes(groups=12), other.shapes(groups=10, per_group=2)
        first = remote.start("tune", *remote.tune_args([remote.held(0, 12)], more=SHARE))
        second = other.start("tune", *other.tune_args([other.held(0, 10)], more=SHARE))
        for bench in (remote, other):
            wait_until(partial(at_work, bench, fleet), "every node has work of each")
        for node in fleet.nodes:
            release(fleet, remote, node.name)
            node.sh(f"touch /home/tuner/.gemmfleet/{other.paths.run}/{node.name}/released")
        for run in (first, second):
            out = finish(run)
            assert run.returncode == 0, out
        for bench, tuned in ((remote, n), (other, m)):
            settled(fleet, bench, tuned)
            assert set(by_node(bench)) == {"h1", "h2", "h3"}
            for node in fleet.nodes:
                assert not steps(bench, node.name, "NodeLost", "Quarantine")
                assert faults_told(bench, node.name, "worker_died") == []
    finally:
        other.close()


# --- shapes and slots -------------------------------------------------------------------------------------------------


def test_a_shape_that_kills_its_worker_wherever_it_lands(fleet: HeavyFleet, remote: Bench) -> None:
    n = remote.shapes(groups=10, per_group=2)
    began = time.time()
    fault = {"kind": "kill_worker", "match": {"N": "32", "M": "2"}, "times": 99}
    done = remote.tune(faults=[fault], seconds=0.1)
    assert done.code == 1, done.out + done.err
    settled(fleet, remote, n - 1, {"2x32x64": "kills_nodes"})
    told = faults_told(remote, "2x32x64", "worker_died")
    counted = {x.name: strikes(remote, x)[0] for x in fleet.nodes}
    assert Counter(node for _, node in told) == Counter(counted)
    assert 2 <= len(told) <= 3
    for t, name in told:
        node = next(x for x in fleet.nodes if x.name == name)
        assert any(died <= t for died in docker_log(node, "die", began)), (t, name)


def test_a_sick_slot_is_quarantined_and_nothing_fails(fleet: HeavyFleet, remote: Bench) -> None:
    n = remote.shapes(groups=24, per_group=2)
    fault = {"kind": "abort", "match": {"node": "h1"}, "times": 99}
    done = remote.tune(faults=[fault], seconds=0.2)
    assert done.code == 0, done.out + done.err
    settled(fleet, remote, n)
    assert {r.node for _, r in journal(remote, Quarantine)} == {"h1"}
    assert set(by_node(remote)) == {"h2", "h3"}
    told = faults_told(remote, "h1", "fault")
    count, last = strikes(remote, fleet.nodes[0])
    assert len(told) == count
    assert last <= max(told)[0]
    assert steps(remote, "h1", "Quarantine")
    assert faults_told(remote, "h2", "fault") == faults_told(remote, "h3", "fault") == []


@pytest.mark.full
def test_a_sick_canary_keeps_a_node_from_work(fleet: HeavyFleet, remote: Bench) -> None:
    n = remote.shapes(groups=12)
    fault = {"kind": "sick_canary", "match": {"node": "h3"}, "times": 99}
    done = remote.tune(faults=[fault], seconds=0.2)
    assert done.code == 0, done.out + done.err
    settled(fleet, remote, n)
    assert set(by_node(remote)) == {"h1", "h2"}
    assert steps(remote, "h3", "AttemptStarted") == []
    told = steps(remote, "h3", "CanaryFailed")
    count, last = strikes(remote, fleet.nodes[2])
    assert len(told) == count
    assert last <= told[-1]["t"]


def test_an_intermittent_shape_is_tuned_in_the_end(fleet: HeavyFleet, remote: Bench) -> None:
    n = remote.shapes(groups=9)
    # the first group is claimed at once; a later one may be taken back, and its attempt number 1 then never begins
    fault = {"kind": "abort", "match": {"N": "16", "attempt_number": "1"}, "times": 1}
    done = remote.tune(faults=[fault], seconds=0.1)
    assert done.code == 0, done.out + done.err
    settled(fleet, remote, n)
    ((t, name),) = faults_told(remote, "1x16x64", "fault")
    struck = {x.name: strikes(remote, x) for x in fleet.nodes}
    assert {k for k, (count, _) in struck.items() if count} == {name}
    assert struck[name][1] <= t


# --- what a node lacks ------------------------------------------------------------------------------------------------


def test_an_image_that_is_missing_costs_its_node_only(fleet: HeavyFleet, remote: Bench) -> None:
    write_inventory(remote, fleet, h2="{image: 'gemmfleet/nowhere:1', docker: {pull: never}}")
    n = remote.shapes(groups=12)
    checked = remote.run_plain("nodes", "check", "-i", str(remote.inventory))
    assert checked.code == 3
    assert "h2: the image is not there, and pull is never" in " ".join(checked.out.split())
    at = time.time()
    done = remote.tune(seconds=0.2)
    assert done.code == 0, done.out + done.err
    assert "gemmfleet/nowhere:1" in done.out + done.err or "the image is not there" in done.out + done.err
    settled(fleet, remote, n)
    assert set(by_node(remote)) == {"h1", "h3"}
    (told,) = steps(remote, "h2", "NodeTroubled")
    assert "the image gemmfleet/nowhere:1 is not there (pull: never)" in told["detail"]
    assert at <= told["t"]


@pytest.mark.full
def test_a_full_disk_on_a_node_costs_nothing_but_time(fleet: HeavyFleet, remote: Bench) -> None:
    write_inventory(remote, fleet, h3="{workdir: /data/work}")
    n = remote.shapes(groups=24)
    run = begun(remote, 3, seconds=0.1)
    wait_until(lambda: unclaimed(remote, fleet.nodes[2], "/data/work"), "it has work")
    filled = time.time()
    fleet.nodes[2].fill_disk()
    here = by_node(remote).get("h3", 0)
    release(fleet, remote)
    # the others end what is not on h3, and it waits for space
    wait_until(lambda: not any(unclaimed(remote, x) for x in fleet.nodes[:2]), "the others go on")
    assert run.poll() is None
    # one row may have been written before the disk was full to the brim
    assert by_node(remote).get("h3", 0) <= here + 1
    fleet.nodes[2].free_disk()
    out = finish(run)
    assert run.returncode == 0, out
    settled(fleet, remote, n)
    # an attempt waits for space to write its rows, or ends as disk_full where there is not even room for its folder
    ends = steps(remote, "h3", "AttemptEnded")
    full = [s["t"] for s in ends if s["outcome"] == "disk_full"]
    assert {s["outcome"] for s in ends} <= {"done", "disk_full"}
    assert all(filled <= t for t in full)
    assert ["disk" in s["why"] for s in steps(remote, "h3", "Quarantine")] == [True] * len(full)
    assert any(s["t"] > filled for s in ends)


@pytest.mark.full
def test_a_clock_two_hours_off_moves_no_time(fleet: HeavyFleet, remote: Bench) -> None:
    write_inventory(remote, fleet, h2=f"{{env: {json.dumps(clock_env(7200))}}}")
    fleet.nodes[1].set_clock(7200)
    n = remote.shapes(groups=45)
    checked = remote.run_plain("nodes", "check", "-i", str(remote.inventory))
    assert "ahead of ours" in " ".join(checked.out.split()), checked.out
    began = time.time()
    done = remote.tune(seconds=0.3)
    ended = time.time()
    assert done.code == 0, done.out + done.err
    settled(fleet, remote, n)
    assert by_node(remote)["h2"] > 0
    assert all(began <= s["t"] <= ended for s in steps(remote, "h2"))


# --- what a node says -------------------------------------------------------------------------------------------------


def hostile_lines() -> list[bytes]:
    """Whole lines, none of which is a record of ours."""
    row = {"us": 1.0, "status": "ok", "kernelName": "evil", "libtype": "x"}
    records: list[dict[str, Any]] = [
        {"type": "shape_tuned", "t": 1.0, "attempt": "../../../etc/passwd", "shape": 1, "row": row},
        {"type": "shape_tuned", "t": 1.0, "attempt": "g9999-1", "shape": 1, "row": row},
        {"type": "shape_tuned", "t": 1.0, "attempt": f"{ESC}]0;owned\a", "shape": 1, "row": row},
        {"type": "attempt_ended", "t": 1.0, "attempt": "g9999-1", "outcome": "done", "seconds": 1.0},
        {"type": f"{ESC}[2J{ESC}[31mhello", "t": 1.0},
        {"type": "drop_table", "t": "now"},
    ]
    return [
        *(json.dumps(r).encode() for r in records),
        b"\x1b[2J\x1b[1;1Hall is well",
        b"\xff\xfe\x00\x01 no text",
        b'{"type":"shape_tuned","t":1,"attempt":"g0001-1","sha',
        b"[" * 50_000,
        b"x" * 300_000,
    ]


def test_hostile_lines_in_the_results_change_nothing(fleet: HeavyFleet, remote: Bench) -> None:
    n = remote.shapes(groups=20)
    run = begun(remote, 3, seconds=0.1)
    node = fleet.nodes[1]
    folder, lines = node_folder(remote, node), hostile_lines()
    append = "dd bs=4M iflag=fullblock oflag=append conv=notrunc status=none"
    for name in ("events/0.jsonl", "logs/0.log"):
        node.exec(["sh", "-c", f"{append} of={folder}/{name}"], user=node.user, stdin=b"\n".join([*lines, b""]))
    wait_until(lambda: bad_lines(remote).get(("h2", "E"), 0) >= len(lines), "they are read")
    out = finish_released(fleet, remote, run)
    assert run.returncode == 0, out
    settled(fleet, remote, n)
    assert bad_lines(remote).keys() == {("h2", "E")}
    with remote.ledger() as ledger:
        assert not any(r.kernel_name == "evil" for r in ledger.profile_rows())
    for argv in (("explain", "h2"), ("status",), ("explain",)):
        done = remote.run(*argv)
        assert ESC not in done.out + done.err
    assert "evil" not in remote.paths.tuned.read_text()


@pytest.mark.full
@pytest.mark.parametrize("how", ["symlink", "folder", "truncated"])
def test_a_results_file_that_is_none_any_more_costs_its_node(fleet: HeavyFleet, remote: Bench, how: str) -> None:
    """Nothing of another file is read as ours, the node is given up, the others do its work."""
    n = remote.shapes(groups=18)
    run = begun(remote, 3, "--lost-after", "4", seconds=0.1)
    node = fleet.nodes[1]
    wait_until(lambda: started(remote, "h2"), "it has results")
    path = f"{node_folder(remote, node)}/events/0.jsonl"
    other = {
        "symlink": f"mv {path} {path}.aside && ln -s /etc/passwd {path}",
        "folder": f"mv {path} {path}.aside && mkdir {path}",
        "truncated": f"truncate -s 100 {path}",
    }[how]
    at = time.time()
    node.sh(other, user=node.user)
    if how != "truncated":  # which a stream sees by itself; what it had open, it reads on
        node.drop_connections()
    wait_until(lambda: in_trouble(remote, "h2", at), "it is noticed")
    # a truncated file may have grown again beyond what was read of it
    wait_until(lambda: "h2" in lost_nodes(remote) or (how == "truncated" and joined(remote, "h2", at)), "it is judged")
    out = finish_released(fleet, remote, run)
    assert run.returncode == 0, out
    settled(fleet, remote, n)  # no worker is left, also not of the node that was given up
    assert "0.jsonl" in out
    if lost := steps(remote, "h2", "NodeLost"):
        assert lost[0]["t"] >= at + 4.0


@pytest.mark.full
def test_a_hundred_megabytes_of_garbage_in_the_results(fleet: HeavyFleet, remote: Bench) -> None:
    n = remote.shapes(groups=12)
    run = begun(remote, 3, seconds=0.1)
    node = fleet.nodes[1]
    path = f"{node_folder(remote, node)}/events/0.jsonl"
    # in one write, so that it tears no record of the worker's
    append = f"dd bs=100000000 iflag=fullblock oflag=append conv=notrunc status=none of={path}"
    node.sh(f"{{ head -c 99999999 /dev/urandom; echo; }} | {append}", user=node.user)
    wait_until(lambda: bad_lines(remote), "it is read")
    out = finish_released(fleet, remote, run)
    assert run.returncode == 0, out
    settled(fleet, remote, n)
    assert bad_lines(remote).keys() == {("h2", "E")}
