"""Building an image on this machine or on a node: the build folder is put there, its script run, its words followed."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from pathlib import Path

from orchestrator.errors import EngineError
from orchestrator.image.recipe import MARKER, Recipe
from orchestrator.inventory import Node, resolved
from orchestrator.ledger import clean
from orchestrator.nodes.facts import DEFAULT_WORKDIR, from_home
from orchestrator.transport import LocalTransport, Transport

HERE = "this machine"
LAST_WORDS = 15
MAX_LINE = 2000
Say = Callable[[str], None]


def build(recipe: Recipe, node: Node | None, flags: Sequence[str], say: Say, *, accept_new_host_keys: bool) -> str:
    """Build on `node` (None: on this machine); the image's id. `say` gets each line of the build.

    Raises EngineError with the last words of a build that failed, TransportError, InputError.
    """
    from orchestrator.nodes.plan import transport_to

    command: tuple[str, ...] = ("docker",)
    transport: Transport = LocalTransport(HERE)
    workdir = DEFAULT_WORKDIR
    if node is not None:
        real = resolved(node)
        transport = transport_to(node, accept_new_host_keys=accept_new_host_keys)
        command, workdir = real.docker.docker_command, real.workdir or DEFAULT_WORKDIR
    local = node is None or node.transport == "local"
    root = str(Path(workdir).expanduser()) if local else from_home(workdir).rstrip("/")
    folder = f"{root}/images/{recipe.folder}"
    files = recipe.files(command, flags)
    transport.connect()
    try:
        transport.put(folder, files)
        return _run(transport, folder, say)
    finally:
        transport.close()


def _run(transport: Transport, folder: str, say: Say) -> str:
    channel = transport.open(["sh", f"{folder}/build.sh"])
    last: list[str] = []
    found = ""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    rest = ""
    try:
        while data := channel.read(1 << 16):
            *lines, rest = (rest + decoder.decode(data)).split("\n")
            rest = rest[-MAX_LINE:]
            for line in lines:
                found = _take(line, found, last, say)
        if rest:
            found = _take(rest, found, last, say)
        why = channel.error()
    finally:
        channel.close()
    if found:
        return found
    told = "\n".join(f"  {line}" for line in last[-LAST_WORDS:])
    raise EngineError(transport.node, f"the build failed ({folder}/build.sh repeats it):\n{told or '  ' + why}")


def _take(raw: str, found: str, last: list[str], say: Say) -> str:
    """Say a line; the image's id where it is the last."""
    line = clean.text(raw.rstrip("\r"), MAX_LINE)
    if line.startswith(MARKER):
        return line.removeprefix(MARKER).strip()
    if line:
        last.append(line)
        del last[: -4 * LAST_WORDS]
        say(line)
    return found
