"""One GPU under two names is refused; nothing else is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.cli.fleet import check_inventory
from orchestrator.controller import node_check
from orchestrator.controller.facts import Gpu, NodeFacts, load_facts, read_facts, save_facts
from orchestrator.controller.node_check import check_node, check_nodes
from orchestrator.controller.occupancy import refuse_one_gpu_twice, twice
from orchestrator.controller.prepare import RunRequest, prepare
from orchestrator.errors import InventoryError
from orchestrator.inventory.load import load_inventory
from orchestrator.inventory.model import Inventory
from orchestrator.transport import Completed


def gpus(*ids: str) -> NodeFacts:
    return NodeFacts(
        {"end": "1", "machine": "x86_64", "cores": "8"}, tuple(Gpu("amd", "gfx950", 256, id=i) for i in ids)
    )


HOST = gpus("0xa1", "0xa2", "0xa3", "0xa4")
CLONE = replace(gpus("0xb1", "0xb2"), values={**HOST.values, "machine_id": "1"})


def load(tmp_path: Path, nodes: str) -> Inventory:
    path = tmp_path / "inv.yaml"
    path.write_text(f"defaults: {{transport: ssh}}\nnodes:\n{nodes}")
    return load_inventory(path)


@pytest.mark.parametrize(
    ("nodes", "facts", "bad"),
    [
        ("  a: {}\n  b: {}\n", {"a": HOST, "b": HOST}, ["b"]),
        ("  a: {gpus: [0, 1]}\n  b: {gpus: [1, 2]}\n", {"a": HOST, "b": HOST}, ["b"]),
        ("  a: {gpus: [0, 1]}\n  b: {gpus: [2, 3]}\n", {"a": HOST, "b": HOST}, []),
        ("  a: {gpus: 2}\n  b: {gpus: [2]}\n  c: {gpus: 3}\n", {"a": HOST, "b": HOST, "c": HOST}, ["c", "c"]),
        ("  a: {gpus: 0}\n  b: {gpus: 0}\n", {"a": HOST, "b": HOST}, []),
        ("  a: {}\n  b: {}\n", {"a": gpus(), "b": gpus()}, []),
        ("  a: {}\n  b: {}\n", {"a": HOST, "b": CLONE}, []),
        ("  a: {}\n  b: {}\n", {"a": HOST}, []),
        # a lease shows a GPU of its own, whatever its number; drivers that tell no id tell it as 0, or not at all
        ("  a: {}\n  b: {}\n", {"a": gpus("GPU-1"), "b": gpus("GPU-2")}, []),
        ("  a: {}\n  b: {}\n", {"a": gpus("", "0"), "b": gpus("0x0000", "")}, []),
        # partitions of one GPU have its id
        ("  a: {}\n", {"a": gpus("0xa1", "0xa1")}, []),
        ("  a: {gpus: [0]}\n  b: {gpus: [1]}\n", {"a": gpus("0xa1", "0xa1"), "b": gpus("0xa1", "0xa1")}, []),
        ("  a: {gpus: [1]}\n  b: {gpus: [1]}\n", {"a": gpus("0xa1", "0xa1"), "b": gpus("0xa1", "0xa1")}, ["b"]),
    ],
)
def test_what_is_refused(tmp_path: Path, nodes: str, facts: dict[str, NodeFacts], bad: list[str]) -> None:
    inventory = load(tmp_path, nodes)
    assert [node for node, _ in twice(inventory.nodes, facts)] == bad
    if not bad:
        refuse_one_gpu_twice(inventory.nodes, facts)
        return
    with pytest.raises(InventoryError) as told:
        refuse_one_gpu_twice(inventory.nodes, facts)
    assert told.value.exit_code == 2


def test_the_message_names_nodes_numbers_id_and_the_way_out(tmp_path: Path) -> None:
    inventory = load(tmp_path, "  a: {gpus: [1, 2]}\n  b: {gpus: [1, 2, 3]}\n")
    with pytest.raises(InventoryError) as told:
        refuse_one_gpu_twice(inventory.nodes, {"a": HOST, "b": HOST})
    assert told.value.faults == [
        f"{tmp_path}/inv.yaml:4: node b: its GPU 1 is GPU 1 of a (id 0xa2), and 1 more: two workers there spoil each "
        f"other's times; drop b or a ({tmp_path}/inv.yaml:3), or give each a list of its own in gpus:"
    ]


def test_it_is_refused_before_a_run_and_shown_by_a_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that say the same GPU are a stand-in for one host under two names; this machine counts as well."""
    said = b"gpu.0.unique_id=0xa1\ngpu.0.gfx_target_version=90500\npython=3.11.2 x True\nend=1\n"
    monkeypatch.setattr(node_check, "_check", lambda node, run, keys: check_node(node, Completed(0, said, b""), 0.0))
    inventory = load(tmp_path, "  a: {}\n  here: {transport: local}\n")
    reports = check_nodes(inventory.nodes.values())
    assert [r.state for r in reports] == ["ok", "unusable"]
    (tmp_path / "s.csv").write_text("M,N,K\n16,64,64\n")
    with pytest.raises(InventoryError, match="node here: its GPU 0 is GPU 0 of a"):
        prepare(RunRequest(tmp_path / "s.csv", tmp_path / "runs", tmp_path / "inv.yaml", tuner="replay"))


