"""Parts of the tuner aiter by themselves: locks, modules, the journal's predicate, parked shapes."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.controller.deploy import NodePlan, node_files
from orchestrator.engine.docker import DockerOptions
from tests.support.aiterbuild import CK2, tree
from tests.waiting import wait_until
from worker.agent.attempt import MessageCheck
from worker.aiter_tree.kernel_lists import KernelLists
from worker.aiter_tree.locate import tree_at
from worker.process import Child, OutputLog
from worker.protocol import NodeConfig, ProtocolError, Spec, SpecShape, TableKernel
from worker.tuners.aiter.blocklist import BlocklistEntry, CandidateId, LeftOut, SlotIdentity, chosen_candidates
from worker.tuners.aiter.findings import SHIM, shim_fit
from worker.tuners.aiter.modules import ModuleStore, clear_stale_locks, link_shipped_modules

MP_TUNER = """
def worker(gpu_id, info, func, args, kwargs, ref=None):
    if func == "raises":
        print(f"run gpu func warning: info:{info} boom")
        return info, -1, 1.0
    return info, 1.0, 0.0

def work_group(tasks):
    return [worker(0, *t) for t in tasks]
"""


# --- locks and modules --------------------------------------------------------------------------------------------


def test_a_lock_is_cleared_only_when_its_owner_is_dead(tmp_path: Path) -> None:
    build = tmp_path / "build"
    (build / "module_x/build").mkdir(parents=True)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    locks = {
        "lock_named_dead": f"{dead.pid}\n{socket.gethostname()}\n",
        "lock_named_alive": f"{os.getpid()}\n{socket.gethostname()}\n",
        "lock_other_host": f"{dead.pid}\nanother-host\n",
        "lock_unnamed": "",
        "lock_open": "",
        "module_x/build/lock": "",
    }
    for name, text in locks.items():
        (build / name).write_text(text)
    with open(build / "lock_open") as held:
        told = clear_stale_locks([tmp_path])
        assert not held.closed
    left = {p.relative_to(build).as_posix() for p in build.rglob("*") if p.is_file()}
    assert left == {"lock_named_alive", "lock_other_host", "lock_open"}
    assert len(told) == 3
    assert clear_stale_locks([tmp_path / "nothing"]) == []


def test_built_modules_are_published_and_copied_never_shared(tmp_path: Path) -> None:
    package, slot, other = tmp_path / "aiter", tmp_path / "slot", tmp_path / "other"
    (package / "jit").mkdir(parents=True)
    (package / "jit/module_core.so").write_text("core")
    assert link_shipped_modules(slot, package) == 1
    assert link_shipped_modules(slot, package) == 0
    (slot / "module_a.so").write_text("a")
    (slot / "build/module_a").mkdir(parents=True)
    (slot / "build/module_a/big.o").write_text("object")
    store = ModuleStore(tmp_path / "cache", "key")
    assert not store.is_warm("a8w8")
    store.publish(slot, "a8w8")
    assert store.is_warm("a8w8")
    link_shipped_modules(other, package)
    assert store.copy_to(other) == 1
    assert store.copy_to(other) == 0
    assert (other / "module_a.so").read_text() == "a"
    assert not (other / "module_a.so").samefile(store.modules / "module_a.so")
    assert not (other / "build").exists()
    (other / "module_core.so").unlink()  # what a builder does before it writes its own
    (other / "module_core.so").write_text("rebuilt")
    assert (package / "jit/module_core.so").read_text() == "core"


def test_one_slot_builds_and_the_others_wait(tmp_path: Path) -> None:
    store = ModuleStore(tmp_path, "key")
    store.root.mkdir(parents=True)
    beats = 0

    def alive() -> None:
        nonlocal beats
        beats += 1
        if beats == 2:
            os.close(holder)  # as when its process dies

    holder = os.open(store.root / "building", os.O_RDWR | os.O_CREAT)
    fcntl.flock(holder, fcntl.LOCK_EX)
    with store.building(alive):
        assert beats == 2


# --- the journal --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (MP_TUNER, ""),
        (MP_TUNER.replace("info", "what"), "takes no info"),
        (MP_TUNER.replace("return info, 1.0, 0.0", "return info"), "does not return (info, us, error)"),
        (MP_TUNER.replace("worker(0, *t)", "t"), "does not call worker"),
        (MP_TUNER.replace("def work_group", "def other"), "no functions worker and work_group"),
        ("def worker(:", "cannot be read"),
    ],
)
def test_the_shim_is_used_only_on_what_it_knows(tmp_path: Path, source: str, why: str) -> None:
    path = tmp_path / "utility/mp_tuner.py"
    path.parent.mkdir()
    path.write_text(source)
    found = shim_fit(tmp_path)
    assert found.fits == (not why)
    assert why in found.why
    assert found.fits == (len(found.target_sha256) == 64 and found.as_json()["state"] == "used")


KEY = ("256", "1", "2", "3")


def shimmed(
    folder: Path, tasks: str, left_out: LeftOut, *, journal: bool = True, func: str = "None"
) -> tuple[str, list[dict[str, Any]]]:
    """Output of a pool with these tasks in an image with a sitecustomize of its own, and the shim's journal."""
    (folder / "aiter/utility").mkdir(parents=True, exist_ok=True)
    for package in ("aiter", "aiter/utility"):
        (folder / package / "__init__.py").touch()
    (folder / "aiter/utility/mp_tuner.py").write_text(MP_TUNER)
    (folder / "sitecustomize.py").write_text("import builtins; builtins.IMAGE_SAYS = 'hello'\n")
    program = f"tasks = [(i, {func}, (), {{}}) for i in {tasks}]\nfrom aiter.utility import mp_tuner\n"
    program += "print(IMAGE_SAYS, mp_tuner.work_group(tasks))"
    steps = folder / "candidates.jsonl"
    steps.unlink(missing_ok=True)
    left_out.write(folder / "blocked.jsonl")
    env = {**os.environ, "PYTHONPATH": f"{SHIM}:{folder}", "GEMMFLEET_AITER_WATCH": str(folder) if journal else ""}
    said = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert ("hello " in said.stdout, said.stderr) == (True, "")
    return said.stdout, [json.loads(line) for line in steps.read_text().splitlines()] if journal else []


