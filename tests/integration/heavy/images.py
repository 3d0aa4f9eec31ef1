"""The images: `node` (a host with sshd and dockerd, no Python), and what runs on its slots: `worker`, or `torch`.

The first two are built once by debootstrap from Debian's mirror, about 90 s and 900 MB of disk. `torch` is `worker`
with what pip finds for `torch` and constraints.txt: another 33 s and 800 MB. All are kept in the cache folder by the
hash of their recipe.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.integration.heavy.outer import CACHE, HeavyError, Outer, locked
from tests.waiting import PATIENCE_S

SUITE = "bookworm"
WORKER_IMAGE = "gemmfleet/test-worker:1"
PACKAGES = {
    "node": "openssh-server,docker.io,iptables,iproute2,procps,sudo,libfaketime,e2fsprogs",
    "worker": "python3-minimal,libpython3.11-stdlib,libfaketime",
}
TORCH_IMAGE = "gemmfleet/test-torch:1"
TORCH = ("torch", "numpy")
"""Packages of the tuner `torch`. It uses no numpy, but torch without it warns at every start."""
CONSTRAINTS = Path(__file__).parents[3] / "constraints.txt"
SITE = "usr/local/lib/python3.11/dist-packages"
TORCH_TRIM = ("torch/include", "torch/test")
"""150 MB that no tuner reads."""
TRIM = ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info")


Say = Callable[[str], None]


def quiet(text: str) -> None:
    """Tells nobody."""


def node_image(outer: Outer, say: Say = quiet) -> str:
    """The node's image in the outer daemon, built and imported where it is missing."""
    name = f"gemmfleet/test-node:{_recipe('node')}"
    with locked("image-node"):
        if outer.run(["image", "inspect", name]).returncode != 0:
            archive = _rootfs("node", say)
            outer.docker("import", str(archive), name, timeout=PATIENCE_S)
    return name


def worker_archive(outer: Outer, say: Say = quiet) -> Path:
    """A `docker save` file of WORKER_IMAGE, for the nodes to load."""
    archive = CACHE / f"worker-{_recipe('worker')}.docker.tar"
    with locked("image-worker"):
        if not archive.exists():
            _save(outer, _rootfs("worker", say), WORKER_IMAGE, archive)
    return archive


def torch_archive(outer: Outer, say: Say = quiet) -> Path:
    """A `docker save` file of TORCH_IMAGE. Raises HeavyError where pip finds no torch, or one for GPUs."""
    recipe = "\n".join((_recipe("worker"), *TORCH, *TORCH_TRIM, CONSTRAINTS.read_text()))
    archive = CACHE / f"torch-{_hash(recipe)}.docker.tar"
    with locked("image-torch"):
        if not archive.exists():
            with locked("image-worker"):
                base = _rootfs("worker", say)
            say("building the image with torch (pip, about half a minute, once) ...")
            with tempfile.TemporaryDirectory(prefix="torch-", dir=CACHE) as folder:
                root, packed = Path(folder) / "root", Path(folder) / "root.tar"
                root.mkdir()
                _run("tar", "-C", str(root), "-xf", str(base))
                _install_torch(root / SITE)
                _run("tar", "-C", str(root), "-cf", str(packed), ".")
                shutil.rmtree(root)
                _save(outer, packed, TORCH_IMAGE, archive, proof="import torch; torch.ones(2, 2) @ torch.ones(2, 2)")
    return archive


def _install_torch(site: Path) -> None:
    """For the image's Python, whichever runs here; asks first what it would be."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    pip += ["--only-binary=:all:", "--python-version", "3.11", "--target", str(site), "-c", str(CONSTRAINTS), *TORCH]
    report = site.with_name("report.json")
    site.mkdir(parents=True, exist_ok=True)
    _run(*pip, "--dry-run", "--report", str(report))
    names = [str(p["metadata"]["name"]) for p in json.loads(report.read_text())["install"]]
    report.unlink()
    if any(name.lower().startswith("nvidia") for name in names):
        raise HeavyError(
            "pip would take a torch for NVIDIA GPUs here, which is gigabytes that nodes without a GPU cannot use; let "
            "it find the CPU build first (PIP_INDEX_URL or PIP_FIND_LINKS, see PyTorch's page on installing)"
        )
    _run(*pip, "--no-compile")
    for name in TORCH_TRIM:
        shutil.rmtree(site / name, ignore_errors=True)


def _save(outer: Outer, rootfs: Path, image: str, archive: Path, proof: str = "pass") -> None:
    """A root file system as a `docker save` file of that image, which must be able to run the Python code `proof`."""
    try:
        outer.docker("import", "-c", 'CMD ["python3"]', str(rootfs), image, timeout=PATIENCE_S)
        outer.docker("run", "--rm", "--network=none", image, "python3", "-c", proof)
        with _aside(archive) as part:
            outer.docker("save", "-o", str(part), image, timeout=PATIENCE_S)
    finally:
        outer.docker("image", "rm", image, check=False)


def _run(*argv: str) -> None:
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        raise HeavyError(f"{Path(argv[0]).name} ended with code {done.returncode}: {done.stderr.strip()[-2000:]}")


def _recipe(kind: str) -> str:
    return _hash("\n".join((SUITE, PACKAGES[kind], *TRIM)))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _rootfs(kind: str, say: Say) -> Path:
    """A tar of a root file system; debootstrap takes about a minute for one."""
    archive = CACHE / f"{kind}-{_recipe(kind)}.tar"
    if archive.exists():
        return archive
    say(f"building the image of a {kind} (debootstrap, about a minute, once) ...")
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
            _run("tar", "-C", str(root), *skip, "-cf", str(part), ".")
    return archive


@contextlib.contextmanager
def _aside(path: Path) -> Iterator[Path]:
    part = path.with_name(f"{path.name}.part")
    yield part
    part.rename(path)
