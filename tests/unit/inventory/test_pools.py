"""Pools of leases in an inventory: what is read, and what each fault is called."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.errors import InventoryError
from orchestrator.inventory.load import load_inventory
from orchestrator.inventory.model import Inventory

SLURM = """\
hosts:
  login1: {host: 198.18.0.9, port: 2222, user: me}
nodes:
  mi355:
    lease: slurm
    via: login1
    count: 1-8
    partition: compute
    account: kernels
    time: 1d4h30m
    gpus: 8
    image: rocm/pytorch:latest
    engine: docker
    extra: ["--constraint=mi355x"]
"""
KUBERNETES = """\
nodes:
  pool:
    lease: kubernetes
    context: lab
    namespace: tuning
    count: 4
    gpus: 8
    image: rocm/pytorch:latest
    pod:
      metadata: {labels: {kueue.x-k8s.io/queue-name: tuning}}
      spec: {tolerations: [{operator: Exists}]}
"""


def load(tmp_path: Path, text: str) -> Inventory:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return load_inventory(path)


def faults(tmp_path: Path, text: str) -> list[str]:
    with pytest.raises(InventoryError) as e:
        load(tmp_path, text)
    return [f.removeprefix(f"{tmp_path}/cluster.yaml:") for f in e.value.faults]


def test_a_pool_on_slurm(tmp_path: Path) -> None:
    node = load(tmp_path, SLURM).nodes["mi355"]
    assert (node.lease, node.count, node.time_s, node.is_here) == ("slurm", (1, 8), 102_600, False)
    assert node.login is not None
    assert (node.via, node.login.host, node.login.port, node.login.user) == ("login1", "198.18.0.9", 2222, "me")
    assert node.extra == ("--constraint=mi355x",)


def test_a_login_node_of_the_ssh_configuration(tmp_path: Path) -> None:
    node = load(tmp_path, "nodes: {a: {lease: slurm, via: cluster}}\n").nodes["a"]
    assert (node.via, node.login, node.count) == ("cluster", None, (1, 1))


def test_a_pool_on_kubernetes(tmp_path: Path) -> None:
    node = load(tmp_path, KUBERNETES).nodes["pool"]
    assert (node.lease, node.count, node.resource, node.engine) == ("kubernetes", (4, 4), "amd.com/gpu", "process")
    assert node.pod["spec"] == {"tolerations": [{"operator": "Exists"}]}


def test_defaults_hold_for_pools(tmp_path: Path) -> None:
    nodes = load(tmp_path, "defaults: {lease: slurm, time: 90m}\nnodes: {a: {}, b: {time: 2h}}\n").nodes
    assert [n.time_s for n in nodes.values()] == [5400, 7200]


@pytest.mark.parametrize(
    ("options", "place", "what"),
    [
        *((f"lease: slurm, count: {n}", ".count", "must be a number of leases such as 4, or a range such as 1-8")
          for n in ("0", "8-1", "0-3", "-1", "1.5", "many", "1-", "5000", "true")),
        *((f"lease: slurm, time: {t}", ".time", "must be a time such as 4h, 90m or 1d12h")
          for t in ("4", "0h", "''", "4 hours", "h", "4:00")),
        ("lease: slurm, time: 4:00:00", ".time", "YAML reads a time with colons as a number, here 14400"),
        ("count: 3", ".count", "add lease: slurm or lease: kubernetes"),
        ("lease: slurm, namespace: x", ".namespace", "is for lease: kubernetes, and this node's is slurm"),
        ("lease: slurm, transport: ssh", ".transport", "name the login node in via:"),
        ("lease: slurm, host: x", ".host", "the options of a login node stand under hosts:"),
        ("lease: slurm, gpus: [0, 1]", ".gpus", "which GPUs a lease has is the scheduler's choice"),
        ("lease: kubernetes, gpus: 1, image: i, partition: x", ".partition", "is for lease: slurm"),
        ("lease: kubernetes, image: i", ".gpus", "a pod needs a number of GPUs"),
        ("lease: kubernetes, gpus: 1", ".image", "a pod needs an image"),
        ("lease: kubernetes, gpus: 1, image: i, engine: docker", ".engine", "a pod is a container already"),
        ("lease: pbs", ".lease", "is not legal (legal: slurm, kubernetes)"),
        ("lease: kubernetes, gpus: 1, image: i", "", "a pool of pods needs a name of small letters, digits and '-'"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit(tmp_path: Path, options: str, place: str, what: str) -> None:
    name = "a" if place else "My_Pool"
    (fault,) = faults(tmp_path, f"nodes:\n  {name}: {{{options}}}\n")
    assert fault.startswith(f"2: nodes.{name}{place}: ")
    assert what in fault
