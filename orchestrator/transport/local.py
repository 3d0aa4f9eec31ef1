"""The transport `local`: subprocesses and plain files of this machine.

SrunOpener (exec.py) and Slurm's commands use it too, because they run here unless the pool has a login node.
"""

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
from orchestrator.transport.base import Channel, Completed, RemoteFile, path_fault

MAX_STDERR = 256 * 1024
"""Bytes that we keep of the end of standard error."""
LOOK_S = 1.0
"""A wait for a pipe looks this often whether `close` was called."""


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
        # the command gets its own session, because Ctrl-C in the terminal must reach only the controller
        pipe = subprocess.PIPE
        try:
            process = subprocess.Popen(
                argv, stdin=pipe, stdout=pipe, stderr=pipe, env=self._env, start_new_session=True
            )
        except OSError as e:
            raise TransportError(self.node, f"cannot run {argv[0]}: {e.strerror or e}") from e
        with process:
            try:
                out, err = process.communicate(stdin, timeout=timeout)
            except BaseException as e:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with all that it started there
                if isinstance(e, subprocess.TimeoutExpired):
                    raise SlowError(self.node, f"{argv[0]} took longer than {timeout:g} s") from e
                raise
        return Completed(process.returncode, out, err)

    def put(self, folder: str, files: Mapping[str, RemoteFile], empty: Sequence[str] = ()) -> None:
        fault = path_fault([*files, *empty])
        if fault:
            raise TransportError(self.node, fault)
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
    """A subprocess whose standard input stays open. When that ends, the command knows that nobody reads its output."""

    def __init__(self, node: str, argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        """Raises OSError."""
        pipe = subprocess.PIPE
        self._node = node
        self._process = subprocess.Popen(
            argv, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, env=env, start_new_session=True
        )
        assert self._process.stdin is not None and self._process.stdout is not None and self._process.stderr is not None  # noqa: PT018
        self._in = self._process.stdin
        self._out = self._process.stdout
        self._err = self._process.stderr
        os.set_blocking(self._in.fileno(), False)
        self._poll = select.poll()
        for stream in (self._out, self._err):
            self._poll.register(stream, select.POLLIN)
        self._reading = threading.Lock()
        self._writing = threading.Lock()
        self._stderr = bytearray()
        self._closing = False

    def read(self, size: int, deadline: float | None = None) -> bytes:
        """Return up to `size` bytes as soon as there are any, b"" at the end. Raise TimeoutError."""
        with self._reading:
            while not self._closing and not self._over:
                ready = {fd for fd, _ in self._poll.poll(1000 * _wait_s(deadline))}
                if not self._err.closed and self._err.fileno() in ready:
                    self._keep_stderr()
                if self._out.fileno() in ready:
                    data = os.read(self._out.fileno(), size)
                    self._over = not data
                    return data
                if deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError
            return b""

    def _keep_stderr(self) -> None:
        more = os.read(self._err.fileno(), 65536)
        if not more:
            self._poll.unregister(self._err)
            self._err.close()
        self._stderr += more
        del self._stderr[:-MAX_STDERR]

    def send(self, data: bytes, deadline: float | None = None) -> None:
        """Send all of `data`. Raises TimeoutError, or OSError if the command no longer reads its input."""
        view = memoryview(data)
        with self._writing:
            if self._closing:
                raise BrokenPipeError("it was closed")
            poll = select.poll()
            poll.register(self._in, select.POLLOUT)
            while view and not self._closing:
                if poll.poll(1000 * _wait_s(deadline)):
                    view = view[self._in.write(view) or 0 :]
                elif deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError
            if view:
                raise BrokenPipeError("the command reads no more")

    def close(self) -> None:
        self._closing = True
        with self._writing:
            self._in.close()
        for number in (signal.SIGTERM, signal.SIGKILL):  # on SIGTERM srun and ssh end what they started elsewhere
            try:
                self._process.wait(1.0)
                break
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, number)
        self._process.wait()
        with self._reading:
            if not self._err.closed:
                os.set_blocking(self._err.fileno(), False)
                with contextlib.suppress(BlockingIOError):
                    while not self._err.closed:
                        self._keep_stderr()
                self._err.close()
            self._out.close()

    def error(self) -> str:
        """Return why it ended."""
        if not self._closing:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)  # its output ended
            self.close()
        return self._describe_end(self._process.returncode, self._stderr)


def _wait_s(deadline: float | None) -> float:
    """Seconds to wait for a pipe: until the deadline, but LOOK_S at most."""
    return LOOK_S if deadline is None else min(LOOK_S, max(0.0, deadline - time.monotonic()))
