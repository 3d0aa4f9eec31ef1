"""Builds an image with AITER on the user's base image, here or on a node.

Also copies files of AITER, vLLM and SGLang out of an image, for commands with `--build IMAGE`. The container that this
needs is never started.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import IO, Any, cast

import docker.errors

from orchestrator import __version__
from orchestrator.command_hints import command
from orchestrator.engine.docker_containers import Docker
from orchestrator.engine.docker_options import DockerOptions
from orchestrator.engines import find_engine
from orchestrator.errors import EngineError, InputError, NodeError
from orchestrator.files.read import read_bytes
from orchestrator.inventory.load import load_inventory, resolved
from orchestrator.inventory.model import Node
from orchestrator.machines.check_script import DEFAULT_WORKDIR, from_home
from orchestrator.machines.node_command import lines
from orchestrator.machines.node_link import transport_to
from orchestrator.tables.table_names import family_of
from orchestrator.templating import render
from orchestrator.transport.base import RemoteFile, Transport, connected
from orchestrator.transport.local import LocalTransport
from worker.aiter_tree.kernel_lists import MODULES
from worker.aiter_tree.locate import PLACES
from worker.triton_configs.engine_package import CONFIG_FOLDERS, ENGINE_MODULES

AITER_REPO = "https://github.com/ROCm/aiter.git"
HOME = "/opt/aiter"  # the place of the tree in the image
TABLES = "/opt/aiter-tables"
MARKER = "gemmfleet-image "  # begins the last line of a build that went well; the image's id follows
# PREBUILD_KERNELS: 0 compiles at first use, 1 GEMM and attention modules now, 2 and 3 attention alone.
PREBUILD = (0, 1, 2, 3)
MAX_TABLE = 64 * 2**20

_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,255}\Z")
_REF = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/+-]{0,199}\Z")
_REPO = re.compile(r"(?:(?:https?|ssh|git|file)://|/|[A-Za-z0-9._-]+@[A-Za-z0-9.-]+:)[!-~]{1,500}\Z")
_SECRET = re.compile(r"://[^/@:]*:[^/@]*@")
_GFX = re.compile(r"gfx[0-9a-f]{3,5}\Z")


@dataclass(frozen=True, slots=True)
class Recipe:
    """The image to build. `gfx`: the chips to compile for. `tables`: tuned tables that AITER is compiled with and uses.

    Raises InputError that lists every fault.
    """

    base: str
    tag: str
    gfx: tuple[str, ...]
    repo: str = AITER_REPO
    ref: str = "main"
    prebuild: int = 0
    jobs: int | None = None
    requirements: bool = True
    tables: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        faults = []
        for name, image in (("--base", self.base), ("--tag", self.tag)):
            if not _IMAGE.match(image):
                faults.append(f"{name} {image[:80]!r} is not the name of an image")
        if not _REF.match(self.ref) or ".." in self.ref:
            faults.append(f"--ref {self.ref[:80]!r} is not a tag, branch or commit")
        if not _REPO.match(self.repo) or "'" in self.repo or '"' in self.repo:
            faults.append(f"--repo {self.repo[:80]!r} is not the address of a git repository")
        elif _SECRET.search(self.repo):
            faults.append("--repo holds a password, which would stay in the image; use a public address or a mirror")
        if self.prebuild not in PREBUILD:
            faults.append(f"--prebuild {self.prebuild} is not one of {', '.join(map(str, PREBUILD))}")
        faults += [f"--gfx {g[:40]!r} is not a chip such as gfx950" for g in self.gfx if not _GFX.match(g)]
        if not self.gfx:
            faults.append("no chip to compile for: say it with --gfx gfx950, or as gfx in the inventory")
        if faults:
            raise InputError(faults)

    def dockerfile(self) -> str:
        """The Dockerfile's text."""
        families = [family_of(table) for table in self.tables]
        if len(set(families)) < len(families):
            raise InputError(
                "two --table of one family, but AITER reads one; make one with: " + command("db export ... -o DIR")
            )
        values = {
            "base": self.base,
            "ref": self.ref,
            "repo": self.repo,
            "home": HOME,
            "tables": [{"name": f"{family.name}.csv", "env": family.env} for family in families],
            "tables_home": TABLES,
            "requirements": self.requirements,
            "prebuild": self.prebuild,
            "archs": ";".join(self.gfx),
            "jobs": self.jobs,
            "version": __version__,
        }
        return render("Dockerfile.j2", values)

    def files(self, command: Sequence[str], flags: Sequence[str]) -> dict[str, RemoteFile]:
        """The build folder: Dockerfile, build.sh, the tables. Raises InputError where a table cannot be read."""
        values = {"tag": self.tag, "command": list(command), "flags": list(flags), "marker": MARKER}
        files = {
            "Dockerfile": RemoteFile(self.dockerfile().encode(), 0o600),
            "build.sh": RemoteFile(render("build.sh.j2", values).encode(), 0o700),
        }
        for path in self.tables:
            data = read_bytes(path, MAX_TABLE, InputError)
            files[f"{family_of(path).name}.csv"] = RemoteFile(data, 0o644)
        return files

    @property
    def folder(self) -> str:
        """The name of its build folder."""
        return re.sub(r"[^A-Za-z0-9._-]", "-", self.tag)


