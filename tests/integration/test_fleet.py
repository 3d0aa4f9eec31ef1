"""The main job on real remote nodes: own sshd, own dockerd, workers in containers. Other faults: tests/fleet."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from orchestrator.events import ShapeStarted
from tests.integration.heavy import WORKER_IMAGE, HeavyFleet
from tests.integration.heavy.bench import NAMES, NodesBench, on_nodes
from tests.waiting import wait_until

pytestmark = on_nodes()


def test_the_nodes_are_checked_the_work_is_split_and_nothing_is_left(remote: NodesBench) -> None:
    checked = remote.run_plain("nodes", "check", "-i", remote.inventory, "--json").ok()
    assert [(n["name"], n["state"]) for n in checked.json()["nodes"]] == [("h1", "ok"), ("h2", "ok"), ("h3", "ok")]
    n = remote.shapes(groups=30, per_group=2)
    remote.tune(seconds=0.2).ok()
    remote.check_books(n)
    tuned = remote.tuned_by_node()
    assert set(tuned) == set(NAMES)
    assert remote.containers() == []
    status = remote.run("status", "--json").json()
    assert [x["tuned"] for x in status["nodes"]] == [tuned[name] for name in NAMES]


def test_a_killed_container_comes_back(fleet: HeavyFleet, remote: NodesBench) -> None:
    n = remote.shapes(groups=18)
    run = remote.begun(4, seconds=0.1)
    node = fleet.nodes[0]
    wait_until(lambda: remote.claimed(node), "its worker has a group")
    at = time.time()
    for name in node.containers("label=gemmfleet.slot"):
        node.kill_worker(name)
    wait_until(lambda: remote.steps("h1", "lost"), "the worker's end is known")
    remote.release()
    remote.finish(run)
    remote.check_books(n)
    (died,) = remote.steps("h1", "lost")
    assert at <= died["t"]


def test_a_controller_killed_and_resumed(fleet: HeavyFleet, remote: NodesBench) -> None:
    n = remote.shapes(groups=18)
    run = remote.begun(4, seconds=0.1)
    wait_until(lambda: remote.claimed(fleet.nodes[0]), "a worker is at work")
    run.kill()
    run.wait()
    at, known = time.time(), remote.tuned()
    here = remote.tuned_by_node()["h1"]
    remote.release()
    wait_until(lambda: remote.measured(fleet.nodes[0]) > here, "a worker goes on alone")
    remote.run("resume").ok()
    remote.check_books(n)
    assert remote.containers() == []
    assert known < n
    starts = Counter(r.shape for r in remote.journal(ShapeStarted))
    assert set(starts.values()) == {1}, "the results that the workers measured alone were found"
    assert all(remote.has_joined(node.name, at) for node in fleet.nodes)


def test_cancel_leaves_no_container(remote: NodesBench) -> None:
    remote.shapes(groups=9)
    run = remote.start("tune", *remote.tune_args(seconds=30.0))
    wait_until(lambda: len(remote.journal(ShapeStarted)) == 3, "all slots work")
    remote.run("cancel").ok()
    remote.finish(run, 130)
    assert remote.run("status", "--json").json()["state"] == "cancelled"
    with remote.ledger() as ledger:
        assert ledger.counts().pending == 9


TAG = "gemmfleet/test-worker:moving"


@pytest.fixture
def moving_tag(fleet: HeavyFleet) -> Iterator[dict[str, str]]:
    """A tag that is another image on h2; each node's image id."""
    for node in fleet.nodes:
        node.sh(f"docker tag {WORKER_IMAGE} {TAG}")
    odd = fleet.nodes[1]
    odd.sh(f"id=$(docker create {TAG} true) && docker commit -c 'LABEL other=yes' $id {TAG} && docker rm $id")
    yield {x.name: x.sh(f"docker image inspect -f '{{{{.Id}}}}' {TAG}") for x in fleet.nodes}
    for node in fleet.nodes:
        node.sh(f"docker ps -aq --filter ancestor={TAG} | xargs -r docker rm -f; docker image rm -f {TAG}")


def test_images_that_differ_never_mix_silently(remote: NodesBench, moving_tag: dict[str, str]) -> None:
    """An image that differs is reported before anything starts, and kept with the rows."""
    assert len(set(moving_tag.values())) == 2
    remote.write_inventory(image=TAG)
    checked = remote.run_plain("nodes", "check", "-i", remote.inventory, "--json")
    states = {x["name"]: x for x in checked.json()["nodes"]}
    assert {k: v["state"] for k, v in states.items()} == {"h1": "ok", "h2": "warning", "h3": "ok"}
    (finding,) = states["h2"]["findings"]
    assert finding["about"] == "image"
    assert moving_tag["h2"][:19] in finding["what"]
    n = remote.shapes(groups=9)
    done = remote.tune(seconds=0.2).ok()
    (told,) = {line for line in done.out.splitlines() if line.startswith("note: h2: ")}
    assert moving_tag["h2"][:19] in told
    remote.check_books(n)
    assert remote.containers() == []
    document = json.loads((remote.paths.root / "provenance.json").read_text())
    assert document["images"] == moving_tag
