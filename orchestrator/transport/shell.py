"""Files and commands on a node that is reached by commands alone, whatever carries them.

Files go as one tar stream (tar_stream.py). Where every command costs a start, small files and renames go through a
shell that is kept open (kept_shell.py).
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

from orchestrator.errors import TransportError
from orchestrator.transport.base import Completed, RemoteFile
from orchestrator.transport.kept_shell import KeptShell, ShellError, ShellLost
from orchestrator.transport.quoting import absolute
from orchestrator.transport.tar_stream import faults, stream, unpack_argv

SMALL_FILES, SMALL_BYTES = 4, 256 * 1024
"""Limits of the kept shell; anything larger goes as a tar stream on a channel of its own."""
CALL_S, BYTES_A_SECOND = 60.0, 250_000
"""Time for a put or rename, and the slowest link that still is one."""
T = TypeVar("T")


RENAME = """\
if [ -d "$2" ]; then echo "$2: Is a directory" >&2; exit 1; fi
mv -f -- "$1" "$2" && exit 0
[ -e "$1" ] || [ -L "$1" ] || exit 3
exit 1
"""


class CommandTransport(ABC):
    """The part of a Transport that is made of commands: files, and the words of errors."""

    node: str

    @abstractmethod
    def _run(self, argv: Sequence[str], stdin: bytes, timeout: float, name: str) -> Completed:
        """Run a command to its end; `name` stands for it in errors."""

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float = 60.0) -> Completed:
        """Run a command to its end. A code is negative where a signal ended it."""
        done = self._run(argv, stdin, timeout, argv[0])
        words = done.err.decode("utf-8", "replace")
        if done.code in (126, 127) and ("exec: " in words or "timeout: " in words) and argv[0] in words:
            raise TransportError(self.node, f"cannot run {argv[0]}: {words.strip()[-300:]}")
        return done

    def put(self, folder: str, files: Mapping[str, RemoteFile], empty: Sequence[str] = ()) -> None:
        """Write files aside and rename each into place."""
        wrong = faults([*files, *empty])
        if wrong or "\0" in folder or not folder:
            raise TransportError(self.node, wrong or f"{folder!r} is not a folder")
        self._put(absolute(folder).rstrip("/") or "/", files, empty)

    def _put(self, folder: str, files: Mapping[str, RemoteFile], empty: Sequence[str]) -> None:
        token = f".put-{secrets.token_hex(8)}"
        data = stream(token, files, empty)
        limit = CALL_S + len(data) / BYTES_A_SECOND
        done = self._run(unpack_argv(folder, token), data, limit, f"writing to {folder}")
        if done.code != 0:
            raise TransportError(self.node, f"cannot write to {folder}: {done.text or f'code {done.code}'}")

    def rename(self, src: str, dst: str) -> bool:
        """Rename on the node; False where `src` is gone. TransportError where that is unknown: the connection broke."""
        src, dst = absolute(src), absolute(dst)
        if "\0" in src + dst:
            raise TransportError(self.node, f"cannot rename {src!r}: no path has a NUL character")
        return self._rename(src, dst)

    def _rename(self, src: str, dst: str) -> bool:
        done = self._run(["sh", "-c", RENAME, "sh", src, dst], b"", CALL_S, f"renaming {src}")
        if done.code not in (0, 3):
            raise TransportError(self.node, f"cannot rename {src}: {done.text or f'code {done.code}'}")
        return done.code == 0


class ShellTransport(CommandTransport):
    """A few small files, and renames, through a kept shell."""

    @abstractmethod
    def _kept_shell(self, deadline: float) -> AbstractContextManager[KeptShell]:
        """The kept shell, for one request that ends by the deadline. Raises TransportError where the node is gone."""

    def _put(self, folder: str, files: Mapping[str, RemoteFile], empty: Sequence[str]) -> None:
        if not files or empty or len(files) > SMALL_FILES or sum(len(f.data) for f in files.values()) > SMALL_BYTES:
            super()._put(folder, files, empty)
            return
        for name, file in files.items():
            self._write(f"{folder}/{name}", file)

    def _write(self, path: str, file: RemoteFile) -> None:
        self._ask_shell(lambda shell, deadline: shell.write(path, file, deadline), f"cannot write {path}")

    def _rename(self, src: str, dst: str) -> bool:
        return self._ask_shell(lambda shell, deadline: shell.rename(src, dst, deadline), f"cannot rename {src}")

    def _ask_shell(self, ask: Callable[[KeptShell, float], T], what: str) -> T:
        deadline = time.monotonic() + CALL_S
        try:
            with self._kept_shell(deadline) as shell:
                return ask(shell, deadline)
        except (ShellError, ShellLost) as e:
            raise TransportError(self.node, f"{what}: {e}") from e
