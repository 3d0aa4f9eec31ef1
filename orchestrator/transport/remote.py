"""What the transports share that reach a node by commands alone: files, renames, and the words of errors."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

from orchestrator.errors import TransportError
from orchestrator.transport import tarstream
from orchestrator.transport.base import Completed, RemoteFile
from orchestrator.transport.shell import KeptShell, ShellError, ShellLost, absolute

SMALL_FILES, SMALL_BYTES = 4, 256 * 1024
"""Limits of single files in the kept shell; anything larger goes as one tar stream."""
CALL_S, BYTES_A_SECOND = 60.0, 250_000
"""Time for a put or rename, and the slowest link that still is one."""
T = TypeVar("T")


class RemoteTransport(ABC):
    """A transport by commands."""

    node: str

    @abstractmethod
    def _run(self, argv: Sequence[str], stdin: bytes, timeout: float, name: str) -> Completed:
        """Run a command to its end. `name`: its name in errors."""

    @abstractmethod
    def _shell(self, deadline: float) -> AbstractContextManager[KeptShell]:
        """A kept shell for one request."""

    @abstractmethod
    def _lost(self, e: ShellLost, what: str) -> TransportError:
        """Error for a kept shell that is gone."""

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float = 60.0) -> Completed:
        """Run a command to its end. A code is negative where a signal ended it."""
        done = self._run(argv, stdin, timeout, argv[0])
        words = done.err.decode("utf-8", "replace")
        if done.code in (126, 127) and ("exec: " in words or "timeout: " in words) and argv[0] in words:
            raise TransportError(self.node, f"cannot run {argv[0]}: {words.strip()[-300:]}")
        return done

    def put(self, folder: str, files: Mapping[str, RemoteFile], empty: Sequence[str] = ()) -> None:
        """Write files aside and rename each into place; a few small ones through the kept shell."""
        wrong = tarstream.faults([*files, *empty])
        if wrong or "\0" in folder or not folder:
            raise TransportError(self.node, wrong or f"{folder!r} is not a folder")
        folder = absolute(folder).rstrip("/") or "/"
        if (
            files
            and not empty
            and len(files) <= SMALL_FILES
            and sum(len(f.data) for f in files.values()) <= SMALL_BYTES
        ):
            for name, file in files.items():
                self._write(f"{folder}/{name}", file)
            return
        token = f".put-{secrets.token_hex(8)}"
        stream = tarstream.stream(token, files, empty)
        limit = CALL_S + len(stream) / BYTES_A_SECOND
        done = self._run(tarstream.unpack_argv(folder, token), stream, limit, f"writing to {folder}")
        if done.code != 0:
            raise TransportError(self.node, f"cannot write to {folder}: {done.text or f'code {done.code}'}")

    def _write(self, path: str, file: RemoteFile) -> None:
        self._ask_shell(lambda shell, deadline: shell.write(path, file, deadline), f"cannot write {path}")

    def rename(self, src: str, dst: str) -> bool:
        """Rename on the node; False where `src` is gone. When the connection breaks, nobody knows (TransportError)."""
        src, dst = absolute(src), absolute(dst)
        if "\0" in src + dst:
            raise TransportError(self.node, f"cannot rename {src!r}: no path has a NUL character")
        return self._ask_shell(lambda shell, deadline: shell.rename(src, dst, deadline), f"cannot rename {src}")

    def _ask_shell(self, ask: Callable[[KeptShell, float], T], what: str, limit: float = CALL_S) -> T:
        deadline = time.monotonic() + limit
        try:
            with self._shell(deadline) as shell:
                return ask(shell, deadline)
        except ShellError as e:
            raise TransportError(self.node, f"{what}: {e}") from e
        except ShellLost as e:
            raise self._lost(e, what) from e
