"""The parent's end of a backend's process, which has a group and a log of its own: start it, ask it, notice its end."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from worker import PACKAGE_PARENT
from worker.process import Child, OutputLog, Stopwatch, exit_words

LAST_WORDS = 600
"""Bytes of its log that go into the words for its end."""
END_WITHIN_S = 10.0
"""For a process that closed its pipe to exit by itself."""


class Gone(Exception):
    """The process ended, or was ended: `status` is `fault`, `timeout` or `oom`."""

    def __init__(self, status: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class Process:
    """One child (child.py). `python`: its interpreter; `env` comes on top of ours, without our PYTHONPATH."""

    def __init__(
        self, python: str, backend: str, options: Mapping[str, Any], folder: Path, env: Mapping[str, str]
    ) -> None:
        """Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        spec = folder / "spec.json"
        spec.write_text(json.dumps({"backend": backend, "options": dict(options)}))
        self._log = OutputLog(folder / "log")
        self._answers, theirs = os.pipe()
        argv = [python or sys.executable, "-u", "-X", "faulthandler", "-m", "worker.bench.child"]
        try:
            with self._log.open() as out:
                self._child = Child(
                    [*argv, str(theirs), str(spec)],
                    stdin=subprocess.PIPE,
                    out=out.fileno(),
                    keep=(theirs,),
                    cwd=folder,
                    env={**os.environ, **environment(python), **env},
                )
        except OSError:
            os.close(self._answers)
            raise
        finally:
            os.close(theirs)
        self._received = bytearray()
        self._open = True

    def ask(self, command: Mapping[str, Any] | None, quiet_s: float, alive: Callable[[], None]) -> dict[str, Any]:
        """Send a command (None: await what it says by itself); its answer. Raises Gone after closing it."""
        if command is not None:
            try:
                self._child.stdin.write(json.dumps(dict(command)).encode() + b"\n")
                self._child.stdin.flush()
            except OSError:
                pass  # it is gone: what it said last is read below
        watch, quiet = Stopwatch(), 0.0
        while True:
            said = self._next()
            alive()
            if said is not None and said.get("is") == "fault":
                self._end("fault", str(said.get("detail", "")))
            if said is not None and said.get("is") != "alive":
                self._mirror()
                return said
            quiet = 0.0 if said is not None else quiet + watch.turn()
            if said is None and not self._open:
                self._child.wait(END_WITHIN_S)
                status = self._child.returncode
                how = "closed its pipe" if status is None else exit_words(status)
                self._end("fault", f"its process {how}{self._last_words()}")
            if quiet > quiet_s:
                self._end("timeout", f"no sign of progress for {quiet_s:g} s")

    def close(self) -> None:
        """End it by force, and what it started."""
        if self._answers < 0:
            return
        self._child.kill()
        try:
            self._child.stdin.close()
        except OSError:
            pass
        self._mirror()
        os.close(self._answers)
        self._answers = -1

    def _end(self, status: str, detail: str) -> None:
        self.close()
        raise Gone(status, detail)

    def _next(self) -> dict[str, Any] | None:
        """The next message that is there within a tenth of a second."""
        end = self._received.find(b"\n")
        if end < 0 and self._open and select.select([self._answers], [], [], 0.1)[0]:
            data = os.read(self._answers, 65536)
            self._open = bool(data)
            self._received += data
            end = self._received.find(b"\n")
        if end < 0:
            return None
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        try:
            raw = json.loads(line)
        except ValueError:
            raw = None
        return raw if isinstance(raw, dict) else {"is": "refused", "status": "error", "detail": "it sent no message"}

    def _last_words(self) -> str:
        words = self._log.tail(LAST_WORDS)
        return f"; the log ends: {words}" if words else ""

    def _mirror(self) -> None:
        """Copy what it printed to the slot's log."""
        self._log.read(mirror=1)


def environment(python: str) -> dict[str, str]:
    """PYTHONPATH: our code, and for the worker's own interpreter what it has. Another one's packages are its own."""
    inherited = [] if python else os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [str(PACKAGE_PARENT), *(str(Path(p).absolute()) for p in inherited if p)]
    out = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "PYTHONUNBUFFERED": "1"}
    return {**out, "GEMMFLEET_AITER_ROOT": ""} if python else out