HERE = "this machine"  # the node in messages if none was named
LAST_LINES = 15  # of its output, in the error of a failed build
Say = Callable[[str], None]


def build(recipe: Recipe, node: Node | None, flags: Sequence[str], say: Say, *, accept_new_host_keys: bool) -> str:
    """Build on `node` (None: on this machine) and return the image's id. `say` gets each line of the build. `flags`:
    further options of `docker build`.

    Raises EngineError with the last output of a failed build, TransportError, InputError.
    """
    command: tuple[str, ...] = ("docker",)
    transport: Transport = LocalTransport(HERE)
    workdir = DEFAULT_WORKDIR
    if node is not None:
        real = resolved(node)
        transport = transport_to(node, accept_new_host_keys=accept_new_host_keys)
        command = real.docker.docker_command
        workdir = real.workdir or DEFAULT_WORKDIR
    if node is None or node.is_here:
        root = str(Path(workdir).expanduser())
    else:
        root = from_home(workdir).rstrip("/")
    folder = f"{root}/images/{recipe.folder}"
    files = recipe.files(command, flags)
    with connected(transport):
        transport.put(folder, files)
        return _run(transport, folder, say)


def _run(transport: Transport, folder: str, say: Say) -> str:
    channel = transport.open(["sh", f"{folder}/build.sh"])
    last: list[str] = []
    image_id = ""
    try:
        for line in map(str.rstrip, lines(channel.read)):
            if line.startswith(MARKER):
                image_id = line.removeprefix(MARKER).strip()
            elif line:
                last = [*last[1 - LAST_LINES :], line]
                say(line)
        why = channel.error()
    finally:
        channel.close()
    if image_id:
        return image_id
    output = "\n".join(f"  {line}" for line in last)
    raise EngineError(transport.node, f"the build failed ({folder}/build.sh repeats it):\n{output or '  ' + why}")


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
# The parts that hold its Triton operators and their configs.
TRITON = ("aiter/__init__.py", "aiter/ops", "aiter/jit/utils", "aiter/utility")
# The parts of vLLM and SGLang that read config files, and the files.
ENGINES = (
    *(
        f"{name.replace('.', '/')}{ending}"
        for modules in ENGINE_MODULES.values()
        for name in modules.executed
        for ending in (".py", "/__init__.py")
    ),
    *(f"{project}/{folder}" for project, folders in CONFIG_FOLDERS.items() for folder in folders),
    "vllm/_version.py",
    "sglang/_version.py",
    "vllm/platforms/rocm.py",
)
# A file by which a package is found.
_MARKS = {"aiter": "aiter/jit/core.py", "vllm": "vllm/envs.py", "sglang": "sglang/srt/environ.py"}
_CHECKOUTS = (*PLACES, "/sgl-workspace/sglang/python", "/vllm-workspace")
_USUAL_BASES = ("/opt/venv", "/opt/conda", "/usr/local", "/usr")
_PYTHON_MINORS = range(14, 7, -1)
_FLYDSL = "flydsl/__init__.py"  # shows that a package which AITER's dispatch imports is installed
# Ends of the names of files that are copied; all others are left out.
_KEPT = (".py", ".csv", ".cu", ".json", "install_mode", "HEAD", "packed-refs")
MAX_FILE = 16 << 20
MAX_MODULE = 4 << 30
MAX_FILES = 200_000
PIECE = 1 << 20
SILENCE_S = 120.0  # Docker may be silent for as long


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
