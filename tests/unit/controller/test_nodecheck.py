"""The check script run for real on this machine with fixture trees, and the verdicts on what nodes answer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator.controller.facts import ARGV, load_facts, read_facts, save_facts, script
from orchestrator.controller.node_check import COLUMNS, NodeReport, check_node, compare, unreachable
from orchestrator.inventory.model import Node
from orchestrator.transport import Completed, LocalTransport
from tests.support.health_kit import unfold
from worker.agent.inbox import DeviceLock
from worker.protocol import LOCKS_ENV

NOW = 1_800_000_000.0
SHELLS = [s for s in ("sh", "dash", "bash", "busybox") if shutil.which(s)]


def a_node(**options: Any) -> Node:
    docker = options.pop("docker", {})
    return Node.model_validate({"name": "n", **options, "docker": docker})


def in_docker(**options: Any) -> Node:
    return a_node(engine="docker", image="i", **options)


def machine(tmp_path: Path) -> Path:
    """A root with the sys of two MI355X and their devices as plain files."""
    root = unfold("mi355x", tmp_path / "root")
    (root / "dev/dri").mkdir(parents=True)
    for name in ("kfd", "dri/renderD128", "dri/renderD136"):
        (root / "dev" / name).touch(mode=0o660)
    return root


def fake_docker(folder: Path, **says: str) -> None:
    """A `docker` that prints a planned answer by its first word, and fails at all others."""
    cases = "\n".join(f"{word}) printf '%s\\n' '{text}' ;;" for word, text in says.items())
    folder.mkdir(exist_ok=True)
    (folder / "docker").write_text(f'#!/bin/sh\ncase "$1" in\n{cases}\n*) echo "$1: no" >&2; exit 1 ;;\nesac\n')
    (folder / "docker").chmod(0o755)


def run(node: Node, root: Path, shell: str = "sh", *, brief: bool = False) -> Completed:
    text = script(node, brief=brief, sys=str(root / "sys"), dev=str(root / "dev"))
    argv = ["busybox", *ARGV] if shell == "busybox" else [shell, *ARGV[1:]]
    return LocalTransport("n").run(argv, stdin=text)


NODES = {
    "process": a_node(),
    "python": a_node(python="/usr/bin/python3 'x"),
    "docker": in_docker(
        docker={"devices": ("/dev/kfd", "/dev/dri", "/dev/none:/dev/x"), "docker_command": ("sudo", "-n", "it's")}
    ),
    "home": in_docker(workdir="~/a b'c"),
    "aiter": in_docker(aiter={"root": "/a it's"}, docker={"volumes": ("/v:/a it's",)}),
    "aiter here": a_node(aiter={"root": "/a it's"}),
}


@pytest.mark.parametrize("brief", [False, True], ids=["all", "brief"])
@pytest.mark.parametrize("node", NODES.values(), ids=NODES)
def test_the_script_is_good_shell(tmp_path: Path, node: Node, brief: bool) -> None:
    path = tmp_path / "check.sh"
    path.write_bytes(script(node, brief=brief))
    for shell in SHELLS:
        subprocess.run([*(["busybox", "sh"] if shell == "busybox" else [shell]), "-n", path], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed (SYSTEM=1 installs it)")
    done = subprocess.run(["shellcheck", "-S", "style", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("shell", SHELLS)
def test_two_gpus_as_the_script_sees_them(tmp_path: Path, shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root = machine(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "root/sys/devices/pci0000:00/0000:05:00.0/local_cpulist").write_text("0-63,128-191\n")
    done = run(in_docker(docker={"devices": ("/dev/kfd", "/dev/dri", "/dev/none")}, workdir="~/x y"), root, shell)
    assert (done.code, done.err) == (0, b"")
    facts = read_facts(done)
    assert facts.complete
    assert facts.values["workdir"] == f"{tmp_path}/x y"
    assert (facts.values["workdir_exists"], facts.values["workdir_writable"]) == ("no", "yes")
    assert (facts.gfx, facts.cu_num) == ("gfx950", 256)
    first, second = facts.gpus
    assert (first.render, first.pci, first.numa, first.cpus) == ("renderD128", "0000:05:00.0", 0, "0-63,128-191")
    assert (first.partition, first.use_pct, first.memory_total) == ("SPX/NPS1", 97, 309220868096)
    assert (first.temperature_c, first.power_w) == ({"junction": 68.0, "mem": 61.0}, 987.0)
    assert (first.uncorrectable, second.uncorrectable) == ({}, {"umc": 2})
    group = str((root / "dev/kfd").stat().st_gid)
    assert facts.devices["/dev/kfd"].split(" ")[0] == group
    assert set(facts.devices) == {"/dev/kfd", "/dev/dri/renderD128", "/dev/dri/renderD136", "/dev/none"}
    assert facts.devices["/dev/none"] == "missing"
    assert abs((facts.number("clock") or 0) - time.time()) < 5


def test_a_host_without_gpus_is_named_as_probe_names_it(tmp_path: Path) -> None:
    from worker.device import cpu_gfx, usable_cores

    (tmp_path / "sys").mkdir()
    facts = read_facts(run(a_node(), tmp_path))
    assert (facts.gfx, facts.cu_num) == (cpu_gfx(), usable_cores())
    assert facts.values["python"].split(" ")[0].startswith("3.")


def test_docker_and_containers_as_the_script_sees_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = "sha256:0123456789abcdef 4000000000 linux/amd64 rocm/x@sha256:aa"
    ours = "aaaaaaaaaaaaaaaa|/gf-0|i|running|run-1|n|0|/dev/kfd,/dev/dri/renderD128,"
    theirs = "bbbbbbbbbbbbbbbb|/web|nginx:1|running||||"
    says = {"ps": "a b", "version": "28.0.1 27.5.1", "info": "overlay2 /", "image": image}
    fake_docker(tmp_path / "bin", **says, container=f"{ours}\n{theirs}")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    done = run(in_docker(), tmp_path)
    facts = read_facts(done)
    assert facts.values["docker.version"] == "28.0.1 27.5.1"
    assert facts.values["image"] == image
    assert [(c.id, c.run, c.slot) for c in facts.containers] == [
        ("aaaaaaaaaaaa", "run-1", "0"),
        ("bbbbbbbbbbbb", "", ""),
    ]
    assert [c.devices for c in facts.containers] == [("/dev/kfd", "/dev/dri/renderD128"), ()]
    brief = read_facts(run(in_docker(), tmp_path, brief=True))
    assert (brief.complete, brief.containers) == (True, facts.containers)
    assert not {"docker.version", "image", "workdir"} & set(brief.values)
    mine = check_node(in_docker(), done, time.time(), "run-1")
    assert [f.about for f in mine.findings] == ["containers"]
    assert "1 foreign container running: web (nginx:1)" in str(mine.findings[0])
    assert {f.what for f in check_node(in_docker(), done, time.time()).findings} >= {"run run-1 works there"}


@pytest.mark.skipif(shutil.which("timeout") is None, reason="no limit without `timeout`")
def test_an_image_that_is_not_shown_in_time_is_not_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_docker(tmp_path / "bin", ps="", version="28.0 28.0", info="")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert read_facts(run(in_docker(), tmp_path)).values["image"] == "missing"
    monkeypatch.setattr("orchestrator.controller.facts.TOOL_TIMEOUT_S", 1)
    docker = tmp_path / "bin" / "docker"
    docker.write_text(docker.read_text().replace("*) echo", "image) exec sleep 600 ;;\n*) echo"))
    assert "image" not in read_facts(run(in_docker(), tmp_path)).values


@pytest.mark.parametrize("shell", SHELLS)
def test_locks_as_the_script_sees_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: str) -> None:
    """Of devices whatever the work folder, and of slots in it that a worker left behind."""
    work = tmp_path / "work"
    for run_, files in (("dead", ["claimed/0/spec.json"]), ("idle", []), ("left", ["inbox/x.json"]), ("busy", [])):
        folder = work / run_ / "n"
        (folder / "claimed/0").mkdir(parents=True)
        (folder / "inbox").mkdir()
        (folder / "claimed/0/lock").touch()
        for name in files:
            (folder / name).touch()
    devices = tmp_path / "it's"
    monkeypatch.setenv(LOCKS_ENV, str(devices))
    ended, living = DeviceLock("gpu-0", "ended/n"), DeviceLock("gpu-1", "living/far")
    assert ended.take()
    assert living.take()
    os.close(ended._fd)
    holder = subprocess.Popen(["flock", str(work / "busy/n/claimed/0/lock"), "sh", "-c", "echo up; read x"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"up\n"
        facts = read_facts(run(a_node(workdir=str(work)), tmp_path, shell))
        brief = read_facts(run(a_node(workdir=str(work)), tmp_path, shell, brief=True))
    finally:
        holder.communicate(b"\n")
    assert brief.locks == {"held": ("living/far/gpu-1",)}
    assert facts.locks == {
        "held": ("living/far/gpu-1",), "stale": ("dead/n/claimed/0/lock",), "waiting": ("left/n/claimed/0/lock",),
    }  # fmt: skip


def test_it_changes_nothing(tmp_path: Path) -> None:
    root = machine(tmp_path)
    before = sorted((p, p.lstat().st_mtime_ns) for p in tmp_path.rglob("*"))
    run(a_node(workdir=str(tmp_path / "work/deep")), root)
    assert sorted((p, p.lstat().st_mtime_ns) for p in tmp_path.rglob("*")) == before


# --- verdicts -----------------------------------------------------------------------------------------------------

GOOD = {
    "check": "1", "clock": f"{NOW:.0f}", "machine": "x86_64", "cores": "64", "user": "me", "workdir": "/w",
    "workdir_writable": "yes", "workdir_fs": "ext2/ext3", "workdir_free_kb": str(100 * 2**20),
    "workdir_free_inodes": "9",
    "docker.version": "28.0 28.0", "image": "sha256:abc 1 linux/amd64 ", "python": "3.11.2 /usr/bin/python3 True",
    "gpu.0.gfx_target_version": "90500", "gpu.0.simd_count": "1024", "gpu.0.simd_per_cu": "4",
    "gpu.0.render": "renderD128", "device./dev/kfd": "44 video 660 open", "device./dev/dri/renderD128": "9 r 660 open",
    "end": "1",
}  # fmt: skip


def answer(**changes: str | None) -> Completed:
    values = {**GOOD, **{k.replace("__", "."): v for k, v in changes.items()}}
    return Completed(0, "".join(f"{k}={v}\n" for k, v in values.items() if v is not None).encode(), b"")


def test_a_good_node() -> None:
    report = check_node(in_docker(), answer(), NOW + 1)
    assert (report.state, report.problems(), report.skew_s) == ("ok", [], -1.0)
    assert report.devices() == (
        "each container gets /dev/kfd, the render node of its slot's GPU (0: renderD128), and their groups"
    )
    assert report.row() == ("n", "ok", "1 x gfx950", "28.0", "abc", "100 GiB", "-1 s", "")
    assert len(report.row()) == len(COLUMNS)
    assert json.loads(json.dumps(report.to_json()))["gpus"][0]["gfx"] == "gfx950"


DRI = in_docker(docker={"devices": ("/dev/kfd", "/dev/dri")})
NO_RENDER = {"device./dev/dri/renderD128": None}


@pytest.mark.parametrize(
    ("node", "changes", "state", "says"),
    [
        (in_docker(), {"clock": f"{NOW + 7200:.0f}"}, "warning", "its clock is 7200 s ahead of ours: set it"),
        (in_docker(), {"clock": f"{NOW - 60:.0f}"}, "warning", "its clock is 60 s behind ours"),
        (in_docker(), {"workdir_writable": "no"}, "unusable", "/w may not be written by me: give another `workdir:`"),
        (in_docker(), {"workdir_free_kb": "2000000"}, "warning", "/w has 1953 MiB free: free some space"),
        (in_docker(), {"workdir_free_kb": "2000"}, "unusable", "/w has 2 MiB free"),
        (in_docker(), {"workdir_free_inodes": "0"}, "unusable", "/w has no inode free"),
        (in_docker(), {"workdir_fs": "nfs"}, "warning", "/w is on nfs"),
        (in_docker(), {"lacks": "tar"}, "unusable", "the node has no `tar`: install"),
        (in_docker(), {"lacks": "flock"}, "ok", ""),
        (a_node(), {"lacks": "flock"}, "unusable", "the node has no `flock`"),
        (a_node(), {"python": None}, "unusable", "no Python was found: install Python 3.10 to 3.13"),
        (a_node(), {"python": "3.8.1 /usr/bin/python3 False"}, "unusable", "its Python is 3.8.1"),
        (a_node(), {"python": "sh: 1: /x: not found"}, "unusable", "no Python that runs: sh: 1: /x: not found"),
        (in_docker(), {"docker__version": None, "docker__lacks": "docker"}, "unusable", "there is no docker on"),
        (
            in_docker(),
            {"docker__version": None, "docker__error": "permission denied while trying to connect"},
            "unusable",
            "add it to the group of /var/run/docker.sock",
        ),
        (
            in_docker(),
            {"docker__version": None, "docker__error": "sudo: a password is required"},
            "unusable",
            "allow it without one in the node's sudoers",
        ),
        (in_docker(), {"docker__error": "Is the docker daemon running?"}, "unusable", "start it (sudo"),
        (in_docker(), {"docker__version": None}, "unusable", "(no answer in time)"),
        (in_docker(), {"docker__version": None, "docker__error": ""}, "unusable", "(no answer in time)"),
        (in_docker(), {"image": "missing"}, "warning", "the image is not there: it will be pulled"),
        (in_docker(docker={"pull": "never"}), {"image": "missing"}, "unusable", "pull is never: load it there"),
        (in_docker(), {"image": "missing", "docker__free_kb": "1000000"}, "warning", "Docker's disk has 1 GiB free"),
        (in_docker(), {"device./dev/kfd": "missing"}, "unusable", "there is no /dev/kfd: load the GPU's driver"),
        (in_docker(), NO_RENDER, "unusable", "GPU 0 has no render node /dev/dri/renderD128: see why"),
        (in_docker(gpus=0), {**NO_RENDER, "device./dev/kfd": None}, "ok", ""),
        (DRI, NO_RENDER, "unusable", "there is no render node in /dev/dri"),
        (DRI, {}, "ok", ""),
        (in_docker(docker={"devices": ("/dev/kfd", "/dev/dri/renderD128:/dev/x")}), {}, "ok", ""),
        *(
            (in_docker(docker={"devices": d}), {}, "unusable", "of GPU 0 no /dev/kfd or no render node: they would see")
            for d in ((), ("/dev/kfd",), ("/dev/dri",), ("/dev/kfd", "/dev/dri/renderD129"))
        ),
        (in_docker(gpus=2), {}, "unusable", "gpus: 2, but 1 were found: correct `gpus:`"),
        (in_docker(gpus=(0, 3)), {}, "unusable", "gpus: [0, 3], but 1 were found"),
        (in_docker(gfx="gfx942", cu_num=304), {}, "unusable", "its GPUs are gfx950, not gfx942: correct or drop"),
        (in_docker(gfx="gfx950", cu_num=304), {}, "unusable", "a GPU has 256 compute units, not 304"),
        (
            in_docker(),
            {"gpu.1.gfx_target_version": "90402", "gpu.1.render": "renderD128"},
            "warning",
            "its GPUs differ: 1 x gfx950, 1 x gfx942",
        ),
        (in_docker(), {"gpu.0.ras.umc": "ue: 2 ce: 0"}, "warning", "GPU 0 has counted uncorrectable errors (umc 2)"),
        (in_docker(), {"gpu.0.ras.umc": "ue: 0 ce: 9"}, "ok", ""),
        (in_docker(), {"gpu.0.sensor.junction": "104000"}, "warning", "GPU 0 is at 104 C"),
        (in_docker(), {"gpu.0.gpu_busy_percent": "95"}, "warning", "GPU 0 is in use (busy 95 %, memory 0 %)"),
        (
            in_docker(),
            {"gpu.0.mem_info_vram_used": "50", "gpu.0.mem_info_vram_total": "100"},
            "warning",
            "(busy 0 %, memory 50 %)",
        ),
        (in_docker(), {"lock.stale": "old-run/n/claimed/0/lock"}, "warning", "run old-run left claimed work behind"),
        (in_docker(), {"lock.held": "other/n/gpu-0"}, "warning", "run other has workers that live"),
        (in_docker(), {"lock.held": "mine/n/gpu-0"}, "ok", ""),
    ],
)
def test_verdicts(node: Node, changes: dict[str, str | None], state: str, says: str) -> None:
    report = check_node(node, answer(**changes), NOW, "mine")
    assert report.state == state, report.findings
    assert report.usable is (state != "unusable")
    problems = [f for f in report.findings if f.level != "ok"]
    assert says in "; ".join(map(str, problems))
    assert bool(problems) is bool(says)
    assert all(f.way_out for f in problems)


NVIDIA = {"gpu.0.simd_count": None, "gpu.0.render": None, "nvidia": "0, NVIDIA H200, 9.0, 143771, 0, 0, 30, GPU-1"}


@pytest.mark.parametrize(
    ("node", "gpus", "state", "says"),
    [
        (in_docker(), "yes", "ok", "each container gets its slot's GPU by --gpus device=N"),
        (in_docker(), "no", "unusable", "install the NVIDIA Container Toolkit"),
        (in_docker(docker={"devices": ("/dev/nvidia0",)}), None, "ok", ""),
        (in_docker(docker={"devices": ()}), None, "warning", "docker.devices names no NVIDIA device"),
    ],
)
def test_verdicts_on_nvidia_gpus(node: Node, gpus: str | None, state: str, says: str) -> None:
    nothing = {k: None for k in GOOD if k.startswith(("gpu.", "device."))}
    report = check_node(node, answer(**{**nothing, **NVIDIA, "docker.gpus": gpus}), NOW)
    assert [g.vendor for g in report.facts.gpus] == ["nvidia"]
    assert report.state == state, report.findings
    assert says in "; ".join(map(str, report.findings))


@pytest.mark.parametrize("shell", SHELLS)
def test_devices_that_containers_get_unasked_as_the_script_sees_them(tmp_path: Path, shell: str) -> None:
    root = machine(tmp_path)
    assert set(read_facts(run(in_docker(), root, shell)).devices) == {
        "/dev/kfd", "/dev/dri/renderD128", "/dev/dri/renderD136",
    }  # fmt: skip
    (root / "dev/kfd").unlink()
    assert read_facts(run(in_docker(), root, shell)).devices["/dev/kfd"] == "missing"
    assert read_facts(run(in_docker(), tmp_path / "no gpu", shell)).devices == {}


@pytest.mark.parametrize(("runtimes", "told"), [('{"nvidia":{},"runc":{}}', "yes"), ('{"runc":{}}', "no")])
def test_whether_docker_hands_out_nvidia_gpus_as_the_script_sees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtimes: str, told: str
) -> None:
    fake_docker(tmp_path / "bin", ps="", version="28.0 28.0", info=runtimes, image="sha256:a 1 l/a ")
    (tmp_path / "bin/nvidia-smi").symlink_to("/bin/true")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert read_facts(run(in_docker(), tmp_path)).values["docker.gpus"] == told


@pytest.mark.parametrize(
    "done",
    [
        Completed(127, b"", b"sh: not found\n"),
        Completed(0, b"", b""),
        Completed(0, b"check=1\nclock=1\n", b""),
        Completed(-9, b"\xff\xfe\x00=\n===\n", b""),
    ],
)
def test_an_answer_that_is_cut_is_no_answer(done: Completed) -> None:
    report = check_node(a_node(), done, NOW)
    assert (report.state, report.findings[0].about) == ("unusable", "check")


def test_hostile_answers_are_cleaned_and_capped() -> None:
    evil = "\x1b]0;x\x07\x1b[31mred\u202e"
    lines = [
        f"user={evil}", "gpu.x.y=1", "gpu.0=1", "gpu..=", "container=a|b", f"docker.error={evil}", "clock=" + "9" * 400,
    ]  # fmt: skip
    lines += [f"lock.stale=r{i}" for i in range(9000)] + ["end=1"]
    facts = read_facts(Completed(0, "\n".join(lines).encode(), b""))
    assert facts.values["user"] == "red"
    assert facts.values["docker.error"] == "red"
    assert (facts.containers, facts.number("clock")) == ((), None)
    assert len(facts.locks["stale"]) < 4000
    assert not facts.complete
    huge = read_facts(Completed(0, b"host=" + b"x" * 10**6 + b"\nend=1\n", b""))
    assert len(huge.values["host"]) <= 600


def test_nodes_are_compared() -> None:
    def report(name: str, **changes: str | None) -> NodeReport:
        return check_node(Node(name=name, engine="docker", image="i"), answer(**changes), NOW)

    a, b, c, d = compare(
        [
            report("a"), report("b"), report("c", image="sha256:fff 1 linux/amd64 "),
            unreachable(Node(name="d", transport="ssh"), "no route"),
        ]
    )  # fmt: skip
    assert (a.state, b.state, c.state, d.state) == ("ok", "ok", "warning", "unusable")
    assert "its image sha256:fff is not the sha256:abc of most nodes: name the image by digest" in str(c.problems())
    assert str(d.findings[0]) == "no route: try: ssh d true"
    x, y = compare([report("x"), report("y", **{"gpu.0.gfx_target_version": "90402"})])
    assert (x.state, y.findings[-1].about) == ("ok", "gfx")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({}, "ssh n true"),
        ({"host": "10.0.0.7", "port": 2222, "user": "tuner"}, "ssh -p 2222 tuner@10.0.0.7 true"),
        (
            {"ssh_config": "~/cfg", "identity": "~/my keys/id", "proxy_jump": "a@b:1,c", "host": "${env:GF_H}.example"},
            """ssh -F ~/cfg -i '~/my keys/id' -J a@b:1,c "${GF_H}.example" true""",
        ),
    ],
)
def test_the_way_to_log_in_is_the_inventorys(options: dict[str, Any], line: str) -> None:
    report = unreachable(a_node(transport="ssh", **options), "no route")
    assert str(report.findings[0]) == f"no route: try: {line}"


def test_a_false_root_of_aiter_as_the_script_sees_it(tmp_path: Path) -> None:
    """Of a node without docker: on the node itself."""
    (tmp_path / "tree/aiter/jit").mkdir(parents=True)
    (tmp_path / "tree/aiter/jit/core.py").touch()
    (tmp_path / "tree/aiter_meta").mkdir()
    (tmp_path / "half").mkdir()
    for root, said in (("tree", "there"), ("tree/aiter", "there"), ("tree/aiter_meta", "there"),
                       ("half", "empty"), ("nope it's", "missing")):  # fmt: skip
        node = a_node(aiter={"root": str(tmp_path / root)})
        done = run(node, tmp_path, brief=False)
        assert read_facts(done).values["aiter_root"] == said, root
        told = check_node(node, done, time.time()).findings
        assert [f.level for f in told if f.about == "aiter"] == ([] if said == "there" else ["unusable"])
    for shell in SHELLS:
        assert read_facts(run(node, tmp_path, shell)).values["aiter_root"] == "missing"
    assert "aiter_root" not in read_facts(run(a_node(), tmp_path)).values
    assert "aiter_root" not in read_facts(run(node, tmp_path, brief=True)).values


@pytest.mark.parametrize(
    ("volumes", "mount"),
    [
        ((), ""),
        (("/data:/data",), ""),
        (("/srv:/opt:ro", '/srv/a,"b":/opt/aiter'), 'type=bind,"source=/srv/a,""b""",target=/opt/aiter,readonly'),
        (("vol:/opt",), 'type=volume,"source=vol",target=/opt,readonly'),
    ],
)
def test_a_root_of_aiter_is_looked_for_where_a_container_finds_it(volumes: tuple[str, ...], mount: str) -> None:
    node = in_docker(aiter={"root": "/opt/aiter"}, docker={"volumes": volumes})
    text = script(node).decode()
    assert ("--mount" in text) is bool(mount)
    assert not mount or f"--mount '{mount}'" in text


def test_what_a_plan_keeps_holds_no_names(tmp_path: Path) -> None:
    facts = read_facts(answer(user="secret-user", home="/home/secret-user", host="secret-host", cpu_flag="avx2"))
    save_facts(tmp_path, {"n": facts})
    assert "secret" not in (tmp_path / "nodes/n/facts.json").read_text()
    back = load_facts(tmp_path, ["n"])["n"]
    assert (back.gpus, back.gfx, back.cu_num, back.cpu_flags) == (facts.gpus, "gfx950", 256, ("avx2",))
