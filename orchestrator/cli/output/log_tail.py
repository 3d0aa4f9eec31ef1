"""Reads the logs of a run's nodes as they grow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from orchestrator.cli.output.live_view import plain


class LogTail:
    """Lines of `logs/<node>.log` of all nodes (or one), each with its node in front and made safe for a terminal."""

    def __init__(self, folder: Path, node: str | None) -> None:
        self._folder, self._only = folder, node
        self._at: dict[Path, int] = {}

    def _files(self) -> list[Path]:
        return sorted(p for p in self._folder.glob("*.log") if self._only in (None, p.stem))

    def last(self, lines: int) -> Iterator[str]:
        """The last lines of each node (0: all); `more` goes on from there."""
        for path in self._files():
            with path.open("rb") as f:
                data = f.read()
            data = data[: data.rfind(b"\n") + 1]
            self._at[path] = len(data)
            every = data.decode("utf-8", "replace").splitlines()
            for line in every[-lines:] if lines else every:
                yield _line(path, line)

    def more(self) -> Iterator[str]:
        """Whole lines that came since the last call."""
        for path in self._files():
            with path.open("rb") as f:
                f.seek(self._at.get(path, 0))
                data = f.read()
            data = data[: data.rfind(b"\n") + 1]
            self._at[path] = self._at.get(path, 0) + len(data)
            for line in data.decode("utf-8", "replace").splitlines():
                yield _line(path, line)


def _line(path: Path, line: str) -> str:
    return f"{path.stem} {plain(line, 2000)}"
