"""The engine `docker` on real nodes: real sshd, real dockerd, containers of a real image. The hosts have no Python."""

from __future__ import annotations

import contextlib
import json
import secrets
import shlex
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from orchestrator.controller.messages import Beat, read_frames
from orchestrator.controller.node_plan import NodePlan, node_files, node_folders
from orchestrator.engine.docker import DockerOptions
from orchestrator.engine.docker_containers import DockerEngine
from orchestrator.errors import EngineError
from orchestrator.ledger.ingest import Chunk
from orchestrator.transport import RemoteFile, SshTransport
from tests.integration.heavy import WORKER_IMAGE, HeavyFleet, HeavyNode, why_not
from tests.integration.heavy.registry import registry
from tests.waiting import PATIENCE_S, wait_until
from worker.protocol import Spec, SpecShape

pytestmark = [
    pytest.mark.xdist_group("docker"),
    pytest.mark.system,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]
HOSTILE = "a'b\"c $(touch /gemmfleet/hacked) `id` ; # \\ é=="


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HeavyFleet]:
    fleet = HeavyFleet(tmp_path_factory.mktemp("fleet"))
    fleet.start(2, users=("tuner", "nodocker"))
    (fleet.folder / "ssh_config").write_text(fleet.ssh_config())
    yield fleet
    fleet.stop()


@dataclass
class Site:
    """A deployed node folder and its engine."""

    node: HeavyNode
    transport: SshTransport
    folder: str
    run: str
    slots: tuple[str, ...]
    options: DockerOptions
    engine: DockerEngine

    def name(self, slot: str = "0") -> str:
        return f"gemmfleet-{self.run}-{self.node.name}-{slot}"

    def inspect(self, slot: str = "0") -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.node.sh(f"docker inspect {self.name(slot)}"))[0]
        return found

    @contextlib.contextmanager
    def followed(self) -> Iterator[Followed]:
        channel = self.transport.open(["sh", f"{self.folder}/follow.sh", "--from", "{}"])
        followed = Followed()
        thread = threading.Thread(target=followed.read, args=(channel.read,), daemon=True)
        thread.start()
        try:
            yield followed
        finally:
            channel.close()
            thread.join(10)


class Followed:
    """Content of a stream, in order."""

    def __init__(self) -> None:
        self.bytes: dict[tuple[str, str], bytes] = {}
        self.beats: list[Beat] = []
        self.faults: list[str] = []
        self.ended = threading.Event()

    def read(self, read: Any) -> None:
        for frame in read_frames(read):
            if isinstance(frame, Chunk):
                key = (frame.stream, frame.slot)
                if frame.offset != len(self.bytes.get(key, b"")):
                    self.faults.append(f"{key} at {frame.offset}")
                self.bytes[key] = self.bytes.get(key, b"") + frame.data
            else:
                self.beats.append(frame)
        self.ended.set()

    def records(self, type_: str, slot: str = "0") -> list[dict[str, Any]]:
        lines = self.bytes.get(("E", slot), b"").splitlines()
        return [r for r in map(json.loads, lines) if r["type"] == type_]


@pytest.fixture
def site(fleet: HeavyFleet) -> Iterator[Any]:
    """Deploys to node number i; whatever it started is removed afterwards."""
    made: list[Site] = []

    def deploy(
        i: int = 0, slots: tuple[str, ...] = ("0",), parent: str = "/data", limit_s: float = 60.0, **options: Any
    ) -> Site:
        node = fleet.nodes[i]
        if node.user == "nodocker":
            options.setdefault("docker_command", ("sudo", "-n", "docker"))
        docker = DockerOptions(**{"image": WORKER_IMAGE, **options})
        run = f"r{secrets.token_hex(4)}"
        folder = f"{parent}/{run}"
        transport = SshTransport(node.name, node.name, config=fleet.folder / "ssh_config")
        transport.connect()
        plan = NodePlan(node.name, folder, slots, "ssh", "docker", None, {}, {}, docker=docker)
        transport.put(folder, node_files(plan, run, "replay", {}, 600.0), node_folders(slots))
        transport.put(folder, {"epoch": RemoteFile(b"1\n")})
        engine = DockerEngine(transport, folder, run, slots, docker, limit_s=limit_s)
        made.append(Site(node, transport, folder, run, slots, docker, engine))
        return made[-1]

    yield deploy
    for s in made:
        s.node.remove_containers(f"label=gemmfleet.run={s.run}")
        s.node.sh(f"rm -rf {shlex.quote(s.folder)}")
        s.engine.close()
        s.transport.close()


