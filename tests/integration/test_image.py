"""`image build --node` for real: a node's dockerd, a base imported there, a git repository in AITER's place."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.heavy import HeavyFleet, why_not
from tests.integration.heavy.images import _rootfs
from tests.integration.heavy.outer import Outer
from tests.support.command import Done, command
from tests.waiting import PATIENCE_S

GIT_FILES = ("usr/bin/git", "usr/lib/git-core", "usr/share/git-core/templates")


def _reason() -> str:
    if shutil.which("git") is None or not Path("/usr/lib/git-core/git-daemon").exists():
        return "git with its daemon is not installed"
    return why_not()


pytestmark = [
    pytest.mark.xdist_group("image"), pytest.mark.soak, pytest.mark.system,
    pytest.mark.skipif(bool(_reason()), reason=_reason()),
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


def git(folder: Path, *args: str) -> None:
    env = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
    who = (
        "-c", "user.name=t", "-c", "user.email=t@t", "-c", "protocol.file.allow=always", "-c",
        "init.defaultBranch=main",
    )  # fmt: skip
    subprocess.run(["git", *who, *args], cwd=folder, env=env, check=True, capture_output=True)


@pytest.fixture(scope="module")
def repos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """aiter (a tag v1, then a commit that must not be taken) with the submodule ck beside it."""
    folder = tmp_path_factory.mktemp("repos")
    for name in ("ck", "aiter"):
        (folder / name).mkdir()
        git(folder / name, "init", "-q")
    (folder / "ck" / "ck.h").write_text("// a kernel\n")
    git(folder / "ck", "add", ".")
    git(folder / "ck", "commit", "-q", "-m", "ck")
    work = folder / "aiter"
    (work / "aiter").mkdir()
    (work / "aiter" / "__init__.py").write_text("VERSION = 1\n")
    (work / "setup.py").write_text(SETUP)
    (work / ".gitmodules").write_text(
        '[submodule "3rdparty/composable_kernel"]\n\tpath = 3rdparty/composable_kernel\n\turl = ../ck\n'
    )
    git(work, "clone", "-q", str(folder / "ck"), "3rdparty/composable_kernel")
    git(work, "add", ".")
    git(work, "commit", "-q", "-m", "one")
    git(work, "tag", "v1")
    (work / "aiter" / "__init__.py").write_text("VERSION = 2\n")
    git(work, "commit", "-q", "-a", "-m", "two")
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A `docker save` file of test/base:1: the worker's file system with git."""
    outer = Outer()
    outer.acquire()
    try:
        folder = tmp_path_factory.mktemp("base")
        shutil.copy(_rootfs("worker", print), folder / "root.tar")
        libs = [
            line.split()[2].lstrip("/")
            for line in subprocess.run(["ldd", "/usr/bin/git"], capture_output=True, text=True).stdout.splitlines()
            if "=> /" in line and "libc.so" not in line
        ]
        with tarfile.open(folder / "root.tar") as tar:
            there = {name.removeprefix("./") for name in tar.getnames()}
        with tarfile.open(folder / "root.tar", "a") as tar:
            for name in (*GIT_FILES, *libs):
                inside = f"usr/{name}" if name.startswith("lib/") else name  # /lib is a link to usr/lib
                if inside not in there:
                    tar.add(os.path.realpath(f"/{name}") if name in libs else f"/{name}", inside)
        outer.docker("import", str(folder / "root.tar"), "test/base:1", timeout=PATIENCE_S)
        outer.docker("save", "-o", str(folder / "base.tar"), "test/base:1", timeout=PATIENCE_S)
        outer.docker("image", "rm", "test/base:1")
        yield folder / "base.tar"
    finally:
        outer.release()


@contextlib.contextmanager
def served(folder: Path, address: str) -> Iterator[str]:
    """The repositories by git's own protocol."""
    with socket.socket() as s:
        s.bind((address, 0))
        port = s.getsockname()[1]
    argv = [
        "git", "daemon", f"--base-path={folder}", "--export-all", f"--listen={address}", f"--port={port}", str(folder),
    ]  # fmt: skip
    daemon = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection((address, port), 1):
                break
            assert time.monotonic() < until, "git daemon does not start"
            time.sleep(0.05)
        yield f"git://{address}:{port}"
    finally:
        daemon.terminate()
        daemon.wait()


def test_built_on_a_node(tmp_path: Path, repos: Path, base: Path) -> None:
    fleet = HeavyFleet(tmp_path / "fleet")
    fleet.start(1, users=("root",), images=[base])
    try:
        node = fleet.nodes[0]
        config = tmp_path / "ssh_config"
        config.write_text(fleet.ssh_config())
        inventory = tmp_path / "inv.yaml"
        inventory.write_text(
            f"defaults: {{transport: ssh, engine: docker, image: test/aiter:1, ssh_config: {config}, workdir: /data/gf,"
            f" gfx: gfx950, cu_num: 256}}\nnodes:\n  {node.name}: {{}}\n"
        )

        def build(ref: str, repo: str) -> Done:
            return command(
                "image", "build", "-i", str(inventory), "--node", node.name, "--base", "test/base:1", "--ref", ref,
                "--repo", f"{repo}/aiter", "--prebuild", "1", "--network", "host",
            )  # fmt: skip

        with served(repos, fleet.gateway) as address:
            done = build("v1", address)
            assert done.code == 0, done.out + done.err
            assert f"[{node.name}] built test/aiter:1: sha256:" in done.out
            python = "import aiter; print(aiter.VERSION, aiter.__file__, open('/opt/aiter/built').read())"
            run = "docker run --rm --network none --user 1234:1234 test/aiter:1"
            assert node.sh(f'{run} python3 -c "{python}"').strip() == "1 /opt/aiter/aiter/__init__.py 1 gfx950"
            assert node.sh(f"{run} git -C /opt/aiter status --short").strip() == "?? built"
            missing = build("v9", address)
        assert missing.code == 3
        assert "the build failed" in missing.err
        assert "v9" in missing.err
    finally:
        fleet.stop()
