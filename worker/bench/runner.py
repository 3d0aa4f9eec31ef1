"""Runs a backend on a side: starts its process when needed, replaces it after its death, and reads its answers.

tuner.py has a `BackendRunner` for each backend of each side, and calls `prepare` for a shape, `sample` for each of its
runs, `drop` at its end. With the timer `rocprof` a run is a process of its own under the profiler (rocprof.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from worker import PACKAGE_PARENT
from worker.bench.rocprof import CALLS, TOOL, WARMUP, per_call_us, profiler_argv
from worker.process import Child, OutputLog, ask_child, exit_words
from worker.protocol.bench import BenchOptions, Side
from worker.protocol.paths import AITER_ROOT_ENV
from worker.tuners.common.helper_process import HelperError, HelperProcess, HelperRefused

LAST_WORDS = 600
"""Bytes of its log that we quote when it ends."""
END_WITHIN_S = 10.0
"""A process that closed its socket has this many seconds to exit by itself."""
START_S = 240.0
"""Seconds of silence until a backend's process is ready: it imports torch, and AITER may build a module."""
Alive = Callable[[], None]


@dataclass(frozen=True, slots=True)
class BackendChannel:
    """A process of child.py, our end of its socket, and its output: a HelperChannel whose messages are JSON objects."""

    child: Child
    connection: Connection
    log: OutputLog

    def send(self, job: Mapping[str, Any]) -> None:
        self.connection.send_bytes(json.dumps(dict(job)).encode())

    def receive(self) -> dict[str, Any]:
        message = dict(json.loads(self.connection.recv_bytes()))
        self.log.read(mirror=1)
        return message

    def describe_death(self) -> str:
        """End it; how it ended, with the end of its log."""
        self.child.wait(END_WITHIN_S)
        status = self.child.returncode
        how = "closed its socket" if status is None else exit_words(status)
        last_words = self.log.tail(LAST_WORDS)
        self.end()
        return f"its process {how}; the log ends: {last_words}"

    def end(self) -> None:
        """End it by force, and what it started."""
        self.child.kill()
        self.log.read(mirror=1)
        self.connection.close()


class BackendProcess(HelperProcess):
    """The process of child.py that holds a backend."""

    silence = "no sign of progress"

    def is_answer(self, message: Any) -> bool:
        return bool(message["is"] != "alive")

    def last_words(self, message: Any) -> str:
        return str(message["detail"]) if message["is"] == "fault" else ""


