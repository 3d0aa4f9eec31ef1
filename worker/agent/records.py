"""The record file of a slot: append-only, one JSON object per line, repaired when opened, safe on a full disk.

One agent writes a file (it holds the slot's lock). write(2) appends a whole line, so the line survives the agent's
death; `sync` puts it on the disk, so it survives a crash of the machine. If the disk is full, the half-written line is
cut off again, and the record waits in memory, in order, until `retry` finds space.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from worker.protocol import MAX_RECORD_BYTES, ProtocolError, parse_record

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors that mean: no space left."""
DURABLE = frozenset({"shape_tuned", "attempt_ended"})
"""Records that must be on the disk before the worker continues."""


class RecordFile:
    """Appends records to one file.

    `full`: the disk was full, and records wait in memory. Other I/O errors are raised.
    """

    def __init__(self, path: Path) -> None:
        """Opens or creates the file. A torn last line gets a newline, so that only that line is bad.

        Raises OSError if it is not a regular file that we may write.
        """
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._waiting: deque[bytes] = deque()
        self._unsynced = False
        info = os.fstat(self._fd)
        if not stat.S_ISREG(info.st_mode):
            os.close(self._fd)
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        self._size = info.st_size
        if not self._size:
            _sync_folder(path.parent)
        if self._size and os.pread(self._fd, 1, self._size - 1) != b"\n":
            self._put(b"\n")

    @property
    def full(self) -> bool:
        return bool(self._waiting)

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a record after the waiting ones. Raises ProtocolError if it is too large."""
        line = json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        if len(line) > MAX_RECORD_BYTES:
            raise ProtocolError(f"{record['type']} record of {len(line)} bytes")
        if record["type"] in DURABLE:
            self._unsynced = True
        self._put(line)

    def sync(self) -> None:
        """Put durable records on the disk. Does nothing if there are no new ones since the last call."""
        if self._unsynced and not self._waiting:
            try:
                os.fdatasync(self._fd)
            except OSError as e:
                if e.errno not in (*FULL, errno.EINVAL):  # EINVAL: a file system that cannot sync
                    raise
            self._unsynced = False

    def retry(self) -> bool:
        """Write the waiting records. Return whether all of them are in the file now."""
        while self._waiting:
            if not self._write(self._waiting[0]):
                return False
            self._waiting.popleft()
        self.sync()
        return True

    def close(self) -> None:
        os.close(self._fd)

    def _put(self, line: bytes) -> None:
        if self._waiting or not self._write(line):
            self._waiting.append(line)

    def _write(self, line: bytes) -> bool:
        done = 0
        try:
            while done < len(line):
                done += os.write(self._fd, line[done:])
        except OSError as e:
            if e.errno not in FULL:
                raise
            if done:
                os.ftruncate(self._fd, self._size)
            return False
        self._size += done
        return True


def _sync_folder(folder: Path) -> None:
    """Put a new file's name on the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with suppress(OSError):  # the file system cannot do it, or has no room
        os.fsync(fd)
    os.close(fd)


def attempt_records(path: Path, attempt: str) -> list[dict[str, Any]]:
    """The records of an attempt from its last attempt_started on. Bad lines are skipped."""
    records: list[dict[str, Any]] = []
    with suppress(FileNotFoundError), open(path, "rb") as f:
        for line in f:
            if attempt.encode() not in line:
                continue
            try:
                record = parse_record(line)
            except ProtocolError:
                continue
            if record.get("attempt") != attempt:
                continue
            if record["type"] == "attempt_started":
                records = [record]
            elif records:
                records.append(record)
    return records


def in_flight(records: list[dict[str, Any]]) -> int | None:
    """The shape that an attempt's records start but do not settle."""
    shape: int | None = None
    for record in records:
        if record["type"] == "shape_started":
            shape = record["shape"]
        elif record["type"] in ("shape_tuned", "shape_failed") and record["shape"] == shape:
            shape = None
    return shape
