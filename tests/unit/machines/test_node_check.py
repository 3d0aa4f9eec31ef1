"""The check script run for real on this machine with fixture trees, and the verdicts on what nodes answer."""

from __future__ import annotations

import fcntl
import getpass
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator import command_hints
from orchestrator.inventory.model import Node
from orchestrator.machines import node_check
from orchestrator.machines.check_script import ARGV, read_facts, render_script
from orchestrator.machines.facts import load_facts, save_facts
from orchestrator.machines.node_check import COLUMNS, check_node, check_nodes, compare, unreachable
from orchestrator.transport.base import Completed
from orchestrator.transport.local import LocalTransport
from tests.standins.sysfs import unfold
from tests.support.files import write_program
from worker.agent.locks import DeviceLock
from worker.protocol import LOCKS_ENV

NOW = 1_800_000_000.0
SHELLS = [s for s in ("sh", "dash", "bash", "busybox") if shutil.which(s)]


def a_node(**options: Any) -> Node:
    docker = options.pop("docker", {})
    return Node.model_validate({"name": "n", **options, "docker": docker})


def in_docker(**options: Any) -> Node:
    return a_node(engine="docker", image="i", **options)


def given(*devices: str, **options: Any) -> Node:
    return in_docker(docker={"devices": devices}, **options)


def fake_docker(folder: Path, **says: str) -> None:
    """A `docker` that prints a planned answer by its first word, and fails at all others."""
    cases = "\n".join(f"{word}) printf '%s\\n' '{text}' ;;" for word, text in says.items())
    write_program(folder / "docker", f'#!/bin/sh\ncase "$1" in\n{cases}\n*) echo "$1: no" >&2; exit 1 ;;\nesac\n')


def run(node: Node, root: Path, shell: str = "sh", *, brief: bool = False) -> Completed:
    text = render_script(node, brief=brief, sysfs=str(root / "sys"), dev=str(root / "dev"))
    argv = ["busybox", *ARGV] if shell == "busybox" else [shell, *ARGV[1:]]
    return LocalTransport("n").run(argv, stdin=text)


