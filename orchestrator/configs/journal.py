"""The journal of a tree of config files: each merge is noted in it, and can be taken back.

It has a line for each merge, with the text of each file before and the hash of its text after:

    {"run": "...", "number": 3, "time": "...", ..., "files": [{"file": "a.json", "before": null, "sha256": "..."}]}

`merge.py` holds the lock (`writing`) and calls `note_and_write`; `configs undo` calls `undo_merge`. The line is written
before any file, so that a merge that was cut off can be undone too. A merge changes many files at once, which is why
their old texts are here and not beside them, as those of tuned tables are (`orchestrator/files/history.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

from orchestrator.command_hints import command
from orchestrator.errors import InputError
from orchestrator.files.history import put_text
from orchestrator.files.lock import locked
from orchestrator.files.write import remove_dead_temporaries, write_atomic
from worker.triton_configs.resolve import CONFIGS

NAME = "gemmfleet-merges.jsonl"


class NotedFile(NamedTuple):
    """A file of a merge, as its line has it."""

    name: str
    """Its path below the tree."""
    path: Path
    before: str | None
    """Its text before the merge, None if there was no file."""
    sha256: str
    """The hash of its text after the merge."""

    def text(self) -> str | None:
        """The text that it has now, with its own line ends; other bytes than UTF-8 are replaced."""
        return self.path.read_bytes().decode(errors="replace") if self.path.exists() else None

    def is_foreign(self, text: str | None) -> bool:
        """True if the file was changed after the merge: its text is neither the one before nor the merge's."""
        if text == self.before:
            return False
        return text is None or _hash(text) != self.sha256


class MergeJournal:
    """The merges into a tree of config files."""

    def __init__(self, folder: Path, root: Path | None = None) -> None:
        """`folder`: the one that holds the journal; `root`: the one that its names are below, if that is another."""
        self.path = folder / NAME
        self.root = root or folder

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
    def note_and_write(self, entry: Mapping[str, Any], texts: Mapping[Path, tuple[str | None, str]]) -> Iterator[None]:
        """Note a merge and make its changes; whatever fails in the block takes them back. `texts`: the text before
        (None: no file) and after of each path. Raises InputError if taking back fails as well."""
        files = [
            {"file": str(path.relative_to(self.root)), "before": before, "sha256": _hash(after)}
            for path, (before, after) in texts.items()
        ]
        line = json.dumps({**entry, "files": files}, separators=(",", ":"), ensure_ascii=False)
        self._write([*self._lines(), line])
        try:
            for path, (_, after) in texts.items():
                path.parent.mkdir(exist_ok=True)  # SGLang has a folder for each version of Triton
                put_text(path, after)
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
        merge, files = self._read_last(lines)
        for file in files:
            remove_dead_temporaries(file.path)
        texts = {file.path: file.text() for file in files}
        foreign = [
            f"{file.path}: was changed after the merge and is left alone; undo that change, then undo the merge"
            for file in files
            if file.is_foreign(texts[file.path])
        ]
        if foreign:
            raise InputError(foreign)
        changed = [file for file in files if texts[file.path] != file.before]
        for file in changed:
            put_text(file.path, file.before)
            if file.before is None and file.path.parent != self.root:
                with suppress(OSError):  # others' files are in the folder; else the merge may have made it
                    file.path.parent.rmdir()
        self._write(lines[:-1])
        return {
            "run": str(merge.get("run", "")),
            "time": str(merge.get("time", "")),
            "restored": tuple(file.name for file in changed if file.before is not None),
            "removed": tuple(file.name for file in changed if file.before is None),
            "left": len(lines) - 1,
        }

    def _read_last(self, lines: list[str]) -> tuple[dict[str, Any], list[NotedFile]]:
        """The last merge and its files. Raises InputError if its line is damaged."""
        try:
            merge: dict[str, Any] = json.loads(lines[-1])
            files = [NotedFile(f["file"], self.root / f["file"], f["before"], f["sha256"]) for f in merge["files"]]
        except (ValueError, KeyError, TypeError) as e:
            raise InputError(f"{self.path}:{len(lines)}: is damaged, so nothing is undone: {e}") from e
        return merge, files

    def _lines(self) -> list[str]:
        """The line of each merge; a text in it may hold other characters that end a line, such as U+2028."""
        if not self.path.exists():
            return []
        text = self.path.read_bytes().decode(errors="replace")
        return [line for line in text.split("\n") if line]

    def _write(self, lines: list[str]) -> None:
        """Write the journal anew; one without a merge goes."""
        if lines:
            write_atomic(self.path, "".join(f"{line}\n" for line in lines))
        else:
            self.path.unlink()


def journals_of(root: Path) -> list[MergeJournal]:
    """The journals that a tree can have: of AITER's configs, of an override folder or package, of an engine in it."""
    journals: list[MergeJournal] = []
    if (root / CONFIGS).is_dir():
        journals.append(MergeJournal(root / CONFIGS, root))
    for folder in (root, root / "vllm", root / "sglang", root / "python" / "sglang"):
        journals.append(MergeJournal(folder))
    return journals


def undo_merge(root: Path) -> dict[str, Any]:
    """Take back the last merge of a tree. Raises InputError if no merge is noted, or if a file was changed since.

    The number of its last merge says which of several journals is the latest. Version 0.3 wrote no numbers: those are
    the oldest, and told apart by their clock.
    """
    journal = max(journals_of(root), key=lambda j: (j.last_number, j.path.stat().st_mtime if j.path.exists() else 0.0))
    with journal.writing():
        return journal.take_back()


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
