"""Copies files of AITER, vLLM and SGLang out of an image, for `--build IMAGE` and for `nodes check`.

The container that this needs is created and never started, and nothing is pulled. `take_out` tries this machine's
Docker, then those of an inventory's nodes; `copy_out` works with a Docker that the caller has.
"""

from __future__ import annotations

import contextlib
import shutil
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import IO, Any, cast

import docker.errors

from orchestrator.engine.docker_client import Docker
from orchestrator.engine.docker_options import DockerOptions
from orchestrator.engines import find_engine
from orchestrator.errors import EngineError, InputError, NodeError
from orchestrator.image.build import HERE
from orchestrator.inventory.load import load_inventory, resolved
from orchestrator.inventory.model import Node
from orchestrator.machines.node_link import transport_to
from orchestrator.transport.base import Transport, connected
from orchestrator.transport.local import LocalTransport
from worker.aiter_tree.kernel_lists import MODULES
from worker.aiter_tree.locate import PLACES
from worker.triton_configs.engine_package import PROJECTS

_PACKAGE = (
    "__init__.py",
    "install_mode",
    "configs",
    "ops",
    "tuned_gemm.py",
    "fused_moe.py",
    "jit/core.py",
    "jit/utils",
)
_META = ("csrc", "hsa", "aiter_meta/csrc", "aiter_meta/hsa")
EVERYTHING = (*(f"aiter/{p}" for p in _PACKAGE), *(f"aiter/jit/{m}.so" for m in MODULES), *_META)
"""The parts of AITER that its tables are checked against."""
TRITON = ("aiter/__init__.py", "aiter/ops", "aiter/jit/utils", "aiter/utility")
"""The parts that hold its Triton operators and their configs."""
ENGINES = (
    *(
        f"{module.replace('.', '/')}{ending}"
        for names in PROJECTS.values()
        for module in names.executed
        for ending in (".py", "/__init__.py")
    ),
    *(f"{project}/{folder}" for project, names in PROJECTS.items() for folder in names.config_folders),
    "vllm/_version.py",
    "sglang/_version.py",
    "vllm/platforms/rocm.py",
)
"""The parts of vLLM and SGLang that read config files, and the files."""
_MARKS = {"aiter": "aiter/jit/core.py", "vllm": "vllm/envs.py", "sglang": "sglang/srt/environ.py"}
"""A file by which each package is found."""
_CHECKOUTS = (*PLACES, "/sgl-workspace/sglang/python", "/vllm-workspace")
_USUAL_BASES = ("/opt/venv", "/opt/conda", "/usr/local", "/usr")
_PYTHON_MINORS = range(14, 7, -1)
_FLYDSL = "flydsl/__init__.py"
"""Shows that flydsl is installed, which AITER's dispatch imports."""
_KEPT = (".py", ".csv", ".cu", ".json", "install_mode", "HEAD", "packed-refs")
"""Ends of the names of files that are copied; all others are not."""
MAX_FILE = 16 << 20
"""Most bytes of such a file."""
MAX_MODULE = 4 << 30
"""Most bytes of a compiled module, *.so."""
MAX_FILES = 200_000
PIECE = 1 << 20
SILENCE_S = 120.0
"""Docker may be silent for as long."""


def take_out(image: str, folder: Path, inventory: Path | None, parts: Sequence[str] = EVERYTHING) -> None:
    """Copy the parts below `folder`, laid out as in the image. Nothing is pulled: the image must be there already.

    Raises InputError and NodeError, which say what to do instead.
    """
    faults: list[str] = []
    for transport, docker_command in _engines(inventory):
        options = DockerOptions(image=image, docker_command=docker_command, pull="never")
        try:
            with connected(transport), contextlib.closing(Docker(transport, options, SILENCE_S)) as client:
                copy_out(client, image, folder, parts)
                return
        except (NodeError, ValueError) as e:
            faults.append(str(e))
    raise InputError(
        [
            *(f"--build {image}: {fault}" for fault in faults),
            f"--build {image}: is not a folder here, and no such image could be read; pull it first, name nodes that"
            " have it with -i INV, or copy its AITER out (docker create; docker cp) and name the folder",
        ]
    )


def _engines(inventory: Path | None) -> Iterator[tuple[Transport, tuple[str, ...]]]:
    """This machine's Docker, then those of the inventory's nodes."""
    yield LocalTransport(HERE), ("docker",)
    nodes: Iterable[Node] = load_inventory(inventory).nodes.values() if inventory else ()
    for node in nodes:
        if "docker" in find_engine(node.engine).sections:
            yield transport_to(node), resolved(node).docker.docker_command