@pytest.mark.parametrize("shell", SHELLS)
def test_two_gpus_as_the_script_sees_them(tmp_path: Path, shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sysfs of two MI355X, with plain files for devices; the check changes nothing."""
    root = unfold("mi355x", tmp_path / "root")
    (root / "dev/dri").mkdir(parents=True)
    for name in ("kfd", "dri/renderD128", "dri/renderD136"):
        (root / "dev" / name).touch(mode=0o660)
    monkeypatch.setenv("HOME", str(tmp_path))
    (root / "sys/devices/pci0000:00/0000:05:00.0/local_cpulist").write_text("0-63,128-191\n")
    before = sorted((p, p.lstat().st_mtime_ns) for p in tmp_path.rglob("*"))
    done = run(given("/dev/kfd", "/dev/dri", "/dev/none", workdir="~/x y"), root, shell)
    assert sorted((p, p.lstat().st_mtime_ns) for p in tmp_path.rglob("*")) == before
    assert (done.code, done.err) == (0, b"")
    facts = read_facts(done)
    assert facts.complete
    assert [facts.values[f"workdir{x}"] for x in ("", "_writable")] == [f"{tmp_path}/x y", "yes"]
    first, second = facts.gpus
    assert (first.gfx, first.cu_num, first.partition) == ("gfx950", 256, "SPX/NPS1")
    assert (first.render, first.pci, first.numa, first.cpus) == ("renderD128", "0000:05:00.0", 0, "0-63,128-191")
    assert (first.use_pct, first.memory_total, first.power_w) == (97, 309220868096, 987.0)
    assert first.temperature_c == {"junction": 68.0, "mem": 61.0}
    assert (first.uncorrectable, second.uncorrectable) == ({}, {"umc": 2})
    assert facts.devices["/dev/kfd"].split(" ")[0] == str((root / "dev/kfd").stat().st_gid)
    assert set(facts.devices) == {"/dev/kfd", "/dev/dri/renderD128", "/dev/dri/renderD136", "/dev/none"}
    assert facts.devices["/dev/none"] == "missing"
    assert abs((facts.number("clock") or 0) - time.time()) < 5
    unasked = read_facts(run(in_docker(), root, shell)).devices
    assert set(unasked) == {"/dev/kfd", "/dev/dri/renderD128", "/dev/dri/renderD136"}
    assert read_facts(run(in_docker(), tmp_path / "no gpu", shell)).devices == {}


def test_docker_and_containers_as_the_script_sees_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = "sha256:0123456789abcdef 4000000000 linux/amd64 rocm/x@sha256:aa"
    ours = "aaaaaaaaaaaaaaaa|/gf-0|i|running|run-1|n|0|/dev/kfd,/dev/dri/renderD128,"
    theirs = "bbbbbbbbbbbbbbbb|/web|nginx:1|running||||"
    says = {"ps": "a b", "version": "28.0.1 27.5.1", "info": '{"nvidia":{}}', "image": image}
    fake_docker(tmp_path / "bin", **says, container=f"{ours}\n{theirs}")
    (tmp_path / "bin/nvidia-smi").symlink_to("/bin/true")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    done = run(in_docker(), tmp_path)
    facts = read_facts(done)
    assert [facts.values[k] for k in ("docker.version", "docker.gpus", "image")] == ["28.0.1 27.5.1", "yes", image]
    assert [(c.id, c.run, c.slot, c.devices) for c in facts.containers] == [
        ("aaaaaaaaaaaa", "run-1", "0", ("/dev/kfd", "/dev/dri/renderD128")),
        ("bbbbbbbbbbbb", "", "", ()),
    ]
    brief = read_facts(run(in_docker(), tmp_path, brief=True))
    assert (brief.complete, brief.containers) == (True, facts.containers)
    assert not {"docker.version", "image", "workdir"} & set(brief.values)
    mine = check_node(in_docker(), done, time.time(), "run-1")
    assert [f.about for f in mine.findings] == ["containers"]
    assert "1 foreign container running: web (nginx:1)" in str(mine.findings[0])
    assert {f.what for f in check_node(in_docker(), done, time.time()).findings} >= {"run run-1 works there"}


@pytest.mark.parametrize("shell", SHELLS)
def test_locks_as_the_script_sees_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: str) -> None:
    """Locks of devices do not depend on the work folder. Locks of slots that a worker left behind are in it."""
    work = tmp_path / "work"
    for run_, files in (("dead", ["claimed/0/spec.json"]), ("idle", []), ("left", ["inbox/x.json"]), ("busy", [])):
        for name in ("claimed/0/lock", *files):
            path = work / run_ / "n" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    monkeypatch.setenv(LOCKS_ENV, str(tmp_path / "it's"))
    ended, living = DeviceLock("gpu-0", "ended/n"), DeviceLock("gpu-1", "living/far")
    assert ended.take()
    assert living.take()
    os.close(ended._fd)
    argv = ["flock", str(work / "busy/n/claimed/0/lock"), "sh", "-c", "echo up; read x"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"up\n"
        looked_at = os.open(work / "dead/n/claimed/0/lock", os.O_RDONLY)
        fcntl.flock(looked_at, fcntl.LOCK_SH)  # as another check and launch.sh lock it while they look
        full, brief = (run(a_node(workdir=str(work)), tmp_path, shell, brief=brief) for brief in (False, True))
        os.close(looked_at)
        holder.communicate(b"\n")
    assert read_facts(brief).locks == {"held": ("living/far/gpu-1",)}
    assert read_facts(brief).values["lock.owner.living"] == getpass.getuser()
    assert read_facts(full).locks == {
        "held": ("living/far/gpu-1",), "stale": ("dead/n/claimed/0/lock",), "waiting": ("left/n/claimed/0/lock",),
    }  # fmt: skip


GOOD = {
    "check": "1", "clock": f"{NOW:.0f}", "machine": "x86_64", "cores": "64", "user": "me", "workdir": "/w",
    "workdir_writable": "yes", "workdir_fs": "ext2/ext3", "workdir_free_kb": str(100 * 2**20),
    "workdir_free_inodes": "9",
    "docker.version": "28.0 28.0", "image": "sha256:abc 1 linux/amd64 ", "python": "3.11.2 /usr/bin/python3 True",
    "gpu.0.gfx_target_version": "90500", "gpu.0.simd_count": "1024", "gpu.0.simd_per_cu": "4",
    "gpu.0.render": "renderD128", "device./dev/kfd": "44 video 660 open", "device./dev/dri/renderD128": "9 r 660 open",
    "end": "1",
}  # fmt: skip


def answer(changes: dict[str, str | None]) -> Completed:
    lines = (f"{k}={v}\n" for k, v in {**GOOD, **changes}.items() if v is not None)
    return Completed(0, "".join(lines).encode(), b"")


def test_a_good_node() -> None:
    report = check_node(in_docker(), answer({}), NOW + 2)
    assert (report.state, report.problems(), report.skew_s) == ("ok", [], -2.0)
    for late_s in (0.9, -0.6):  # of the second that `date` prints, and until it runs
        assert check_node(in_docker(), answer({}), NOW + late_s).skew_s == 0.0
    assert "the render node of its slot's GPU (0: renderD128), and their groups" in report.devices()
    assert report.row() == ("n", "ok", "1 x gfx950", "28.0", "abc", "100 GiB", "-2 s", "")
    assert len(report.row()) == len(COLUMNS)
    assert json.loads(json.dumps(report.to_json()))["gpus"][0]["gfx"] == "gfx950"


def test_an_image_that_differs_is_named_with_the_nodes_of_the_usual_one() -> None:
    def problems(*images: str) -> list[str]:
        nodes = [in_docker().model_copy(update={"name": f"n{i}"}) for i in range(len(images))]
        reports = [check_node(n, answer({"image": f"sha256:{x} 1"}), NOW) for n, x in zip(nodes, images, strict=True)]
        return [p for r in compare(reports) for p in r.problems()]

    way = "name the image by digest, because no table takes rows of both"
    assert problems("a", "b") == [f"n1: its image sha256:b is not the sha256:a of n0: {way}"]
    assert problems("a", "b", "b", "b") == [f"n0: its image sha256:a is not the sha256:b of n1, n2 and 1 more: {way}"]
    assert problems("a", "a") == []


DOCKER, HERE = in_docker(), a_node()
NO_RENDER: dict[str, str | None] = {"device./dev/dri/renderD128": None}
NO_DOCKER: dict[str, str | None] = {"docker.version": None}
NO_GPUS = {k: None for k in GOOD if k.startswith(("gpu.", "device."))}
NVIDIA = {**NO_GPUS, "nvidia": "0, NVIDIA H200, 9.0, 143771, 0, 0, 30, GPU-1"}


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"lock.held": "there/n/gpu-0"}, "end it first (gemmfleet cancel there --runs {runs}), or see --busy"),
        ({"lock.held": "far/n/gpu-0"}, "end it first (gemmfleet cancel far --runs ITS_FOLDER), or see --busy"),
        (
            {"lock.held": "far/n/gpu-0", "lock.owner.far": "ann"},
            "run far of ann has workers that live: ann can end it (gemmfleet cancel far --runs ITS_FOLDER), or",
        ),
        ({"lock.held": "there/n/gpu-0", "lock.owner.there": "me"}, "run there has workers that live: end it first"),
        ({"lock.stale": "there/n/claimed/0/lock"}, "gemmfleet resume there --runs {runs} picks it up"),
        ({"lock.waiting": "far/n/claimed/0/lock"}, "gemmfleet resume far --runs ITS_FOLDER picks it up"),
        ({"workdir_free_kb": "2000000"}, "free some space (gemmfleet runs prune --runs {runs})"),
    ],
)
def test_a_suggested_command_names_its_run_and_its_owner(
    tmp_path: Path, facts: dict[str, str | None], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Typed as it stands there, the command must not hit the user's own latest run."""
    monkeypatch.setattr(command_hints, "program", lambda: "gemmfleet")
    (tmp_path / "there").mkdir()
    (tmp_path / "there/run.yaml").touch()
    report = check_node(in_docker(), answer(facts), NOW, runs=tmp_path)
    (problem,) = report.problems()
    assert says.format(runs=tmp_path) in problem


@pytest.mark.parametrize(
    ("state", "node", "changes", "says"),
    [
        ("warning", DOCKER, {"clock": f"{NOW + 7200:.0f}"}, "its clock is 7200 s ahead of ours: set it"),
        ("unusable", DOCKER, {"workdir_writable": "no"}, "/w may not be written by me: give another `workdir:`"),
        ("warning", DOCKER, {"workdir_free_kb": "2000000"}, "/w has 1953 MiB free: free some space"),
        ("warning", DOCKER, {"workdir_fs": "nfs"}, "/w is on nfs"),
        ("unusable", DOCKER, {"lacks": "tar"}, "the node has no `tar`: install"),
        ("unusable", HERE, {"lacks": "flock"}, "the node has no `flock`"),
        ("unusable", HERE, {"python": None}, "no Python was found: install Python 3.10 to 3.13"),
        ("unusable", HERE, {"python": "3.9.18 /usr/bin/python3 False"}, "its Python is 3.9.18: 3.10 to 3.13 is needed"),
        ("unusable", HERE, {"aiter_root": "empty"}, "there is no AITER (aiter/jit/core.py) in"),
        ("unusable", DOCKER, {**NO_DOCKER, "docker.lacks": "docker"}, "there is no docker on"),
        ("unusable", DOCKER, {**NO_DOCKER, "docker.error": "permission denied while trying to connect"}, "docker.sock"),
        ("warning", DOCKER, {"image": "missing"}, "the image is not there: it will be pulled"),
        ("unusable", in_docker(docker={"pull": "never"}), {"image": "missing"}, "pull is never: load it there"),
        ("unusable", DOCKER, {"device./dev/kfd": "missing"}, "there is no /dev/kfd: load the GPU's driver"),
        ("unusable", DOCKER, NO_RENDER, "GPU 0 has no render node /dev/dri/renderD128: find out why"),
        ("ok", in_docker(gpus=0), {**NO_RENDER, "device./dev/kfd": None}, ""),
        ("ok", given("/dev/kfd", "/dev/dri/renderD128:/dev/x"), {}, ""),
        ("unusable", given("/dev/kfd", "/dev/dri/renderD129"), {}, "of GPU 0 no /dev/kfd or no render node"),
        ("unusable", in_docker(gpus=2), {}, "gpus: 2, but 1 were found: correct `gpus:`"),
        ("unusable", in_docker(gfx="gfx942", cu_num=304), {}, "its GPUs are gfx950, not gfx942: correct or drop"),
        ("warning", DOCKER, {"gpu.1.gfx_target_version": "90402", "gpu.1.render": "renderD128"}, "its GPUs differ"),
        ("warning", DOCKER, {"gpu.0.ras.umc": "ue: 2 ce: 0"}, "GPU 0 has counted uncorrectable errors (umc 2)"),
        ("warning", DOCKER, {"gpu.0.gpu_busy_percent": "95"}, "GPU 0 is in use (busy 95 %, memory 0 %)"),
        ("warning", DOCKER, {"lock.closed": "gpu-0 /l/gpu-0 of ann"}, "the lock /l/gpu-0 of ann cannot be opened"),
        ("warning", DOCKER, {"lock.stale": "old-run/n/claimed/0/lock"}, "run old-run left claimed work behind"),
        ("warning", DOCKER, {"lock.held": "other/n/gpu-0"}, "run other has workers that live: end it first"),
        ("warning", DOCKER, {"lock.held": "other/n/gpu-1"}, "other has workers that live: not on its GPUs, but"),
        ("ok", DOCKER, {**NVIDIA, "docker.gpus": "yes"}, ""),
        ("unusable", DOCKER, {**NVIDIA, "docker.gpus": "no"}, "install the NVIDIA Container Toolkit"),
    ],
)  # fmt: skip
def test_verdicts(state: str, node: Node, changes: dict[str, str | None], says: str) -> None:
    report = check_node(node, answer(changes), NOW, "mine")
    assert report.state == state, report.findings
    assert report.usable is (state != "unusable")
    problems = [f for f in report.findings if f.level != "ok"]
    assert says in "; ".join(map(str, problems))
    assert bool(problems) is bool(says)
    assert all(f.way_out for f in problems)


def test_a_login_shell_that_greets_every_command_is_named() -> None:
    done = answer({})
    report = check_node(HERE, Completed(0, b"\nWelcome, \x1b[1mann\n" + done.out, b""), NOW)
    assert report.state == "unusable"
    assert r"prints text before the output of each command: 'Welcome, \x1b[1mann'" in report.problems()[0]


def test_hostile_answers_are_cleaned_and_capped() -> None:
    evil = "\x1b]0;x\x07\x1b[31mred\u202e"
    lines = [f"user={evil}", "gpu.x.y=1", "gpu.0=1", "gpu..=", "container=a|b", "clock=" + "9" * 400]
    lines += [f"host={'x' * 10**4}", *(f"lock.stale=r{i}" for i in range(9000)), "end=1"]
    facts = read_facts(Completed(0, "\n".join(lines).encode(), b""))
    assert facts.values["user"] == "red"
    assert (facts.containers, facts.number("clock"), len(facts.values["host"])) == ((), None, 600)
    assert len(facts.locks["stale"]) < 4000
    assert not facts.complete


def test_the_way_to_log_in_is_the_inventorys() -> None:
    way = {"ssh_config": "~/cfg", "identity": "~/my keys/id", "proxy_jump": "a@b:1,c", "host": "${env:GF_H}.example"}
    report = unreachable(a_node(transport="ssh", port=2222, user="tuner", **way), "no route")
    line = """ssh -F ~/cfg -p 2222 -i '~/my keys/id' -J a@b:1,c tuner@"${GF_H}.example" true"""
    assert str(report.findings[0]) == f"no route: try: {line}"


@pytest.mark.parametrize("shell", SHELLS)
def test_a_false_root_of_aiter_as_the_script_sees_it(tmp_path: Path, shell: str) -> None:
    """AITER of a node without docker is on the node itself."""
    for folder in ("tree/aiter/jit", "tree/aiter_meta", "half"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "tree/aiter/jit/core.py").touch()
    said = {"tree": "there", "tree/aiter": "there", "tree/aiter_meta": "there", "half": "empty", "no it's": "missing"}
    found = {x: run(a_node(aiter={"root": str(tmp_path / x)}), tmp_path, shell) for x in said}
    assert {x: read_facts(done).values["aiter_root"] for x, done in found.items()} == said


def test_a_root_of_aiter_is_looked_for_where_a_container_finds_it() -> None:
    volumes = ("/srv:/opt:ro", '/srv/a,"b":/opt/aiter')
    text = render_script(in_docker(aiter={"root": "/opt/aiter"}, docker={"volumes": volumes})).decode()
    mount = 'type=bind,"source=/srv/a,""b""",target=/opt/aiter,readonly'
    assert f"--mount '{mount}'" in text


def test_what_a_plan_keeps_holds_no_names(tmp_path: Path) -> None:
    names: dict[str, str | None] = {"user": "secret-user", "home": "/home/secret-user", "host": "secret-host"}
    facts = read_facts(answer({**names, "cpu_flag": "avx2"}))
    save_facts(tmp_path, {"n": facts})
    assert "secret" not in (tmp_path / "nodes/n/facts.json").read_text()
    back = load_facts(tmp_path, ["n"])["n"]
    assert (back.gpus, back.gfx, back.cu_num, back.cpu_flags) == (facts.gpus, "gfx950", 256, ("avx2",))


def test_a_node_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`df` hangs where a network file system does."""
    write_program(tmp_path / "df", "#!/bin/sh\nexec sleep 600\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(node_check, "TIMEOUT_S", 0.5)
    (report,) = check_nodes([a_node(transport="local")])
    assert report.problems() == ["n: its check took longer than 0.5 s: the node or one of its disks hangs"]
