"""Processes of the tuner's own: forked from one that has imported torch and triton, and never touched a GPU.

The standard library's fork server does the forking, so a process costs tens of milliseconds and shares the imported
libraries' memory. Each talks over one pipe, in pickled messages. All end with the tuner's process: its pipe closes,
and the agent kills the session.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from worker.process import exit_words

PRELOAD = ["worker.tuners.triton.preload"]
GRACE_S = 2.0

Serve = Callable[..., None]


class ChildProcess:
    """One such process. `conn` is our end of its pipe."""

    def __init__(self, serve: Serve, env: Mapping[str, str], *args: Any) -> None:
        """Starts `serve(conn, *args)` with `env` set in it. Raises OSError."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.conn, theirs = context.Pipe()
        self._process = context.Process(target=_begin, args=(serve, dict(env), theirs, args), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def ended_by_itself(self, seconds: float = 1.0) -> bool:
        """Wait a moment for a process whose pipe has closed, so that its exit code is known."""
        self._process.join(seconds)
        return self._process.exitcode is not None

    def end(self) -> str:
        """End it, by force if it has not ended by itself; a text of how it ended."""
        try:
            self.conn.close()
        except OSError:
            pass
        forced = self._process.exitcode is None
        if forced:
            self._process.kill()
            self._process.join(GRACE_S)
        code = self._process.exitcode
        if code is None:
            return "it cannot be killed"
        self._process.close()
        return "we ended it" if forced else f"it {exit_words(code)}"


def _begin(serve: Serve, env: Mapping[str, str], conn: Connection, args: tuple[Any, ...]) -> None:
    """Main function of the new process: environment, no Ctrl-C (its parent handles it), then `serve`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(env)
    tempfile.tempdir = None  # the server may have looked already
    faulthandler.enable()
    try:
        serve(conn, *args)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the tuner is gone
    os._exit(0)  # exit handlers of libraries may hang


def now() -> float:
    """CLOCK_MONOTONIC: the same in all processes of a machine."""
    return time.monotonic()
