"""A process of the search, forked: it compiles (`compile_pool.py`), or measures (`measuring_process.py`).

The standard library's fork server forks it from a process that has imported torch and triton: that costs tens of
milliseconds, and they share its memory; it never touched a GPU. Each talks over one pipe, in pickled messages. All end
with the tuner's process: its pipe closes, and the agent kills the session.
"""

from __future__ import annotations

import contextlib
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

PRELOAD = ["worker.tuners.search.device_bench"]
"""Imported once, by the fork server: it imports torch and triton."""
GRACE_S = 2.0
"""Seconds until a killed process is gone."""
EXIT_S = 1.0
"""Seconds from the end of its pipe until a process's exit code is known."""
Serve = Callable[..., None]
now = time.monotonic
"""The same clock in all processes of a machine."""


class ForkedProcess:
    """A forked process as a HelperChannel. `connection`: our end of its pipe."""

    def __init__(self, name: str, serve: Serve, env: Mapping[str, str], *args: Any) -> None:
        """Starts `serve(connection, *args)` with `env` set in it. `name`: it in a sentence. Raises OSError."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._name = name
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_begin, args=(serve, dict(env), theirs, args), daemon=True)
        self._process.start()
        theirs.close()
        self.send = self.connection.send
        self.receive = self.connection.recv

    def describe_death(self) -> str:
        """End a process whose pipe is closed; a sentence of how it ended."""
        self._process.join(EXIT_S)
        return f"{self._name} died: {self._end()}"

    def end(self) -> None:
        """End it by force."""
        self._end()

    def _end(self) -> str:
        """End it, by force if it has not ended by itself; a text of how it ended."""
        with contextlib.suppress(OSError):
            self.connection.close()
        forced = self._process.exitcode is None
        if forced:
            self._process.kill()
            self._process.join(GRACE_S)
        code = self._process.exitcode
        if code is None:
            return "it cannot be killed"
        self._process.close()
        return "we ended it" if forced else f"it {exit_words(code)}"


def _begin(serve: Serve, env: Mapping[str, str], connection: Connection, args: tuple[Any, ...]) -> None:
    """Main function of the new process: environment, no Ctrl-C (its parent handles it), then `serve`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(env)
    tempfile.tempdir = None  # the server may have looked already
    faulthandler.enable()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the tuner is gone
        serve(connection, *args)
    os._exit(0)  # exit handlers of libraries may hang
