"""The parts of the engine `docker` that need no Docker: options, scripts, states, errors, progress."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from orchestrator.engine.docker_containers import DockerEngine
from orchestrator.engine.docker_errors import engine_error
from orchestrator.engine.docker_options import DockerOptions
from orchestrator.errors import EngineError
from orchestrator.machines.node_files import node_files
from orchestrator.machines.node_plan import NodePlan
from orchestrator.transport.local import LocalTransport
from tests.support.files import write_files, write_program
from tests.support.shells import check

HOSTILE = "a'b\"c $(touch hacked) `id` ; rm -rf / \\ é"
PLAIN = DockerOptions(image="rocm/image:1")
FULL = DockerOptions.model_construct(  # an inventory would refuse the hostile values
    image="registry:5000/a/b@sha256:" + "0" * 64, devices=("/dev/kfd", "/dev/dri", HOSTILE),
    group_add=("auto", "video"), cap_add=("SYS_PTRACE", HOSTILE), security_opt=("seccomp=unconfined",),
    shm_size="16G", ipc="host", network="host",
    volumes=(f"/x {HOSTILE}:/x",), env={"A": HOSTILE}, pull="never", docker_command=("sudo", "-n", "docker"),
    user="1:2", memory="1g",
)  # fmt: skip


PRIVATE = FULL.model_copy(update={"image": "${env:GF_REGISTRY}/i:1", "volumes": ("/x/${env:GF_USER}:/x", "/y:/y")})


def scripts(folder: Path, options: DockerOptions, *, gpus: bool = False) -> list[Path]:
    devices = {slot: {"HIP_VISIBLE_DEVICES": "0" if gpus else ""} for slot in ("0", "1", "10")}
    plan = NodePlan("n-1", str(folder), (*devices,), "ssh", "docker", None, {"B": HOSTILE}, devices, docker=options)
    out = []
    for name, file in node_files(plan, "run-1", "torch", {}, 60.0).items():
        if name.endswith(".sh"):
            out.append(folder / name)
            out[-1].write_bytes(file.data)
    return out


@pytest.mark.parametrize("gpus", [False, True], ids=["cpu", "gpus"])
@pytest.mark.parametrize("options", [PLAIN, FULL, PRIVATE], ids=["plain", "full", "private"])
def test_scripts_pass_the_shell_and_shellcheck(tmp_path: Path, options: DockerOptions, gpus: bool) -> None:
    found = scripts(tmp_path, options, gpus=gpus)
    assert {p.name for p in found} == {"launch.sh", "tune.sh", "follow.sh", "container.sh"}
    check(*found)


def run_argv(
    folder: Path, options: DockerOptions, slot: str, amd: Sequence[int] = (), *, gpus: bool = True
) -> list[str]:
    """Arguments of `docker run`, from a stand-in that prints them; the group of a device is its path. `amd`: render
    minors of the KFD topology's GPUs."""
    for number, minor in enumerate([0, *amd]):  # node 0 is the CPU
        text = f"simd_count {0 if number == 0 else 1024}\ndrm_render_minor {minor}\n"
        write_files(folder / f"sys/class/kfd/kfd/topology/nodes/{number}", {"properties": text})
    # not below `folder`: its colon would end an entry of PATH
    stand_in = write_program(Path(tempfile.mkdtemp()) / "docker", "#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
    (stand_in.parent / "nvidia-smi").symlink_to("/bin/true")
    scripts(folder, options, gpus=gpus)
    group = 'group_of() { echo "--group-add=$1"; }' if amd else ":"
    done = subprocess.run(
        ["sh", "-c", f'. ./container.sh; {group}; container "$1" --rm "$image" x', "sh", slot],
        capture_output=True, check=True, cwd=folder, text=True,
        env={"PATH": f"{stand_in.parent}:/usr/bin:/bin", "GEMMFLEET_SYS": str(folder / "sys")},
    )  # fmt: skip
    shutil.rmtree(stand_in.parent)
    return done.stdout.split("\0")[:-1]


def test_hostile_values_stay_single_words(tmp_path: Path) -> None:
    folder = tmp_path / f"a,b:{HOSTILE.replace('/', '_')}"
    folder.mkdir()
    options = DockerOptions.model_construct(image="i:1", cap_add=(HOSTILE,), volumes=(HOSTILE,), user=HOSTILE)
    argv = run_argv(folder, options, "1", gpus=False)
    assert argv[0] == "run"
    assert {f"--cap-add={HOSTILE}", f"--volume={HOSTILE}"} <= set(argv)
    assert argv[argv.index("--user") + 1] == HOSTILE
    doubled = str(folder).replace('"', '""')
    assert argv[argv.index("--mount") + 1] == f'type=bind,"source={doubled}",target=/gemmfleet'
    assert argv[-3:] == ["--rm", "i:1", "x"]
    assert "--privileged" not in argv
    assert not list(tmp_path.rglob("hacked"))


DRI = DockerOptions(image=PLAIN.image, devices=("/dev/dri",))
ELEVEN = [140, 128, *range(129, 138)]


@pytest.mark.parametrize(
    ("options", "slot", "amd", "gpus", "passed"),
    [
        # by default: an AMD GPU with the groups of its devices, an NVIDIA GPU through Docker, nothing for the cores
        (PLAIN, "0", ELEVEN, True, ["--device=/dev/kfd", "--device=/dev/dri/renderD140", "--group-add=/dev/kfd",
                                    "--group-add=/dev/dri/renderD140"]),
        (PLAIN, "10", [], True, ["--gpus=device=10"]),
        (PLAIN, "0", ELEVEN, False, []),
        # a slot gets its own render node: 10 comes after 9, not after 1
        (DRI, "1", ELEVEN, True, ["--device=/dev/dri/renderD128"]),
        (DRI, "10", ELEVEN, True, ["--device=/dev/dri/renderD137"]),
        # a list of devices keeps its say
        (DockerOptions(image=PLAIN.image, devices=()), "0", ELEVEN, True, []),
        (DockerOptions(image=PLAIN.image, devices=("/dev/kfd",)), "0", ELEVEN, True, ["--device=/dev/kfd"]),
    ],
)  # fmt: skip
def test_a_container_gets_the_gpu_of_its_slot(
    tmp_path: Path, options: DockerOptions, slot: str, amd: list[int], gpus: bool, passed: list[str]
) -> None:
    argv = run_argv(tmp_path, options, slot, amd, gpus=gpus)
    assert {a for a in argv if a.startswith(("--device", "--gpus", "--group-add"))} == set(passed)
    assert options.isolates == (options in (PLAIN, DRI))


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("Cannot connect to the Docker daemon at unix:///x. Is the docker daemon running?", "systemctl start docker"),
        ("timeout: failed to run command 'docker': No such file or directory", "no docker on the node"),
        ("write /var/lib/docker/tmp/x: no space left on device", "no space left on the node"),
        ('Get "https://r/v2/": dial tcp: lookup r: no such host', "cannot reach the registry of i:1"),
        ("something new", "n1: Docker: something new"),
    ],
)
def test_an_error_names_the_way_out(said: str, hint: str) -> None:
    assert hint in str(engine_error("n1", DockerOptions(image="i:1"), said))


