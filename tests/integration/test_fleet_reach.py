"""Nodes that may not be used: false host keys (also of a jump host), refused keys, another image of the same name."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.events import NodeLost
from tests.integration.fleetkit import (
    ON_OTHER_NODES,
    begun,
    by_node,
    finish_released,
    journal,
    settled,
    started,
    steps,
    troubled,
    write_inventory,
)
from tests.integration.heavy import WORKER_IMAGE, HeavyFleet
from tests.integration.kit import Bench
from tests.waiting import wait_until

pytestmark = ON_OTHER_NODES

LOST_AFTER = 3.0


def lost_for(bench: Bench, node: str, at: float, said: str) -> None:
    """`explain NODE` says that it was given up, when, and why."""
    (lost,) = steps(bench, node, "NodeLost")
    assert lost["node"] == node
    assert said in lost["detail"], lost
    # the patience begins when the fault is noticed
    assert lost["t"] >= at + LOST_AFTER
    troubled(bench, node, at)


def test_a_false_host_key_is_named_from_the_start(fleet: HeavyFleet, remote: Bench, tmp_path: Path) -> None:
    n = remote.shapes(groups=6)
    known = tmp_path / "known"
    first, second, *rest = fleet.known_hosts.read_text().splitlines()
    known.write_text("\n".join([f"{first.split()[0]} {second.split(' ', 1)[1]}", second, *rest]) + "\n")
    config = tmp_path / "config"
    config.write_text((fleet.folder / "ssh_config").read_text().replace(str(fleet.known_hosts), str(known)))
    write_inventory(remote, fleet, more=f"  ssh_config: {config}\n")
    done = remote.tune()
    assert done.code == 0, done.out + done.err
    (told,) = {line for line in done.out.splitlines() if line.startswith("note: h1: ")}
    assert "host key" in told
    settled(fleet, remote, n)
    assert set(by_node(remote)) <= {"h2", "h3"}


def test_a_jump_host_with_another_host_key_costs_what_is_behind_it(fleet: HeavyFleet, remote: Bench) -> None:
    """h2 is reached through h1, which answers with another key from the middle of the run on."""
    write_inventory(remote, fleet, h2="{proxy_jump: h1}")
    n = remote.shapes(groups=36)
    run = begun(remote, 6, "--lost-after", str(LOST_AFTER), free=24, seconds=0.1)
    wait_until(lambda: all(started(remote, n) for n in ("h1", "h2", "h3")), "all three work")
    at = time.time()
    fleet.nodes[0].change_host_key()
    wait_until(lambda: {r.node for _, r in journal(remote, NodeLost)} >= {"h1", "h2"}, "both are given up")
    out = finish_released(fleet, remote, run)
    assert run.returncode == 0, out
    settled(fleet, remote, n, left=("h1", "h2"))
    lost_for(remote, "h1", at, "host key")
    lost_for(remote, "h2", at, "(h1) shows")
    assert {r.node for _, r in journal(remote, NodeLost)} == {"h1", "h2"}
    known = fleet.known_hosts.read_text()
    assert all(x.known_hosts in known for x in fleet.nodes), "nothing was trusted anew"


def test_a_node_that_refuses_the_key_costs_itself_only(fleet: HeavyFleet, remote: Bench) -> None:
    n = remote.shapes(groups=18)
    run = begun(remote, 6, "--lost-after", str(LOST_AFTER), seconds=0.1)
    at = time.time()
    fleet.nodes[2].refuse_keys()
    fleet.nodes[2].drop_connections()
    wait_until(lambda: any(r.node == "h3" for _, r in journal(remote, NodeLost)), "it is given up")
    out = finish_released(fleet, remote, run)
    assert run.returncode == 0, out
    settled(fleet, remote, n, left=("h3",))
    lost_for(remote, "h3", at, "did not let us in")
    assert {r.node for _, r in journal(remote, NodeLost)} == {"h3"}
    checked = remote.run_plain("nodes", "check", "-i", str(remote.inventory), "--json")
    assert checked.code == 3
    assert {x["name"]: x["state"] for x in checked.json()["nodes"]} == {"h1": "ok", "h2": "ok", "h3": "unusable"}


# --- another image under the same name --------------------------------------------------------------------------------

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


def test_images_that_differ_never_mix_silently(fleet: HeavyFleet, remote: Bench, moving_tag: dict[str, str]) -> None:
    """An image that differs is reported before anything starts, and kept with the rows."""
    assert len(set(moving_tag.values())) == 2
    write_inventory(remote, fleet, more=f"  image: {TAG}\n")
    checked = remote.run_plain("nodes", "check", "-i", str(remote.inventory), "--json")
    states = {x["name"]: x for x in checked.json()["nodes"]}
    assert {k: v["state"] for k, v in states.items()} == {"h1": "ok", "h2": "warning", "h3": "ok"}
    (finding,) = states["h2"]["findings"]
    assert finding["about"] == "image"
    assert moving_tag["h2"][:19] in finding["what"]
    n = remote.shapes(groups=9)
    done = remote.tune(seconds=0.2)
    assert done.code == 0, done.out + done.err
    (told,) = {line for line in done.out.splitlines() if line.startswith("note: h2: ")}
    assert moving_tag["h2"][:19] in told
    settled(fleet, remote, n)
    document = json.loads((remote.paths.root / "provenance.json").read_text())
    assert document["images"] == moving_tag
