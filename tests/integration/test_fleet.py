"""The main job on real remote nodes: own sshd, own dockerd, workers in containers, and nodes that misbehave."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from orchestrator.events import NodeLost, ShapeStarted
from tests.integration.fleetkit import (
    CLOSE_S,
    ON_NODES,
    begun,
    by_node,
    containers,
    docker_log,
    faults_told,
    finish,
    journal,
    measured,
    settled,
    steps,
    strikes,
    troubled,
)
from tests.integration.heavy import HeavyFleet
from tests.integration.kit import Bench, wait_until

pytestmark = ON_NODES


def test_the_nodes_are_checked(remote: Bench) -> None:
    done = remote.run_plain("nodes", "check", "-i", str(remote.inventory), "--json")
    assert done.code == 0, done.out + done.err
    assert [(n["name"], n["state"]) for n in done.json()["nodes"]] == [("h1", "ok"), ("h2", "ok"), ("h3", "ok")]


def test_the_work_is_split_and_nothing_is_left(fleet: HeavyFleet, remote: Bench) -> None:
    n = remote.shapes(groups=30, per_group=2)
    done = remote.tune(seconds=0.2, timeout=120.0)
    assert done.code == 0, done.out + done.err
    remote.check_books(tuned=n, failed={})
    assert set(by_node(remote)) == {"h1", "h2", "h3"}
    assert containers(fleet) == []
    status = remote.run("status", "--json").json()
    assert [x["tuned"] for x in status["nodes"]] == [by_node(remote)[x] for x in ("h1", "h2", "h3")]


def test_a_poison_shape_is_confirmed_on_two_nodes(fleet: HeavyFleet, remote: Bench) -> None:
    # in the last group: by then every node is up, however slow the machine is
    n = remote.shapes(groups=20, per_group=3)
    fault = {"kind": "abort", "match": {"N": "320", "M": "2"}, "times": 99}
    done = remote.tune(faults=[fault], seconds=0.3, timeout=120.0)
    assert done.code == 1, done.out + done.err
    remote.check_books(tuned=n - 1, failed={"2x320x64": "fault"})
    with remote.ledger() as ledger:
        (failed,) = ledger.failed()
        assert failed.confirmed
    told = faults_told(remote, "2x320x64", "fault")
    struck = {x.name: strikes(remote, x) for x in fleet.nodes}
    assert Counter(name for _, name in told) == {name: count for name, (count, _) in struck.items() if count}
    assert len(told) == 2
    assert all(abs(t - struck[name][1]) < CLOSE_S for t, name in told)


def test_a_cut_connection_costs_nothing(fleet: HeavyFleet, remote: Bench) -> None:
    n = remote.shapes(groups=30)
    run = begun(remote, 4, seconds=0.5)
    at = time.time()
    fleet.nodes[0].drop_connections()
    fleet.nodes[1].drop_connections()
    assert "30 tuned" in finish(run)
    assert run.returncode == 0
    settled(fleet, remote, n)
    for name in ("h1", "h2"):
        troubled(remote, name, at)
        assert 0 <= steps(remote, name, "NodeJoined")[-1]["t"] - at < CLOSE_S
    assert not steps(remote, "h3", "NodeTroubled")
    assert not journal(remote, NodeLost)
    assert max(Counter(r.shape for _, r in journal(remote, ShapeStarted)).values()) == 1


def test_sshd_down_for_20_s_costs_that_while(fleet: HeavyFleet, remote: Bench) -> None:
    """Its worker goes on meanwhile, and what it finished counts."""
    n = remote.shapes(groups=60)
    run = begun(remote, 4, seconds=0.8)
    node = fleet.nodes[2]
    at = time.time()
    node.stop_sshd()
    timer = threading.Timer(20.0, node.start_sshd)
    timer.start()
    time.sleep(8.0)
    heard = by_node(remote)["h3"]
    wait_until(lambda: measured(remote, node) >= heard + 5, 10, "its worker goes on")
    assert by_node(remote)["h3"] == heard
    out = finish(run)
    timer.join()
    assert run.returncode == 0, out
    settled(fleet, remote, n)
    assert by_node(remote)["h3"] >= heard + 5
    assert not journal(remote, NodeLost)
    assert max(Counter(r.shape for _, r in journal(remote, ShapeStarted)).values()) == 1
    (told,) = troubled(remote, "h3", at)
    # at the latest the longest pause between two tries (15 s) after it is back
    assert 20.0 <= steps(remote, "h3", "NodeJoined")[-1]["t"] - at < 20.0 + 15.0 + CLOSE_S
    assert told["node"] == "h3"


def test_a_killed_container_comes_back(fleet: HeavyFleet, remote: Bench) -> None:
    n = remote.shapes(groups=24)
    run = begun(remote, 4, seconds=0.5)
    node = fleet.nodes[0]
    at = time.time()
    for name in node.containers("label=gemmfleet.slot"):
        node.kill_worker(name)
    out = finish(run)
    assert run.returncode == 0, out
    settled(fleet, remote, n)
    ((died, name),) = faults_told(remote, "h1", "worker_died")
    assert name == "h1"
    assert abs(died - docker_log(node, "die", at)[0]) < CLOSE_S


def test_dockerd_restarted(fleet: HeavyFleet, remote: Bench) -> None:
    n = remote.shapes(groups=30)
    run = begun(remote, 4, seconds=0.5)
    at = time.time()
    fleet.nodes[1].restart_dockerd()
    back = time.time()
    out = finish(run)
    assert run.returncode == 0, out
    settled(fleet, remote, n)
    troubled(remote, "h2", at)
    assert 0 <= steps(remote, "h2", "NodeJoined")[-1]["t"] - back < 2 * CLOSE_S
    told = faults_told(remote, "h2", "worker_died")
    assert len(told) <= 1
    assert all(-CLOSE_S < t - at < back - at + CLOSE_S for t, _ in told)


def test_a_partition_that_heals(fleet: HeavyFleet, remote: Bench) -> None:
    """What the node finished alone counts, and is not done again."""
    n = remote.shapes(groups=40)
    run = begun(remote, 4, seconds=0.8)
    at = time.time()
    node = fleet.nodes[1]
    node.partition()
    time.sleep(4.0)
    heard = by_node(remote)["h2"]
    time.sleep(8.0)
    assert measured(remote, node) >= heard + 5
    assert by_node(remote)["h2"] == heard
    node.heal()
    back = time.time()
    out = finish(run)
    assert run.returncode == 0, out
    settled(fleet, remote, n)
    assert by_node(remote)["h2"] >= heard + 5
    assert not journal(remote, NodeLost)
    assert max(Counter(r.shape for _, r in journal(remote, ShapeStarted)).values()) == 1
    (told,) = troubled(remote, "h2", at)
    assert "no word for" in told["detail"]
    assert 0 <= steps(remote, "h2", "NodeJoined")[-1]["t"] - back < 15.0 + CLOSE_S


def test_a_silent_node_holds_up_no_status(fleet: HeavyFleet, remote: Bench) -> None:
    remote.shapes(groups=6)
    assert remote.tune(timeout=120.0).code == 0
    fleet.nodes[0].partition()
    began = time.monotonic()
    status = remote.run("status", "--json").json()
    took = time.monotonic() - began
    fleet.nodes[0].heal()
    assert took < 8.0
    assert {x["name"]: x["state"] for x in status["nodes"]}["h2"] != "unreachable"


@pytest.mark.full
def test_a_node_killed_for_good_and_one_partitioned(fleet: HeavyFleet, remote: Bench, tmp_path: Path) -> None:
    n = remote.shapes(groups=40)
    run = begun(remote, 4, "--lost-after", "8", seconds=0.8)
    killed = time.time()
    fleet.nodes[0].kill()
    time.sleep(3.0)
    parted = time.time()
    fleet.nodes[1].partition()
    time.sleep(5.0)
    fleet.nodes[1].heal()
    out = finish(run)
    assert run.returncode == 0, out
    remote.check_books(tuned=n, failed={})
    troubled(remote, "h1", killed)
    (lost,) = steps(remote, "h1", "NodeLost")
    # silence is noticed after three beats, and then the patience begins
    assert 7.0 <= lost["t"] - killed < 8.0 + 12.0
    assert all(abs(s["since"] - parted) < CLOSE_S for s in steps(remote, "h2", "NodeTroubled"))
    assert not steps(remote, "h3", "NodeTroubled", "NodeLost")