def test_a_long_message_is_cut_between_words() -> None:
    said = f"permission denied while trying to connect to {'x' * 570} dial unix: permission denied"
    shown = str(engine_error("n1", DockerOptions(image="i:1"), said))
    assert "(... " in shown
    assert "( trying" not in shown
    assert shown.endswith("dial unix: permission denied)")


def test_a_pull_tells_how_it_goes() -> None:
    """A stand-in for the daemon: no image, then a pull, or one that is denied."""
    lines = [
        {"status": "Pulling from a/b", "id": "1"},
        {"status": "Downloading", "id": "aa", "progressDetail": {"current": 5_000_000, "total": 10_000_000}},
        {"status": "Pull complete", "id": "aa"},
    ]
    script = """
import json, sys
answers = {"/version": [{"ApiVersion": "1.44"}], "/v1.44/images/create": LINES}
for line in sys.stdin:
    if " HTTP/" in line:
        found = answers.get(line.split()[1].partition("?")[0])
    elif line == "\\r\\n":
        body = "".join(json.dumps(x) + "\\n" for x in found or [{"message": "No such image"}])
        print("HTTP/1.1", 200 if found else 404, "is\\r\\nTransfer-Encoding: chunked\\r\\n\\r", flush=True)
        print(f"{len(body):x}\\r\\n{body}\\r\\n0\\r\\n\\r", flush=True)
"""
    for said, fails in ((lines, False), ([{"error": "denied"}], True)):
        told: list[str] = []
        command = (sys.executable, "-c", script.replace("LINES", json.dumps(said)))
        options = DockerOptions.model_construct(image="a/b:1", docker_command=command)
        engine = DockerEngine(LocalTransport("here"), "/f", "r", ("0",), options, progress=told.append)
        with (
            contextlib.closing(engine),
            pytest.raises(EngineError, match="here: Docker: denied") if fails else contextlib.nullcontext(),
        ):
            engine.prepare()
        assert told == ([] if fails else ["pulling a/b:1: 5 of 10 MB", "pulled a/b:1"])