@pytest.mark.parametrize("i", [0, 1], ids=["group docker", "sudo"])
def test_containers_are_started_as_specified(site: Any, i: int) -> None:
    s: Site = site(
        i, slots=("0", "1"), devices=("/dev/kfd", "/dev/dri"), group_add=("auto", "7"), cap_add=("SYS_PTRACE",),
        security_opt=("seccomp=unconfined",), shm_size="64m", memory="256m", volumes=("/opt:/opt:ro",),
    )  # fmt: skip
    s.engine.start(env={"PRIVATE": HOSTILE})
    owner = s.node.sh(f"stat -c %u:%g {s.folder}")
    assert owner == {"root": "0:0", "tuner": "1000:1000", "nodocker": "1001:1001"}[s.node.user]
    for slot in s.slots:
        found = s.inspect(slot)
        config, host = found["Config"], found["HostConfig"]
        assert {k: v for k, v in config["Labels"].items() if k != "gemmfleet.version"} == {
            "gemmfleet.run": s.run, "gemmfleet.node": s.node.name, "gemmfleet.slot": slot,
        }  # fmt: skip
        assert config["Labels"]["gemmfleet.version"]
        assert config["User"] == owner
        assert config["Hostname"] == f"{s.node.name}-{slot}"
        assert config["WorkingDir"] == "/gemmfleet"
        assert f"PRIVATE={HOSTILE}" in config["Env"]
        assert (config["Entrypoint"], config["Cmd"]) == (["sh"], ["/gemmfleet/tune.sh", "agent", "--slot", slot])
        assert not host["Privileged"]
        assert host["Init"]
        assert not host["AutoRemove"]
        assert host["RestartPolicy"] == {"Name": "on-failure", "MaximumRetryCount": 5}
        assert host["LogConfig"] == {"Type": "local", "Config": {"max-size": "10m", "max-file": "3"}}
        assert (host["NetworkMode"], host["IpcMode"]) == ("none", "private")
        assert host["CapAdd"] == ["SYS_PTRACE"]
        assert host["SecurityOpt"] == ["seccomp=unconfined"]
        assert (host["ShmSize"], host["Memory"], host["MemorySwap"]) == (64 * 2**20, 256 * 2**20, 256 * 2**20)
        devices = [d["PathOnHost"] for d in host["Devices"]]
        assert sorted(devices) == [f"/dev/dri/renderD{128 + int(slot)}", "/dev/kfd"]
        assert sorted(host["GroupAdd"]) == ["44", "7"]
        assert host["Binds"] == ["/opt:/opt:ro"]
        assert [(m["Type"], m["Source"], m["Target"]) for m in host["Mounts"]] == [("bind", s.folder, "/gemmfleet")]
    states = s.engine.list()
    assert [(w.slot, w.state, w.code) for w in states] == [("0", "running", None), ("1", "running", None)]


def test_a_follower_may_not_write_and_ends_with_its_connection(site: Any) -> None:
    s: Site = site()
    s.engine.start()
    mine = ("label=gemmfleet.role=follow", f"label=gemmfleet.run={s.run}")
    with s.followed() as stream:
        wait_until(lambda: stream.beats, "a beat")
        (follower,) = s.node.containers(*mine)
        assert s.node.exec(["docker", "exec", follower, "sh", "-c", "echo x >/gemmfleet/x"]).returncode != 0
        s.node.drop_connections()
        assert stream.ended.wait(PATIENCE_S)
    wait_until(lambda: not s.node.containers(*mine), "the follower is gone")
    s.transport.connect()


def test_out_of_memory_is_recognised_and_restarts_come_to_an_end(site: Any) -> None:
    s: Site = site(memory="6m")
    s.engine.start()
    wait_until(lambda: s.engine.list()[0].state == "ended", "Docker gives it up")
    (state,) = s.engine.list()
    assert (state.oom_killed, state.code, state.signal, s.inspect()["RestartCount"]) == (True, 137, 9, 5)
    assert state.why == "killed by SIGKILL (out of memory)"


