"""The history of files of a user that belong together: every old state is kept beside them, and the last one restored.

A tuned table and its records are such files (`orchestrator/tables/merge.py`). Each old state is kept under one
number, as `<name>.<number>.<UTC>.bak` for each file; the number alone says which state is the later one, because a
clock may be wrong. An empty kept file says that there was none. A merge of config files keeps the old texts in its own
journal (`orchestrator/configs/journal.py`) and puts them back with `put_text`.

One writer at a time: the caller holds the lock of the main file (`lock.py`) and calls `clean_up` first.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TextIO

from orchestrator.errors import TunedDBError
from orchestrator.files.write import remove_dead_temporaries, sync_folder, write_atomic

_STAMP = re.compile(r"(?:\.(\d+))?\.(\d{8}T\d{6}Z)(?:-(\d+))?\.(?:bak|undone)\Z")
"""The end of a kept file's name. Version 0.3 wrote no number, and told files of one second apart by `-2`."""


def put_text(path: Path, text: str | None) -> None:
    """Let a file hold this text, with the mode that it has; None: let there be no such file. Durable."""
    if text is not None:
        write_atomic(path, text, like=path.stat() if path.exists() else None)
        return
    path.unlink()
    sync_folder(path.parent)


@dataclass(frozen=True)
class Undone:
    """The outcome of an undo."""

    restored: Path
    """The kept file that is the main file again."""
    aside: Path
    """The path of what was the main file until now."""
    companion: Literal["restored", "removed", "left"]
    """The fate of the companion; `left`: none was kept with that state, so today's stays."""
    states_left: int
    """The number of states that can be undone still."""


@dataclass(frozen=True)
class FileHistory:
    """The history of a file and of the companion that changes with it: `table.csv` and `table.csv.provenance.jsonl`.

    A kept state is `table.csv.0003.20260401T120000Z.bak`, with the companion's under the same end.
    The companion changes first, then the main file. So a change that was killed between the two can be told: its kept
    state is the main file itself, and `clean_up` takes it back.
    """

    main: Path
    companion: Path

    def states(self) -> list[Path]:
        """The kept states of the main file, the oldest first: those of version 0.3 by their clock, then the numbered
        ones."""
        kept = []
        for path in self.main.parent.glob(f"{glob.escape(self.main.name)}.*.bak"):
            stamp = _STAMP.fullmatch(path.name, len(self.main.name))
            if stamp and path.is_file():
                number, clock, copy_of_second = stamp.groups()
                kept.append((int(number or 0), clock, int(copy_of_second or 1), path))
        return [path for *_, path in sorted(kept)]

    def clean_up(self) -> None:
        """Take back a change that was killed, and remove what it left."""
        for path in (self.main, self.companion):
            remove_dead_temporaries(path)
        states = self.states()
        if not states or not self.main.exists() or not states[-1].samefile(self.main):
            return
        # The main file was kept (linked), and never replaced. Its companion may have been: it goes back first.
        kept_companion = self._kept_companion(states[-1])
        if kept_companion.exists():
            self._restore_companion(kept_companion)
        states[-1].unlink()

    def replace(self, texts: Mapping[Path, Iterable[str]], before: os.stat_result | None) -> Path | None:
        """Replace the main file, and the companion if `texts` has it; the path of the kept old main file.

        `before`: the main file as it was read, None where there was none. Raises OSError and TunedDBError; then both
        files are as they were, but for a failure of the very last step, which leaves a whole new file and the old one
        kept.
        """
        files = [path for path in (self.main, self.companion) if path in texts]
        had_companion = self.companion.exists()
        kept: dict[Path, Path] = {}
        written: list[Path] = []
        try:
            if before:
                end = self._next_end("bak")
                for path in files:
                    kept[path] = _named(path, end)
                    _keep(path, kept[path])
            sync_folder(self.main.parent)
            if before and _has_changed(before, self.main.stat()):
                raise TunedDBError(
                    f"{self.main}: was changed by another process during the merge, and nothing was merged; merge again"
                )
            for path in reversed(files):  # the companion first
                written.append(path)
                like = self.companion.stat() if path == self.companion and had_companion else before
                write_atomic(path, partial(_write_lines, texts[path]), like=like)
        except BaseException:
            if _inode(self.main) == (before.st_ino if before else None):
                if not had_companion:
                    self.companion.unlink(missing_ok=True)
                elif self.companion in written and self.companion in kept:
                    os.rename(kept[self.companion], self.companion)
                for path in kept.values():
                    path.unlink(missing_ok=True)
            raise
        return kept.get(self.main)

    def undo(self) -> Undone | None:
        """Restore the last kept state; None if none is kept. The replaced file is kept as
        `<name>.<number>.<UTC>.undone`. Raises OSError; the main file is then as it was."""
        states = self.states()
        if not states:
            return None
        kept = states[-1]
        end = self._next_end("undone")
        aside = _named(self.main, end)
        _keep(self.main, aside)
        outcome: Literal["restored", "removed", "left"] = "left"
        kept_companion = self._kept_companion(kept)
        if kept_companion.exists():
            outcome = "restored" if kept_companion.stat().st_size else "removed"
            if self.companion.exists():
                _keep(self.companion, _named(self.companion, end))
            self._restore_companion(kept_companion)
        os.rename(kept, self.main)
        sync_folder(self.main.parent)
        return Undone(kept, aside, outcome, len(states) - 1)

    def _kept_companion(self, state: Path) -> Path:
        """The companion's file that was kept with the main file's."""
        return _named(self.companion, state.name[len(self.main.name) :])

    def _restore_companion(self, kept: Path) -> None:
        if not kept.stat().st_size:  # there was none
            self.companion.unlink(missing_ok=True)
        elif not (self.companion.exists() and self.companion.samefile(kept)):
            os.rename(kept, self.companion)  # of a file onto itself it would leave both names
        kept.unlink(missing_ok=True)

    def _next_end(self, word: str) -> str:
        """The end of the names of a new state, `.<number>.<UTC>.<word>`, with a number above that of every kept file,
        the companion's included: its name begins with the main file's."""
        numbers = [0]
        for path in self.main.parent.glob(f"{glob.escape(self.main.name)}.*"):
            if stamp := _STAMP.search(path.name):
                numbers.append(int(stamp[1] or 0))
        return f".{max(numbers) + 1:04}.{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.{word}"


def _named(path: Path, end: str) -> Path:
    return path.with_name(path.name + end)


def _keep(source: Path, kept: Path) -> None:
    """Keep a file durably under a new name, an empty one if the source does not exist. Linked where that is possible:
    the source is only ever replaced, never written to."""
    if source.exists():
        with suppress(OSError):
            os.link(source, kept)
            return
    kept.touch(exist_ok=False)
    if source.exists():
        shutil.copy2(source, kept)
    with kept.open("rb") as f:
        os.fsync(f.fileno())


def _write_lines(lines: Iterable[str], f: TextIO) -> None:
    f.writelines(lines)


def _inode(path: Path) -> int | None:
    return path.stat().st_ino if path.exists() else None


def _has_changed(a: os.stat_result, b: os.stat_result) -> bool:
    return (a.st_mtime_ns, a.st_size, a.st_ino) != (b.st_mtime_ns, b.st_size, b.st_ino)
