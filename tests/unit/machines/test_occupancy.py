"""Occupants of a node, the admission of workers to it, and one GPU under two names."""

from __future__ import annotations

import getpass
import os
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.cli.inventory import check_inventory
from orchestrator.controller.prepare import prepare
from orchestrator.controller.request import RunRequest
from orchestrator.errors import InventoryError, LeftOutError
from orchestrator.inventory.load import load_inventory
from orchestrator.inventory.model import Inventory, Node
from orchestrator.machines import node_check
from orchestrator.machines.admission import NodeAdmission
from orchestrator.machines.check_script import ARGV, read_facts, render_script
from orchestrator.machines.facts import Container, Gpu, NodeFacts, load_facts, save_facts
from orchestrator.machines.gpu_names import gpus_with_two_names, refuse_one_gpu_twice
from orchestrator.machines.node_check import check_node, check_nodes
from orchestrator.machines.occupancy import closed_lock_occupant, occupants, occupants_text, what_we_do
from orchestrator.transport.base import Completed
from orchestrator.transport.local import LocalTransport
from tests.standins.sysfs import put, unfold
from worker.protocol import LOCKS_ENV

GPUS = tuple(Gpu("amd", "gfx950", 256, render=f"renderD{128 + 8 * i}", use_pct=0) for i in range(4))


def with_container(*devices: str, run: str = "", slot: str = "") -> NodeFacts:
    there = Container("abc", "c", "img:1", "running", run, "n" if run else "", slot, devices)
    return NodeFacts({}, GPUS, containers=(there,))


def with_gpu(**changes: Any) -> NodeFacts:
    return NodeFacts({}, (GPUS[0], replace(GPUS[1], **changes)))


@pytest.mark.parametrize(
    ("facts", "on_gpus", "on_cores"),
    [
        (with_container(), "", ""),  # a database, an exporter: it only exists
        (with_container("/dev/kfd", "/dev/dri/renderD136"), "container c", ""),
        (with_container("/dev/kfd", "/dev/dri/renderD144"), "", ""),  # of GPU 2, which is not ours
        (with_container("gpu:nvidia"), "container c", ""),
        (with_container("/dev/nvidia1", "/dev/nvidiactl"), "container c", ""),
        (with_container("/dev/kfd", "/dev/dri/renderD128", run="mine", slot="0"), "", ""),
        (with_container("/dev/kfd", "/dev/dri/renderD128", run="other", slot="0"), "container c", "container c"),
        (with_container("/dev/kfd", "/dev/dri", run="other", slot="3"), "", "container c"),
        (with_container("/dev/kfd", run="other", slot="\u00b2"), "container c", "container c"),  # a digit, no number
        (with_gpu(use_pct=20), "GPU 1 is in use (busy 20 %, memory 0 %)", ""),
        (with_gpu(memory_used=10, memory_total=100), "GPU 1 is in use (busy 0 %, memory 10 %)", ""),
        (with_gpu(processes={"41": 3 << 20, "42": 0}), "GPU 1 is held by process 41 (3 MiB)", ""),
        (NodeFacts({}, GPUS, locks={"held": ("mine/n/gpu-0", "their/n/gpu-1", "far/n/gpu-3")}), "their", ""),
        (NodeFacts({}, GPUS, locks={"held": ("cpu/n/cores",)}), "", "cpu"),
    ],
)
def test_who_else_computes_on_our_two_gpus_or_on_the_cores(facts: NodeFacts, on_gpus: str, on_cores: str) -> None:
    for gpus, says in (((0, 1), on_gpus), ((), on_cores)):
        found = occupants(facts, gpus, "mine")
        assert (len(found), says in occupants_text(found)) == (bool(says), True)


def test_processes_on_a_gpu_as_the_script_sees_them(tmp_path: Path) -> None:
    root = unfold("mi355x", tmp_path)
    for number, gpu, held in ((2, 100, "0"), (3, 200, "1048576")):
        put(root / f"sys/class/kfd/kfd/topology/nodes/{number}/gpu_id", str(gpu))
        put(root / f"sys/class/kfd/kfd/proc/4711/vram_{gpu}", held)
    text = render_script(Node(name="n"), brief=True, sysfs=str(root / "sys"))
    facts = read_facts(LocalTransport("n").run(ARGV, stdin=text))
    assert [g.processes for g in facts.gpus] == [{"4711": 0}, {"4711": 1048576}]


