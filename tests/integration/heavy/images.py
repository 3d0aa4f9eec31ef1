"""The two images: `node` (a host with sshd and dockerd, no Python) and `worker` (what runs on its slots).

Built once by debootstrap from Debian's mirror, about 90 s and 900 MB of disk, and kept in the cache folder by
the hash of their recipe.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.integration.heavy.outer import CACHE, HeavyError, Outer, locked

SUITE = "bookworm"
WORKER_IMAGE = "gemmfleet/test-worker:1"
PACKAGES = {
    "node": "openssh-server,docker.io,iptables,iproute2,procps,sudo,libfaketime,e2fsprogs",
    "worker": "python3-minimal,libpython3.11-stdlib,libfaketime",
}
TRIM = ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info")


def node_image(outer: Outer) -> str:
    """The node's image in the outer daemon, built and imported where it is missing."""
    name = f"gemmfleet/test-node:{_recipe('node')}"
    with locked("image-node"):
        if outer.run(["image", "inspect", name]).returncode != 0:
            archive = _rootfs("node")
            outer.docker("import", str(archive), name, timeout=300)
    return name


def worker_archive(outer: Outer) -> Path:
    """A `docker save` file of WORKER_IMAGE, for the nodes to load."""
    archive = CACHE / f"worker-{_recipe('worker')}.docker.tar"
    with locked("image-worker"):
        if not archive.exists():
            outer.docker("import", "-c", 'CMD ["python3"]', str(_rootfs("worker")), WORKER_IMAGE, timeout=300)
            with _aside(archive) as part:
                outer.docker("save", "-o", str(part), WORKER_IMAGE, timeout=300)
            outer.docker("image", "rm", WORKER_IMAGE)
    return archive


def _recipe(kind: str) -> str:
    text = "\n".join((SUITE, PACKAGES[kind], *TRIM))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _rootfs(kind: str) -> Path:
    """A tar of a root file system; debootstrap takes about a minute for one."""
    archive = CACHE / f"{kind}-{_recipe(kind)}.tar"
    if archive.exists():
        return archive
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{kind}-", dir=CACHE) as folder:
        root = Path(folder) / "root"
        argv = ["debootstrap", "--variant=minbase", f"--include={PACKAGES[kind]}", SUITE, str(root)]
        done = subprocess.run(argv, capture_output=True, text=True)
        if done.returncode != 0:
            raise HeavyError(f"debootstrap of the {kind} image failed: {(done.stdout + done.stderr)[-2000:]}")
        for name in TRIM:
            shutil.rmtree(root / name, ignore_errors=True)
        for key in (root / "etc/ssh").glob("ssh_host_*"):
            key.unlink()
        with _aside(archive) as part:
            skip = [f"--exclude=./{name}/*" for name in ("proc", "sys", "dev")]
            subprocess.run(["tar", "-C", str(root), *skip, "-cf", str(part), "."], check=True)
    return archive


@contextlib.contextmanager
def _aside(path: Path) -> Iterator[Path]:
    part = path.with_name(f"{path.name}.part")
    yield part
    part.rename(path)
