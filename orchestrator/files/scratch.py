"""A folder for the temporary files of a command, which nobody has to remove by hand.

    with scratch_folder("gemmfleet-engine-") as folder:
        unpack_wheel(engine, folder)

The folder is removed when the block ends. The folder of a command that was killed is removed by the next command that
asks for a folder with the same prefix: a process locks its folder, and its lock ends with it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

YOUNG_S = 60.0
"""A folder is left alone for this long, because the process that made it may be about to lock it."""


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """A fresh folder whose name begins with the prefix, below the system's folder for temporary files. Raises
    OSError."""
    _remove_abandoned(prefix)
    with tempfile.TemporaryDirectory(prefix=prefix) as name:
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with suppress(OSError):  # NFS locks no folder, and so no other command locks and removes it
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield Path(name)
        finally:
            os.close(descriptor)


def _remove_abandoned(prefix: str) -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):  # another user's, in use, or removed meanwhile
            _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: Path) -> None:
    """Remove a folder that no living process has locked. Raises OSError, also if one has."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or time.time() - status.st_mtime < YOUNG_S:
            return
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)
