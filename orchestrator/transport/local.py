"""Transport to this machine: subprocesses and plain files."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from orchestrator.errors import SlowError, TransportError
from orchestrator.transport.base import Channel, Completed, RemoteFile, faults

MAX_WORDS = 256 * 1024
"""Bytes of standard error that are kept, from its end."""
LOOK_S = 1.0


class LocalTransport:
    """Reaches the machine the controller runs on."""

    def __init__(self, node: str, env: Mapping[str, str] | None = None) -> None:
        """`env`: the whole environment of commands; ours by default."""
        self.node = node
        self._env = env

    def connect(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float = 60.0) -> Completed:
        # a session of its own: Ctrl-C in the terminal must reach the controller alone
        pipe = subprocess.PIPE
        try:
            p = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, env=self._env, start_new_session=True)
        except OSError as e:
            raise TransportError(self.node, f"cannot run {argv[0]}: {e.strerror or e}") from e
        with p:
            try:
                out, err = p.communicate(stdin, timeout=timeout)
            except BaseException as e:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(p.pid, signal.SIGKILL)  # with all that it started there
                if isinstance(e, subprocess.TimeoutExpired):
                    raise SlowError(self.node, f"{argv[0]} took longer than {timeout:g} s") from e
                raise
        return Completed(p.returncode, out, err)

    def put(self, folder: str, files: Mapping[str, RemoteFile], empty: Sequence[str] = ()) -> None:
        if wrong := faults([*files, *empty]):
            raise TransportError(self.node, wrong)
        root = Path(folder)
        try:
            for name in ("", *empty):
                _make_folder(root / name)
            for name, file in files.items():
                _write(root / name, file)
        except OSError as e:
            raise TransportError(self.node, f"cannot write {e.filename or folder}: {e.strerror or e}") from e

    def rename(self, src: str, dst: str) -> bool:
        try:
            os.rename(src, dst)
        except OSError as e:
            if isinstance(e, FileNotFoundError) and not os.path.lexists(src):
                return False
            raise TransportError(self.node, f"cannot rename {src}: {e.strerror or e}") from e
        return True

    def open(self, argv: Sequence[str]) -> ProcessChannel:
        try:
            return ProcessChannel(self.node, argv, self._env)
        except OSError as e:
            raise TransportError(self.node, f"cannot run {argv[0]}: {e.strerror or e}") from e


def _make_folder(path: Path) -> None:
    """Make a folder and those above it, each 0700."""
    for folder in () if path.is_dir() else (*reversed(path.parents), path):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)


def _write(path: Path, file: RemoteFile) -> None:
    _make_folder(path.parent)
    aside = path.with_name(f".{secrets.token_hex(8)}.tmp")
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, file.mode)
    try:
        with os.fdopen(fd, "wb") as f:
            f.write(file.data)
        os.chmod(aside, file.mode)
        os.rename(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


class ProcessChannel(Channel):
    """A subprocess whose standard input stays open: its end shows the command that nobody reads any more."""

    def __init__(self, node: str, argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        """Raises OSError."""
        pipe = subprocess.PIPE
        self._node = node
        self._p = subprocess.Popen(
            argv, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, env=env, start_new_session=True
        )
        assert self._p.stdin is not None and self._p.stdout is not None and self._p.stderr is not None  # noqa: PT018
        self._in = self._p.stdin
        self._out = self._p.stdout
        self._err = self._p.stderr
        os.set_blocking(self._in.fileno(), False)
        self._poll = select.poll()
        for stream in (self._out, self._err):
            self._poll.register(stream, select.POLLIN)
        self._reading = threading.Lock()
        self._writing = threading.Lock()
        self._words = bytearray()
        self._closing = False

    def read(self, size: int, deadline: float | None = None) -> bytes:
        """Return up to `size` bytes as soon as there are any, b"" at the end. Raise TimeoutError."""
        with self._reading:
            while not self._closing and not self._over:
                ready = {fd for fd, _ in self._poll.poll(1000 * _left(deadline))}
                if not self._err.closed and self._err.fileno() in ready:
                    self._keep_words()
                if self._out.fileno() in ready:
                    data = os.read(self._out.fileno(), size)
                    self._over = not data
                    return data
                if deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError
            return b""

    def _keep_words(self) -> None:
        more = os.read(self._err.fileno(), 65536)
        if not more:
            self._poll.unregister(self._err)
            self._err.close()
        self._words += more
        del self._words[:-MAX_WORDS]

    def send(self, data: bytes, deadline: float | None = None) -> None:
        """Send all of `data`. Raises TimeoutError, or OSError where the command listens no more."""
        view = memoryview(data)
        with self._writing:
            if self._closing:
                raise BrokenPipeError("it was closed")
            poll = select.poll()
            poll.register(self._in, select.POLLOUT)
            while view and not self._closing:
                if poll.poll(1000 * _left(deadline)):
                    view = view[self._in.write(view) or 0 :]
                elif deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError
            if view:
                raise BrokenPipeError("the command reads no more")

    def close(self) -> None:
        self._closing = True
        with self._writing:
            self._in.close()
        for number in (signal.SIGTERM, signal.SIGKILL):  # on SIGTERM, some end what they started elsewhere
            try:
                self._p.wait(1.0)
                break
            except subprocess.TimeoutExpired:
                os.killpg(self._p.pid, number)
        self._p.wait()
        with self._reading:
            if not self._err.closed:
                os.set_blocking(self._err.fileno(), False)
                with contextlib.suppress(BlockingIOError):
                    while not self._err.closed:
                        self._keep_words()
                self._err.close()
            self._out.close()

    def error(self) -> str:
        """Reason of its end."""
        if not self._closing:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._p.wait(1.0)  # its output ended
            self.close()
        return self._end(self._p.returncode, self._words)


def _left(deadline: float | None) -> float:
    """Seconds until then, or until it is time to look after a `close`."""
    return LOOK_S if deadline is None else min(LOOK_S, max(0.0, deadline - time.monotonic()))
