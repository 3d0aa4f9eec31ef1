"""Deaths of workers, nodes and controllers: out of memory, a killer of nodes, a sick only slot, a second host."""

from __future__ import annotations

import shutil
import sqlite3
import time
from functools import partial
from pathlib import Path

from orchestrator.events import NodeLost, Resumed, ShapeStarted
from tests.integration.fleetkit import (
    ON_NODES,
    begun,
    docker_log,
    faults_told,
    finish,
    finish_released,
    journal,
    settled,
    steps,
    strikes,
    write_inventory,
)
from tests.integration.heavy import HeavyFleet, HeavyNode
from tests.integration.kit import Bench
from tests.waiting import wait_until

pytestmark = ON_NODES


def test_out_of_memory_in_a_container_is_a_reason(fleet: HeavyFleet, remote: Bench) -> None:
    """A real limit and the kernel's own killer: one shape needs too much everywhere, one did once."""
    write_inventory(remote, fleet, more="  docker: {memory: 200m}\n")
    n = remote.shapes(groups=12, per_group=2)
    began = time.time()
    faults = [
        {"kind": "oom", "match": {"N": "64", "M": "2"}, "guard": False},
        {"kind": "oom", "match": {"N": "16", "M": "1", "attempt": "g0001-1"}, "guard": False},
    ]
    done = remote.tune(faults=faults, seconds=0.2)
    assert done.code == 1, done.out + done.err
    settled(fleet, remote, n - 1, {"2x64x64": "oom"})
    told = faults_told(remote, "2x64x64", "oom")
    once = faults_told(remote, "1x16x64", "oom")
    assert len(once) <= 1  # its first attempt may have been taken back unbegun
    # two nodes convict; a fault where a slot has a mark, from the one that passed elsewhere, does not count
    assert len({node for _, node in told}) in (2, 2 + len(once))
    for node in fleet.nodes:
        ours = sum(name == node.name for _, name in told + once)
        # Docker hears of the kernel's kills when it gets to it, maybe after us
        wait_until(partial(saw_kills, node, began, ours), f"Docker on {node.name} saw {ours} kills")
    (failed,) = steps(remote, "2x64x64", "FailShape")
    assert failed["reason"] == "oom"
    assert failed["confirmed"]


def saw_kills(node: HeavyNode, since: float, count: int) -> bool:
    return len(docker_log(node, "oom", since)) >= count


def fell_when_struck(node: HeavyNode) -> None:
    """On the node itself: sshd and Docker die as soon as a fault has counted itself there."""
    node.sh(
        "rm -f /run/felled; setsid sh -c '"
        "until ls /root/.gemmfleet/*/*/replay/* /home/*/.gemmfleet/*/*/replay/* 2>/dev/null | grep -q .;"
        " do sleep 0.02; done; date +%s.%N >/run/felled; kill -9 $(cat /run/node-dockerd); rm -f /run/node-dockerd;"
        " kill -9 $(cat /run/node-sshd); rm -f /run/node-sshd; pkill -9 -x sshd; pkill -9 containerd'"
        " >/dev/null 2>&1 </dev/null &"
    )


def test_a_shape_that_takes_its_node_down_wherever_it_lands(fleet: HeavyFleet, remote: Bench) -> None:
    """All three nodes are lost to it, one after the other, and still every other shape is tuned."""
    n = remote.shapes(groups=15, per_group=2)
    for node in fleet.nodes:
        fell_when_struck(node)
    fault = {"kind": "hang", "match": {"N": "80", "M": "1"}, "times": 99}
    done = remote.tune(faults=[fault], seconds=0.2, more=["--lost-after", "3"])
    assert done.code == 1, done.out + done.err
    remote.check_books(tuned=n - 1, failed={"1x80x64": "kills_nodes"})
    felled: dict[str, float] = {}
    for node in fleet.nodes:
        when = node.sh("cat /run/felled 2>/dev/null || true")
        felled |= {node.name: float(when)} if when else {}
    told = {r.node: t for t, r in journal(remote, NodeLost)}
    assert told.keys() == felled.keys()
    for name, at in felled.items():
        (lost,) = steps(remote, name, "NodeLost")
        assert lost["t"] >= at + 3.0
        assert steps(remote, name, "NodeTroubled")
    (failed,) = steps(remote, "1x80x64", "FailShape")
    assert failed["reason"] == "kills_nodes"
    assert failed["confirmed"]
    assert all(name in failed["detail"] for name in felled)


