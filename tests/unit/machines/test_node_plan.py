"""From inventory to plans, transports and engines; references resolved only where they are used."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.controller.prepare import prepare
from orchestrator.controller.request import RunRequest
from orchestrator.engine.docker_containers import DockerEngine
from orchestrator.errors import InputError, InventoryError, NoUsableNodeError
from orchestrator.inventory.load import load_inventory
from orchestrator.inventory.model import Inventory
from orchestrator.machines import check_script
from orchestrator.machines.facts import Gpu, NodeFacts, save_facts
from orchestrator.machines.node_check import NodeReport, check_nodes
from orchestrator.machines.node_files import node_files
from orchestrator.machines.node_link import engine_of, transport_of
from orchestrator.machines.node_plan import NodePlan, plan_nodes
from orchestrator.transport.ssh import SshTransport
from tests.kits.worker import node as worker_node
from tests.support.files import write_program
from worker.device import SLOTS_ON_CORES, pin
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
    (out,) = plan_nodes(inventory, RUN, tmp_path / "run", {"n": facts} if facts else {})
    return out


def test_a_remote_node_takes_its_slots_from_what_it_said(tmp_path: Path) -> None:
    docker = "docker: {devices: [/dev/kfd, /dev/dri], group_add: [auto]}"
    p = plan(tmp_path, f"transport: ssh, engine: docker, image: i, {docker}")
    assert (p.slots, p.gfx, p.cu_num, p.python) == (("0", "1", "2", "3"), "gfx950", 256, None)
    assert p.folder == f".gemmfleet/{RUN}/n"  # below the home folder, where commands begin
    # alone in its container, each GPU has the number 0
    assert p.devices["3"] == {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "0", CPUS: "1-9"}
    assert p.docker is not None
    assert (p.docker.image, p.docker.devices, p.docker.network) == ("i", ("/dev/kfd", "/dev/dri"), "none")
    assert isinstance(transport_of(p), SshTransport)
    assert isinstance(engine_of(p, transport_of(p)), DockerEngine)


@pytest.mark.parametrize(
    ("options", "facts", "slots", "chip"),
    [
        ("gpus: [1, 3]", GPUS, ("1", "3"), ("gfx950", 256)),
        ("", CPU, ("0",), ("cpu-x86_64-avx2", 6)),
        ("gpus: 2, gfx: gfx950, cu_num: 256", None, ("0", "1"), ("gfx950", 256)),
    ],
)
def test_slots(
    tmp_path: Path, options: str, facts: NodeFacts | None, slots: tuple[str, ...], chip: tuple[object, ...]
) -> None:
    p = plan(tmp_path, f"transport: ssh, {options}", facts)
    assert (p.slots, (p.gfx, p.cu_num)) == (slots, chip)
    assert [e["HIP_VISIBLE_DEVICES"] for e in p.devices.values()] == ([""] if facts is CPU else list(slots))


@pytest.mark.parametrize(("numa", "cpus"), [("none", [None] * 4), ("[1, 1, 0, 7]", ["1-9", "1-9", "0-9", None])])
def test_numa(tmp_path: Path, numa: str, cpus: list[str | None]) -> None:
    p = plan(tmp_path, f"transport: ssh, gpus: 4, numa: {numa}")
    assert [e.get(CPUS) for e in p.devices.values()] == cpus


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
    (out,) = plan_nodes(load(tmp_path, PRIVATE), RUN, tmp_path / "run", {"n": GPUS})
    return out


def test_no_value_is_in_what_is_kept(private: NodePlan) -> None:
    kept = b"".join(f.data for name, f in node_files(private, RUN, "torch", {}, 1.0).items() if "code/" not in name)
    assert not [v for v in VALUES.values() if v.encode() in kept or v in repr(private)]
    assert b"${env:GF_REGISTRY}/tuner:1" in kept
    assert (b"PLAIN" in kept, b"GF_A" in kept) == (True, False)


def test_a_docker_daemon_here_that_is_down_is_known_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_program(tmp_path / "docker", "#!/bin/sh\necho 'Cannot connect to the Docker daemon' >&2\nexit 1\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "inv.yaml").write_text("nodes:\n  here: {engine: docker, image: 'x:1', gpus: 0}\n")
    (tmp_path / "shapes.csv").write_text("M,N,K\n16,64,64\n")
    request = RunRequest(tmp_path / "shapes.csv", tmp_path / "runs", tmp_path / "inv.yaml", "a16w16", "torch")
    with pytest.raises(NoUsableNodeError, match=r"here: docker does not answer .* start it"):
        prepare(request)


def test_what_this_machine_lacks_for_the_tuner_is_known_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its Python imports only what lies in a folder of ours, and AITER's usual place is ours, too."""
    place, site = tmp_path / "opt/aiter", tmp_path / "site"
    monkeypatch.setattr(check_script, "PLACES", (str(place),))
    python = write_program(tmp_path / "python", f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} -S "$@"\n')
    (tmp_path / "shapes.csv").write_text("M,N,K\n16,64,64\n")

    def prepared(tuner: str, gpus: str = "0", **more: Any) -> NodeReport | None:
        (tmp_path / "inv.yaml").write_text(f"nodes:\n  here: {{python: {python}, gpus: {gpus}}}\n")
        request = RunRequest(tmp_path / "shapes.csv", tmp_path / "runs", tmp_path / "inv.yaml", "a16w16", tuner, **more)
        return next(iter(prepare(request).reports), None)

    def refused(tuner: str, gpus: str = "0") -> str:
        with pytest.raises(NoUsableNodeError) as told:
            prepared(tuner, gpus)
        return str(told.value)

    (site / "aiter").mkdir(parents=True)  # without __init__.py: no package
    for tuner in ("aiter", "aiter-triton"):
        assert refused(tuner).count("here: there is no AITER: ") == 1
        assert "name its folder, `aiter: {root: PATH}`, or a Python" in refused(tuner)
        assert prepared(tuner, options={"root": str(place)})
    assert "gpus: [4000], but " in refused("torch", "[4000]")
    assert prepared("replay", "[4000]") is None, "it needs no device"
    report = prepared("torch")
    assert report is not None
    assert (report.state, report.facts.values["workdir"]) == ("ok", str(tmp_path / "runs")), (
        "it works in the run's folder"
    )
    (site / "aiter" / "__init__.py").touch()
    assert prepared("aiter")
    shutil.rmtree(site)
    (place / "aiter" / "jit").mkdir(parents=True)
    (place / "aiter" / "jit" / "core.py").touch()
    assert prepared("aiter")
    assert not (tmp_path / "runs").exists()