def test_the_shim_measures_what_is_asked_for_and_stands_aside(tmp_path: Path) -> None:
    tasks = "[((256, 1, 2, 3), n, 0, '') for n in (4, 5, 6)]"
    five = CandidateId(KEY, ("5", "0", ""))
    entries = {five: BlocklistEntry(SlotIdentity("s", "i"), "a8w8", five, "fault", "", True, 1.0)}
    kernels = [{"libtype": "ck", "numbers": [n], "name": "", "split": "0"} for n in ("5", "6")]
    asked = [{"sizes": ["1", "2", "3"], "only": kernels}]
    for left_out, events in (
        (LeftOut(entries), ["begin 4", "end 4", "blocked 5", "begin 6", "end 6"]),
        (LeftOut(entries, only=asked), ["skipped 4", "blocked 5", "begin 6", "end 6"]),
    ):
        printed, steps = shimmed(tmp_path, tasks, left_out)
        assert [f"{s['event']} {s['candidate'][0]}" for s in steps] == events
        assert "((256, 1, 2, 3), 5, 0, ''), inf, 1.0)" in printed
    assert "inf" not in shimmed(tmp_path, tasks, LeftOut(entries), journal=False)[0]


def test_the_shim_keeps_what_aiter_prints_of_a_candidate_that_raised(tmp_path: Path) -> None:
    printed, steps = shimmed(tmp_path, "[((256, 1, 2, 3), 4, 0, '')]", LeftOut(), func="'raises'")
    assert steps[-1]["said"] == "run gpu func warning: info:((256, 1, 2, 3), 4, 0, '') boom"
    assert steps[-1]["said"] in printed


