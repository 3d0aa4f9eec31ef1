"""Control of a run through its folder: the lock of the controller that drives it, and requests of other commands."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orchestrator.command_hints import command
from orchestrator.errors import RunBusyError


@contextlib.contextmanager
def run_lock(path: Path, run: str) -> Iterator[None]:
    """Hold the lock of the controller that drives the run. Raise RunBusyError, which names who drives it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        who = holder(path)
        os.close(fd)
        raise RunBusyError(
            f"run {run} is driven by process {who.get('pid', '?')} on {who.get('host', 'this machine')}"
            f" (since {who.get('since', '?')}); watch it with: {command(f'status {run} --watch')}"
        ) from None
    os.ftruncate(fd, 0)
    who = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    os.pwrite(fd, json.dumps(who).encode(), 0)
    try:
        yield
    finally:
        os.ftruncate(fd, 0)
        os.close(fd)


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
