"""Control of a run through its folder: the lock of the controller that drives it, and requests of other commands."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from orchestrator.command_hints import command
from orchestrator.errors import RunBusyError


class RunLock:
    """Context manager; RunBusyError names who drives the run."""

    def __init__(self, path: Path, run: str) -> None:
        self._path, self._run = path, run
        self._fd = -1

    def __enter__(self) -> RunLock:
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = holder(self._path)
            os.close(self._fd)
            raise RunBusyError(
                f"run {self._run} is driven by process {who.get('pid', '?')} on {who.get('host', 'this machine')}"
                f" (since {who.get('since', '?')}); watch it with: {command(f'status {self._run} --watch')}"
            ) from None
        os.ftruncate(self._fd, 0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        os.pwrite(
            self._fd,
            json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}).encode(),
            0,
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        os.ftruncate(self._fd, 0)
        os.close(self._fd)


def holder(path: Path) -> dict[str, Any]:
    """Holder of the lock (pid, host, since); {} where there is none."""
    try:
        with path.open("rb") as f:
            try:
                fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raw = json.loads(f.read() or b"{}")
                return raw if isinstance(raw, dict) and raw else {"pid": "?"}
    except (OSError, ValueError):
        return {}
    return {}


KINDS = ("cancel", "retry", "drain", "join")


def ask(folder: Path, kind: str, **fields: Any) -> Path:
    """Leave a request for the controller, which removes the file when it takes it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{time.time_ns()}-{kind}.json"
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps({"kind": kind, **fields}))
    os.rename(aside, path)
    return path


def take(folder: Path) -> list[dict[str, Any]]:
    """Waiting requests, oldest first, removed from the folder. A file that is no request is removed and ignored."""
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
