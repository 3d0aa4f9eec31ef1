"""Every rendered script is valid shell, quotes what it is given, and refuses what it cannot quote."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from orchestrator.controller.deploy import NodePlan, node_files, worker_code
from orchestrator.controller.facts import Gpu, NodeFacts, script
from orchestrator.controller.node_plan import node_of, plan_lease, plan_nodes
from orchestrator.engines import find_engine
from orchestrator.errors import TemplateError
from orchestrator.inventory.load import load_inventory, resolved
from orchestrator.inventory.values import names
from orchestrator.templating import data_folder, quote, render

HOSTILE = "a'b\"c $(touch hacked) `id` ; rm -rf / \\ é"


def plan(**changes: object) -> NodePlan:
    values: dict[str, object] = {
        "node": "n1", "folder": "/tmp/x", "slots": ("0", "1"), "transport": "local", "engine": "process",
        "python": "/usr/bin/python3", "env": {"A": HOSTILE}, "devices": {"0": {"HIP_VISIBLE_DEVICES": "0"}, "1": {}},
    }  # fmt: skip
    return NodePlan(**{**values, **changes})  # type: ignore[arg-type]


def scripts(folder: Path, p: NodePlan) -> list[Path]:
    out = []
    for name, file in node_files(p, "run-1", "torch", {}, 60.0).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.data)
        path.chmod(file.mode)
        if name.endswith(".sh"):
            out.append(path)
    return out


@pytest.mark.parametrize(
    "changes",
    [{}, {"env": {}, "devices": {}}, {"slots": ("0",), "python": None}, {"python": HOSTILE}],
    ids=str,
)
def test_rendered_scripts_pass_the_shell_and_shellcheck(tmp_path: Path, changes: dict[str, object]) -> None:
    found = scripts(tmp_path, plan(**changes))
    assert {p.name for p in found} == {"launch.sh", "tune.sh", "follow.sh"}
    for path in found:
        for shell in ("sh", "bash"):
            subprocess.run([shell, "-n", path], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed (SYSTEM=1 installs it)")
    done = subprocess.run(["shellcheck", "-S", "warning", *found], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


INVENTORIES = sorted(data_folder("inventories").glob("*.yaml"))
EIGHT = NodeFacts(
    {"end": "1", "machine": "x86_64", "cores": "256"},
    tuple(
        Gpu(
            "amd", "gfx950", 256, render=f"renderD{128 + 8 * i}", numa=i // 4,
            cpus=f"{64 * (i // 4)}-{64 * (i // 4) + 63}",
        )
        for i in range(8)
    ),
)  # fmt: skip
"""Probe of a node with eight MI355X; made up."""


def rendered_for(inventory: Path, folder: Path) -> dict[str, list[Path]]:
    """Every script of every node of an inventory, by the template that it comes from."""
    out: dict[str, list[Path]] = {}
    nodes = load_inventory(inventory).nodes
    plans = plan_nodes(load_inventory(inventory), "run-1", folder, dict.fromkeys(nodes, EIGHT))
    plans += [plan_lease(n, "run-1", EIGHT, {})[0] for n in nodes.values() if n.lease is not None]
    assert plans
    for p in plans:
        home = folder / p.node
        made = scripts(home, p)
        for path in made:
            out.setdefault(str(find_engine(p.engine).scripts[path.name]), []).append(path)
        for brief in (False, True):
            path = home / f"check-{brief}.sh"
            path.write_bytes(script(resolved(node_of(p)), brief=brief))
            out.setdefault("check.sh.j2", []).append(path)
    return out


@pytest.mark.parametrize("inventory", INVENTORIES, ids=lambda p: p.name)
def test_the_scripts_of_every_inventory_here_pass_the_shell_and_shellcheck(
    tmp_path: Path, inventory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in names(inventory.read_text()):
        monkeypatch.setenv(name, "someone")
    found = [path for paths in rendered_for(inventory, tmp_path).values() for path in paths]
    for path in found:
        for shell in ("sh", "bash"):
            subprocess.run([shell, "-n", path], check=True)
    if inventory.name == "mi355x.example.yaml":
        text = (tmp_path / "gpu-node-1" / "container.sh").read_text()
        assert all(f"--cpuset-cpus={cpus}" in text for cpus in ("0-63", "64-127"))
        assert "gemmfleet-run-1-gpu-node-1-7" in text  # eight slots
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed (SYSTEM=1 installs it)")
    for home in {path.parent for path in found}:
        mine = [path.name for path in found if path.parent == home]
        done = subprocess.run(["shellcheck", "-x", "-S", "warning", *mine], capture_output=True, text=True, cwd=home)
        assert done.returncode == 0, done.stdout


def test_no_shell_template_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_USER", "someone")
    used = {t for i, path in enumerate(INVENTORIES) for t in rendered_for(path, tmp_path / str(i))}
    # `image build`'s: test_image.py; the holder's: leases/test_holder_script.py; a part of launch.sh
    used |= {"build.sh.j2", "lease.sh.j2", "hold.sh.j2"}
    assert used == {p.name for p in data_folder("templates").glob("*.sh.j2")}


def test_values_reach_the_worker_as_they_are_and_run_nothing(tmp_path: Path) -> None:
    scripts(tmp_path, plan(python=None))
    probe = tmp_path / "code" / worker_code()[0] / "worker" / "__main__.py"
    probe.write_text("import os, sys\nprint(os.environ['A'], sys.argv[1:], sep='|')\n")
    done = subprocess.run(["sh", tmp_path / "tune.sh", "probe", "x y"], capture_output=True, text=True, check=True)
    assert done.stdout == f"{HOSTILE}|['probe', 'x y']\n"
    assert not list(tmp_path.rglob("hacked"))


def test_inherited_tuning_switches_are_cleared_and_named(tmp_path: Path) -> None:
    scripts(tmp_path, plan(python=None, env={"AITER_JIT_DIR": "/mine"}))
    probe = tmp_path / "code" / worker_code()[0] / "worker" / "__main__.py"
    probe.write_text(
        "import os\nprint(os.environ.get('AITER_REBUILD'), os.environ.get('HIP_ONLINE_TUNING'),"
        " os.environ['AITER_JIT_DIR'], sorted(os.environ['GEMMFLEET_CLEARED_ENV'].split()))\n"
    )
    env = {
        "PATH": "/usr/bin:/bin", "AITER_REBUILD": "1", "HIP_ONLINE_TUNING": "1", "AITER_JIT_DIR": "/theirs",
    }  # fmt: skip
    done = subprocess.run(["sh", tmp_path / "tune.sh", "probe"], capture_output=True, text=True, check=True, env=env)
    assert done.stdout == "None None /mine ['AITER_JIT_DIR', 'AITER_REBUILD', 'HIP_ONLINE_TUNING']\n"


def test_an_undefined_name_and_a_control_character_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t.j2").write_text("rm -rf /data/{{ folder }}\n")
    with pytest.raises(TemplateError, match="'folder' is undefined"):
        render(tmp_path / "t.j2", {})
    with pytest.raises(TemplateError, match=r"templates/launch\.sh\.j2.*undefined"):
        render("launch.sh.j2", {"run": "r"})
    with pytest.raises(TemplateError, match="control character"):
        quote("a\x1b[2J")