def test_stop_leaves_evidence_and_a_start_sets_it_aside(site: Any) -> None:
    s: Site = site(slots=("0", "1"))
    s.engine.start()
    with s.followed() as stream:
        wait_until(lambda: stream.records("worker_started") and stream.records("worker_started", "1"), "both start")
        s.engine.stop()
        wait_until(lambda: {w.state for w in s.engine.list()} == {"ended"}, "both end")
        wait_until(lambda: stream.records("worker_stopped"), "they close their books")
    assert [w.code for w in s.engine.list()] == [0, 0]
    both = [s.name("0"), s.name("1")]
    ours = f"label=gemmfleet.run={s.run}"
    wait_until(lambda: sorted(s.node.containers(ours)) == both, "the stream's own container is gone")
    first = s.inspect()["Id"]
    s.engine.start(["0"])
    s.engine.start(["0"])  # runs already
    assert [w.state for w in s.engine.list()] == ["running", "ended"]
    there = s.node.containers(f"label=gemmfleet.run={s.run}", "label=gemmfleet.slot=0")
    assert sorted(there) == [s.name(), f"{s.name()}-ended-{first[:12]}"]
    assert "[launch] the container of slot 0 ended: code 0, out of memory: false" in s.node.sh(
        f"cat {s.folder}/logs/0.log"
    )
    for _ in range(4):
        s.engine.stop(kill=True)
        wait_until(lambda: s.engine.list()[0].state == "ended", "it ends")
        assert s.engine.list()[0].why == "killed by SIGKILL"
        s.engine.start(["0"])
    assert len(s.node.containers(f"label=gemmfleet.run={s.run}", "label=gemmfleet.slot=0")) == 1 + 3


def test_tidy_takes_only_what_is_ours(site: Any) -> None:
    s, other = site(slots=("0", "1")), site()
    bystander = f"bystander-{s.run}"
    s.node.sh(f"docker run -d --init --name {bystander} --network none {WORKER_IMAGE} sleep 600")
    try:
        s.engine.start()
        other.engine.start()
        for _ in range(2):
            s.engine.tidy()
        assert [w.state for w in s.engine.list()] == ["absent", "absent"]
        assert other.engine.list()[0].state == "running"
        assert set(s.node.containers()) >= {bystander, other.name()}
        other.engine.tidy()
        assert other.engine.list()[0].state == "absent"
    finally:
        s.node.sh(f"docker rm -f {bystander}")


def test_a_stalled_docker_is_told_within_the_limit_and_forgiven(site: Any) -> None:
    s: Site = site()
    s.engine.start()
    impatient = DockerEngine(s.transport, s.folder, s.run, s.slots, s.options, limit_s=1.0)
    s.node.stall_dockerd()
    try:
        for _ in range(2):
            with pytest.raises(EngineError, match=r"h1: Docker does not answer within 1 s"):
                impatient.list()
    finally:
        s.node.unstall_dockerd()
        impatient.close()
    assert s.engine.list()[0].state == "running"
    # each time-out gave its channel back
    running = s.node.sh("pgrep -fc '[d]ial-stdio' || true")
    assert int(running) <= 2


def test_docker_restarted_is_found_again(site: Any) -> None:
    s: Site = site()
    s.engine.start()
    assert s.engine.list()[0].state == "running"
    s.node.stop_dockerd()
    with pytest.raises(EngineError, match=r"h1: Docker does not run there: start it \(sudo systemctl start docker\)"):
        s.engine.list()
    with pytest.raises(EngineError, match="Docker does not run there"):
        s.engine.start()
    s.node.start_dockerd()
    s.engine.start()
    wait_until(lambda: s.engine.list()[0].state == "running", "the worker runs again")


