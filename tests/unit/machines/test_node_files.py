"""Every rendered script is valid shell, quotes what it is given, and refuses what it cannot quote."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from orchestrator.engines import find_engine
from orchestrator.errors import TemplateError
from orchestrator.inventory.load import load_inventory, resolved
from orchestrator.inventory.references import reference_names
from orchestrator.machines.check_script import render_script
from orchestrator.machines.facts import Gpu, NodeFacts
from orchestrator.machines.node_files import node_files, worker_code
from orchestrator.machines.node_plan import NodePlan, node_of, plan_lease, plan_nodes
from orchestrator.templating import data_folder, quote, render
from tests.support.shells import check

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


EIGHT = NodeFacts(
    {"end": "1", "machine": "x86_64", "cores": "256"},
    tuple(
        Gpu("amd", "gfx950", 256, render=f"renderD{128 + 8 * i}", numa=i // 4, cpus=("0-63", "64-127")[i // 4])
        for i in range(8)
    ),
)
"""Facts of a node with eight MI355X; made up."""


def test_the_scripts_of_every_inventory_here_pass_the_shell_and_shellcheck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Path] = []
    # `image build`'s: test_image.py; the holder's: leases/test_holder_script.py; a part of launch.sh
    used = {"build.sh.j2", "lease.sh.j2", "hold.sh.j2", "check.sh.j2"}
    for inventory in sorted(data_folder("inventories").glob("*.yaml")):
        for name in reference_names(inventory.read_text()):
            monkeypatch.setenv(name, "someone")
        nodes = load_inventory(inventory).nodes
        plans = plan_nodes(load_inventory(inventory), "run-1", tmp_path, dict.fromkeys(nodes, EIGHT))
        for p in [*plans, *(plan_lease(n, "run-1", EIGHT, {})[0] for n in nodes.values() if n.lease is not None)]:
            home = tmp_path / inventory.name / p.node
            made = scripts(home, p)
            used |= {str(find_engine(p.engine).scripts[path.name]) for path in made}
            for brief in (False, True):
                made.append(home / f"check-{brief}.sh")
                made[-1].write_bytes(render_script(resolved(node_of(p)), brief=brief))
            found += made
    assert used == {p.name for p in data_folder("templates").glob("*.sh.j2")}, "no template is left out"
    text = (tmp_path / "mi355x.example.yaml/gpu-node-1/container.sh").read_text()
    for part in ("--cpuset-cpus=0-63", "--cpuset-cpus=64-127", "gemmfleet-run-1-gpu-node-1-7"):
        assert part in text
    check(*found)


def run_probe(folder: Path, p: NodePlan, code: str, *words: str, **env: str) -> str:
    """Output of `tune.sh WORDS`, with `code` in place of the worker."""
    scripts(folder, p)
    (folder / "code" / worker_code()[0] / "worker" / "__main__.py").write_text(f"import os, sys\nprint({code})\n")
    argv, env = ["sh", str(folder / "tune.sh"), *words], {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", **env}
    return subprocess.run(argv, capture_output=True, text=True, check=True, env=env).stdout


def test_values_reach_the_worker_as_they_are_and_run_nothing(tmp_path: Path) -> None:
    out = run_probe(tmp_path, plan(python=None), "os.environ['A'], sys.argv[1:], sep='|'", "probe", "x y")
    assert out == f"{HOSTILE}|['probe', 'x y']\n"
    assert not list(tmp_path.rglob("hacked"))


def test_inherited_tuning_switches_are_cleared_and_named(tmp_path: Path) -> None:
    shown = "AITER_REBUILD", "HIP_ONLINE_TUNING", "AITER_JIT_DIR", "GEMMFLEET_CLEARED_ENV"
    inherited = {"AITER_REBUILD": "1", "HIP_ONLINE_TUNING": "1", "AITER_JIT_DIR": "/theirs"}
    mine = plan(python=None, env={"AITER_JIT_DIR": "/mine"})
    out = run_probe(tmp_path, mine, f"*map(os.environ.get, {shown})", "probe", **inherited).split()
    assert (out[:3], sorted(out[3:])) == (["None", "None", "/mine"], sorted(inherited))


def test_an_undefined_name_and_a_control_character_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t.j2").write_text("rm -rf /data/{{ folder }}\n")
    with pytest.raises(TemplateError, match="'folder' is undefined"):
        render(tmp_path / "t.j2", {})
    with pytest.raises(TemplateError, match="control character"):
        quote("a\x1b[2J")


def test_a_template_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        TemplateError, match=r"^templates/missing\.sh\.j2: there is no such template; install gemmfleet"
    ):
        render("missing.sh.j2", {})
    with pytest.raises(TemplateError, match=r"mine\.j2: No such file or directory"):
        render(tmp_path / "mine.j2", {})