def copy_out(
    client: Docker,
    image: str,
    folder: Path,
    parts: Sequence[str],
    places: Sequence[str] | None = None,
    volumes: Sequence[str] = (),
) -> dict[str, str | None]:
    """Copy the parts out of a container that is created and never started; return where each package was found.

    `places`: the only folders to look in; None: where images keep packages. `volumes`: mounts that must be seen."""
    container = client.ask(
        lambda c: c.create_container(
            image, command=["true"], network_disabled=True, host_config=c.create_host_config(binds=[*volumes])
        )["Id"],
        again=False,
    )
    try:
        details = client.ask(lambda c: c.inspect_image(image))
        roots = list(_roots(details)) if places is None else [*places]
        homes: dict[str, str | None] = {}
        for package, mark in _MARKS.items():
            if any(part.startswith(f"{package}/") for part in parts):
                homes[package] = _fetch_from_first(client, container, roots, mark, folder)
        if not any(homes.values()):
            names = " or ".join(homes)
            raise EngineError(HERE, f"no {names} lies where images keep it ({', '.join(_CHECKOUTS)}, site-packages)")
        for part in parts:
            if root := homes.get(part.partition("/")[0], homes.get("aiter")):  # aiter_meta/ lies beside aiter/
                _fetch(client, container, f"{root}/{part}", folder, root)
        if (folder / "aiter" / "ops" / "flydsl").is_dir():
            _fetch_from_first(client, container, roots, _FLYDSL, folder)
        return homes
    finally:
        with contextlib.suppress(NodeError):
            client.ask(lambda c: c.remove_container(container, force=True, v=True))


def _roots(details: dict[str, Any]) -> Iterator[str]:
    """Folders where the package may lie: PYTHONPATH, checkouts, the site-packages of usual Pythons."""
    env: dict[str, str] = {}
    for setting in (details.get("Config") or {}).get("Env") or ():
        if isinstance(setting, str):
            name, _, value = setting.partition("=")
            env[name] = value
    python_path = [folder for folder in env.get("PYTHONPATH", "").split(":") if folder.startswith("/")]
    yield from dict.fromkeys((*python_path, *_CHECKOUTS))
    beside_path = [str(PurePosixPath(folder).parent) for folder in env.get("PATH", "").split(":") if folder]
    for base in dict.fromkeys((env.get("VIRTUAL_ENV", ""), *beside_path, *_USUAL_BASES)):
        if not base.startswith("/"):
            continue
        for minor in _PYTHON_MINORS:
            for kind in ("site-packages", "dist-packages"):
                yield f"{base}/lib/python3.{minor}/{kind}"


def _fetch_from_first(client: Docker, container: str, roots: Sequence[str], path: str, folder: Path) -> str | None:
    """Copy a file from the first folder that has it; that folder."""
    for root in roots:
        if _fetch(client, container, f"{root}/{path}", folder, root):
            return root
    return None


def _fetch(client: Docker, container: str, path: str, folder: Path, root: str) -> bool:
    """Copy a file or folder; False where the image has none."""
    target = folder / PurePosixPath(path).relative_to(root).parent

    def ask(c: Any) -> bool:
        try:
            chunks, _ = c.get_archive(container, path, chunk_size=PIECE)
        except docker.errors.NotFound:
            return False
        # tarfile reads a stream by pieces of this size, and takes less
        stream = cast("IO[bytes]", SimpleNamespace(read=lambda _: next(chunks, b"")))
        with tarfile.open(fileobj=stream, mode="r|", bufsize=PIECE) as tar:
            unpack(tar, target)
        return True

    return client.ask(ask)


def unpack(tar: tarfile.TarFile, target: Path) -> None:
    """Write the files of an archive that we read, and only regular ones of a legal size below the target."""
    for number, entry in enumerate(tar):
        parts = PurePosixPath(entry.name).parts
        if number > MAX_FILES or not entry.isfile() or ".." in parts or entry.name.startswith("/"):
            continue
        path = target.joinpath(*parts)
        if entry.name.endswith(".co"):  # only its name is needed
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        elif entry.size <= _size_limit(path):
            source = tar.extractfile(entry)
            if source is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as f:
                    shutil.copyfileobj(source, f)


def _size_limit(path: Path) -> int:
    """Most bytes of a file that is copied; -1 for one that is not."""
    if path.suffix == ".so":
        return MAX_MODULE
    return MAX_FILE if path.name.endswith(_KEPT) else -1
