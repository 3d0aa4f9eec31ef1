"""The journal of a tree's merges, `gemmfleet-merges.jsonl` beside its configs: provenance, and the way back.

One line a merge: run, time, what the run says of itself, and for each file its text before, the hash of its text
after, and the measurements behind every new bucket. It is written before any config, so that a merge that was cut off
can be undone too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.errors import InputError
from orchestrator.tuned_db.merge import LOCK_WAIT_S
from orchestrator.tuned_db.versions import locked
from orchestrator.userfiles import sync_folder, write_atomic
from worker.triton_configs.resolve import CONFIGS

NAME = "gemmfleet-merges.jsonl"


@dataclass(frozen=True, slots=True)
class Undone:
    """`restored`: files that are as before; `removed`: files that the merge had made; `left`: merges before it."""

    run: str
    time: str
    restored: tuple[str, ...]
    removed: tuple[str, ...]
    left: int


def journal_of(root: Path) -> Path:
    """The journal of a tree. Raises InputError where the tree has no configs."""
    folder = root / CONFIGS
    if not folder.is_dir():
        raise InputError(f"{root}: is no tree of AITER with Triton configs: there is no {CONFIGS}")
    return folder / NAME


@contextmanager
def writing(root: Path) -> Iterator[Path]:
    """One writer to a tree's configs at a time. Raises InputError, TunedDBError where another one writes."""
    journal = journal_of(root)
    try:
        with locked(journal, LOCK_WAIT_S):
            yield journal
    except OSError as e:
        raise InputError(f"{root}: cannot be written: {e.strerror or e}") from e


def record(journal: Path, root: Path, entry: Mapping[str, Any], texts: Mapping[Path, tuple[str | None, str]]) -> None:
    """Note a merge and make its changes. `texts`: the text before (None: no file) and after of each path."""
    files = [
        {"file": str(path.relative_to(root)), "before": before, "sha256": _sha(after)}
        for path, (before, after) in texts.items()
    ]
    line = json.dumps({**entry, "files": files}, separators=(",", ":"), ensure_ascii=False)
    earlier = journal.read_text() if journal.exists() else ""
    write_atomic(journal, f"{earlier}{line}\n")
    for path, (before, after) in texts.items():
        write_atomic(path, after, like=path.stat() if before is not None else None)


def undo(root: Path) -> Undone:
    """Take back the last merge of a tree. Raises InputError where there is none, or a file was changed since."""
    with writing(root) as journal:
        return take_back(journal, root)


def take_back(journal: Path, root: Path) -> Undone:
    """`undo`, for who holds the lock."""
    lines = journal.read_text().splitlines() if journal.exists() else []
    if not lines:
        raise InputError(f"{root}: nothing to undo: no merge is noted in {journal.relative_to(root)}")
    try:
        last = json.loads(lines[-1])
        files = [(root / f["file"], f["before"], f["sha256"]) for f in last["files"]]
    except (ValueError, KeyError, TypeError) as e:
        raise InputError(f"{journal}:{len(lines)}: is no line that gemmfleet wrote, so nothing is undone: {e}") from e
    texts = {path: path.read_text() if path.exists() else None for path, _, _ in files}
    foreign = [
        f"{path}: was changed after the merge and is left alone; undo that change, then undo the merge"
        for path, before, after in files
        if (text := texts[path]) != before and (text is None or _sha(text) != after)
    ]
    if foreign:
        raise InputError(foreign)
    restored, removed = [], []
    for path, before, _ in files:
        name = str(path.relative_to(root))
        if texts[path] == before:
            continue
        if before is None:
            path.unlink()
            sync_folder(path.parent)
            removed.append(name)
        else:
            write_atomic(path, before, like=path.stat())
            restored.append(name)
    rest = "".join(f"{line}\n" for line in lines[:-1])
    if rest:
        write_atomic(journal, rest)
    else:
        journal.unlink()
    return Undone(str(last.get("run", "")), str(last.get("time", "")), tuple(restored), tuple(removed), len(lines) - 1)


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
