"""A backend in an environment as the tuner holds it: one process, started when needed, replaced after its death."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from worker.bench import rocprof
from worker.bench.options import Env, Options
from worker.bench.process import Gone, Process, environment
from worker.process import Child, Stopwatch, exit_words

MOST_LOST_STARTS = 2
"""Starts in a row where the process dies before it is ready; then the backend counts as unavailable."""


class Refused(Exception):
    """No number for this shape: `status` is a row's (unavailable, unsupported, wrong, fault, timeout, oom, error)."""

    def __init__(self, status: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status


@dataclass(slots=True, eq=False)
class Contestant:
    """`name` is the backend's; `folder` its own; `variables` what its process gets beyond ours."""

    env: Env
    name: str
    folder: Path
    options: Options
    raw: Mapping[str, Any]
    variables: Mapping[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    gone: str = ""
    """Why it is unavailable for good."""
    _process: Process | None = None
    _lost: int = 0
    _shape: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.env.name}-{self.name}" if self.env.name else self.name

    def prepare(
        self, family: str, key: Mapping[str, Any], err_ratio: float, quiet_s: float, alive: Callable[[], None]
    ) -> dict[str, Any]:
        """Have it ready for a shape; its answer (child.py). Raises Refused."""
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
        """Let go of the shape's memory."""
        if self._process is not None:
            try:
                self._process.ask({"do": "drop"}, 60.0, alive)
            except Gone:
                self._process = None

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def ready(self, quiet_s: float, alive: Callable[[], None]) -> Process:
        """Its process, started if there is none. Raises Refused."""
        if self.gone:
            raise Refused("unavailable", self.gone)
        if self._process is not None:
            return self._process
        try:
            made = Process(self.env.python, self.name, self.raw, self.folder, self.variables)
        except OSError as e:
            self.gone = f"{self.env.python} cannot be started: {e.strerror or e}"
            raise Refused("unavailable", self.gone) from e
        try:
            answer = made.ask(None, quiet_s, alive)
        except Gone as e:
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
            self.gone = str(answer.get("detail", "it said no more"))
            raise Refused("unavailable", self.gone)
        self._lost = 0
        self._process = made
        return made

    def _ask(self, command: Mapping[str, Any], quiet_s: float, alive: Callable[[], None]) -> dict[str, Any]:
        process = self.ready(quiet_s, alive)
        try:
            answer = process.ask(command, quiet_s, alive)
        except Gone as e:  # it alone is lost; the next shape gets a new one
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
        program = [self.env.python or sys.executable, "-m", "worker.bench.once", str(folder / "spec.json")]
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
