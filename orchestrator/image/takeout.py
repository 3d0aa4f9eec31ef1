"""Copy the files that list an image's AITER kernels out of a container that is never started."""

from __future__ import annotations

import contextlib
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

import docker.errors

from orchestrator.engine.docker import DockerOptions
from orchestrator.engine.docker_containers import Docker
from orchestrator.engines import find_engine
from orchestrator.errors import EngineError, InputError, NodeError
from orchestrator.image.build import HERE
from orchestrator.inventory.load import load_inventory, resolved
from orchestrator.inventory.model import Node
from orchestrator.transport import LocalTransport, Transport
from worker.aiter_tree.kernels import MODULES
from worker.aiter_tree.locate import PLACES

_PACKAGE = (
    "__init__.py", "install_mode", "configs", "ops", "tuned_gemm.py", "fused_moe.py", "jit/core.py", "jit/utils",
)  # fmt: skip
_META = ("csrc", "hsa", "aiter_meta/csrc", "aiter_meta/hsa")
EVERYTHING = (*(f"aiter/{p}" for p in _PACKAGE), *(f"aiter/jit/{m}.so" for m in MODULES), *_META)
# Parts that its Triton operators and their configs are made of.
TRITON = ("aiter/__init__.py", "aiter/ops", "aiter/jit/utils", "aiter/utility")
_FLYDSL = "flydsl/__init__.py"  # of a package that AITER's dispatch imports: that it is there
_KEPT = (".py", ".csv", ".cu", ".json", "install_mode")
MAX_FILE = 16 << 20
MAX_MODULE = 4 << 30
MAX_FILES = 200_000
SILENCE_S = 120.0


def take_out(image: str, folder: Path, inventory: Path | None, parts: Sequence[str] = EVERYTHING) -> None:
    """Copy the parts below `folder`, laid out as in the image. The image must be there already: nothing is pulled.

    Raises InputError and NodeError with what to do instead.
    """
    faults: list[str] = []
    for transport, command in _engines(inventory):
        client: Docker | None = None
        try:
            options = DockerOptions(image, docker_command=command, pull="never")
            transport.connect()
            client = Docker(transport, options, SILENCE_S)
            _copy(client, image, folder, parts)
            return
        except (NodeError, ValueError) as e:
            faults.append(str(e))
        finally:
            if client is not None:
                client.close()
            transport.close()
    raise InputError([
        *(f"--build {image}: {fault}" for fault in faults),
        f"--build {image}: is no folder here, and no such image could be read; pull it first, name nodes that have it"
        " with -i INV, or copy its AITER out (docker create; docker cp) and name the folder",
    ])  # fmt: skip


def _engines(inventory: Path | None) -> Iterator[tuple[Transport, tuple[str, ...]]]:
    """This machine's Docker, then those of the inventory's nodes."""
    from orchestrator.controller.node_plan import transport_to

    yield LocalTransport(HERE), ("docker",)
    nodes: Iterable[Node] = load_inventory(inventory).nodes.values() if inventory else ()
    for node in nodes:
        if "docker" in find_engine(node.engine).sections:
            yield transport_to(node), resolved(node).docker.docker_command


def _copy(client: Docker, image: str, folder: Path, parts: Sequence[str]) -> None:
    made = client.ask(lambda c: c.create_container(image, command=["true"], network_disabled=True), again=False)
    try:
        details = client.ask(lambda c: c.inspect_image(image))
        roots = list(_roots(details))
        root = next((r for r in roots if _fetch(client, made["Id"], f"{r}/aiter/jit/core.py", folder, r)), None)
        if root is None:
            raise EngineError(HERE, f"no AITER lies where images keep it ({', '.join(PLACES)}, site-packages)")
        for part in parts:
            _fetch(client, made["Id"], f"{root}/{part}", folder, root)
        if (folder / "aiter" / "ops" / "flydsl").is_dir():
            any(_fetch(client, made["Id"], f"{r}/{_FLYDSL}", folder, r) for r in roots)
    finally:
        with contextlib.suppress(NodeError):
            client.ask(lambda c: c.remove_container(made["Id"], force=True, v=True))


def _roots(details: dict[str, Any]) -> Iterator[str]:
    """Folders where the package may lie: PYTHONPATH, checkouts, the site-packages of usual Pythons."""
    env = dict(e.partition("=")[::2] for e in (details.get("Config") or {}).get("Env") or () if isinstance(e, str))
    given = [p for p in env.get("PYTHONPATH", "").split(":") if p.startswith("/")]
    bases = [env.get("VIRTUAL_ENV", ""), *(str(PurePosixPath(p).parent) for p in env.get("PATH", "").split(":") if p)]
    bases = [b for b in dict.fromkeys((*bases, "/opt/venv", "/opt/conda", "/usr/local", "/usr")) if b.startswith("/")]
    yield from dict.fromkeys((*given, *PLACES))
    for base in bases:
        for minor in range(14, 7, -1):
            for kind in ("site-packages", "dist-packages"):
                yield f"{base}/lib/python3.{minor}/{kind}"


def _fetch(client: Docker, container: str, path: str, folder: Path, root: str) -> bool:
    """Copy a file or folder; False where the image has none."""
    target = folder / PurePosixPath(path).relative_to(root).parent

    def ask(c: Any) -> bool:
        try:
            stream, _ = c.get_archive(container, path)
        except docker.errors.NotFound:
            return False
        with tarfile.open(fileobj=cast("IO[bytes]", _Chunks(stream)), mode="r|") as tar:
            _unpack(tar, target)
        return True

    return client.ask(ask)


def _unpack(tar: tarfile.TarFile, target: Path) -> None:
    for n, entry in enumerate(tar):
        parts = PurePosixPath(entry.name).parts
        if n > MAX_FILES or not entry.isfile() or ".." in parts or entry.name.startswith("/"):
            continue
        path = target.joinpath(*parts)
        if entry.name.endswith(".co"):  # that it is there says enough
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        elif entry.size <= (MAX_MODULE if path.suffix == ".so" else MAX_FILE if path.name.endswith(_KEPT) else -1):
            source = tar.extractfile(entry)
            if source is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as f:
                    while data := source.read(1 << 20):
                        f.write(data)


class _Chunks:
    """A stream of chunks as a file."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._rest = b""

    def read(self, size: int) -> bytes:
        while len(self._rest) < size:
            more = next(self._chunks, b"")
            if not more:
                break
            self._rest += more
        out, self._rest = self._rest[:size], self._rest[size:]
        return out