def test_mistakes_of_the_user_are_told_before_any_node_is_contacted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GF_NONE", raising=False)
    text = "nodes:\n  here: {env: {TOKEN: '${env:GF_NONE}'}}\n  far: {transport: ssh, host: '${env:GF_NONE}'}\n"
    inventory = load(tmp_path, text)
    (tmp_path / "shapes.csv").write_text("M,N,K\n16,64,64\n")
    request = RunRequest(tmp_path / "shapes.csv", tmp_path / "runs", tmp_path / "inv.yaml", tuner="torch")
    heard: list[object] = []
    for ask in (lambda: check_nodes(inventory.nodes.values(), answered=heard.append), lambda: prepare(request)):
        with pytest.raises(InventoryError) as told:
            ask()
        assert told.value.faults == [
            f"{tmp_path}/inv.yaml:{line}: node {node}: {path} refers to ${{env:GF_NONE}}, and GF_NONE is not set here:"
            " export GF_NONE=... and try again"
            for line, node, path in ((2, "here", "env.TOKEN"), (3, "far", "host"))
        ]
    monkeypatch.setenv("GF_NONE", "x")
    with pytest.raises(InputError, match="the tuner torch does not tune family a8w8_blockscale; it tunes a16w16, a8w8"):
        prepare(replace(request, family="a8w8_blockscale"))
    assert heard == []


def test_a_plan_reads_what_the_run_kept(tmp_path: Path) -> None:
    inventory = load(tmp_path, "nodes: {a: {transport: ssh}, b: {transport: ssh}, c: {transport: ssh}}")
    save_facts(tmp_path, {"a": GPUS, "b": replace(CPU, values={})})
    (tmp_path / "nodes/c").mkdir()
    (tmp_path / "nodes/c/facts.json").write_text('{"values": {}, "gpus": [{"x": 1}], "cpu_flags": []}')
    assert [p.slots for p in plan_nodes(inventory, RUN, tmp_path)] == [("0", "1", "2", "3"), (), ()]
    assert oct((tmp_path / "nodes/a").stat().st_mode)[-3:] == "700"


def test_a_worker_runs_on_its_slots_cores(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    assert [pin(text) for text in ("x", "2-1", "0-999999999", "1,,2")] == [0] * 4, "no list of cores"
    assert os.sched_getaffinity(0) == before
    with worker_node(tmp_path) as n:
        config = json.loads(n.paths.config.read_text())
        config["slots"] = {key: {CPUS: f"{max(before)},60000"} for key in ("0", "1")}
        n.paths.config.write_text(json.dumps(config))
        n.put("g1-1")
        agent = n.start()
        n.wait_record("worker_started")
        assert os.sched_getaffinity(agent.pid) == {max(before)}
        n.wait_record("attempt_ended")
        (tuner,) = n.tuner_pids()
        assert f"{SLOTS_ON_CORES}=2".encode() in Path(f"/proc/{tuner}/environ").read_bytes().split(b"\0")
