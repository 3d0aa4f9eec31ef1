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
from typing import Any, NamedTuple

from worker import PACKAGE_PARENT
from worker.process import Child, OutputLog, Stopwatch, exit_words
from worker.protocol.bench import BenchOptions, Side
from worker.protocol.paths import AITER_ROOT_ENV
from worker.text import plural

LAST_WORDS = 600
"""Bytes of its log that we quote when it ends."""
END_WITHIN_S = 10.0
"""A process that closed its socket has this many seconds to exit by itself."""
WARMUP = 5
CALLS = 26
"""Calls under the profiler: WARMUP, which do not count, then CALLS."""
TOOL = "rocprofv3"
_RUNTIME = re.compile(r"__amd_rocclr_|^hip(Memcpy|Memset)")
"""Copies and fills of the runtime. They are part of a call only if a pattern asks for them."""
Alive = Callable[[], None]


class Refused(Exception):
    """No result for this shape: `status` is a row's (unavailable, unsupported, wrong, fault, timeout, oom, error)."""

    def __init__(self, status: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class Process(NamedTuple):
    """A child.py, our end of its socket, and its output."""

    child: Child
    conn: Connection
    log: OutputLog


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
    _process: Process | None = None
    _shape: dict[str, Any] = field(default_factory=dict)

    def prepare(
        self, family: str, key: Mapping[str, Any], err_ratio: float, quiet_s: float, alive: Alive
    ) -> dict[str, Any]:
        """Prepare a shape and return the answer. Raises Refused."""
        self._shape = {"do": "prepare", "family": family, "key": dict(key), "err_ratio": err_ratio}
        answer = self.ask(self._shape, quiet_s, alive)
        if answer["status"] != "ok":
            raise Refused("wrong", f"{answer['err']:.2%} of its elements are off (kernel {answer['kernel']})")
        if self.options.timer == "rocprof":  # its memory is wanted by the process under the profiler
            self.ask({"do": "drop"}, quiet_s, alive)
        return answer

    def sample(self, quiet_s: float, alive: Alive) -> dict[str, Any]:
        """One run: us, spread, samples, and with rocprof `kernel`. Raises Refused."""
        if self.options.timer == "rocprof":
            return self._profiled(quiet_s, alive)
        return self.ask({"do": "sample"}, quiet_s, alive)

    def drop(self, alive: Alive) -> None:
        """Free the shape's memory."""
        if self._process is not None:
            with contextlib.suppress(Refused):
                self.ask({"do": "drop"}, 60.0, alive)

    def close(self) -> None:
        """End its process by force, and what it started."""
        if self._process is not None:
            self._process.child.kill()
            self._process.log.read(mirror=1)
            self._process.conn.close()
        self._process = None

    def start(self, quiet_s: float, alive: Alive = lambda: None) -> Process:
        """Return the process; start it if needed. Raises Refused, and then the backend stays unavailable."""
        if self.gone:
            raise Refused("unavailable", self.gone)
        if self._process is None:
            try:
                self._process = self._spawn()
                self._answer(self._process, quiet_s, alive)
            except OSError as e:
                self.gone = f"{self.side.python} cannot be started: {e.strerror or e}"
                raise Refused("unavailable", self.gone) from e
            except Refused as e:
                self.gone = str(e) if e.status == "unavailable" else f"its process ends before it is ready: {e}"
                self.close()
                raise
        return self._process

    def ask(self, command: Mapping[str, Any], quiet_s: float, alive: Alive = lambda: None) -> dict[str, Any]:
        """Send a command and return its answer. Raises Refused."""
        process = self.start(quiet_s, alive)
        with contextlib.suppress(OSError):  # it ended: its last messages are read below
            process.conn.send_bytes(json.dumps(dict(command)).encode())
        return self._answer(process, quiet_s, alive)

    def _spawn(self) -> Process:
        """Start the process. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        spec = self.folder / "spec.json"
        spec.write_text(json.dumps({"backend": self.name, "options": dict(self.raw)}))
        log, (ours, theirs) = OutputLog(self.folder / "log"), Pipe()
        with theirs, log.open() as out:
            fd = theirs.fileno()
            return Process(self._run([*self._program(spec), str(fd)], out.fileno(), (fd,)), ours, log)

    def _program(self, spec: Path) -> list[str]:
        return [self.side.python or sys.executable, "-u", "-X", "faulthandler", "-m", "worker.bench.child", str(spec)]

    def _run(self, argv: list[str], out: int, keep: tuple[int, ...] = ()) -> Child:
        env = {**os.environ, **environment(self.side.python), **self.variables}
        return Child(argv, env=env, cwd=self.folder, out=out, keep=keep)

    def _answer(self, process: Process, quiet_s: float, alive: Alive) -> dict[str, Any]:
        """The next message but `alive`. Raises Refused, after closing a process that ended or hangs."""
        watch, quiet = Stopwatch(), 0.0
        while quiet <= quiet_s:
            alive()
            try:
                message = json.loads(process.conn.recv_bytes()) if process.conn.poll(0.1) else None
            except (EOFError, OSError):
                process.child.wait(END_WITHIN_S)
                status, words = process.child.returncode, process.log.tail(LAST_WORDS)
                how = "closed its socket" if status is None else exit_words(status)
                raise self._end("fault", f"its process {how}; the log ends: {words}") from None
            quiet = watch.turn() + (quiet if message is None else 0.0)
            if message is None or message["is"] == "alive":
                continue
            if message["is"] == "fault":
                raise self._end("fault", str(message["detail"]))
            process.log.read(mirror=1)
            self.facts = message.get("facts") or self.facts
            if message["is"] == "refused":
                raise Refused(str(message["status"]), str(message["detail"]))
            return dict(message)
        raise self._end("timeout", f"no sign of progress for {quiet_s:g} s")

    def _end(self, status: str, detail: str) -> Refused:
        self.close()
        return Refused(status, detail)

    def _profiled(self, quiet_s: float, alive: Alive) -> dict[str, Any]:
        """One run under rocprofv3, in a process that makes the calls and ends."""
        folder = self.folder / "rocprof"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        calls = {"do": "calls", "calls": WARMUP + CALLS - 1}  # the check of the result was the first
        spec = {"backend": self.name, "options": dict(self.raw), "commands": [self._shape, calls]}
        (folder / "spec.json").write_text(json.dumps(spec))
        argv, log = profiler_argv(self._program(folder / "spec.json"), folder / "out"), OutputLog(folder / "log")
        with log.open() as out:
            child = self._run(argv, out.fileno())
        watch, spent = Stopwatch(), 0.0
        try:
            while not child.wait(0.05):
                spent += watch.turn()
                if spent > quiet_s:
                    raise Refused("timeout", f"{TOOL} did not end within {quiet_s:g} s")
                alive()
            status = child.returncode
        finally:
            child.kill()  # the profiler, and the program under it
        if status:
            raise Refused("error", f"{TOOL} or the program under it {exit_words(status)}: {log.tail(LAST_WORDS)}")
        us, kernels = per_call_us(folder / "out", self.options.kernel)
        return {"us": us, "spread": 0.0, "samples": CALLS, "kernel": kernels}


def environment(python: str) -> dict[str, str]:
    """PYTHONPATH: our code, and for the worker's own interpreter what it has. Another one's packages are its own."""
    inherited = [] if python else os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [str(PACKAGE_PARENT), *(str(Path(p).absolute()) for p in inherited if p)]
    root = {AITER_ROOT_ENV: ""} if python else {}
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "PYTHONUNBUFFERED": "1", **root}


def profiler_argv(program: Sequence[str], folder: Path) -> list[str]:
    """The command line that runs `program` under the profiler. Raises Refused if there is no profiler."""
    tool = shutil.which(TOOL, path=f"{os.environ.get('PATH', os.defpath)}:/opt/rocm/bin")
    if tool is None:
        raise Refused("unavailable", f"{TOOL} is neither in PATH nor in /opt/rocm/bin")
    return [
        tool,
        *["--kernel-trace", "--stats", "--output-format", "csv", "-o", "bench", "-d"],
        str(folder),
        "--",
        *program,
    ]


def per_call_us(folder: Path, pattern: str = "", warmup: int = WARMUP, calls: int = CALLS) -> tuple[float, str]:
    """(microseconds of one call, the kernels that count, joined by ` + `). Raises Refused, which names what ran.

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
        raise Refused(
            "error",
            f"no {wanted} ran a whole number of times in each of {all_calls} calls; there were:"
            f" {', '.join(ran) or 'none, or none on a GPU'}",
        )
    return sum(ns_per_call.values()) / 1e3, " + ".join(map(_short, ns_per_call))


def parse_trace(path: Path) -> dict[str, list[int]]:
    """Durations of the dispatches of a `kernel_trace.csv` in ns, by kernel, in the order of their start. Raises Refused
    with file and line."""
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
            raise Refused("error", f"{path}:{reader.line_num}: this is not a trace of {TOOL}: {e!r}") from e
    return {name: [duration for _, duration in sorted(pairs)] for name, pairs in times.items()}


def _short(name: str) -> str:
    return name.split("(", 1)[0][:80]
