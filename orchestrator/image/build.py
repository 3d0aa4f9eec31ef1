"""Builds an image with AITER on the user's base image, here or on a node.

`image build` makes a `Recipe` and calls `build` once for each node. The recipe's folder (Dockerfile, build.sh, tables)
is copied to the machine, and build.sh runs there. For files out of a finished image see `image_files.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator import __version__
from orchestrator.command_hints import command
from orchestrator.errors import EngineError, InputError
from orchestrator.files.read import read_bytes
from orchestrator.inventory.load import resolved
from orchestrator.inventory.model import Node
from orchestrator.machines.check_script import DEFAULT_WORKDIR, from_home
from orchestrator.machines.node_command import lines
from orchestrator.machines.node_link import transport_to
from orchestrator.tables.table_names import family_of
from orchestrator.templating import render
from orchestrator.transport.base import RemoteFile, Transport, connected
from orchestrator.transport.local import LocalTransport

AITER_REPO = "https://github.com/ROCm/aiter.git"
HOME = "/opt/aiter"
"""The place of AITER's tree in the image."""
TABLES = "/opt/aiter-tables"
"""The place of tuned tables in the image."""
MARKER = "gemmfleet-image "
"""Begins the last line of a build that went well; the image's id follows."""
PREBUILD = (0, 1, 2, 3)
"""PREBUILD_KERNELS: 0 compiles at first use, 1 GEMM and attention modules now, 2 and 3 attention alone."""
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


HERE = "this machine"
"""The node in messages if none was named."""
LAST_LINES = 15
"""Lines of the output in the error of a failed build."""
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
