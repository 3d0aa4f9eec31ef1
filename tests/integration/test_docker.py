"""The engine `docker` on real nodes: real sshd, real dockerd, containers of a real image. The hosts have no Python."""

from __future__ import annotations

import json
import secrets
import shlex
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from orchestrator.engine.docker_containers import DockerEngine
from orchestrator.engine.docker_options import DockerOptions
from orchestrator.errors import EngineError
from orchestrator.image.fixes import UNKNOWN, aiter_lines
from orchestrator.inventory.model import Node
from orchestrator.machines.facts import NodeFacts
from orchestrator.machines.node_files import node_files, node_folders
from orchestrator.machines.node_plan import NodePlan
from orchestrator.transport.base import RemoteFile
from orchestrator.transport.ssh import SshTransport
from tests.integration.heavy import WORKER_IMAGE, HeavyFleet, HeavyNode, why_not
from tests.standins.aiter import make_tree
from tests.waiting import wait_until
from worker.protocol import Spec, SpecShape

pytestmark = [
    pytest.mark.xdist_group("docker"), pytest.mark.system, pytest.mark.skipif(bool(why_not()), reason=why_not()),
]  # fmt: skip
HOSTILE = "a'b\"c $(touch /gemmfleet/hacked) `id` ; # \\ é=="


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HeavyFleet]:
    fleet = HeavyFleet(tmp_path_factory.mktemp("fleet"))
    fleet.start(2, users=("tuner", "nodocker"))
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

    def containers(self, *filters: str) -> list[str]:
        return sorted(self.node.containers(f"label=gemmfleet.run={self.run}", *filters))

    def inspect(self, slot: str = "0") -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.node.sh(f"docker inspect {self.name(slot)}"))[0]
        return found

    def recorded(self, kind: str) -> int:
        """Records of that type of all slots."""
        return int(self.node.sh(f"cat {self.folder}/events/*.jsonl | grep -c '\"{kind}\"' || true"))

    def wait(self, *states: str) -> None:
        wait_until(lambda: [w.state for w in self.engine.list()] == [*states], f"workers are {', '.join(states)}")


@pytest.fixture
def site(fleet: HeavyFleet) -> Iterator[Callable[..., Site]]:
    """Deploys to node number i; whatever it started is removed afterwards."""
    made: list[Site] = []

    def deploy(i: int = 0, slots: tuple[str, ...] = ("0",), **options: Any) -> Site:
        node = fleet.nodes[i]
        if node.user == "nodocker":
            options.setdefault("docker_command", ("sudo", "-n", "docker"))
        docker = DockerOptions(**{"image": WORKER_IMAGE, **options})
        run = f"r{secrets.token_hex(4)}"
        folder = f"/data/{run}"
        transport = SshTransport(node.name, node.name, config=fleet.folder / "ssh_config")
        transport.connect()
        plan = NodePlan(node.name, folder, slots, "ssh", "docker", None, {}, {}, docker=docker)
        transport.put(folder, node_files(plan, run, "replay", {}, 600.0), node_folders(slots))
        transport.put(folder, {"epoch": RemoteFile(b"1\n")})
        engine = DockerEngine(transport, folder, run, slots, docker, limit_s=60.0)
        made.append(Site(node, transport, folder, run, slots, docker, engine))
        return made[-1]

    yield deploy
    for s in made:
        s.node.remove_containers(f"label=gemmfleet.run={s.run}")
        s.node.sh(f"rm -rf {shlex.quote(s.folder)}")
        s.engine.close()
        s.transport.close()


Deploy = Callable[..., Site]


