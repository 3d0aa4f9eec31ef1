"""AITER's compiled modules on a node: stale locks, and where they are kept."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator.engine.docker_options import DockerOptions
from orchestrator.machines.node_files import node_files
from orchestrator.machines.node_plan import NodePlan
from tests.support.files import write_files
from worker.protocol import NodeConfig
from worker.tuners.aiter import modules
from worker.tuners.aiter.modules import clear_stale_locks


def test_a_lock_is_cleared_only_when_nobody_holds_it(tmp_path: Path) -> None:
    build = write_files(tmp_path / "build", dict.fromkeys(("lock_dead", "lock_open", "module_x/build/lock"), ""))
    with open(build / "lock_open"):
        assert len(clear_stale_locks([tmp_path, tmp_path / "nothing"])) == 2
    assert [p.name for p in build.rglob("*") if p.is_file()] == ["lock_open"]


def test_a_lock_that_its_builder_is_just_done_with_and_a_new_one_of_that_name_are_no_stale_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = write_files(tmp_path / "build", dict.fromkeys(("lock_closed", "lock_again"), ""))

    def meanwhile(seconds: float) -> None:
        (build / "lock_closed").unlink()
        (build / "new").touch()  # beside the old one, which would give its inode to it
        (build / "new").rename(build / "lock_again")

    monkeypatch.setattr(modules, "time", SimpleNamespace(sleep=meanwhile))
    assert clear_stale_locks([tmp_path]) == []
    assert [p.name for p in build.iterdir()] == ["lock_again"]


def test_the_node_keeps_modules_beside_the_runs_for_this_tuner_only() -> None:
    plan = NodePlan("n", "/w/run/n", ("0",), "ssh", "docker", None, {}, {}, docker=DockerOptions(image="img:1"))
    for tuner, there in (("aiter", True), ("torch", False)):
        files = node_files(plan, "run", tuner, {"family": "a8w8"} if there else {}, 60.0)
        assert ("GEMMFLEET_CACHE=/gemmfleet-cache" in files["container.sh"].data.decode()) == there
        assert (NodeConfig.loads(files["node.json"].data).start_timeout_s > 3600) == there
    process = NodePlan("n", "/r/run/work/n", ("0",), "local", "process", None, {}, {}, cache="../../../.cache")
    assert "cd ../../../.cache && pwd -P" in node_files(process, "run", "aiter", {}, 60.0)["tune.sh"].data.decode()
