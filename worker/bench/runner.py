"""A backend in a software environment: its process, started when needed, replaced after its death, and its answers."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from worker import PACKAGE_PARENT
from worker.bench import rocprof
from worker.process import Child, OutputLog, Stopwatch, exit_words
from worker.protocol.bench import Env, Options
from worker.protocol.paths import AITER_ROOT_ENV

MOST_LOST_STARTS = 2
"""Starts in a row where the process dies before it is ready; then the backend counts as unavailable."""
LAST_WORDS = 600
"""Bytes of its log that go into the words for its end."""
END_WITHIN_S = 10.0
"""Seconds for a process that closed its pipe to exit by itself."""


class Refused(Exception):
    """No result for this shape: `status` is a row's (unavailable, unsupported, wrong, fault, timeout, oom, error)."""

    def __init__(self, status: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status


@dataclass(slots=True, eq=False)
class BackendRunner:
    """`name` is the backend's; `folder` its own; `variables` what its process gets beyond ours."""

    env: Env
    name: str
    folder: Path
    options: Options
    raw: Mapping[str, Any]
    variables: Mapping[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    gone: str = ""
    """Reason for which it is unavailable for good."""
    _process: BackendProcess | None = None
    _lost: int = 0
    _shape: dict[str, Any] = field(default_factory=dict)

    def prepare(
        self, family: str, key: Mapping[str, Any], err_ratio: float, quiet_s: float, alive: Callable[[], None]
    ) -> dict[str, Any]:
        """Prepare a shape; the answer (child.py). Raises Refused."""
        self._shape = {"do": "prepare", "family": family, "key": dict(key), "err_ratio": err_ratio}
        answer = self._ask(self._shape, quiet_s, alive)
        if answer["status"] != "ok":
            raise Refused("wrong", f"{answer['err']:.2%} of its elements are off (kernel {answer['kernel']})")
        if self.options.timer == "rocprof":  # its memory is wanted by the process under the profiler
            self._ask({"do": "drop"}, quiet_s, alive)
        return answer

    def sample(self, quiet_s: float, alive: Callable[[], None]) -> dict[str, Any]:
        """One run: us, spread, samples, and with rocprof `kernel`. Raises Refused."""
        if self.options.timer == "rocprof":
            return self._profiled(quiet_s, alive)
        return self._ask({"do": "sample"}, quiet_s, alive)

    def drop(self, alive: Callable[[], None]) -> None:
        """Free the shape's memory."""
        if self._process is not None:
            try:
                self._process.ask({"do": "drop"}, 60.0, alive)
            except ProcessEnded:
                self._process = None

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def ready(self, quiet_s: float, alive: Callable[[], None]) -> BackendProcess:
        """Its process, started if there is none. Raises Refused."""
        if self.gone:
            raise Refused("unavailable", self.gone)
        if self._process is not None:
            return self._process
        try:
            made = BackendProcess(self.env.python, self.name, self.raw, self.folder, self.variables)
        except OSError as e:
            self.gone = f"{self.env.python} cannot be started: {e.strerror or e}"
            raise Refused("unavailable", self.gone) from e
        try:
            answer = made.ask(None, quiet_s, alive)
        except ProcessEnded as e:
            self._lost += 1
            if self._lost >= MOST_LOST_STARTS:
                self.gone = f"its process ends before it is ready: {e}"
                raise Refused("unavailable", self.gone) from e
            raise Refused(e.status, str(e)) from e
        except KeyboardInterrupt:
            made.close()
            raise
        self.facts = answer.get("facts") or self.facts
        if answer["is"] != "ready":
            made.close()
            self.gone = str(answer.get("detail", "no reason given"))
            raise Refused("unavailable", self.gone)
        self._lost = 0
        self._process = made
        return made

    def _ask(self, command: Mapping[str, Any], quiet_s: float, alive: Callable[[], None]) -> dict[str, Any]:
        process = self.ready(quiet_s, alive)
        try:
            answer = process.ask(command, quiet_s, alive)
        except ProcessEnded as e:  # it alone is lost; the next shape gets a new one
            self._process = None
            raise Refused(e.status, str(e)) from e
        if answer["is"] == "refused":
            raise Refused(str(answer["status"]), str(answer["detail"]))
        return answer

    def _profiled(self, quiet_s: float, alive: Callable[[], None]) -> dict[str, Any]:
        """One run under rocprofv3, in a process that makes the calls and ends."""
        folder = self.folder / "rocprof"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        calls = {"do": "calls", "warmup": rocprof.WARMUP, "calls": rocprof.CALLS}
        spec = {"backend": self.name, "options": dict(self.raw), "commands": [self._shape, calls]}
        (folder / "spec.json").write_text(json.dumps(spec))
        program = [self.env.python or sys.executable, "-m", "worker.bench.child", str(folder / "spec.json")]
        try:
            argv = rocprof.argv(program, folder / "out")
            with open(folder / "log", "wb") as log:
                status = self._run(argv, log.fileno(), quiet_s, alive)
            if status != 0:
                words = (folder / "log").read_text(errors="replace")[-400:]
                raise Refused("error", f"{rocprof.TOOL} or the program under it {exit_words(status)}: {words}")
            us, kernels = rocprof.per_call_us(folder / "out", self.options.kernel)
        except rocprof.RocprofError as e:
            raise Refused("unavailable" if "PATH" in str(e) else "error", str(e)) from e
        return {"us": us, "spread": 0.0, "samples": rocprof.CALLS, "kernel": kernels}

    def _run(self, argv: list[str], log: int, quiet_s: float, alive: Callable[[], None]) -> int:
        """Its exit status; ended by force after `quiet_s`. Raises Refused."""
        env = {**os.environ, **environment(self.env.python), **self.variables}
        child = Child(argv, env=env, cwd=self.folder, out=log)
        watch, spent = Stopwatch(), 0.0
        try:
            while not child.wait(0.05):
                spent += watch.turn()
                if spent > quiet_s:
                    raise Refused("timeout", f"{rocprof.TOOL} did not end within {quiet_s:g} s")
                alive()
        finally:
            status = child.returncode
            child.kill()  # the profiler, and the program under it
        assert status is not None
        return status


class ProcessEnded(Exception):
    """The process ended, or was ended: `status` is `fault`, `timeout` or `oom`."""

    def __init__(self, status: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class BackendProcess:
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
        """Send a command (None: await a message); its answer. Raises ProcessEnded after closing it."""
        if command is not None:
            try:
                self._child.stdin.write(json.dumps(dict(command)).encode() + b"\n")
                self._child.stdin.flush()
            except OSError:
                pass  # it ended: its last messages are read below
        watch, quiet = Stopwatch(), 0.0
        while True:
            message = self._next()
            alive()
            if message is not None and message.get("is") == "fault":
                self._end("fault", str(message.get("detail", "")))
            if message is not None and message.get("is") != "alive":
                self._mirror()
                return message
            quiet = 0.0 if message is not None else quiet + watch.turn()
            if message is None and not self._open:
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
        raise ProcessEnded(status, detail)

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
    return {**out, AITER_ROOT_ENV: ""} if python else out
