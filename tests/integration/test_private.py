"""References to the environment: on a real node image and mounts reach Docker, and no file here or there."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.heavy import WORKER_IMAGE, HeavyFleet, HeavyNode
from tests.integration.heavy.bench import NodesBench, on_nodes

pytestmark = on_nodes("private")
IMAGE, MOUNT, SECRET = "private-registry/private-worker:7", "/opt/private mount", "private value"
RESULTS = "/data/private results"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HeavyFleet]:
    fleet = HeavyFleet(tmp_path_factory.mktemp("fleet"))
    (node,) = fleet.start(1, users=("tuner",))
    node.sh(f"docker tag {WORKER_IMAGE} {IMAGE} && mkdir -p '{MOUNT}' && echo there >'{MOUNT}/file'")
    yield fleet
    fleet.stop()


@pytest.fixture
def remote(fleet: HeavyFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodesBench]:
    bench = NodesBench(tmp_path, fleet)
    for name, value in (("GF_IMAGE", IMAGE), ("GF_MOUNT", MOUNT), ("GF_SECRET", SECRET), ("GF_RESULTS", RESULTS)):
        monkeypatch.setenv(name, value)
    bench.inventory.write_text(
        "defaults:\n  tuner: replay\n  transport: ssh\n  engine: docker\n  image: ${env:GF_IMAGE}\n"
        f"  ssh_config: {fleet.folder}/ssh_config\n  gpus: 0\n  env: {{GIVEN: '${{env:GF_SECRET}}'}}\n"
        "  results: '${env:GF_RESULTS}/r'\n"
        "  docker: {pull: never, volumes: ['${env:GF_MOUNT}:/given:ro', '/opt:/plain']}\nnodes:\n  h1: {}\n"
    )
    yield bench
    bench.close()


def told(folder: str, node: HeavyNode | None = None) -> str:
    """Files below a folder, here or on the node, that hold one of the values."""
    argv = ["grep", "-rlaE", "private-registry|private mount|private value|private results", folder]
    done = node.exec(argv) if node else subprocess.run(argv, capture_output=True)
    return done.stdout.decode()


def test_the_values_reach_docker_and_no_file(fleet: HeavyFleet, remote: NodesBench) -> None:
    (node,) = fleet.nodes
    n = remote.shapes(groups=16)
    run = remote.begun(2)
    name = f"gemmfleet-{remote.paths.run}-h1-0"
    folder = f"/home/tuner/.gemmfleet/{remote.paths.run}/h1"
    assert told(folder, node) == told(str(remote.paths.root)) == ""
    for path in (f"{folder}/launch.sh", f"{folder}/container.sh"):
        kept = (remote.paths.node("h1") / path.rsplit("/", 1)[-1]).read_text()
        assert node.sh(f"cat {path}") == kept.strip()  # the run's folder has the deployed file
    assert "${env:GF_IMAGE}" in node.sh(f"cat {folder}/container.sh")
    assert node.sh(f"docker inspect -f '{{{{.Config.Image}}}}' {name}") == IMAGE
    assert node.sh(
        f"docker exec {name} sh -c 'cat /given/file; echo $GIVEN; env | grep -c GEMMFLEET_PRIVATE'; true"
    ) == (f"there\n{SECRET}\n0")
    node.kill_worker(name)  # Docker starts it again, without anybody telling it anything
    node.sh(f"docker inspect -f '{{{{.RestartCount}}}}' {name}")
    # a person on the node needs no value either
    by_hand = node.sh(f"cd {folder} && sh tune.sh probe </dev/null && sh launch.sh start </dev/null", user="tuner")
    assert "gfx" in by_hand
    remote.release()
    assert "private" not in remote.finish(run)
    remote.check_books(tuned=n, failed={})
    assert told(str(remote.paths.root)) == ""
    # the node's rows stay there, and belong to who logged in
    kept = f"'{RESULTS}/r/{remote.paths.run}/h1'"
    assert node.sh(f"stat -c '%U %a' {kept} {kept}/events/0.jsonl") == "tuner 700\ntuner 600"
    assert node.sh(f"cmp {kept}/events/0.jsonl {folder}/events/0.jsonl && ls {kept}") == "events\nlogs"
    assert int(node.sh(f"grep -c tuned {kept}/events/0.jsonl")) >= n
