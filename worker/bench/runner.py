"""Runs a backend on a side: starts its process when needed, replaces it after its death, and reads its answers.

The timer `rocprof` takes kernel times from `rocprofv3 --kernel-trace --stats`, and selects kernels by name. The trace
is a documented CSV (ROCm 6.2 to 7.1): `*_kernel_trace.csv` with a row for each dispatch (Kernel_Name, Start_Timestamp,
End_Timestamp in ns, ...). Columns are found by name, because their number changes with every release. A process makes
WARMUP + CALLS calls. A kernel belongs to the call if it ran a whole number of times per call. Warm-up is left out.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from worker import PACKAGE_PARENT
from worker.process import Child, OutputLog, ask_child, exit_words
from worker.protocol.bench import BenchOptions, Side
from worker.protocol.paths import AITER_ROOT_ENV
from worker.text import plural
from worker.tuners.common.helper_process import HelperError, HelperProcess, HelperRefused

LAST_WORDS = 600
"""Bytes of its log that we quote when it ends."""
END_WITHIN_S = 10.0
"""A process that closed its socket has this many seconds to exit by itself."""
START_S = 240.0
"""Seconds of silence until a backend's process is ready: it imports torch, and AITER may build a module."""
WARMUP = 5
CALLS = 26
"""Calls under the profiler: WARMUP, which do not count, then CALLS."""
TOOL = "rocprofv3"
_RUNTIME = re.compile(r"__amd_rocclr_|^hip(Memcpy|Memset)")
"""Copies and fills of the runtime. They are part of a call only if a pattern asks for them."""
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


def profiler_argv(program: Sequence[str], folder: Path) -> list[str]:
    """The command line that runs `program` under the profiler. Raises HelperError if there is no profiler."""
    tool = shutil.which(TOOL, path=f"{os.environ.get('PATH', os.defpath)}:/opt/rocm/bin")
    if tool is None:
        raise HelperRefused("unavailable", f"{TOOL} is neither in PATH nor in /opt/rocm/bin")
    return [
        tool,
        *["--kernel-trace", "--stats", "--output-format", "csv", "-o", "bench", "-d"],
        str(folder),
        "--",
        *program,
    ]


def per_call_us(folder: Path, pattern: str = "", warmup: int = WARMUP, calls: int = CALLS) -> tuple[float, str]:
    """(microseconds of one call, the kernels that count, joined by ` + `). Raises HelperError, which names what ran.

    Kernels belong to the call by `pattern`, else all but the runtime's own.
    """
    # there is a trace for each process, and only one of the processes had work for the device
    durations: dict[str, list[int]] = {}
    for path in sorted(folder.rglob("*kernel_trace.csv")):
        trace = parse_trace(path)
        if sum(map(len, trace.values())) > sum(map(len, durations.values())):
            durations = trace
    all_calls = warmup + calls
    ns_per_call: dict[str, float] = {}
    for name, times in durations.items():
        is_wanted = re.search(pattern, name) if pattern else not _RUNTIME.search(name)
        per_call, rest = divmod(len(times), all_calls)
        if is_wanted and per_call and not rest:
            ns_per_call[name] = sum(times[per_call * warmup :]) / calls
    if not ns_per_call:
        ran = [f"{_short(name)} ({plural(len(times), 'time')})" for name, times in durations.items()][:8]
        wanted = f"kernel matching {pattern!r}" if pattern else "kernel"
        raise HelperRefused(
            "error",
            f"no {wanted} ran a whole number of times in each of {all_calls} calls; there were:"
            f" {', '.join(ran) or 'none, or none on a GPU'}",
        )
    return sum(ns_per_call.values()) / 1e3, " + ".join(map(_short, ns_per_call))


def parse_trace(path: Path) -> dict[str, list[int]]:
    """Durations of the dispatches of a `kernel_trace.csv` in ns, by kernel, in the order of their start. Raises
    HelperError with file and line."""
    times: dict[str, list[tuple[int, int]]] = {}
    with path.open(newline="", encoding="utf-8", errors="replace") as f:
        reader = csv.DictReader(f)
        try:
            for row in reader:
                start = int(row["Start_Timestamp"])
                duration = int(row["End_Timestamp"]) - start
                if row.get("Kind", "KERNEL_DISPATCH") == "KERNEL_DISPATCH":
                    times.setdefault(row["Kernel_Name"], []).append((start, duration))
        except (KeyError, TypeError, ValueError, csv.Error) as e:
            raise HelperRefused("error", f"{path}:{reader.line_num}: this is not a trace of {TOOL}: {e!r}") from e
    return {name: [duration for _, duration in sorted(pairs)] for name, pairs in times.items()}


def _short(name: str) -> str:
    return name.split("(", 1)[0][:80]
