"""Waiting until something in folders changes: inotify, which Python has no module for, by ctypes.

It tells only of what this kernel itself writes, and each user has a limited number of instances
(fs.inotify.max_user_instances): who waits must be able to look by himself as well.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import time
from collections.abc import Iterable
from pathlib import Path

MODIFY, MOVED_TO, CREATE, OVERFLOW = 0x2, 0x80, 0x100, 0x4000
NEW_NAMES = MOVED_TO | CREATE | OVERFLOW
"""Of what `wait` returns: there may be files that were not there before."""
GATHER_S = 0.002
"""Changes so close together are told of at once."""
_EVENT = struct.Struct("iIII")
"""Watch, mask, cookie, length of the name that follows."""


class Changes:
    """Changes of the files in folders, from now on."""

    def __init__(self, folders: Iterable[Path]) -> None:
        """Raise OSError where the kernel does not tell of them."""
        try:
            from ctypes import CDLL, get_errno

            libc = CDLL(None, use_errno=True)
            self._fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            if self._fd < 0:
                raise OSError(get_errno(), "inotify_init1")
        except (ImportError, AttributeError) as e:
            raise OSError(f"no inotify: {e}") from e
        for folder in folders:
            if libc.inotify_add_watch(self._fd, os.fsencode(folder), MODIFY | MOVED_TO | CREATE) < 0:
                number = get_errno()
                self.close()
                raise OSError(number, f"inotify_add_watch {folder}")
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def close(self) -> None:
        os.close(self._fd)

    def wait(self, seconds: float) -> int:
        """Wait for a change; return the kinds of all until now (MODIFY, ...), 0 where none came in time."""
        if not self._poll.poll(1000.0 * max(0.0, seconds)):
            return 0
        time.sleep(GATHER_S)
        seen = 0
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._fd, 65536):
                at = 0
                while at < len(data):
                    _, mask, _, length = _EVENT.unpack_from(data, at)
                    seen |= mask
                    at += _EVENT.size + length
        return seen
