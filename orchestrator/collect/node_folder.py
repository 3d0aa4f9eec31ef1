"""The folder of a node where jobs were started by hand: its files fetched, or its status with containers and GPUs.

Files are plain ones right in the folder, listed by one command (POSIX sh); fetched ones are capped, byte for byte. The
status needs no run: the check script gives containers and GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.errors import OrchestratorError, SlowError, TransportError, UnreachableError
from orchestrator.inventory import Node, resolved
from orchestrator.ledger import clean
from orchestrator.nodes.facts import ARGV, NodeFacts, from_home, read_facts, script
from orchestrator.nodes.link import transport_to
from orchestrator.nodes.poll import ASIDE_S, LIMIT_S, ask_all
from orchestrator.transport import Transport, connected

MAX_FILE = 48 * 2**20
"""Bytes of one file; a profile of a thousand shapes has about 15 MB."""
MAX_FETCHED = 500
_LIST_FILES = """\
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
    """The CSV files and logs right in `folder` on a connected node. `note` gets what was passed over.

    Raises TransportError where the folder cannot be read.
    """
    folder = from_home(folder)
    if "\n" in folder or "\0" in folder:
        raise TransportError(transport.node, f"{folder!r} is not a folder")
    listed = transport.run(["sh", "-c", _LIST_FILES, "sh", folder])
    if listed.code != 0:
        raise TransportError(transport.node, f"cannot read the folder {folder}: {clean.text(listed.text, 300)}")
    out: list[Fetched] = []
    lines = listed.out.decode("utf-8", "surrogateescape").splitlines()
    if len(lines) > MAX_FETCHED:
        note(f"{transport.node}: {folder} has {len(lines)} files; the first {MAX_FETCHED} are taken")
    for line in lines[:MAX_FETCHED]:
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


MAX_LISTED = 100
LINES = 3
_LIST_STATUS = """\
cd -- "$1" || exit 3
for f in *.csv *.log; do
    [ -f "$f" ] && [ ! -L "$f" ] && [ -r "$f" ] || continue
    case $f in *.csv) lines=$(wc -l <"$f") ;; *) lines=0 ;; esac
    printf 'file %s %s %s %s\\n' $(wc -c <"$f") "$(stat -c %Y -- "$f" 2>/dev/null || date -r "$f" +%s)" $lines "$f"
    case $f in *.log) tail -c 4000 -- "$f" | tail -n "$2" | cut -c 1-500 | sed 's/^/log /'; echo ;; esac
done
echo end
"""


@dataclass(frozen=True, slots=True)
class FolderFile:
    """A file of the folder. `written`: epoch seconds by the node's clock; `rows` of a CSV without its header; `last`
    lines of a log."""

    name: str
    bytes: int
    written: int
    rows: int | None = None
    last: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FolderStatus:
    """A node's answer, or `error`: the reason why there is none."""

    node: str
    at: float
    files: tuple[FolderFile, ...] = ()
    facts: NodeFacts | None = None
    error: str = ""

    @property
    def clock(self) -> float:
        """The node's own time: files are as old as it says."""
        return (self.facts.number("clock") if self.facts else None) or self.at


def read_listing(out: bytes) -> tuple[FolderFile, ...]:
    """The answer of the listing; what cannot be understood is passed over."""
    found: list[dict[str, Any]] = []
    for line in out.decode("utf-8", "replace").splitlines():
        word, _, rest = line.partition(" ")
        if word == "file":
            cells = rest.split(" ", 3)
            if len(cells) == 4 and all(c.isascii() and c.isdigit() and len(c) < 19 for c in cells[:3]):
                size, written, lines = map(int, cells[:3])
                rows = max(0, lines - 1) if cells[3].endswith(".csv") else None
                found.append(
                    {"name": clean.text(cells[3], 120), "bytes": size, "written": written, "rows": rows, "last": ()}
                )
        elif word == "log" and found and rest.strip():
            found[-1]["last"] = (*found[-1]["last"], clean.text(rest, 300))[-LINES:]
    return tuple(FolderFile(**f) for f in found[:MAX_LISTED])


def ask(node: Node, folder: str, limit_s: float = LIMIT_S, *, accept_new_host_keys: bool = False) -> FolderStatus:
    """One node; never raises for what is wrong with it."""
    until = time.monotonic() + limit_s - ASIDE_S
    try:
        transport = transport_to(
            node, accept_new_host_keys=accept_new_host_keys, patient=False, connect_s=limit_s - ASIDE_S
        )
        with connected(transport):
            return _status(node, transport, folder, until)
    except OrchestratorError as e:
        slow = isinstance(e, SlowError) or (isinstance(e, UnreachableError) and e.silent)
        return FolderStatus(node.name, time.time(), error=f"no answer within {limit_s:g} s" if slow else e.reason)


def _status(node: Node, transport: Transport, folder: str, until: float) -> FolderStatus:
    at = str(Path(folder).expanduser()) if node.is_here else from_home(folder)
    if "\n" in at or "\0" in at:
        raise TransportError(node.name, f"{at!r} is not a folder")
    listed = transport.run(["sh", "-c", _LIST_STATUS, "sh", at, str(LINES)], timeout=max(0.1, until - time.monotonic()))
    # whatever engine the inventory names, such jobs run in containers
    by_hand = resolved(node).model_copy(update={"engine": "docker"})
    done = transport.run(ARGV, stdin=script(by_hand, brief=True), timeout=max(0.1, until - time.monotonic()))
    facts = read_facts(done)
    error = f"cannot read the folder {folder}: {clean.text(listed.text, 200)}" if listed.code else ""
    return FolderStatus(node.name, time.time(), read_listing(listed.out), facts if facts.complete else None, error)


def poll(
    nodes: Sequence[Node], folder: str, limit_s: float = LIMIT_S, *, accept_new_host_keys: bool = False
) -> Iterator[FolderStatus]:
    """Every node once, all at the same time, in the order of their answers; the silent ones come last."""
    polls = {n.name: partial(ask, n, folder, limit_s, accept_new_host_keys=accept_new_host_keys) for n in nodes}
    for name, standing in ask_all(polls, limit_s):
        yield standing or FolderStatus(name, time.time(), error=f"no answer within {limit_s:g} s")