@pytest.mark.parametrize("i", [0, 1], ids=["group docker", "sudo"])
def test_containers_are_started_as_specified(site: Deploy, i: int) -> None:
    s = site(
        i, slots=("0", "1"), devices=("/dev/kfd", "/dev/dri"), group_add=("auto", "7"), cap_add=("SYS_PTRACE",),
        security_opt=("seccomp=unconfined",), shm_size="64m", memory="256m", volumes=("/opt:/opt:ro",),
    )  # fmt: skip
    s.engine.start(env={"PRIVATE": HOSTILE})
    owner = s.node.sh(f"stat -c %u:%g {s.folder}")
    assert owner == {"tuner": "1000:1000", "nodocker": "1001:1001"}[s.node.user]
    for slot in s.slots:
        found = s.inspect(slot)
        config, host = found["Config"], found["HostConfig"]
        assert config["Labels"].pop("gemmfleet.version")
        assert f"PRIVATE={HOSTILE}" in config["Env"]
        wanted: dict[str, Any] = {
            "Labels": {"gemmfleet.run": s.run, "gemmfleet.node": s.node.name, "gemmfleet.slot": slot},
            "User": owner, "Hostname": f"{s.node.name}-{slot}", "WorkingDir": "/gemmfleet",
            "Entrypoint": ["sh"], "Cmd": ["/gemmfleet/tune.sh", "agent", "--slot", slot],
        }  # fmt: skip
        assert {k: config[k] for k in wanted} == wanted
        wanted = {
            "Privileged": False, "Init": True, "AutoRemove": False,
            "RestartPolicy": {"Name": "on-failure", "MaximumRetryCount": 5},
            "LogConfig": {"Type": "local", "Config": {"max-size": "10m", "max-file": "3"}},
            "NetworkMode": "none", "IpcMode": "private", "CapAdd": ["SYS_PTRACE"],
            "SecurityOpt": ["seccomp=unconfined"], "Binds": ["/opt:/opt:ro"],
            "ShmSize": 64 * 2**20, "Memory": 256 * 2**20, "MemorySwap": 256 * 2**20,
        }  # fmt: skip
        assert {k: host[k] for k in wanted} == wanted
        devices = [d["PathOnHost"] for d in host["Devices"]]
        assert sorted(devices) == [f"/dev/dri/renderD{128 + int(slot)}", "/dev/kfd"]
        assert sorted(host["GroupAdd"]) == ["44", "7"]
        assert [(m["Type"], m["Source"], m["Target"]) for m in host["Mounts"]] == [("bind", s.folder, "/gemmfleet")]
    assert [(w.slot, w.state, w.code) for w in s.engine.list()] == [("0", "running", None), ("1", "running", None)]


def test_a_follower_may_not_write_and_ends_with_its_connection(site: Deploy) -> None:
    s = site()
    s.engine.start()
    stream = s.transport.open(["sh", f"{s.folder}/follow.sh", "--from", "{}"])
    assert stream.read(65536)
    (follower,) = s.containers("label=gemmfleet.role=follow")
    assert follower.startswith(f"gemmfleet-{s.run}-h1-follow-")
    assert s.node.exec(["docker", "exec", follower, "sh", "-c", "echo x >/gemmfleet/x"]).returncode != 0
    s.node.drop_connections()
    while stream.read(65536):
        pass
    wait_until(lambda: not s.containers("label=gemmfleet.role=follow"), "the follower is gone")
    s.transport.connect()


def test_out_of_memory_is_recognised_and_restarts_come_to_an_end(site: Deploy) -> None:
    s = site(memory="6m")
    s.engine.start()
    s.wait("ended")
    (state,) = s.engine.list()
    assert (state.oom_killed, state.code, state.signal, s.inspect()["RestartCount"]) == (True, 137, 9, 5)


def test_stop_leaves_evidence_and_a_start_sets_it_aside(site: Deploy) -> None:
    s = site(slots=("0", "1"))
    s.engine.start()
    wait_until(lambda: s.recorded("worker_started") == 2, "both start")
    s.engine.stop()
    s.wait("ended", "ended")
    assert s.recorded("worker_stopped") == 2, "they close their books"
    assert [w.code for w in s.engine.list()] == [0, 0]
    assert s.containers() == [s.name("0"), s.name("1")]
    first = s.inspect()["Id"]
    s.engine.start(["0"])
    s.engine.start(["0"])  # runs already
    assert [w.state for w in s.engine.list()] == ["running", "ended"]
    assert s.containers("label=gemmfleet.slot=0") == [s.name(), f"{s.name()}-ended-{first[:12]}"]
    log = s.node.sh(f"cat {s.folder}/logs/0.log")
    assert "[launch] the container of slot 0 ended: code 0, out of memory: false" in log
    for _ in range(4):
        s.engine.stop(kill=True)
        s.wait("ended", "ended")
        assert s.engine.list()[0].how_it_ended == "killed by SIGKILL"
        s.engine.start(["0"])
    assert len(s.containers("label=gemmfleet.slot=0")) == 1 + 3


def test_a_dead_container_stays_dead_when_its_docker_comes_back(site: Deploy) -> None:
    """Docker itself starts a container with `on-failure` and code 137 again; kept ones are evidence and no workers."""
    s = site()
    s.engine.start()
    s.engine.stop(kill=True)
    s.wait("ended")
    aside = f"{s.name()}-ended-{s.inspect()['Id'][:12]}"
    s.engine.start()
    assert s.node.sh(f"cat {s.folder}/supervisor/0.ended").startswith("137 "), "for the next worker's record"
    s.engine.stop(kill=True)
    s.wait("ended")
    s.node.stop_dockerd()
    s.node.start_dockerd()
    for name in (s.name(), aside):
        state = s.node.sh(f"docker inspect --format '{{{{.State.Status}}}} {{{{.State.ExitCode}}}}' {name}")
        assert state == "exited 137", name


