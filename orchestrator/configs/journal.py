"""Changes of a tree of config files: each merge is noted, and can be taken back.

A line a merge, with the text of each file before and the hash of its text after. The line is written before any file,
so that a merge that was cut off can be undone too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import Any

from orchestrator.command_hints import command
from orchestrator.errors import InputError
from orchestrator.tables.journal import locked
from orchestrator.tables.textfiles import remove_dead_temporaries, sync_folder, write_atomic


class Journal:
    """The merges into a tree of config files, at `path`."""

    def __init__(self, path: Path, root: Path) -> None:
        self.path, self.root = path, root

    @contextmanager
    def writing(self) -> Iterator[None]:
        """One writer to a tree's configs at a time. Raises InputError, TunedDBError where another one writes."""
        try:
            with locked(self.path):
                remove_dead_temporaries(self.path)
                yield
        except OSError as e:
            raise InputError(f"{e.filename or self.root}: cannot be written: {e.strerror or e}") from e

    @property
    def last_number(self) -> int:
        """The number of the last merge; 0 for one of version 0.3, which wrote none, and where no merge is noted."""
        try:
            return int(json.loads(self._lines()[-1])["number"])
        except (IndexError, ValueError, KeyError, TypeError):
            return 0

    @contextmanager
    def noted(self, entry: Mapping[str, Any], texts: Mapping[Path, tuple[str | None, str]]) -> Iterator[None]:
        """Note a merge and make its changes; whatever fails in the block takes them back. `texts`: the text before
        (None: no file) and after of each path. Raises InputError if taking back fails as well."""
        files = [
            {"file": str(path.relative_to(self.root)), "before": before, "sha256": _sha(after)}
            for path, (before, after) in texts.items()
        ]
        line = json.dumps({**entry, "files": files}, separators=(",", ":"), ensure_ascii=False)
        write_atomic(self.path, "".join(f"{one}\n" for one in (*self._lines(), line)))
        try:
            for path, (before, after) in texts.items():
                write_atomic(path, after, like=path.stat() if before is not None else None)
            yield
        except BaseException as e:
            self._take_back_after(e)
            raise

    def _take_back_after(self, fault: BaseException) -> None:
        try:
            self.take_back()
        except (OSError, InputError) as e:
            raise InputError(
                f"{self.root}: the merge failed ({fault}), and could not be taken back ({e}); free some space, then run"
                f" {command(f'configs undo {quote(str(self.root))}')}"
            ) from fault

    def take_back(self) -> dict[str, Any]:
        """Take back the last merge; the caller holds the lock. The document of `configs undo`: `restored` are the files
        that are as before, `removed` those that the merge had made, `left` counts the merges before it.

        Raises InputError if no merge is noted, or if a file was changed since.
        """
        lines = self._lines()
        if not lines:
            raise InputError(f"{self.root}: nothing to undo: no merge is noted in {self.path.relative_to(self.root)}")
        try:
            last = json.loads(lines[-1])
            files = [(f["file"], self.root / f["file"], f["before"], f["sha256"]) for f in last["files"]]
        except (ValueError, KeyError, TypeError) as e:
            raise InputError(f"{self.path}:{len(lines)}: is damaged, so nothing is undone: {e}") from e
        for _, path, _, _ in files:
            remove_dead_temporaries(path)
        texts = {path: path.read_text() if path.exists() else None for _, path, _, _ in files}
        if foreign := [
            f"{path}: was changed after the merge and is left alone; undo that change, then undo the merge"
            for _, path, before, after in files
            if (text := texts[path]) != before and (text is None or _sha(text) != after)
        ]:
            raise InputError(foreign)
        changed = [(name, path, before) for name, path, before, _ in files if texts[path] != before]
        for _, path, before in changed:
            if before is None:
                path.unlink()
                sync_folder(path.parent)
            else:
                write_atomic(path, before, like=path.stat())
        if rest := lines[:-1]:
            write_atomic(self.path, "".join(f"{line}\n" for line in rest))
        else:
            self.path.unlink()
        restored, removed = (
            tuple(name for name, _, before in changed if (before is None) is made) for made in (False, True)
        )
        of = {name: str(last.get(name, "")) for name in ("run", "time")}
        return {**of, "restored": restored, "removed": removed, "left": len(rest)}

    def _lines(self) -> list[str]:
        return self.path.read_text().splitlines() if self.path.exists() else []


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
