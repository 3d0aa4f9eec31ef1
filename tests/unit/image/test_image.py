"""`image build`: the recipe, its checks, and a build on this machine with a stand-in for docker."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import InputError
from orchestrator.families import get_family
from orchestrator.image.build import Recipe
from orchestrator.image.fixes import aiter_lines
from orchestrator.inventory.model import AiterSection, Node
from orchestrator.machines.facts import NodeFacts
from tests.kits.fleet import Done, command
from tests.standins.aiter import make_tree


def recipe(**kw: Any) -> Recipe:
    return Recipe(**{"base": "my/base:1", "tag": "my/aiter:1", "gfx": ("gfx950",), **kw})


def test_what_is_rendered_is_what_was_asked() -> None:
    text = recipe(ref="v0.1.13", prebuild=1, jobs=8, gfx=("gfx942", "gfx950"), repo="git://host/aiter").dockerfile()
    lines = [x.removeprefix("RUN ") for x in text.replace("\\\n", "").splitlines() if x.startswith("RUN ")]
    for line in lines:  # sh reads them
        subprocess.run(["sh", "-n", "-c", line], check=True)
    for words in (
        "git://host/aiter /opt/aiter",
        "fetch origin v0.1.13",
        "submodule update --init --recursive",
        "export PREBUILD_KERNELS=1 GPU_ARCHS='gfx942;gfx950' AITER_USE_SYSTEM_TRITON=1 MAX_JOBS=8;",
    ):
        assert any(words in x for x in lines), words
    assert text.splitlines()[1] == "FROM my/base:1"
    assert "COPY" not in text
    assert "ENV" not in text
    assert "requirements.txt" not in recipe(requirements=False).dockerfile()


def test_tables_are_compiled_with_and_used(tmp_path: Path) -> None:
    of = get_family("a4w4_blockscale")
    table = tmp_path / of.tuned_csv
    table.write_text(",".join(of.tuned_header) + "\n")
    made = recipe(tables=(table,))
    text = made.dockerfile()
    assert "COPY a4w4_blockscale.csv /opt/aiter-tables/a4w4_blockscale.csv\n" in text
    assert "\nENV AITER_CONFIG_GEMM_A4W4=/opt/aiter-tables/a4w4_blockscale.csv\n" in text
    assert text.index("ENV") < text.index("setup.py develop")
    assert made.files(["docker"], [])["a4w4_blockscale.csv"].data == table.read_bytes()
    with pytest.raises(InputError, match="two --table of one family"):
        recipe(tables=(table, table)).dockerfile()


@pytest.mark.parametrize(
    ("kw", "told"),
    [
        ({"base": "a b"}, "--base"),
        ({"ref": "main; rm -rf /"}, "--ref"),
        ({"repo": "--upload-pack=x"}, "--repo"),
        ({"repo": "ext::sh -c id"}, "--repo"),
        ({"repo": "https://me:hunter2@h/aiter.git"}, "password"),
        ({"gfx": ("sm_90",)}, "--gfx"),
        ({"prebuild": 7}, "--prebuild"),
    ],
)
def test_what_is_refused(kw: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told) as e:
        recipe(**kw)
    assert "hunter2" not in str(e.value), "a secret is never repeated"


def image(*args: object) -> Done:
    return command("image", *args)


def test_the_inventory_says_image_and_chip(tmp_path: Path) -> None:
    inventory, out = tmp_path / "inv.yaml", tmp_path / "folder"
    node = "transport: ssh, engine: docker, image: my/aiter:2, gfx: gfx950, cu_num: 256"
    inventory.write_text(f"nodes:\n  a: {{{node}}}\n  b: {{{node}}}\n")
    told = image("build", "--render", "-i", inventory, "--base", "b", "-o", out).ok()
    assert told.out == f"written: {out}; build it with: sh {out}/build.sh\n"
    assert sorted(os.listdir(out)) == ["Dockerfile", "build.sh"]
    assert "--tag my/aiter:2" in (out / "build.sh").read_text()
    assert "GPU_ARCHS=gfx950" in image("build", "--render", "-i", inventory, "--base", "b").ok().out
    subprocess.run(["sh", "-n", out / "build.sh"], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "-S", "warning", out / "build.sh"], check=True)
    inventory.write_text(f"nodes:\n  a: {{{node}}}\n  b: {{{node.replace(':2', ':3')}}}\n")
    for args, says in (
        (("--render", "-i", str(inventory)), "give --tag"),
        (("-i", str(inventory), "--tag", "t", "--node", "c"), "has no node 'c'"),
        (("--tag", "t", "--node", "c"), "--node needs the inventory"),
    ):
        image("build", "--base", "b", *args).failed_with(2, says)


def test_a_build_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for docker, which notes how it was called, prints, and ends with the code in `code`."""
    docker = tmp_path / "bin/docker"
    docker.parent.mkdir()
    docker.write_text(
        f'#!/bin/sh\necho "$PWD $*" >>{tmp_path}/calls\n[ "$1" = image ] && echo sha256:abc && exit\n'
        f"printf 'Step 1\\n\\033[31mred\\033[0m warning\\n' >&2; exit \"$(cat {tmp_path}/code)\"\n"
    )
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{docker.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "code").write_text("0")
    args = ("build", "--base", "b", "--tag", "x/y:1", "--gfx", "gfx950", "--network", "host", "--no-cache")
    said = ["Step 1", "red warning", "built x/y:1: sha256:abc"]
    assert image(*args).ok().out.splitlines() == [f"[this machine] {line}" for line in said]
    call = (tmp_path / "calls").read_text().splitlines()[0]
    assert call == f"{tmp_path}/.gemmfleet/images/x-y-1 build --tag x/y:1 --network host --no-cache ."
    assert image(*args, "--json").ok().json() == {"image": "x/y:1", "built": {"this machine": "sha256:abc"}}
    (tmp_path / "code").write_text("3")
    image(*args).failed_with(3, "the build failed ", "build.sh repeats it", "red warning")


def test_the_fixes_that_a_node_needs_are_known_before_a_worker_starts(tmp_path: Path) -> None:
    old, new = (make_tree(tmp_path / date, date).root for date in ("runbook", "newest"))
    (new / "aiter/_version.py").write_text("__version__ = version = '0.1.14'\n")
    (old / ".git").mkdir()
    (old / ".git/HEAD").write_text("da29487171" + 30 * "0" + "\n")
    nowhere = str(tmp_path / "nowhere")
    nodes = {
        "old": Node(name="old", gpus=0, gfx="gfx950", cu_num=256, aiter=AiterSection(root=str(old))),
        "found": Node(name="found", gpus=0),
        "package": Node(name="package", gpus=0, aiter=AiterSection(root=str(new / "aiter"))),
        "none": Node(name="none", gpus=0, aiter=AiterSection(root=nowhere)),
        "unasked": Node(name="unasked", engine="docker", image="i:1"),
        "pool": Node(name="pool", lease="slurm"),
    }
    usable = {name: NodeFacts({"aiter_at": str(new)}) for name in nodes}
    late = "AITER: known when the worker starts"
    assert aiter_lines(nodes.values(), usable) == {
        "old": f"AITER da29487171 in {old} needs asm_dir_symlink, tile_column_case, k_trim; applied to a copy",
        "found": f"AITER 0.1.14 in {new} needs no fix",
        "package": f"AITER 0.1.14 in {new / 'aiter'} needs no fix",
        "none": f"{late} (no AITER is in {nowhere})",
        "unasked": late,
        "pool": late,
    }
    assert aiter_lines(nodes.values(), {}) == {}