def test_the_only_slot_is_sick(fleet: HeavyFleet, remote: Bench) -> None:
    """Nothing can be confirmed, and the reasons say so; the run ends."""
    write_inventory(remote, fleet, ("h1",))
    remote.shapes(groups=3)
    fault = {"kind": "abort", "match": {"node": "h1"}, "times": 99}
    done = remote.tune(faults=[fault])
    assert done.code == 1, done.out + done.err
    settled(fleet, remote, 0, {f"1x{16 * g}x64": "fault" for g in (1, 2, 3)})
    with remote.ledger() as ledger:
        assert not any(f.confirmed for f in ledger.failed())
    told = []
    for g in (1, 2, 3):
        (failed,) = steps(remote, f"1x{16 * g}x64", "FailShape")
        assert "unconfirmed" in failed["text"]
        assert "only one slot" in failed["detail"]
        told += faults_told(remote, f"1x{16 * g}x64", "fault")
    count, last = strikes(remote, fleet.nodes[0])
    assert len(told) == count
    assert last <= max(told)[0]


def test_the_only_slot_fails_its_canary(fleet: HeavyFleet, remote: Bench) -> None:
    """No shape is blamed; the run ends, and what is pending can be resumed."""
    write_inventory(remote, fleet, ("h1",))
    n = remote.shapes(groups=3)
    done = remote.tune(faults=[{"kind": "sick_canary", "match": {"node": "h1"}, "times": 3}])
    assert done.code == 3, done.out + done.err
    assert "canary" in done.err
    with remote.ledger() as ledger:
        assert (ledger.counts().pending, ledger.counts().failed) == (n, 0)
    told = steps(remote, "h1", "CanaryFailed")
    count, last = strikes(remote, fleet.nodes[0])
    assert len(told) == count == 3
    assert last <= told[-1]["t"]
    done = remote.run("resume")
    assert done.code == 0, done.out + done.err
    settled(fleet, remote, n)


def copy_of(runs: Path, to: Path, run: str) -> None:
    """A run folder as another machine would have it: its files, and a consistent copy of its ledger."""
    shutil.copytree(runs / run, to / run, ignore=shutil.ignore_patterns("ledger.db*", "lock*"))
    source, target = sqlite3.connect(runs / run / "ledger.db"), sqlite3.connect(to / run / "ledger.db")
    source.backup(target)
    source.close()
    target.close()


def test_a_second_host_takes_over_while_the_first_lives(fleet: HeavyFleet, remote: Bench, tmp_path: Path) -> None:
    n = remote.shapes(groups=18)
    first = begun(remote, 6, seconds=0.1)
    run = remote.paths.run
    (tmp_path / "second").mkdir()
    other = Bench(tmp_path / "second")
    copy_of(remote.runs, other.runs, run)
    try:
        at = time.time()
        second = other.start("resume")
        out = finish(first)
        assert first.returncode == 2, out
        assert f"a younger controller took run {run} over" in out
        assert "changes nothing more" in out
        before = [p.read_bytes() for p in (remote.paths.ledger, remote.paths.config)]
        rest = finish_released(fleet, other, second)
        assert second.returncode == 0, rest
        settled(fleet, other, n)
        assert [p.read_bytes() for p in (remote.paths.ledger, remote.paths.config)] == before
        assert max(starts(other).values()) == 1, "what the first had sent was found, not repeated"
        ((taken, _),) = [(t, r) for t, r in journal(other, Resumed) if r.epoch == 2]
        assert at <= taken
        assert remote.tuned() < n
    finally:
        other.close()


def starts(bench: Bench) -> dict[int, int]:
    """Shape -> times that it was begun."""
    out: dict[int, int] = {}
    for _, r in journal(bench, ShapeStarted):
        out[r.shape] = out.get(r.shape, 0) + 1
    return out
