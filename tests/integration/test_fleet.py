"""The main job on real remote nodes: own sshd, own dockerd, workers in containers, and nodes that misbehave."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest

from orchestrator.events import NodeLost, ShapeStarted
from tests.integration.fleetkit import (
    ON_NODES,
    begun,
    busy_slots,
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
    release,
    settled,
    steps,
    strikes,
    troubled,
    unclaimed,
)
from tests.integration.heavy import HeavyFleet
from tests.integration.kit import Bench
from tests.waiting import wait_until

pytestmark = ON_NODES

ALONE = 4
"""Shapes that a node must tune while nobody hears of it."""


def test_the_nodes_are_checked(remote: Bench) -> None:
    done = remote.run_plain("nodes", "check", "-i", str(remote.inventory), "--json")
    assert done.code == 0, done.out + done.err
    assert [(n["name"], n["state"]) for n in done.json()["nodes"]] == [("h1", "ok"), ("h2", "ok"), ("h3", "ok")]


def test_the_work_is_split_and_nothing_is_left(fleet: HeavyFleet, remote: Bench) -> None:
    n = remote.shapes(groups=30, per_group=2)
    done = remote.tune(seconds=0.2)
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
    done = remote.tune(faults=[fault], seconds=0.3)
    assert done.code == 1, done.out + done.err
    remote.check_books(tuned=n - 1, failed={"2x320x64": "fault"})
    with remote.ledger() as ledger:
        (failed,) = ledger.failed()
        assert failed.confirmed
    told = faults_told(remote, "2x320x64", "fault")
    struck = {x.name: strikes(remote, x) for x in fleet.nodes}
    assert Counter(name for _, name in told) == {name: count for name, (count, _) in struck.items() if count}
    assert len(told) == 2
    assert all(t >= min(when for count, when in struck.values() if count) for t, _ in told)


def test_a_cut_connection_costs_nothing(fleet: HeavyFleet, remote: Bench) -> None:
    n = remote.shapes(groups=18)
    run = begun(remote, 4, seconds=0.1)
    at = time.time()
    fleet.nodes[0].drop_connections()
    fleet.nodes[1].drop_connections()
    wait_until(lambda: joined(remote, "h1", at) and joined(remote, "h2", at), "both are there again")
    assert "18 tuned" in finish_released(fleet, remote, run)
    assert run.returncode == 0
    settled(fleet, remote, n)
    for name in ("h1", "h2"):
        troubled(remote, name, at)
    assert not journal(remote, NodeLost)
    assert max(Counter(r.shape for _, r in journal(remote, ShapeStarted)).values()) == 1


def test_sshd_down_costs_that_while(fleet: HeavyFleet, remote: Bench) -> None:
    """Its worker goes on meanwhile, and what it finished counts."""
    n = remote.shapes(groups=30)
    run = begun(remote, 4, seconds=0.1)
    node = fleet.nodes[2]
    wait_until(lambda: unclaimed(remote, node) >= ALONE, "it has work for itself")
    at = time.time()
    node.stop_sshd()
    wait_until(lambda: in_trouble(remote, "h3", at), "it is noticed")
    heard = by_node(remote).get("h3", 0)
    release(fleet, remote, "h3")
    wait_until(lambda: measured(remote, node) >= heard + ALONE, "its worker goes on")
    assert by_node(remote).get("h3", 0) == heard
    back = time.time()
    node.start_sshd()
    wait_until(lambda: joined(remote, "h3", back), "it is there again")
    out = finish_released(fleet, remote, run)
    assert run.returncode == 0, out
    settled(fleet, remote, n)
    assert by_node(remote)["h3"] >= heard + ALONE
    assert not journal(remote, NodeLost)
    assert max(Counter(r.shape for _, r in journal(remote, ShapeStarted)).values()) == 1
    troubled(remote, "h3", at)


def test_a_killed_container_comes_back(fleet: HeavyFleet, remote: Bench) -> None:
    n = remote.shapes(groups=18)
    run = begun(remote, 4, seconds=0.1)
    node = fleet.nodes[0]
    wait_until(lambda: busy_slots(remote, "h1"), "its worker has a group")
    at = time.time()
    for name in node.containers("label=gemmfleet.slot"):
        node.kill_worker(name)
    wait_until(lambda: faults_told(remote, "h1", "worker_died"), "the worker's end is known")
    out = finish_released(fleet, remote, run)
    assert run.returncode == 0, out
    settled(fleet, remote, n)
    ((died, name),) = faults_told(remote, "h1", "worker_died")
    assert name == "h1"
    assert at <= docker_log(node, "die", at)[0] <= died


def test_dockerd_restarted(fleet: HeavyFleet, remote: Bench) -> None:
    n = remote.shapes(groups=18)
    run = begun(remote, 4, seconds=0.1)
    at = time.time()
    fleet.nodes[1].restart_dockerd()
    wait_until(lambda: joined(remote, "h2", at), "it is there again")
    out = finish_released(fleet, remote, run)
    assert run.returncode == 0, out
    settled(fleet, remote, n)
    troubled(remote, "h2", at)
    told = faults_told(remote, "h2", "worker_died")
    assert len(told) <= 1
    assert all(at <= t for t, _ in told)


def test_a_partition_that_heals(fleet: HeavyFleet, remote: Bench) -> None:
    """Shapes that the node finished alone count, and are not measured again."""
    n = remote.shapes(groups=30)
    run = begun(remote, 4, seconds=0.1)
    node = fleet.nodes[1]
    wait_until(lambda: unclaimed(remote, node) >= ALONE, "it has work for itself")
    at = time.time()
    node.partition()
    wait_until(lambda: in_trouble(remote, "h2", at), "its silence is noticed")
    heard = by_node(remote).get("h2", 0)
    release(fleet, remote, "h2")
    wait_until(lambda: measured(remote, node) >= heard + ALONE, "its worker goes on")
    assert by_node(remote).get("h2", 0) == heard
    back = time.time()
    node.heal()
    wait_until(lambda: joined(remote, "h2", back), "it is there again")
    out = finish_released(fleet, remote, run)
    assert run.returncode == 0, out
    settled(fleet, remote, n)
    assert by_node(remote)["h2"] >= heard + ALONE
    assert not journal(remote, NodeLost)
    assert max(Counter(r.shape for _, r in journal(remote, ShapeStarted)).values()) == 1
    assert "no word for" in troubled(remote, "h2", at)[0]["detail"]


def test_a_silent_node_holds_up_no_status(fleet: HeavyFleet, remote: Bench) -> None:
    remote.shapes(groups=6)
    assert remote.tune().code == 0
    fleet.nodes[0].partition()
    status = remote.run("status", "--json").json()
    fleet.nodes[0].heal()
    assert {x["name"]: x["state"] for x in status["nodes"]}["h2"] != "unreachable"


@pytest.mark.full
def test_a_node_killed_for_good_and_one_partitioned(fleet: HeavyFleet, remote: Bench, tmp_path: Path) -> None:
    n = remote.shapes(groups=18)
    run = begun(remote, 4, "--lost-after", "20", seconds=0.1)
    killed = time.time()
    fleet.nodes[0].kill()
    parted = time.time()
    fleet.nodes[1].partition()
    wait_until(lambda: in_trouble(remote, "h2", parted), "its silence is noticed")
    back = time.time()
    fleet.nodes[1].heal()
    wait_until(lambda: joined(remote, "h2", back), "it is there again")
    wait_until(lambda: any(r.node == "h1" for _, r in journal(remote, NodeLost)), "h1 is given up")
    for node in fleet.nodes[1:]:
        release(fleet, remote, node.name)
    out = finish(run)
    assert run.returncode == 0, out
    remote.check_books(tuned=n, failed={})
    troubled(remote, "h1", killed)
    (lost,) = steps(remote, "h1", "NodeLost")
    # silence is noticed after three beats, and then the patience begins
    assert lost["t"] >= killed + 20.0
    troubled(remote, "h2", parted)
    assert not steps(remote, "h3", "NodeLost")
