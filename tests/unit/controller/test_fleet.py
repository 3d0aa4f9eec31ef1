"""From inventory to plans, transports and engines; references resolved only where they are used."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.controller import node_plan
from orchestrator.controller.deploy import NodePlan, node_files
from orchestrator.controller.facts import Gpu, NodeFacts, load_facts, save_facts
from orchestrator.controller.node_check import check_nodes
from orchestrator.controller.prepare import RunRequest, prepare
from orchestrator.engine.docker import engine_error
from orchestrator.engine.docker_containers import DockerEngine
from orchestrator.engine.process import ProcessEngine
from orchestrator.errors import InventoryError
from orchestrator.inventory.load import load_inventory
from orchestrator.inventory.model import Inventory
from orchestrator.inventory.values import masker
from orchestrator.transport import LocalTransport
from orchestrator.transport.ssh import SshTransport
from tests.support.workernode import node as worker_node
from worker.device import SLOTS_ON_CORES, cores_of, own_cores, pin, slots_on_cores
from worker.protocol import CPUS

RUN = "20260101-000000-abcd"
GPUS = NodeFacts(
    {"end": "1", "machine": "x86_64", "cores": "128"},
    tuple(Gpu("amd", "gfx950", 256, render=f"renderD{128 + 8 * i}", numa=i // 2, cpus=f"{i // 2}-9") for i in range(4)),
)
CPU = NodeFacts({"end": "1", "machine": "x86_64", "cores": "6"}, cpu_flags=("avx2",))


def load(tmp_path: Path, text: str) -> Inventory:
    path = tmp_path / "inv.yaml"
    path.write_text(text)
    return load_inventory(path)


def plan(tmp_path: Path, options: str, facts: NodeFacts | None = GPUS) -> NodePlan:
    inventory = load(tmp_path, f"nodes:\n  n: {{{options}}}\n")
    (out,) = node_plan.plan_nodes(inventory, RUN, tmp_path / "run", {"n": facts} if facts else {})
    return out


DOCKER = "transport: ssh, engine: docker, image: i"


def test_this_machine_with_processes(tmp_path: Path) -> None:
    p = plan(tmp_path, "gpus: 0, env: {A: b}", None)
    assert (p.slots, p.transport, p.engine, p.docker) == (("0",), "local", "process", None)
    assert p.folder == str(tmp_path / "run/work/n")
    assert p.env == {"A": "b"}
    assert p.devices == {"0": {"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": ""}}
    assert p.gfx
    assert p.cu_num
    assert isinstance(node_plan.transport_of(p), LocalTransport)
    assert isinstance(node_plan.engine_of(p, node_plan.transport_of(p)), ProcessEngine)


def test_a_remote_node_takes_its_slots_from_what_it_said(tmp_path: Path) -> None:
    p = plan(tmp_path, f"{DOCKER}, docker: {{devices: [/dev/kfd, /dev/dri], group_add: [auto]}}")
    assert (p.slots, p.gfx, p.cu_num) == (("0", "1", "2", "3"), "gfx950", 256)
    assert p.folder == f".gemmfleet/{RUN}/n"  # below the home folder, where commands begin
    assert p.python is None
    # alone in its container, each GPU has the number 0
    assert p.devices["3"] == {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "0", CPUS: "1-9"}
    assert p.docker is not None
    assert (p.docker.image, p.docker.devices, p.docker.network) == ("i", ("/dev/kfd", "/dev/dri"), "none")
    assert isinstance(node_plan.transport_of(p), SshTransport)
    assert isinstance(node_plan.engine_of(p, node_plan.transport_of(p)), DockerEngine)


def test_without_devices_of_its_own_a_slot_sees_its_number(tmp_path: Path) -> None:
    p = plan(tmp_path, f"{DOCKER}, gpus: [1, 3], docker: {{devices: ['/dev/dri:/dev/dri']}}")
    assert p.slots == ("1", "3")
    assert [e["HIP_VISIBLE_DEVICES"] for e in p.devices.values()] == ["1", "3"]


def test_a_remote_node_without_gpus_is_one_slot(tmp_path: Path) -> None:
    p = plan(tmp_path, "transport: ssh", CPU)
    assert (p.slots, p.gfx, p.cu_num, CPUS in p.devices["0"]) == (("0",), "cpu-x86_64-avx2", 6, False)


def test_a_remote_node_that_said_nothing(tmp_path: Path) -> None:
    assert plan(tmp_path, "transport: ssh", None).slots == ()
    p = plan(tmp_path, "transport: ssh, gpus: 2, gfx: gfx950, cu_num: 256", None)
    assert (p.slots, p.gfx, p.cu_num) == (("0", "1"), "gfx950", 256)


@pytest.mark.parametrize(
    ("numa", "cpus"),
    [("auto", ["0-9", "0-9", "1-9", "1-9"]), ("none", [None] * 4), ("[1, 1, 0, 7]", ["1-9", "1-9", "0-9", None])],
)
def test_numa(tmp_path: Path, numa: str, cpus: list[str | None]) -> None:
    p = plan(tmp_path, f"transport: ssh, gpus: 4, numa: {numa}")
    assert [e.get(CPUS) for e in p.devices.values()] == cpus


@pytest.mark.parametrize(
    ("workdir", "folder"),
    [("/scratch/x/", f"/scratch/x/{RUN}/n"), ("~/g", f"g/{RUN}/n"), ("'${env:GF_DIR}/y'", f"/mnt/y/{RUN}/n")],
)
def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workdir: str, folder: str) -> None:
    monkeypatch.setenv("GF_DIR", "/mnt")
    assert plan(tmp_path, f"transport: ssh, workdir: {workdir}").folder == folder


PRIVATE = """\
nodes:
  n:
    transport: ssh
    engine: docker
    host: ${env:GF_HOST}
    user: ${env:GF_USER}
    image: ${env:GF_REGISTRY}/tuner:1
    gpus: 1
    results: /mnt/${env:GF_USER}
    env: {PLAIN: "1", GF_A: "${env:GF_SECRET}"}
    docker: {volumes: ["/data/${env:GF_USER}:/data"], env: {GF_B: "x-${env:GF_SECRET}", ALSO: "2"}}