def test_a_closed_lock_occupies_its_device_and_nobody_waits_for_it(tmp_path: Path) -> None:
    """Read by the node's own script."""
    folder = tmp_path / "locks"
    (folder / "gpu-1").mkdir(parents=True)
    (folder / "gpu-2").symlink_to("/none")
    (folder / "gpu-0").touch()
    on_node = LocalTransport("n", {**os.environ, LOCKS_ENV: str(folder)})
    facts = read_facts(on_node.run(ARGV, stdin=render_script(Node(name="n"), brief=True)))
    assert occupants(facts, (0, 3), "mine") == ()
    found = occupants(facts, (0, 1, 2), "mine")
    assert [o.id for o in found] == [f"lock {folder}/gpu-1", f"lock {folder}/gpu-2"]
    assert [what_we_do(mode, found) for mode in ("wait", "skip", "share")] == ["skip", "skip", "share"]
    for words in (f"{folder}/gpu-1 of {getpass.getuser()}, mode ", "GEMMFLEET_LOCKS", "--busy share"):
        assert words in occupants_text(found)
    reports: list[tuple[str, str]] = []
    for mode in ("wait", "share"):
        engine: Any = SimpleNamespace(list=list)
        admission = NodeAdmission(
            on_node, engine, mode, render_script(Node(name="n"), brief=True), lambda _: (1,), "mine"
        )
        with pytest.raises(LeftOutError, match="gpu-1") if mode == "wait" else nullcontext():
            admission(threading.Event(), lambda *said: reports.append(said))
    assert [doing for doing, _ in reports] == ["skip", "share"]
    admission.decide(
        (closed_lock_occupant(f"{folder}/gpu-1 of bob (Is a directory)"),), lambda *said: reports.append(said)
    )
    assert len(reports) == 2, "a worker says it again"
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to("/none")
    facts = read_facts(on_node.run(ARGV, stdin=render_script(Node(name="n"), brief=True)))
    assert [o.id for o in occupants(facts, (3,), "mine")] == [f"lock {folder}"]


def gpus(*ids: str) -> NodeFacts:
    values = {"end": "1", "machine": "x86_64", "cores": "8"}
    return NodeFacts(values, tuple(Gpu("amd", "gfx950", 256, id=i) for i in ids))


HOST, PARTS = gpus("0xa1", "0xa2", "0xa3", "0xa4"), gpus("0xa1", "0xa1")


def load(tmp_path: Path, *nodes: str) -> Inventory:
    """An inventory of nodes a, b, ... on hosts of their own, a line each from the third on."""
    lines = "".join(f"  {name}: {{{options}}}\n" for name, options in zip("abc", nodes, strict=False))
    (tmp_path / "inv.yaml").write_text(f"defaults: {{transport: ssh}}\nnodes:\n{lines}")
    (tmp_path / "s.csv").write_text("M,N,K\n16,64,64\n")
    return load_inventory(tmp_path / "inv.yaml")


@pytest.mark.parametrize(
    ("nodes", "facts", "bad"),
    [
        (("", ""), (HOST, HOST), ["b"]),
        (("gpus: [0, 1]", "gpus: [1, 2]"), (HOST, HOST), ["b"]),
        (("gpus: [0, 1]", "gpus: [2, 3]"), (HOST, HOST), []),
        (("", ""), (HOST, gpus("0xb1")), []),
        (("", ""), (gpus("", "0"), gpus("0x0000", "")), []),  # drivers that tell no id
        (("",), (PARTS,), []),  # partitions of one GPU have its id
        (("gpus: [1]", "gpus: [1]"), (PARTS, PARTS), ["b"]),
    ],
)
def test_ids_that_two_nodes_have(
    tmp_path: Path, nodes: tuple[str, ...], facts: tuple[NodeFacts, ...], bad: list[str]
) -> None:
    inventory = load(tmp_path, *nodes)
    assert [node for node, _ in gpus_with_two_names(inventory.nodes, dict(zip("abc", facts, strict=False)))] == bad


def test_it_is_refused_before_a_run_and_shown_by_a_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that say the same GPU are a stand-in for one host under two names; this machine counts as well. What a run
    keeps of its nodes is enough to refuse one that joins."""
    said = b"gpu.0.unique_id=0xa1\ngpu.0.gfx_target_version=90500\npython=3.11.2 x True\nend=1\n"
    monkeypatch.setattr(node_check, "_check", lambda node, runs, keys: check_node(node, Completed(0, said, b""), 0.0))
    inventory = load(tmp_path, "", "transport: local")
    reports = check_nodes(inventory.nodes.values())
    assert [r.state for r in reports] == ["ok", "unusable"]
    with pytest.raises(InventoryError, match="node b: its GPU 0 is GPU 0 of a"):
        prepare(RunRequest(tmp_path / "s.csv", tmp_path / "runs", tmp_path / "inv.yaml", tuner="replay"))
    save_facts(tmp_path, {r.node: r.facts for r in reports})
    with pytest.raises(InventoryError, match=rf"inv.yaml:4: node b: .*drop b or a \({tmp_path}/inv.yaml:3\)"):
        refuse_one_gpu_twice(inventory.nodes, load_facts(tmp_path, inventory.nodes))


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [
        ("transport: local, gpus: [0, 1]", "transport: local, gpus: [1]", "is this machine, too, and both take GPU 1"),
        ("transport: local, gpus: 0", "transport: local, gpus: 0", "both take its cores"),
        ("host: h", "host: H", "a is its host H, too, and both take all its GPUs"),
        ("host: h, port: 23", "host: h, port: 24", ""),  # containers with an sshd each
        ("host: h, proxy_jump: x", "host: h, proxy_jump: y", ""),  # one address in two networks
        ("host: h, gpus: [0]", "host: h, gpus: [1]", ""),
    ],
)  # fmt: skip
def test_one_gpu_under_two_names_of_one_host_is_seen_without_contact(tmp_path: Path, a: str, b: str, says: str) -> None:
    load(tmp_path, a, b)
    path = tmp_path / "inv.yaml"
    if not says:
        check_inventory(path)
        return
    with pytest.raises(InventoryError) as told:
        check_inventory(path)
    (fault,) = told.value.faults
    assert fault.startswith(f"{path}:4: node b: ")
    assert says in fault
    assert f"drop b or a ({path}:3)" in fault
