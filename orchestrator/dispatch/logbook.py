"""A node's log on the controller: whole lines of all its slots, each once, whatever dies in between."""

from __future__ import annotations

from pathlib import Path

from orchestrator.dispatch.frames import Chunk
from orchestrator.ledger import Ledger

MAX_LINE = 64 * 1024


class Logbook:
    """Appends `[slot] line`. The file's length is committed with the offsets it was read up to.

    What stands beyond the committed length was written by a controller that died before it committed; it is cut
    off, because the stream brings it again.
    """

    def __init__(self, ledger: Ledger, node: str, folder: Path) -> None:
        self._ledger, self._node = ledger, node
        self._path = folder / f"{node}.log"
        self._rest: dict[str, bytes] = {}
        self._length = ledger.offsets(node).get(("log", ""), 0)
        with self._path.open("ab") as f:
            f.truncate(self._length)

    def add(self, chunk: Chunk) -> None:
        """Call within the ledger's transaction."""
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