"""
VALUES = {"GF_HOST": "host-v.example.com", "GF_USER": "user-v", "GF_REGISTRY": "registry-v", "GF_SECRET": "secret v"}


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NodePlan:
    for name, value in VALUES.items():
        monkeypatch.setenv(name, value)
    (out,) = node_plan.plan_nodes(load(tmp_path, PRIVATE), RUN, tmp_path / "run", {"n": GPUS})
    return out


def test_no_value_is_in_what_is_kept(private: NodePlan) -> None:
    kept = b"".join(f.data for name, f in node_files(private, RUN, "torch", {}, 1.0).items() if "code/" not in name)
    assert not [v for v in VALUES.values() if v.encode() in kept]
    assert b"${env:GF_REGISTRY}/tuner:1" in kept
    assert b"PLAIN" in kept
    assert b"GF_A" not in kept


def test_image_and_mounts_are_resolved_for_the_engine_alone(private: NodePlan) -> None:
    engine = node_plan.engine_of(private, node_plan.transport_of(private))
    assert isinstance(engine, DockerEngine)
    options = engine._options
    assert options.private_lines() == [
        "GEMMFLEET_PRIVATE_IMAGE=registry-v/tuner:1",
        "GEMMFLEET_PRIVATE_VOLUME=/data/user-v:/data",
        "GEMMFLEET_PRIVATE_VOLUME=/mnt/user-v:/mnt/user-v",
    ]
    assert not [v for v in VALUES.values() if v in repr(private)]
    said = str(engine_error("n", options, "No such image: registry-v/tuner:1"))
    assert "the image ${env:GF_REGISTRY}/tuner:1 is not there" in said


def test_messages_that_are_kept_have_the_references_back(private: NodePlan) -> None:
    mask = masker(node_plan.node_of(private).options())
    said = "user-v@host-v.example.com:22 refused; registry-v/tuner:1 for user-v; xuser-vx stays, and so does secret"
    assert mask(said) == (
        "${env:GF_USER}@${env:GF_HOST}:22 refused; ${env:GF_REGISTRY}/tuner:1 for ${env:GF_USER}; xuser-vx stays,"
        " and so does secret"
    )
    assert masker({"a": "plain"})(said) == said


def test_private_values_are_for_the_start_alone(private: NodePlan) -> None:
    assert private.env == {"PLAIN": "1", "ALSO": "2"}
    assert node_plan.private_env(private) == {
        "GF_A": "secret v", "GF_B": "x-secret v", "GEMMFLEET_RESULTS": f"/mnt/user-v/{RUN}/n",
    }  # fmt: skip


def test_a_variable_that_is_missing_when_it_is_used(private: NodePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GF_SECRET")
    with pytest.raises(InventoryError, match=r"inv.yaml:10: node n: env.GF_A refers to \$\{env:GF_SECRET\}"):
        node_plan.private_env(private)
    with pytest.raises(InventoryError, match="GF_SECRET is not set here"):
        node_plan.transport_of(private)


# --- asking -------------------------------------------------------------------------------------------------------


def test_nodes_are_asked_and_what_a_plan_needs_is_kept(tmp_path: Path) -> None:
    inventory = load(
        tmp_path, f"nodes:\n  here: {{workdir: {tmp_path}/w}}\n  gone: {{transport: ssh, host: 127.0.0.1, port: 1}}\n"
    )
    heard: list[str] = []
    reports = check_nodes(inventory.nodes.values(), answered=lambda r: heard.append(r.node))
    assert sorted(heard) == ["gone", "here"]
    here, gone = reports
    assert here.usable
    assert (gone.state, gone.findings[0].about) == ("unusable", "ssh")
    save_facts(tmp_path / "run", {r.node: r.facts for r in reports})
    assert sorted(p.name for p in (tmp_path / "run/nodes").iterdir()) == ["here"]
    kept = load_facts(tmp_path / "run", inventory.nodes)
    assert (kept["here"].gfx, kept["here"].cu_num) == (here.facts.gfx, here.facts.cu_num)


def test_variables_that_are_not_set_are_the_users_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults of all nodes are raised at once, and before any is contacted."""
    monkeypatch.delenv("GF_NONE", raising=False)
    text = "nodes:\n  here: {env: {TOKEN: '${env:GF_NONE}'}}\n  far: {transport: ssh, host: '${env:GF_NONE}'}\n"
    inventory = load(tmp_path, text)
    (tmp_path / "shapes.csv").write_text("M,N,K\n16,64,64\n")
    heard: list[object] = []
    asked = RunRequest(tmp_path / "shapes.csv", tmp_path / "runs", tmp_path / "inv.yaml", tuner="replay")
    for ask in (lambda: check_nodes(inventory.nodes.values(), answered=heard.append), lambda: prepare(asked)):
        with pytest.raises(InventoryError) as told:
            ask()
        assert told.value.exit_code == 2
        assert told.value.faults == [
            f"{tmp_path}/inv.yaml:{line}: node {node}: {path} refers to ${{env:GF_NONE}}, and GF_NONE is not set here:"
            " export GF_NONE=... and try again"
            for line, node, path in ((2, "here", "env.TOKEN"), (3, "far", "host"))
        ]
    assert heard == []