def test_the_aiter_of_an_image_is_read_without_starting_or_pulling_it(fleet: HeavyFleet, tmp_path: Path) -> None:
    node, tree = fleet.nodes[0], make_tree(tmp_path, "runbook").root
    packed = subprocess.run(["tar", "-C", tree.parent, "-c", tree.name], capture_output=True, check=True).stdout
    script = f"id=$(docker create {WORKER_IMAGE} true) && docker cp - $id:/opt && docker commit $id test/fixes:1"
    assert node.exec(["sh", "-c", f"{script} && docker rm $id"], stdin=packed).returncode == 0
    config = str(fleet.folder / "ssh_config")
    nodes = [
        Node(name="h1", transport="ssh", ssh_config=config, engine="docker", image=image, gfx="gfx950", cu_num=256)
        for image in ("test/fixes:1", "test/not-there:1")
    ]
    there = {"h1": NodeFacts({"image": "sha256:1"})}
    needs = (
        "AITER of an unknown version in /opt/aiter needs asm_dir_symlink, tile_column_case, k_trim; applied to a copy"
    )
    assert aiter_lines(nodes[:1], there) == {"h1": needs}
    assert node.containers("ancestor=test/fixes:1") == []
    assert aiter_lines(nodes[1:], {"h1": NodeFacts({"image": "missing"})}) == {"h1": f"AITER: {UNKNOWN}"}


def test_tidy_takes_only_what_is_ours(site: Deploy) -> None:
    s, other = site(slots=("0", "1")), site()
    bystander = f"bystander-{s.run}"
    s.node.sh(f"docker run -d --init --name {bystander} --network none {WORKER_IMAGE} sleep 600")
    try:
        s.engine.start()
        other.engine.start()
        for _ in range(2):
            s.engine.tidy()
        s.wait("absent", "absent")
        other.wait("running")
        assert set(s.node.containers()) >= {bystander, other.name()}
    finally:
        s.node.sh(f"docker rm -f {bystander}")


def test_a_docker_that_stalls_or_restarts_is_reported_and_found_again(site: Deploy) -> None:
    s = site()
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
    s.wait("running")
    assert int(s.node.sh("pgrep -fc '[d]ial-stdio' || true")) <= 2, "each time-out gave its channel back"
    s.node.stop_dockerd()
    for call in (s.engine.list, s.engine.start):
        with pytest.raises(EngineError, match=r"h1: Docker does not run there: start it \(sudo systemctl start doc"):
            call()
    s.node.start_dockerd()
    s.engine.start()
    s.wait("running")


@pytest.mark.parametrize(
    ("i", "options", "says"),
    [
        (0, {"image": "nowhere/none:1", "pull": "never"}, r"h1: the image nowhere/none:1 is not there .*docker load"),
        (1, {"docker_command": ("docker",)}, r"h2: this user may not use Docker: add it to the group of .*sudo, -n"),
        (0, {"docker_command": ("podman-not-here",)}, r"there is no podman-not-here on the node"),
        (0, {"devices": ("/dev/nothing",), "group_add": ("auto",)}, r"a device of .* is not on the node.*/dev/nothing"),
        (0, {"slots": ("2",), "devices": ("/dev/dri",)}, r"GPU 2 has no render node"),
        (1, {"docker_command": ("sudo", "-n", "-u", "tuner", "docker")}, r"asks for a password"),
    ],
)
def test_what_is_missing_is_named_with_the_way_out(site: Deploy, i: int, options: dict[str, Any], says: str) -> None:
    with pytest.raises(EngineError, match=says):
        site(i, **options).engine.start()


def test_a_person_gets_the_same_by_hand(site: Deploy) -> None:
    s = site(slots=("0", "1"), env={"PLAIN": HOSTILE})

    def by_hand(script: str) -> str:
        done = s.transport.run(["sh", "-c", f"cd {s.folder} && {script}"])
        assert done.code == 0, done.text
        return done.out.decode()

    assert by_hand("sh launch.sh list") == "0 absent\n1 absent\n"
    by_hand("bash launch.sh </dev/null")
    assert by_hand("sh launch.sh list") == "0 running\n1 running\n"
    by_hand("sh launch.sh kill 1")
    wait_until(lambda: by_hand("sh launch.sh list 1") == "1 ended 137\n", "slot 1 ends")
    shapes = (SpecShape(1, {"M": 1, "N": 16, "K": 32}),)
    spec = Spec("g0009-1", s.run, 1, group="g9", family="a16w16", tuner="replay", shapes=shapes)
    s.transport.put(s.folder, {"elsewhere/GROUP.json": RemoteFile(spec.dumps())})
    assert "1" in by_hand("cd elsewhere && sh ../tune.sh GROUP.json")
    assert json.loads(by_hand("sh tune.sh probe --json"))["host"] == f"{s.node.name}-0"
    by_hand("sh launch.sh remove")
    assert s.containers() == []
