"""Transport to this machine: subprocesses and plain files."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from orchestrator.errors import SlowError, TransportError
from orchestrator.transport.base import Channel, Completed, RemoteFile


class LocalTransport:
    """Reaches the machine the controller runs on."""

    def __init__(self, node: str) -> None:
        self.node = node

    def connect(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float = 60.0) -> Completed:
        # a session of its own: Ctrl-C in the terminal must reach the controller alone
        pipe = subprocess.PIPE
        try:
            p = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
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
        root = Path(folder)
        try:
            for name in ("", *empty):
                (root / name).mkdir(mode=0o700, parents=True, exist_ok=True)
            for name, file in files.items():
                _write(root / name, file)
        except OSError as e:
            raise TransportError(self.node, f"cannot write {e.filename or folder}: {e.strerror or e}") from e

    def rename(self, src: str, dst: str) -> bool:
        try:
            os.rename(src, dst)
        except FileNotFoundError:
            return False
        except OSError as e:
            raise TransportError(self.node, f"cannot rename {src}: {e.strerror or e}") from e
        return True

    def open(self, argv: Sequence[str]) -> Channel:
        try:
            return _Process(self.node, argv)
        except OSError as e:
            raise TransportError(self.node, f"cannot run {argv[0]}: {e.strerror or e}") from e


def _write(path: Path, file: RemoteFile) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, file.mode)
    try:
        with os.fdopen(fd, "wb") as f:
            f.write(file.data)
        os.chmod(aside, file.mode)
        os.rename(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


class _Process:
    """A subprocess whose standard input stays open: its end shows the command that nobody reads any more."""

    def __init__(self, node: str, argv: Sequence[str]) -> None:
        self._node = node
        self._p = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        assert self._p.stdout is not None
        self._out = self._p.stdout.fileno()

    def read(self, size: int) -> bytes:
        return os.read(self._out, size)

    def write(self, data: bytes) -> None:
        assert self._p.stdin is not None
        view = memoryview(data)
        try:
            while view:
                view = view[self._p.stdin.write(view) :]
        except (OSError, ValueError) as e:  # a broken pipe, or closed by us
            raise TransportError(self._node, "the command takes no more input") from e

    def close(self) -> None:
        if self._p.stdin is not None and not self._p.stdin.closed:
            self._p.stdin.close()
        try:
            self._p.wait(1.0)
        except subprocess.TimeoutExpired:
            os.killpg(self._p.pid, signal.SIGKILL)
            self._p.wait()

    def error(self) -> str:
        code = self._p.wait()
        assert self._p.stderr is not None
        if self._p.stderr.closed:
            return f"ended with code {code}"
        words = os.read(self._p.stderr.fileno(), 4096).decode("utf-8", "replace").strip()
        self._p.stderr.close()
        assert self._p.stdout is not None
        self._p.stdout.close()
        return f"ended with code {code}" + (f": {words[-1000:]}" if words else "")