def test_a_plan_reads_what_the_run_kept(tmp_path: Path) -> None:
    inventory = load(tmp_path, "nodes: {a: {transport: ssh}, b: {transport: ssh}, c: {transport: ssh}}")
    save_facts(tmp_path, {"a": GPUS, "b": replace(CPU, values={})})
    (tmp_path / "nodes/c").mkdir()
    (tmp_path / "nodes/c/facts.json").write_text('{"values": {}, "gpus": [{"x": 1}], "cpu_flags": []}')
    a, b, c = node_plan.plan_nodes(inventory, RUN, tmp_path)
    assert (a.slots, b.slots, c.slots) == (("0", "1", "2", "3"), (), ())
    assert oct((tmp_path / "nodes/a").stat().st_mode)[-3:] == "700"
    assert json.loads((tmp_path / "nodes/a/facts.json").read_text())["gpus"][2]["cpus"] == "1-9"


# --- the worker's cores -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "x", "2-1", "-1", "0-999999999", "1,,2", "1;2"])
def test_what_is_no_core_list_changes_nothing(text: str) -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(ValueError, match=r".*"):
        cores_of(text)
    assert pin(text) == 0
    assert os.sched_getaffinity(0) == before


def test_a_worker_runs_on_its_slots_cores(tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))
    with worker_node(tmp_path) as n:
        config = json.loads(n.paths.config.read_text())
        config["slots"] = {key: {CPUS: f"{core},60000"} for key in ("0", "1")}
        n.paths.config.write_text(json.dumps(config))
        n.put("g1-1")
        agent = n.start()
        n.wait_record("worker_started")
        assert os.sched_getaffinity(agent.pid) == {core}
        n.wait_record("attempt_ended")
        (tuner,) = n.tuner_pids()
        assert f"{SLOTS_ON_CORES}=2".encode() in Path(f"/proc/{tuner}/environ").read_bytes().split(b"\0")


def test_slots_on_the_same_cores_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = {"0": {CPUS: "0-7"}, "1": {CPUS: "0-7"}, "2": {CPUS: "8-15"}, "3": {}}
    assert [slots_on_cores(slots, s) for s in slots] == [2, 2, 1, 1]
    assert slots_on_cores({}, "0") == 1
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(9)))
    for told, cores in (("2", 4), ("1", 9), ("20", 1), ("", 9), ("0", 9), ("x", 9)):
        monkeypatch.setenv(SLOTS_ON_CORES, told)
        assert own_cores() == cores
