"""A fresh bench a test, whose processes are gone afterwards; and three real nodes for all tests of a session."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.integration.heavy import HeavyFleet
from tests.integration.heavy.bench import NAMES, USERS, NodesBench, mend
from tests.integration.slurm import SlurmCluster, missing, slurm_cluster
from tests.kits.fleet import Bench
from tests.support.kube import Cluster


@pytest.fixture
def make_bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(slots: int = 2) -> Bench:
        made.append(Bench(tmp_path, slots))
        return made[-1]

    yield make
    for b in made:
        b.close()


@pytest.fixture
def bench(make_bench: Callable[..., Bench]) -> Bench:
    return make_bench()


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HeavyFleet]:
    """Three nodes, each with its own sshd, dockerd and address; to be left as they were found (see `remote`)."""
    fleet = HeavyFleet(tmp_path_factory.mktemp("fleet"))
    fleet.start(len(NAMES), users=USERS)
    yield fleet
    fleet.stop()


@pytest.fixture
def remote(fleet: HeavyFleet, tmp_path: Path) -> Iterator[NodesBench]:
    """A bench whose inventory is the fleet: a slot a node. The nodes are mended afterwards."""
    bench = NodesBench(tmp_path, fleet)
    yield bench
    bench.close()
    with ThreadPoolExecutor(len(fleet.nodes)) as pool:
        list(pool.map(mend, fleet.nodes))


@pytest.fixture(scope="session")
def slurm_nodes() -> Iterator[SlurmCluster]:
    """A real Slurm with three nodes g1 to g3; to be left as it was found (see `slurm`)."""
    if why := missing():
        pytest.skip(why)
    with slurm_cluster() as cluster:
        yield cluster


@pytest.fixture
def slurm(slurm_nodes: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    """The cluster, idle, as our environment finds it. It is mended afterwards."""
    for name, value in slurm_nodes.environment.items():
        monkeypatch.setenv(name, f"{value}:{os.environ['PATH']}" if name == "PATH" else value)
    yield slurm_nodes
    slurm_nodes.mend()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A real Kubernetes control plane with two nodes k1 and k2 of two GPUs each; to be left as it was found."""
    with Cluster(tmp_path_factory.mktemp("kube"), nodes=2, gpus=2) as cluster:
        yield cluster