@dataclass(slots=True, eq=False)
class BackendRunner:
    """Runs a backend in a process. `name`: the backend's. `folder`: its own. `variables`: added to our environment.

    child.py defines commands and answers. If the process dies, nothing else is lost: the next command starts another.
    """

    side: Side
    name: str
    folder: Path
    options: BenchOptions
    raw: Mapping[str, Any]
    variables: Mapping[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    gone: str = ""
    """The reason why it is unavailable and is not started again."""
    _process: BackendProcess = field(init=False)
    _shape: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._process = BackendProcess(self._start_channel, START_S)

    def prepare(
        self, family: str, key: Mapping[str, Any], err_ratio: float, quiet_s: float, alive: Alive
    ) -> dict[str, Any]:
        """Prepare a shape and return the answer. Raises HelperError."""
        self._shape = {"do": "prepare", "family": family, "key": dict(key), "err_ratio": err_ratio}
        answer = self.ask(self._shape, quiet_s, alive)
        if answer["status"] != "ok":
            raise HelperRefused("wrong", f"{answer['err']:.2%} of its elements are off (kernel {answer['kernel']})")
        if self.options.timer == "rocprof":  # its memory is wanted by the process under the profiler
            self.ask({"do": "drop"}, quiet_s, alive)
        return answer

    def sample(self, quiet_s: float, alive: Alive) -> dict[str, Any]:
        """One run: us, spread, samples, and with rocprof `kernel`. Raises HelperError."""
        if self.options.timer == "rocprof":
            return self._profiled(quiet_s, alive)
        return self.ask({"do": "sample"}, quiet_s, alive)

    def drop(self, alive: Alive) -> None:
        """Free the shape's memory."""
        if self._process.is_alive:
            with contextlib.suppress(HelperError):
                self.ask({"do": "drop"}, 60.0, alive)

    def close(self) -> None:
        """End its process by force, and what it started."""
        self._process.end()

    def start(self, quiet_s: float = START_S, alive: Alive = lambda: None) -> None:
        """Start the process if none runs. Raises HelperError, and then the backend stays unavailable."""
        if self.gone:
            raise HelperRefused("unavailable", self.gone)
        if self._process.is_alive:
            return
        try:
            self._process.start(greets=True)
            self._wait_for_answer(quiet_s, alive)
        except OSError as e:
            self.gone = f"{self.side.python} cannot be started: {e.strerror or e}"
            raise HelperRefused("unavailable", self.gone) from e
        except HelperError as e:
            self.gone = str(e) if e.status == "unavailable" else f"its process ends before it is ready: {e}"
            self.close()
            raise

    def ask(self, command: Mapping[str, Any], quiet_s: float, alive: Alive = lambda: None) -> dict[str, Any]:
        """Send a command and return its answer. Raises HelperError."""
        self.start(quiet_s, alive)
        self._process.send(command)
        return self._wait_for_answer(quiet_s, alive)

    def _start_channel(self) -> BackendChannel:
        """Start the process. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        spec = self.folder / "spec.json"
        spec.write_text(json.dumps({"backend": self.name, "options": dict(self.raw)}))
        log = OutputLog(self.folder / "log")
        ours, theirs = Pipe()
        with theirs, log.open() as out:
            fd = theirs.fileno()
            argv = [*self._program(spec), str(fd)]
            child = Child(argv, env=self._environment(), cwd=self.folder, out=out.fileno(), keep=(fd,))
            return BackendChannel(child, ours, log)

    def _program(self, spec: Path) -> list[str]:
        return [self.side.python or sys.executable, "-u", "-X", "faulthandler", "-m", "worker.bench.child", str(spec)]

    def _environment(self) -> dict[str, str]:
        return {**os.environ, **environment(self.side.python), **self.variables}

    def _wait_for_answer(self, quiet_s: float, alive: Alive) -> dict[str, Any]:
        """The answer that is owed. Raises HelperError."""
        answer: dict[str, Any] = self._process.wait_for_answer(quiet_s, alive)
        self.facts = answer.get("facts") or self.facts
        if answer["is"] == "refused":
            raise HelperRefused(str(answer["status"]), str(answer["detail"]))
        return answer

    def _profiled(self, quiet_s: float, alive: Alive) -> dict[str, Any]:
        """One run under rocprofv3, in a process that makes the calls and ends."""
        folder = self.folder / "rocprof"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        calls = {"do": "calls", "calls": WARMUP + CALLS - 1}  # the check of the result was the first
        spec = {"backend": self.name, "options": dict(self.raw), "commands": [self._shape, calls]}
        (folder / "spec.json").write_text(json.dumps(spec))
        argv = profiler_argv(self._program(folder / "spec.json"), folder / "out")
        log = OutputLog(folder / "log")
        with log.open() as out:
            status = ask_child(argv, out, env=self._environment(), cwd=self.folder, limit_s=quiet_s, alive=alive)
        if status is None:
            raise HelperRefused("timeout", f"{TOOL} did not end within {quiet_s:g} s")
        if status:
            raise HelperRefused("error", f"{TOOL} or the program under it {exit_words(status)}: {log.tail(LAST_WORDS)}")
        us, kernels = per_call_us(folder / "out", self.options.kernel)
        return {"us": us, "spread": 0.0, "samples": CALLS, "kernel": kernels}


def environment(python: str) -> dict[str, str]:
    """PYTHONPATH: our code, and for the worker's own interpreter what it has. Another one's packages are its own."""
    inherited = [] if python else os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [str(PACKAGE_PARENT), *(str(Path(p).absolute()) for p in inherited if p)]
    root = {AITER_ROOT_ENV: ""} if python else {}
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "PYTHONUNBUFFERED": "1", **root}
