"""Occupants of a node, and the admission of workers to it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.controller.facts import ARGV, Container, Gpu, NodeFacts, read_facts, script
from orchestrator.controller.occupancy import NodeAdmission, gpus_of, mode_of, occupants, occupants_text, start_turn
from orchestrator.engines import WorkerState
from orchestrator.errors import LeftOutError
from orchestrator.inventory.model import Node
from orchestrator.transport import Completed, LocalTransport
from orchestrator.transport.local import ProcessChannel
from tests.support.health_kit import put, unfold

GPUS = tuple(Gpu("amd", "gfx950", 256, render=f"renderD{128 + 8 * i}", use_pct=0) for i in range(4))


def container(*devices: str, run: str = "", slot: str = "", name: str = "c") -> Container:
    return Container("abc", name, "img:1", "running", run, "n" if run else "", slot, devices)


def ids(facts: NodeFacts, gpus: Sequence[int] = (0, 1)) -> list[str]:
    return [o.id for o in occupants(facts, gpus, "mine")]


@pytest.mark.parametrize(
    ("there", "gpu_node", "cpu_node"),
    [
        (container(), False, False),  # a database, an exporter: it only exists
        (container("/dev/snd", "/dev/dri/card1"), False, False),
        (container("/dev/kfd", "/dev/dri"), True, False),
        (container("/dev/kfd"), True, False),
        (container("/dev/kfd", "/dev/dri/renderD136"), True, False),
        (container("/dev/kfd", "/dev/dri/renderD144"), False, False),  # of GPU 2, which is not ours
        (container("gpu:nvidia"), True, False),
        (container("/dev/nvidia1", "/dev/nvidiactl"), True, False),
        (container("/dev/nvidia3", "/dev/nvidiactl"), False, False),
        (container("/dev/kfd", "/dev/dri/renderD128", run="mine", slot="0"), False, False),
        (container("/dev/kfd", "/dev/dri/renderD128", run="other", slot="0"), True, True),
        (container("/dev/kfd", "/dev/dri", run="other", slot="3"), False, True),
        (container(run="other", slot="0"), False, True),  # a worker on the cores
        (container(run="other"), False, False),  # the stream's reader
    ],
)
def test_containers(there: Container, gpu_node: bool, cpu_node: bool) -> None:
    facts = NodeFacts({}, GPUS, containers=(there,))
    assert ids(facts) == (["container c"] if gpu_node else [])
    assert ids(facts, ()) == (["container c"] if cpu_node else [])
    if there.run != "mine":  # before there is a run
        assert bool(occupants(facts, (0, 1), "")) is gpu_node


def test_a_render_node_that_cannot_be_placed_counts() -> None:
    """Devices are there, but no topology says whose they are."""
    assert ids(NodeFacts({}, containers=(container("/dev/dri/renderD200"),)), (0,)) == ["container c"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_pct": 20}, "GPU 1 is in use (busy 20 %, memory 0 %)"),
        ({"use_pct": 19}, ""),
        ({"memory_used": 10, "memory_total": 100}, "GPU 1 is in use (busy 0 %, memory 10 %)"),
        ({"memory_used": 9, "memory_total": 100}, ""),
        ({"processes": {"41": 3 << 20, "42": 0}}, "GPU 1 is held by process 41 (3 MiB)"),
        ({"processes": {"42": 0}}, ""),
    ],
)
def test_what_a_gpu_does(changes: dict[str, object], words: str) -> None:
    facts = NodeFacts({}, (GPUS[0], replace(GPUS[1], **changes)))  # type: ignore[arg-type]
    assert occupants_text(occupants(facts, (0, 1), "mine")) == words
    assert occupants_text(occupants(facts, (0,), "mine")) == ""
    assert occupants_text(occupants(facts, (), "mine")) == ""


def test_living_workers_of_other_runs() -> None:
    held = ("mine/n/gpu-0", "their/n/gpu-1", "far/n/gpu-3", "cpu/n/cores", "/gpu-0")
    facts = NodeFacts({}, GPUS, locks={"held": held, "stale": ("old/n/claimed/0/lock",)})
    assert ids(facts) == ["run their", "run "]
    assert ids(facts, ()) == ["run cpu"]


def test_processes_on_a_gpu_as_the_script_sees_them(tmp_path: Path) -> None:
    root = unfold("mi355x", tmp_path)
    for number, gpu in ((2, 100), (3, 200)):
        put(root / f"sys/class/kfd/kfd/topology/nodes/{number}/gpu_id", str(gpu))
    put(root / "sys/class/kfd/kfd/proc/4711/vram_200", "1048576")
    put(root / "sys/class/kfd/kfd/proc/4711/vram_100", "0")
    text = script(Node(name="n"), brief=True, sys=str(root / "sys"))
    facts = read_facts(LocalTransport("n").run(ARGV, stdin=text))
    assert [g.processes for g in facts.gpus] == [{"4711": 0}, {"4711": 1048576}]
    assert "process 4711 (1 MiB)" in occupants_text(occupants(facts, (1,), ""))


def test_what_the_inventory_and_the_command_line_say() -> None:
    assert mode_of(Node(name="n"), None) == "wait"
    assert mode_of(Node(name="n", busy="share"), None) == "share"
    assert mode_of(Node(name="n", busy="share"), "skip") == "skip"
    facts = NodeFacts({}, GPUS)
    assert [gpus_of(Node(name="n", gpus=g), facts) for g in ("auto", 0, 2, (1, 3))] == [
        (0, 1, 2, 3), (), (0, 1), (1, 3),
    ]  # fmt: skip


# --- the gate -----------------------------------------------------------------------------------------------------


class Site(LocalTransport):
    """A node that names one more container with a GPU for each time it is to be busy."""

    def __init__(self, busy: Sequence[str]) -> None:
        super().__init__("n")
        self.busy, self.asked, self.ours = list(busy), 0, False

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float = 60.0) -> Completed:
        self.asked += 1
        name = self.busy.pop(0) if self.busy else ""
        return Completed(
            0, f"check=1\n{f'container=i|/{name}|img|running||||/dev/kfd,' if name else ''}\nend=1\n".encode(), b""
        )

    def open(self, argv: Sequence[str]) -> ProcessChannel:
        return super().open(["echo", "none"])  # it has no locks

    def list(self) -> list[WorkerState]:
        return [WorkerState("0", "running" if self.ours else "absent")]


def gate(site: Site, mode: str) -> NodeAdmission:
    return NodeAdmission(site, site, mode, b"", lambda facts: (0,), "mine", first_s=0.01)  # type: ignore[arg-type]


def test_waiting_ends_when_they_are_done_and_says_only_what_is_new() -> None:
    site, told = Site(["a", "a", "a", "b"]), list[tuple[str, str]]()
    with gate(site, "wait")(threading.Event(), lambda doing, why: told.append((doing, why))):
        pass
    assert site.asked == 5
    assert [d for d, _ in told] == ["wait", "wait", "free"]
    assert [w for _, w in told[:2]] == ["container a (img)", "container b (img)"]


@pytest.mark.parametrize("mode", ["wait", "skip", "share"])
def test_a_free_node_and_one_that_works_for_us_pass_in_silence(mode: str) -> None:
    for site, asked in ((Site([]), 1), (Site(["a"]), 0)):
        site.ours = asked == 0
        told: list[str] = []
        with gate(site, mode)(threading.Event(), lambda doing, why, told=told: told.append(doing)):  # type: ignore[misc]
            assert (told, site.asked) == ([], asked)


def test_skip_and_share() -> None:
    told: list[tuple[str, str]] = []
    gate(Site(["a"]), "share")(threading.Event(), lambda *x: told.append(x))
    with pytest.raises(LeftOutError, match=r"n: left out \(--busy skip\): container a \(img\)"):
        gate(Site(["a"]), "skip")(threading.Event(), lambda *x: told.append(x))
    assert told == [("share", "container a (img)"), ("skip", "container a (img)")]


def test_a_turn_ends_with_its_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def take(seconds: int) -> AbstractContextManager[str]:
        monkeypatch.setattr("orchestrator.controller.occupancy.TURN_S", seconds)
        return start_turn(LocalTransport("n"), str(tmp_path / "lock"))

    with take(0) as first:
        assert first == "ours"
        with take(0) as other:
            assert other == "theirs"
    with take(30) as third:
        assert third == "ours"
