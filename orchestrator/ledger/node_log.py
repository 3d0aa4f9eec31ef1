"""Writes the logs that a node's slots stream into one file of the run, `logs/NODE.log`, with lines `[slot] line`.

controller/node_reports.py calls `NodeLog.add` with each chunk. The length of the file is committed together with the
offsets of the streams. Bytes beyond the committed length were written by a controller that died before its commit; they
are cut off, because the stream delivers them again. Streams of records are read by ingest.py.
"""

from __future__ import annotations

from pathlib import Path

from orchestrator.ledger.ingest import Chunk
from orchestrator.ledger.writer import Ledger

MAX_LINE = 64 * 1024
"""A longer line without an end is cut."""


class NodeLog:
    """The log file of one node."""

    def __init__(self, ledger: Ledger, node: str, folder: Path) -> None:
        self._ledger = ledger
        self._node = node
        self._path = folder / f"{node}.log"
        self._rest: dict[str, bytes] = {}
        """The unfinished last line of a slot's log."""
        offsets = ledger.offsets(node)
        self._next = {slot: offset for (stream, slot), offset in offsets.items() if stream == "L"}
        """The next byte to take of a slot's log, unfinished lines included."""
        self._length = offsets.get(("log", ""), 0)
        with self._path.open("ab") as f:
            f.truncate(self._length)

    def add(self, chunk: Chunk) -> None:
        """Append the whole lines of a chunk, but for bytes that were taken before; call within the ledger's
        transaction."""
        chunk = chunk.after(self._next.get(chunk.slot, 0))
        self._next[chunk.slot] = chunk.offset + len(chunk.data)
        rest = self._rest.get(chunk.slot, b"")
        data = rest + chunk.data
        end = data.rfind(b"\n") + 1
        if not end and len(data) > MAX_LINE:
            end = len(data)
        self._rest[chunk.slot] = data[end:]
        if not end:
            return
        tag = f"[{chunk.slot}] ".encode()
        text = b"".join(tag + line + b"\n" for line in data[:end].removesuffix(b"\n").split(b"\n"))
        with self._path.open("r+b") as f:
            f.seek(self._length)
            f.write(text)
        self._length += len(text)
        self._ledger.set_offset(self._node, "", "log", self._length)
        self._ledger.set_offset(self._node, chunk.slot, "L", chunk.offset - len(rest) + end)
