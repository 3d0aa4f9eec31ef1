"""`--busy` on real nodes: a container of others that holds a GPU's device. What a run does about it: tests/fleet."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from orchestrator.events import AttemptStarted, NodeBusy, NodeJoined, NodeLost, Record
from tests.integration.fleetkit import release
from tests.integration.heavy import WORKER_IMAGE, HeavyFleet, HeavyNode, why_not
from tests.integration.heavy.gpu import a_gpu
from tests.integration.kit import Bench
from tests.support.ledger_kit import per_node
from tests.waiting import PATIENCE_S, wait_until

pytestmark = [
    pytest.mark.xdist_group("busy"),
    pytest.mark.system,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HeavyFleet]:
    fleet = HeavyFleet(tmp_path_factory.mktemp("fleet"))
    fleet.start(2, users=("tuner", "root"))
    (fleet.folder / "ssh_config").write_text(fleet.ssh_config())
    for node in fleet.nodes:
        a_gpu(node)
    yield fleet
    fleet.stop()


@pytest.fixture
def remote(fleet: HeavyFleet, make_bench: Callable[..., Bench]) -> Iterator[Bench]:
    """A bench with two nodes of one GPU each (stand-in devices); h2 has a container of others that only exists."""
    bench = make_bench()
    write_inventory(bench, fleet)
    occupy(fleet.nodes[1], "idler")
    yield bench
    bench.close()
    for node in fleet.nodes:
        node.remove_containers()


def write_inventory(bench: Bench, fleet: HeavyFleet, gpus: str = "[0]", names: tuple[str, ...] = ("h1", "h2")) -> None:
    bench.inventory.write_text(
        f"defaults:\n  tuner: replay\n  transport: ssh\n  engine: docker\n  image: {WORKER_IMAGE}\n"
        f"  ssh_config: {fleet.folder}/ssh_config\n  gpus: {gpus}\n"
        "nodes:\n" + "".join(f"  {n}: {{}}\n" for n in names)
    )


def occupy(node: HeavyNode, name: str, *flags: str) -> None:
    node.sh(f"docker run -d --name {name} --network none {' '.join(flags)} --entrypoint sleep {WORKER_IMAGE} 600")


def told(bench: Bench, kind: type[Record] = NodeBusy) -> list[tuple[float, Any]]:
    with contextlib.suppress(Exception), bench.ledger() as ledger:
        return [(t, r) for t, r in ledger.journal_records() if isinstance(r, kind)]
    return []


def waits(bench: Bench, *nodes: str) -> bool:
    return {r.node for _, r in told(bench) if r.doing == "wait"} == set(nodes)


def status_of(bench: Bench, node: str) -> dict[str, Any]:
    done = bench.run("status", "--json", "--timeout", str(PATIENCE_S))
    return next(x for x in done.json()["nodes"] if x["name"] == node)


def by_node(bench: Bench) -> set[str]:
    with bench.ledger() as ledger:
        return {node for node, (tuned, _) in per_node(ledger).items() if tuned}


def test_wait_until_they_are_done_while_the_others_work(fleet: HeavyFleet, remote: Bench) -> None:
    n = remote.shapes(groups=18)
    node = fleet.nodes[0]
    occupy(node, "theirs", "--device /dev/kfd")
    run = remote.start("tune", *remote.tune_args(faults=[remote.held(3, 18)], seconds=0.1))
    wait_until(
        lambda: (waits(remote, "h1") and remote.tuned() >= 3) or run.poll() is not None, "h2 works while h1 waits"
    )
    h1 = status_of(remote, "h1")
    assert (h1["state"], h1["tuned"]) == ("preparing", 0)
    assert "is occupied and waited for: container theirs" in h1["detail"]
    assert node.containers("label=gemmfleet.run") == []
    node.remove_containers("name=theirs")
    wait_until(lambda: [r for _, r in told(remote, AttemptStarted) if r.node == "h1"], "h1 has work")
    # the inventory says nothing about devices: the container got its GPU, and the group that may open it
    host = json.loads(node.sh(f"docker inspect gemmfleet-{remote.paths.run}-h1-0"))[0]["HostConfig"]
    assert {d["PathOnHost"] for d in host["Devices"]} == {"/dev/kfd", "/dev/dri/renderD128"}
    assert host["GroupAdd"] == [node.sh("stat -c %g /dev/kfd").strip()]
    # its worker has locked the device for all runs of the host
    lock = "/tmp/.gemmfleet-locks/gpu-0"
    assert node.sh(f"flock -n -s 9 9<{lock} || cat {lock}").strip() == f"{remote.paths.run}/h1"
    checked = remote.run_plain("nodes", "check", "-i", str(remote.inventory)).out
    assert "h1, h2: each container gets /dev/kfd, the render node of its slot's GPU (0: renderD128)" in checked
    release(fleet, remote)
    out, _ = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 0, out
    assert "h1 is occupied and waited for: container theirs" in out
    assert "idler" not in out.split("tuned")[-1]
    remote.check_books(tuned=n, failed={})
    assert by_node(remote) == {"h1", "h2"}
    assert [r.doing for _, r in told(remote)] == ["wait", "free"]
    assert told(remote, NodeLost) == []
    (free,) = [t for t, r in told(remote) if r.doing == "free"]
    assert all(t > free for t, r in told(remote, NodeJoined) if r.node == "h1")
    assert fleet.nodes[1].containers() == ["idler"]
    steps = remote.run("explain", "h1", "--json").json()["stories"][0]["steps"]
    (waited,) = [s for s in steps if s["kind"] == "busy"]
    assert "h1 is occupied and waited for: container theirs" in waited["text"]