def test_the_shim_finds_kernels_of_a_table_by_name_and_unnamed_ones_by_this_trees_number(tmp_path: Path) -> None:
    tasks = (
        "[(k, n, s, name) for k in (('gfx950', 256, 1, 2, 3), ('gfx950', 256, 4, 2, 3))"
        " for n, s, name in ((0, 0, ''), (1, 0, ''), (1, 1, ''), (7, 0, '_ZN_asm'))]"
    )
    old = [("ck", "0", CK2, "0"), ("asm", "1", "_ZN_asm", "0"), ("asm", "7", "_ZN_gone", "0")]
    spec = Spec("a", "r", 1, family="a4w4_blockscale", shapes=(SpecShape(5, {"M": 1, "N": 2, "K": 3}),))
    spec = replace(spec, only={"5": [TableKernel(*k)._asdict() for k in old]})
    chosen = chosen_candidates(KernelLists(tree_at(tree(tmp_path / "tree"))), "gfx950", spec)
    first = {"libtype": "ck", "numbers": ["1"], "name": CK2, "split": "0"}
    assert chosen[5]["only"][0] == first, "number 1 here, 0 in the table's image"
    _, steps = shimmed(tmp_path / "image", tasks, LeftOut(only=list(chosen.values())))
    ran = [(s["key"][2], *s["candidate"][:2]) for s in steps if s["event"] == "end"]
    assert ran == [("1", "1", "0"), ("1", "7", "0"), *(("4", n, s) for n, s in ("00", "10", "11", "70"))]


# --- what the worker learned for it -------------------------------------------------------------------------------


def test_a_parked_shape_waits_for_its_verdict_without_blame() -> None:
    course = MessageCheck(Spec("a", "r", 1, shapes=(SpecShape(1, {"M": 1}), SpecShape(2, {"M": 2}))))
    row = {"us": 1.0, "errRatio": 0.0, "kernelName": "k", "block_m": 64, "kernelName1": "x", "us1": 2.0}
    assert course.take({"type": "shape_started", "shape": 1}, 0.0)
    assert course.take({"type": "shape_parked", "shape": 1}, 0.0) is None
    assert [course.in_flight] == [None]
    course.take({"type": "shape_started", "shape": 2}, 0.0)
    made = course.take({"type": "shape_tuned", "shape": 1, "row": row}, 0.0)
    assert made is not None
    assert made["row"] == row
    assert course.in_flight == 2
    for message in ({"type": "shape_parked", "shape": 1}, {"type": "row", "shape": 1, "row": row}):
        with pytest.raises(ProtocolError):
            course.take(message, 0.0)
    course.take({"type": "shape_parked", "shape": 2}, 0.0)
    course.take({"type": "shape_started", "shape": 2}, 0.0)  # it is tried again
    assert course.in_flight == 2


@pytest.mark.parametrize(
    ("program", "session"),
    [
        ("subprocess.Popen(['sleep', '60'], preexec_fn=os.setpgrp)", True),
        ("signal.signal(signal.SIGINT, signal.SIG_IGN); subprocess.Popen(['sleep', '60'])", False),
    ],
)
def test_a_process_is_ended_with_all_that_it_started(tmp_path: Path, program: str, session: bool) -> None:
    """In groups of their own, and where it ignores SIGINT."""
    log, words = (
        OutputLog(tmp_path / "log"),
        f"import os,signal,subprocess,time; {program}; print(1,flush=True); time.sleep(60)",
    )
    with log.open() as out:
        leader = Child([sys.executable, "-c", words], env=os.environ, out=out.fileno(), session=session)
    wait_until(log.read, "it runs")
    assert len(leader.members()) == 2
    if session:
        leader.kill()
    else:
        leader.stop(0.2)
    assert (leader.members(), leader.returncode) == ({}, -9)


# --- on the node --------------------------------------------------------------------------------------------------


def test_the_node_keeps_modules_beside_the_runs_for_this_tuner_only() -> None:
    docker = DockerOptions("img:1")
    plan = NodePlan("n", "/w/run/n", ("0",), "ssh", "docker", None, {}, {}, docker=docker)
    for tuner, there in (("aiter", True), ("torch", False)):
        files = node_files(plan, "run", tuner, {"family": "a8w8"} if there else {}, 60.0)
        script = files["container.sh"].data.decode()
        assert ("GEMMFLEET_CACHE=/gemmfleet-cache" in script) == there
        assert ("GEMMFLEET_IMAGE_DIGEST=$digest" in script) == there
        config = NodeConfig.loads(files["node.json"].data)
        assert (config.start_timeout_s > 3600) == there
        for name in ("container.sh", "tune.sh"):
            subprocess.run(["sh", "-n"], input=files[name].data, check=True)
    process = NodePlan("n", "/r/run/work/n", ("0",), "local", "process", None, {}, {}, cache="../../../.cache")
    assert "cd ../../../.cache && pwd -P" in node_files(process, "run", "aiter", {}, 60.0)["tune.sh"].data.decode()
