"""What other commands ask of the controller that drives a run: small files in the run folder, renamed into place."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

KINDS = ("cancel", "retry", "drain", "join")


def ask(folder: Path, kind: str, **fields: Any) -> Path:
    """Leave a request for the controller; it removes the file when it has taken it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{time.time_ns()}-{kind}.json"
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps({"kind": kind, **fields}))
    os.rename(aside, path)
    return path


def take(folder: Path) -> list[dict[str, Any]]:
    """The requests that wait, oldest first, removed. A file that is none is put away, not obeyed."""
    if not folder.is_dir():
        return []
    out = []
    for path in sorted(folder.glob("*.json")):
        try:
            raw = json.loads(path.read_text())
            if isinstance(raw, dict) and raw.get("kind") in KINDS:
                out.append(raw)
        except (OSError, ValueError):
            pass
        path.unlink(missing_ok=True)
    return out