def test_the_id_of_an_nvidia_gpu_is_its_uuid() -> None:
    line = b"nvidia=0, NVIDIA H100 80GB HBM3, 9.0, 81559, 4, 0, 31, GPU-6f8d9a2b-0001\nend=1\n"
    (gpu,) = read_facts(Completed(0, line, b"")).gpus
    assert (gpu.id, gpu.temperature_c) == ("GPU-6f8d9a2b-0001", {"gpu": 31.0})


def test_what_a_run_keeps_of_its_nodes_is_enough_to_refuse_one_that_joins(tmp_path: Path) -> None:
    inventory = load(tmp_path, "  a: {}\n  b: {}\n")
    save_facts(tmp_path, {"a": HOST, "b": HOST})
    with pytest.raises(InventoryError, match="node b: its GPU 0"):
        refuse_one_gpu_twice(inventory.nodes, load_facts(tmp_path, inventory.nodes))


HERE = "{transport: local, gpus: %s}"


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [
        (HERE % "[0, 1]", HERE % "[1]", "a is this machine, too, and both take GPU 1"),
        (HERE % "2", HERE % "4", "both take GPU 0, 1"),
        (HERE % "auto", HERE % "auto", "both take all its GPUs"),
        (HERE % "auto", HERE % "[3]", "both take GPU 3"),
        (HERE % "0", HERE % "0", "both take its cores"),
        ("{host: h}", "{host: H}", "a is its host H, too, and both take all its GPUs"),
        ("{host: one}", "{host: two}", "a is its host two, too"),  # two names in the SSH configuration
        ("{host: '${env:GF_NOT_SET}'}", "{host: '${env:GF_NOT_SET}'}", "both take all its GPUs"),
        ("{host: localhost, gpus: [0]}", HERE % "[0]", "a is this machine, too"),
        (HERE % "[0]", HERE % "[1]", ""),
        (HERE % "0", HERE % "auto", ""),
        ("{host: h, port: 23}", "{host: h, port: 24}", ""),  # containers with an sshd each
        ("{host: h, proxy_jump: x}", "{host: h, proxy_jump: y}", ""),  # one address in two networks
        ("{host: one}", "{host: three}", ""),
        ("{host: h, gpus: [0]}", "{host: h, gpus: [1]}", ""),
    ],
)
def test_one_gpu_under_two_names_of_one_host_is_seen_without_contact(tmp_path: Path, a: str, b: str, says: str) -> None:
    names = tmp_path / "ssh_config"
    names.write_text("Host one two\n  HostName 10.0.0.1\nHost *\n  Port 22\n")
    path = tmp_path / "inv.yaml"
    path.write_text(f"defaults: {{transport: ssh}}\nnodes:\n  a: {a}\n  b: {b}\n")
    text = path.read_text().replace("{host", f"{{ssh_config: {names}, host")
    path.write_text(text)
    if not says:
        check_inventory(path)
        return
    with pytest.raises(InventoryError) as told:
        check_inventory(path)
    (fault,) = told.value.faults
    assert fault.startswith(f"{path}:4: node b: ")
    assert says in fault
    assert f"drop b or a ({path}:3)" in fault
