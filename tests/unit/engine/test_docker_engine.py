"""The parts of the engine `docker` that need no Docker: options, scripts, states, errors, progress."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.controller.node_plan import NodePlan, node_files
from orchestrator.engine.docker import DockerOptions, engine_error
from orchestrator.engine.docker_containers import Docker, follow_pull, worker_state
from orchestrator.engines import WorkerState
from orchestrator.errors import EngineError
from orchestrator.transport import LocalTransport
from tests.waiting import PATIENCE_S

HOSTILE = "a'b\"c $(touch hacked) `id` ; rm -rf / \\ é"
PLAIN = DockerOptions("rocm/image:1")
FULL = DockerOptions(
    "registry:5000/a/b@sha256:" + "0" * 64, devices=("/dev/kfd", "/dev/dri", HOSTILE), group_add=("auto", "video"),
    cap_add=("SYS_PTRACE", HOSTILE), security_opt=("seccomp=unconfined",), shm_size="16G", ipc="host", network="host",
    volumes=(f"/x {HOSTILE}:/x",), env={"A": HOSTILE}, pull="never", docker_command=("sudo", "-n", "docker"),
    user="1:2", memory="1g",
)  # fmt: skip


def scripts(
    folder: Path, options: DockerOptions, slots: tuple[str, ...] = ("0", "1"), *, gpus: bool = False
) -> list[Path]:
    devices = {slot: {"HIP_VISIBLE_DEVICES": "0" if gpus else ""} for slot in slots}
    plan = NodePlan("n-1", str(folder), slots, "ssh", "docker", None, {"B": HOSTILE}, devices, docker=options)
    out = []
    for name, file in node_files(plan, "run-1", "torch", {}, 60.0).items():
        if name.endswith(".sh"):
            out.append(folder / name)
            out[-1].write_bytes(file.data)
    return out


PRIVATE = replace(FULL, image="${env:GF_REGISTRY}/i:1", volumes=("/x/${env:GF_USER}:/x", "/y:/y"))


@pytest.mark.parametrize("gpus", [False, True], ids=["cpu", "gpus"])
@pytest.mark.parametrize("options", [PLAIN, FULL, PRIVATE], ids=["plain", "full", "private"])
def test_scripts_pass_the_shell_and_shellcheck(tmp_path: Path, options: DockerOptions, gpus: bool) -> None:
    found = scripts(tmp_path, options, gpus=gpus)
    assert {p.name for p in found} == {"launch.sh", "tune.sh", "follow.sh", "container.sh"}
    for path in found:
        for shell in ("sh", "bash"):
            subprocess.run([shell, "-n", path], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed (SYSTEM=1 installs it)")
    done = subprocess.run(["shellcheck", "-x", "-S", "warning", *found], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout


def run_argv(
    folder: Path,
    options: DockerOptions,
    slot: str,
    sys: Path | None = None,
    *,
    gpus: bool = False,
    nvidia: bool = False,
) -> list[str]:
    """Arguments of `docker run`, from a stand-in that prints them; the group of a device is its path. Raises
    CalledProcessError."""
    stand_in = Path(tempfile.mkdtemp()) / "docker"  # a folder's own colon would end an entry of PATH
    stand_in.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
    stand_in.chmod(0o755)
    if nvidia:
        (stand_in.parent / "nvidia-smi").symlink_to("/bin/true")
    scripts(folder, options, ("0", "1", "10"), gpus=gpus)
    group = 'group_of() { echo "--group-add=$1"; }' if sys else ":"
    done = subprocess.run(
        ["sh", "-c", f'. ./container.sh; {group}; container "$1" --rm "$image" x', "sh", slot],
        capture_output=True, cwd=folder, text=True,
        env={"PATH": f"{stand_in.parent}:/usr/bin:/bin", "GEMMFLEET_SYS": str(sys or folder / "none")},
    )  # fmt: skip
    shutil.rmtree(stand_in.parent)
    done.check_returncode()
    return done.stdout.split("\0")[:-1]


def test_hostile_values_stay_single_words(tmp_path: Path) -> None:
    folder = tmp_path / f"a,b:{HOSTILE.replace('/', '_')}"
    folder.mkdir()
    options = DockerOptions("i:1", cap_add=(HOSTILE,), volumes=(HOSTILE,), user=HOSTILE)
    argv = run_argv(folder, options, "1")
    assert argv[0] == "run"
    assert {f"--cap-add={HOSTILE}", f"--volume={HOSTILE}"} <= set(argv)
    assert argv[argv.index("--user") + 1] == HOSTILE
    doubled = str(folder).replace('"', '""')
    assert argv[argv.index("--mount") + 1] == f'type=bind,"source={doubled}",target=/gemmfleet'
    assert argv[-3:] == ["--rm", "i:1", "x"]
    assert "--privileged" not in argv
    assert not list(tmp_path.rglob("hacked"))


def topology(root: Path, gpus: Sequence[int]) -> Path:
    """A KFD topology: node 0 is the CPU, then GPUs with these render minors."""
    for number, minor in enumerate([0, *gpus]):
        node = root / "class/kfd/kfd/topology/nodes" / str(number)
        node.mkdir(parents=True)
        (node / "properties").write_text(f"simd_count {0 if number == 0 else 1024}\ndrm_render_minor {minor}\n")
    return root


def test_a_slot_gets_its_own_render_node(tmp_path: Path) -> None:
    sys = topology(tmp_path / "sys", [140, 128, *range(129, 138)])  # eleven: 10 comes after 9, not after 1
    options = DockerOptions("i:1", devices=("/dev/dri",))
    assert options.isolates
    for slot, minor in (("0", 140), ("1", 128), ("10", 137)):
        argv = run_argv(tmp_path, options, slot, sys)
        assert f"--device=/dev/dri/renderD{minor}" in argv
        assert len([a for a in argv if a.startswith("--device")]) == 1


def passed(argv: Sequence[str]) -> set[str]:
    return {a for a in argv if a.startswith(("--device", "--gpus", "--group-add"))}


def test_without_a_word_a_container_gets_the_gpu_of_its_slot(tmp_path: Path) -> None:
    """An AMD GPU with the groups of its devices, an NVIDIA one by Docker; a slot on the cores gets nothing."""
    sys = topology(tmp_path / "sys", [140, 128])
    assert PLAIN.isolates
    for slot, render in (("0", "/dev/dri/renderD140"), ("1", "/dev/dri/renderD128")):
        devices = {"/dev/kfd", render}
        argv = run_argv(tmp_path, PLAIN, slot, sys, gpus=True, nvidia=True)
        assert passed(argv) == {f"--device={d}" for d in devices} | {f"--group-add={d}" for d in devices}
    assert passed(run_argv(tmp_path, PLAIN, "10", gpus=True, nvidia=True)) == {"--gpus=device=10"}
    assert passed(run_argv(tmp_path, PLAIN, "0", sys, gpus=False)) == set()


def test_a_list_of_devices_keeps_its_say(tmp_path: Path) -> None:
    sys = topology(tmp_path / "sys", [128])
    for devices in ((), ("/dev/kfd",)):
        argv = run_argv(tmp_path, replace(PLAIN, devices=devices), "0", sys, gpus=True)
        assert passed(argv) == {f"--device={d}" for d in devices}


@pytest.mark.parametrize(("amd", "says"), [([], "this node shows no GPU"), ([128], "GPU 1 has no render node")])
def test_no_container_is_started_that_would_see_no_gpu(tmp_path: Path, amd: list[int], says: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as told:
        run_argv(tmp_path, PLAIN, "1", topology(tmp_path / "sys", amd), gpus=True)
    assert says in told.value.stderr


def test_a_pinned_slot_gets_its_cores_and_a_legal_host_name() -> None:
    values = PLAIN.values("r", "n_1." + "x" * 80, ("0", "12"), "1", {"0": "0-7,64-71"}, [])
    assert values["slot_flags"] == {"0": ["--cpuset-cpus=0-7,64-71"], "12": []}
    assert values["hostnames"]["12"] == "n-1." + "x" * 53 + "-12"


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"Status": "running", "ExitCode": 0}, WorkerState("3", "running")),
        ({"Status": "restarting", "ExitCode": 1}, WorkerState("3", "running")),
        ({"Status": "exited", "ExitCode": 0}, WorkerState("3", "ended", 0)),
        ({"Status": "exited", "ExitCode": 137, "OOMKilled": True}, WorkerState("3", "ended", 137, True, 9)),
        ({"Status": "exited", "ExitCode": 139}, WorkerState("3", "ended", 139, False, 11)),
        ({"Status": "exited", "ExitCode": 255}, WorkerState("3", "ended", 255)),
        ({"Status": "created"}, WorkerState("3", "ended")),
        ({"Status": "running", "Health": {"Status": "unhealthy"}}, WorkerState("3", "running")),
    ],
)
def test_a_state_says_code_signal_and_memory(state: dict[str, Any], expected: WorkerState) -> None:
    assert worker_state("3", {"State": state}) == expected


def test_a_state_in_words() -> None:
    assert WorkerState("0", "running").why == ""
    assert WorkerState("0", "ended", 3).why == "ended with code 3"
    assert WorkerState("0", "ended", 139, signal=11).why == "killed by SIGSEGV"
    assert WorkerState("0", "ended", 137, True, 9).why == "killed by SIGKILL (out of memory)"
    assert WorkerState("0", "ended", 160, signal=32).why == "killed by signal 32"


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        (
            "Got permission denied while trying to connect to the Docker daemon socket",
            "the group of /var/run/docker.sock on the node",
        ),
        ("Cannot connect to the Docker daemon at unix:///x. Is the docker daemon running?", "systemctl start docker"),
        ("sudo: a password is required", "asks for a password"),
        ("bash: line 1: exec: docker: not found", "no docker on the node"),
        ("timeout: failed to run command 'docker': No such file or directory", "no docker on the node"),
        ("write /var/lib/docker/tmp/x: no space left on device", "no space left on the node"),
        ("manifest for x:2 not found: manifest unknown: manifest unknown", "the image i:1 is not there"),
        ("Error response from daemon: pull access denied for x", "the image i:1 is not there"),
        ('Get "https://r/v2/": dial tcp: lookup r: no such host', "cannot reach the registry of i:1"),
        ('error gathering device information while adding custom device "/dev/kfd": no such file', "`devices:`"),
        ("something new", "n1: Docker: something new"),
        ("", "it gave no message"),
    ],
)
def test_an_error_names_the_way_out(said: str, hint: str) -> None:
    assert hint in str(engine_error("n1", DockerOptions("i:1"), said))


def test_a_pull_in_words() -> None:
    told: list[str] = []
    lines: list[dict[str, Any]] = [
        {"status": "Pulling from a/b", "id": "1"},
        {"status": "Pulling fs layer", "id": "aa"},
        {"status": "Downloading", "id": "aa", "progressDetail": {"current": 5_000_000, "total": 10_000_000}},
        {"status": "Pull complete", "id": "aa"},
    ]
    assert follow_pull("a/b:1", lines, told.append) == ""
    assert told[-1] == "pulled a/b:1"
    assert told[0].startswith("pulling a/b:1: ")
    assert follow_pull("a/b:1", [{"error": "denied"}, *lines], told.append) == "denied"


def docker_that(script: str, limit_s: float) -> Docker:
    """This machine's Docker, but for what answers: a shell script."""
    return Docker(LocalTransport("here"), DockerOptions("i:1", docker_command=("bash", "-c", script)), limit_s)


def test_requests_over_a_channel_keep_their_time_limits() -> None:
    """A real command as the far end: it answers once and then never again."""
    answer = '{"ApiVersion": "1.44"}'
    docker = docker_that(
        'read line; while [ "$line" != "$(printf "\\r")" ]; do read line; done;'
        f" printf 'HTTP/1.1 200 OK\\r\\nContent-Length: {len(answer)}\\r\\n\\r\\n%s' '{answer}'; cat >/dev/null",
        1.0,
    )
    for _ in range(2):  # the channel that was given up is not used again
        with pytest.raises(EngineError, match=r"here: Docker does not answer within 1 s"):
            docker.ask(lambda c: c.ping())
        assert docker.ask(lambda c: c.api_version) == "1.44"
        docker.close()
    for thread in threading.enumerate():
        if thread.name == "docker channel":
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def test_the_words_of_a_channel_that_ends_are_in_the_error() -> None:
    docker = docker_that("echo no daemon here >&2; exit 7", PATIENCE_S)
    with pytest.raises(EngineError, match=r"here: Docker: ended with code 7: no daemon here"):
        docker.ask(lambda c: c.ping())
