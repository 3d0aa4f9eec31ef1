"""Fetch files from a folder of a node: plain files only, capped, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.errors import TransportError
from orchestrator.ledger import clean
from orchestrator.nodes.facts import from_home
from orchestrator.transport import Transport

MAX_FILE = 48 * 2**20
"""Bytes of one file; a profile of a thousand shapes has about 15 MB."""
MAX_FILES = 500
KINDS = (".csv", ".log")
_LIST = """\
cd -- "$1" || exit 3
for f in *.csv *.log; do
    [ -f "$f" ] && [ ! -L "$f" ] && [ -r "$f" ] && printf '%s %s\\n' "$(wc -c <"$f")" "$f"
done
exit 0
"""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A file of a node. `name`: as it is called there."""

    node: str
    name: str
    data: bytes


def fetch(transport: Transport, folder: str, note: Callable[[str], None]) -> list[Fetched]:
    """The CSV files and logs right in `folder` on a connected node. `note` is told of what was passed over.

    Raises TransportError where the folder cannot be read.
    """
    folder = from_home(folder)
    if "\n" in folder or "\0" in folder:
        raise TransportError(transport.node, f"{folder!r} is not a folder")
    listed = transport.run(["sh", "-c", _LIST, "sh", folder])
    if listed.code != 0:
        raise TransportError(transport.node, f"cannot read the folder {folder}: {clean.text(listed.text, 300)}")
    out: list[Fetched] = []
    lines = listed.out.decode("utf-8", "surrogateescape").splitlines()
    if len(lines) > MAX_FILES:
        note(f"{transport.node}: {folder} has {len(lines)} files; the first {MAX_FILES} are taken")
    for line in lines[:MAX_FILES]:
        size, _, name = line.strip().partition(" ")
        shown = clean.text(name.encode("utf-8", "replace").decode(), 100)
        if not size.isdigit() or not _plain(name):
            note(f"{transport.node}: passed over a file with an odd name: {shown}")
        elif int(size) > MAX_FILE:
            note(f"{transport.node}: passed over {shown}: {int(size) >> 20} MiB, the limit is {MAX_FILE >> 20}")
        else:
            out.append(Fetched(transport.node, name, _read(transport, f"{folder.rstrip('/')}/{name}")))
    return out


def _plain(name: str) -> bool:
    return name.isascii() and name.isprintable() and "/" not in name and not name.startswith(".") and len(name) < 200


def _read(transport: Transport, path: str) -> bytes:
    done = transport.run(["head", "-c", str(MAX_FILE), "--", path], timeout=60.0 + MAX_FILE / 250_000)
    if done.code != 0:
        raise TransportError(transport.node, f"cannot read {path}: {clean.text(done.text, 300)}")
    return done.out
