"""`image build --node` for real: a node's dockerd, a base made there, a git repository in AITER's place."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from tests.integration.heavy import WORKER_IMAGE, HeavyFleet, HeavyNode
from tests.integration.heavy.bench import on_nodes
from tests.kits.fleet import Done, command
from tests.waiting import wait_until

DAEMON = Path("/usr/lib/git-core/git-daemon")
pytestmark = [
    *on_nodes(), pytest.mark.soak, pytest.mark.skipif(not (shutil.which("git") and DAEMON.exists()), reason="no git"),
]  # fmt: skip

SETUP = """
import os, site, sys
assert sys.argv[1:] == ["develop"], sys.argv
here = os.path.dirname(os.path.abspath(__file__))
assert os.path.exists(os.path.join(here, "3rdparty", "composable_kernel", "ck.h")), "the submodule is missing"
os.makedirs(site.getsitepackages()[0], exist_ok=True)
open(os.path.join(site.getsitepackages()[0], "aiter.pth"), "w").write(here + "\\n")
open(os.path.join(here, "built"), "w").write(os.environ["PREBUILD_KERNELS"] + " " + os.environ["GPU_ARCHS"])
"""
REPOS = r"""
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_SYSTEM=/dev/null GIT_CONFIG_COUNT=4
export GIT_CONFIG_KEY_0=user.name GIT_CONFIG_VALUE_0=t GIT_CONFIG_KEY_1=user.email GIT_CONFIG_VALUE_1=t@t
export GIT_CONFIG_KEY_2=protocol.file.allow GIT_CONFIG_VALUE_2=always
export GIT_CONFIG_KEY_3=init.defaultBranch GIT_CONFIG_VALUE_3=main
git init -q ck && git init -q aiter && mkdir aiter/aiter
(cd ck && echo '// a kernel' >ck.h && git add . && git commit -q -m ck) || exit
cd aiter && echo 'VERSION = 1' >aiter/__init__.py && cat >setup.py
printf '[submodule "ck"]\n\tpath = 3rdparty/composable_kernel\n\turl = ../ck\n' >.gitmodules
git clone -q ../ck 3rdparty/composable_kernel && git add . && git commit -q -m one && git tag v1 &&
echo 'VERSION = 2' >aiter/__init__.py && git commit -q -a -m two
"""
"""aiter (a tag v1, then a commit that must not be taken) with the submodule ck beside it."""


def make_base(node: HeavyNode) -> None:
    """test/base:1 on the node: the worker's image with this machine's git."""
    linked = subprocess.run(["ldd", "/usr/bin/git"], capture_output=True, text=True, check=True).stdout
    libs = [lib for lib in re.findall(r"=> /(\S+)", linked) if "libc.so" not in lib]
    files = ["usr/bin/git", "usr/lib/git-core", "usr/share/git-core/templates", *libs]
    tar = ["tar", "-C", "/", "-ch", "--transform", "s#^lib/#usr/lib/#", *files]  # /lib is a link to usr/lib
    packed = subprocess.run(tar, capture_output=True, check=True).stdout
    script = f"id=$(docker create {WORKER_IMAGE} true) && docker cp - $id:/ && docker commit $id test/base:1"
    done = node.exec(["sh", "-c", f"{script} && docker rm $id"], stdin=packed)
    assert done.returncode == 0, done.stderr


def test_built_on_a_node(tmp_path: Path, fleet: HeavyFleet) -> None:
    node, repos, inventory = fleet.nodes[0], tmp_path / "repos", tmp_path / "inv.yaml"
    make_base(node)
    repos.mkdir()
    subprocess.run(["sh", "-c", REPOS], cwd=repos, input=SETUP, text=True, check=True)
    inventory.write_text(
        "defaults: {transport: ssh, engine: docker, image: test/aiter:1, workdir: /data/gf, gfx: gfx950, cu_num: 256,"
        f" ssh_config: {fleet.folder}/ssh_config}}\nnodes:\n  {node.name}: {{}}\n"
    )
    with socket.socket() as s:
        s.bind((fleet.gateway, 0))
        port = s.getsockname()[1]
    argv = ["git", "daemon", f"--base-path={repos}", "--export-all", f"--listen={fleet.gateway}", f"--port={port}"]
    daemon = subprocess.Popen([*argv, repos], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def build(ref: str) -> Done:
        return command(
            "image", "build", "-i", str(inventory), "--node", node.name, "--base", "test/base:1", "--ref", ref,
            "--repo", f"git://{fleet.gateway}:{port}/aiter", "--prebuild", "1", "--network", "host",
        )  # fmt: skip

    try:
        look = ["git", "ls-remote", f"git://{fleet.gateway}:{port}/aiter"]
        wait_until(lambda: subprocess.run(look, capture_output=True, env=os.environ).returncode == 0, "git serves")
        done = build("v1").ok()
        assert f"[{node.name}] built test/aiter:1: sha256:" in done.out
        python = "import aiter; print(aiter.VERSION, aiter.__file__, open('/opt/aiter/built').read())"
        run = "docker run --rm --network none --user 1234:1234 test/aiter:1"
        assert node.sh(f'{run} python3 -c "{python}"').strip() == "1 /opt/aiter/aiter/__init__.py 1 gfx950"
        assert node.sh(f"{run} git -C /opt/aiter status --short").strip() == "?? built"
        missing = build("v9")
        assert missing.code == 3
        assert "the build failed" in missing.err
        assert "v9" in missing.err
    finally:
        daemon.terminate()
        daemon.wait()
        node.sh("rm -rf /data/gf; docker image rm -f test/aiter:1 test/base:1")
