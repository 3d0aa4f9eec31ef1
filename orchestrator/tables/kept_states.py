"""The old states of a table: a table and the records beside it are one state, kept and restored together."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from orchestrator.errors import TunedDBError
from orchestrator.files.history import FileHistory
from orchestrator.files.lock import LOCK_WAIT_S, locked
from orchestrator.tables.provenance import records_path


def history_of(table: Path) -> FileHistory:
    """The history of a table and its records."""
    return FileHistory(table, records_path(table))


def undo(table: Path, lock_wait_s: float = LOCK_WAIT_S) -> dict[str, Any]:
    """Restore the last kept state of a table and its records. The replaced table is kept as
    `<name>.<number>.<UTC>.undone`.

    The document of `db undo`: `restored` is the kept file that is the table again, `aside` what was the table until
    now. `records` says `restored`, `removed` (that state had none) or `left` (none were kept with it, so today's stay).
    `left` is the number of states that can be undone still.

    Raises TunedDBError if nothing is kept, or if nothing can be written; the table is then as it was.
    """
    target = Path(os.path.realpath(table))
    if not target.is_file():
        raise TunedDBError(f"{table}: there is no such table")
    history = history_of(target)
    try:
        with locked(target, lock_wait_s):
            history.clean_up()
            undone = history.undo()
    except OSError as e:
        raise TunedDBError(f"{table}: cannot be undone (nothing of it is lost): {e.strerror or e}") from e
    if undone is None:
        raise TunedDBError(
            f"{table}: nothing to undo: no older state is kept beside it"
            f" ({target.name}.<number>.<UTC>.bak; a table's first merge has none)"
        )
    return {
        "path": str(table),
        "restored": str(undone.restored),
        "aside": str(undone.aside),
        "records": undone.companion,
        "left": undone.left,
    }