def test_what_is_missing_is_named_with_the_way_out(site: Any) -> None:
    missing: Site = site(image="nowhere/none:1", pull="never")
    with pytest.raises(EngineError, match=r"h1: the image nowhere/none:1 is not there \(pull: never\): .*docker load"):
        missing.engine.start()
    by_hand = missing.transport.run(["sh", f"{missing.folder}/launch.sh"])
    assert by_hand.code != 0
    assert "No such image: nowhere/none:1" in by_hand.text
    with pytest.raises(
        EngineError, match=r"h2: this user may not use Docker: add it to the group of .*sudo, -n, docker"
    ):
        site(1, docker_command=("docker",)).engine.start()
    with pytest.raises(EngineError, match=r"there is no podman-not-here on the node"):
        site(docker_command=("podman-not-here",)).engine.start()
    with pytest.raises(EngineError, match=r"a device of the inventory is not on the node.*/dev/nothing"):
        site(devices=("/dev/nothing",), group_add=("auto",)).engine.start()
    with pytest.raises(EngineError, match=r"GPU 2 has no render node"):
        site(slots=("2",), devices=("/dev/dri",)).engine.start()
    with pytest.raises(EngineError, match=r"sudo: .*asks for a password|asks for a password"):
        site(1, docker_command=("sudo", "-n", "-u", "tuner", "docker")).engine.start()


def test_a_pull_tells_how_it_goes(site: Any, fleet: HeavyFleet) -> None:
    told: list[str] = []
    with registry(fleet.gateway) as image:
        s: Site = site(image=image)
        engine = DockerEngine(s.transport, s.folder, s.run, s.slots, s.options, progress=told.append)
        engine.prepare()
        assert image in s.node.sh("docker image ls --format '{{.Repository}}:{{.Tag}}'")
        assert told[-1] == f"pulled {image}"
        assert told[0].startswith(f"pulling {image}: ")
        wrong = DockerEngine(s.transport, s.folder, s.run, s.slots, replace(s.options, image=image[:-1] + "2"))
        with pytest.raises(EngineError, match=r"the image .*:2 is not there"):
            wrong.prepare()
        wrong.close()
        engine.close()
        s.node.sh(f"docker image rm {image}")


def test_private_values_are_in_no_file_and_on_no_command_line(site: Any, fleet: HeavyFleet) -> None:
    noted = '#!/bin/sh\nprintf "%s " "$@" >>/data/noted.log\nenv >>/data/noted.log\nexec docker "$@"\n'
    node = fleet.nodes[0]
    node.exec(["sh", "-c", "cat >/data/noted && chmod 755 /data/noted"], stdin=noted.encode())
    node.sh("install -m 666 /dev/null /data/noted.log")
    s: Site = site(docker_command=("/data/noted",))
    secret = f"s3cret-{s.run}"
    s.engine.start(env={"TOKEN": secret, "DOCKER_HOST": "tcp://nowhere", "ODD": HOSTILE})
    env = s.node.sh(f'docker exec {s.name()} sh -c \'tr "\\0" "\\n" </proc/1/environ\'')
    assert {f"TOKEN={secret}", "DOCKER_HOST=tcp://nowhere", f"ODD={HOSTILE}"} <= set(env.splitlines())
    assert "--env-file" in s.node.sh("cat /data/noted.log")
    assert s.node.sh(f"grep -rl {secret} /data /home /tmp /root || true") == ""
    assert s.node.sh("ls /gemmfleet 2>/dev/null || true") == ""
    assert "hacked" not in s.node.sh(f"ls {s.folder}")


def test_a_person_gets_the_same_by_hand(site: Any) -> None:
    s: Site = site(slots=("0", "1"), env={"PLAIN": HOSTILE})

    def by_hand(script: str) -> str:
        done = s.transport.run(["sh", "-c", f"cd {s.folder} && {script}"])
        assert done.code == 0, done.text
        return done.out.decode()

    assert by_hand("sh launch.sh list") == "0 absent\n1 absent\n"
    by_hand("bash launch.sh </dev/null")
    assert by_hand("sh launch.sh list") == "0 running\n1 running\n"
    by_hand("sh launch.sh kill 1")
    wait_until(lambda: by_hand("sh launch.sh list 1") == "1 ended 137\n", "slot 1 ends")
    spec = Spec(
        "g0009-1",
        s.run,
        1,
        group="g9",
        family="a16w16",
        tuner="replay",
        shapes=(SpecShape(1, {"M": 1, "N": 16, "K": 32}),),
    )
    s.transport.put(s.folder, {"elsewhere/GROUP.json": RemoteFile(spec.dumps())})
    told = by_hand("cd elsewhere && sh ../tune.sh GROUP.json")
    assert "1" in told
    assert json.loads(by_hand("sh tune.sh probe --json"))["host"] == f"{s.node.name}-0"
    by_hand("sh launch.sh remove")
    assert s.node.containers(f"label=gemmfleet.run={s.run}") == []
