"""Runs code that is not ours: of a tree of AITER, vLLM or SGLang, or of a model, in a process that answers once.

`call` calls one of our own functions, which may import and run such code, in a fresh process. Arguments and answer go
through JSON and are checked against the function's annotations (`values` lists the types), so nothing that the code
does to its process reaches ours as anything but a wrong answer. `call_each` makes several such calls at once, and
`run` runs a command in the same way.

    def count_kernels(tree: Path, names: list[str]) -> dict[str, int]: ...      # a function of a module of ours
    counts = call(count_kernels, tree, ["gemm_a8w8"], limits=Limits(seconds=30), packages=True)

The process gets a whitelist of our environment and an empty home that is removed afterwards. Where the kernel lets us
make user, PID and mount namespaces, it sees no process but its own, and all that it started ends with it. Elsewhere it
can read what the user's other processes hold, and what leaves its session outlives it; `unprotected` says so. In both
cases it can read and write the user's files and use the network.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ParamSpec, TypeVar, get_type_hints

from worker import PACKAGE_PARENT
from worker.foreign.values import decode, encode
from worker.text import clean

P = ParamSpec("P")
T = TypeVar("T")
KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "ROCM_PATH", "CUDA_HOME", "VIRTUAL_ENV")
"""Variables of ours that a process gets: where programs and libraries are, and how to write."""
END_WITHIN_S = 10.0
LOOK_EVERY_S = 0.2
MOST_ANSWER = 64 << 20
"""Bytes of an answer: what a process may write beside it can be far more."""
_HERE = Path(__file__).parent
ENTER = _HERE / "enter.py"
_shared: list[str] = []
"""The kernel's reason for each run without namespaces."""


class ForeignCodeError(ValueError):
    """The code that is not ours gave no answer, or not one of the right type. The message is one line without the name
    of the tree: `was not done within 60 s`, `ended with status 3`, `raised KeyError: 'x'`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one run. `memory`: bytes of data of each process. `output`: bytes of each file that it writes, its
    answer too. `processes`: how many may live at once, held only with namespaces."""

    seconds: float = 60
    memory: int = 2 << 30
    output: int = 64 << 20
    processes: int = 64


def unprotected() -> str:
    """A sentence for the user if a run of this process had no namespaces, else ""."""
    if not _shared:
        return ""
    return (
        "code of the tree ran without namespaces of its own, so it could read what your other processes hold"
        f" ({clean(_shared[0], 200)}); run it where the kernel allows user namespaces if you do not trust the tree"
    )


def call(
    function: Callable[..., T],
    *arguments: Any,
    limits: Limits = Limits(),
    packages: bool = False,
    env: Mapping[str, str] | None = None,
    raises: Sequence[type[Exception]] = (),
    stop: threading.Event | None = None,
) -> T:
    """Call a function of a module of ours, with positional arguments, in a process of its own; return its answer.

    `packages`: it may import what this process can (torch, triton), else Python's standard library alone. `env`: more
    variables. `raises`: classes of the function's own errors, which are raised here with the same text. `stop`: once
    set, the process is ended. Raises ForeignCodeError and OSError.
    """
    request = {
        "module": function.__module__,
        "name": function.__qualname__,
        "arguments": encode(arguments),
        "root": str(PACKAGE_PARENT),
        "path": [os.path.abspath(p) for p in sys.path] if packages else [],
    }
    flags = ["-B"] if packages else ["-I", "-S", "-B"]
    with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as asked:
        asked.write(json.dumps(request).encode())
        asked.seek(0)
        argv = [sys.executable, *flags, str(_HERE / "answer.py"), str(answer.fileno())]
        with _Process(argv, limits, env, stdin=asked, output=errors, keep=(answer.fileno(),)) as process:
            status = process.wait(stop)
        answer.seek(0)
        document = _parse(answer.read(MOST_ANSWER + 1), status, errors)
    return _value_of(document, function, raises)  # type: ignore[no-any-return]


def call_each(
    function: Callable[..., T],
    calls: Sequence[Sequence[Any]],
    *,
    finished: Callable[[int], None] = lambda count: None,
    **options: Any,
) -> list[T]:
    """Call a function once for each list of arguments, as many at once as we may use cores; return the answers in
    their order.

    Each call is a process of its own, as in `call`, which takes the same `options`: code in one cannot reach another's
    answer. The first that fails ends the others. `finished` gets the number of calls that are done.
    """
    stop = threading.Event()

    def call_one(arguments: Sequence[Any]) -> T:
        return call(function, *arguments, stop=stop, **options)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        answers = [threads.submit(call_one, arguments) for arguments in calls]
        try:
            for count, answer in enumerate(as_completed(answers), 1):
                answer.result()
                finished(count)
        finally:
            stop.set()
            threads.shutdown(cancel_futures=True)
    return [answer.result() for answer in answers]


def run(
    argv: Sequence[str],
    output: IO[bytes],
    *,
    cwd: Path,
    limits: Limits = Limits(),
    env: Mapping[str, str] | None = None,
) -> int:
    """Run a command with both outputs in a file; return its exit status, negative for a signal. Raises OSError, and
    ForeignCodeError if it passed a limit."""
    with _Process(argv, limits, env, cwd=cwd, output=output) as process:
        return process.wait()


class _Process:
    """A command under `enter.py`, our end of its socket, and its home. Leaving the block ends all of it."""

    def __init__(
        self,
        argv: Sequence[str],
        limits: Limits,
        env: Mapping[str, str] | None,
        *,
        output: IO[bytes],
        stdin: IO[bytes] | None = None,
        cwd: Path | None = None,
        keep: Sequence[int] = (),
    ) -> None:
        self._limits = limits
        self._home = tempfile.TemporaryDirectory(prefix="gemmfleet-foreign-", ignore_cleanup_errors=True)
        home = self._home.name
        kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        own = {"HOME": home, "TMPDIR": home, "PYTHONDONTWRITEBYTECODE": "1"}
        self._control, theirs = socket.socketpair()
        order = {
            "control": theirs.fileno(),
            "home": home,
            "seconds": math.ceil(limits.seconds),
            "memory": limits.memory,
            "output": limits.output,
            "processes": limits.processes,
        }
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", str(ENTER), json.dumps(order), *argv],
                stdin=stdin or subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=cwd or home,
                env={"PATH": os.defpath, "LC_ALL": "C.UTF-8", **kept, **own, **(env or {})},
                pass_fds=(theirs.fileno(), *keep),
                start_new_session=True,
            )

    def __enter__(self) -> _Process:
        return self

    def wait(self, stop: threading.Event | None = None) -> int:
        """Wait for the command and return its status. Raises ForeignCodeError, soon after `stop` is set too."""
        until = time.monotonic() + self._limits.seconds
        told = b""
        self._control.settimeout(LOOK_EVERY_S)
        while time.monotonic() < until:
            if stop and stop.is_set():
                raise ForeignCodeError("was stopped")
            with suppress(TimeoutError):
                more = self._control.recv(4096)
                if not more:
                    return self._status(told)
                told += more
        raise ForeignCodeError(f"was not done within {self._limits.seconds:g} s")

    def _status(self, told: bytes) -> int:
        document: dict[str, Any] = {}
        for line in told.splitlines():
            document |= json.loads(line)
        if document.get("many"):
            raise ForeignCodeError(f"had more than {self._limits.processes} processes at once")
        if document.get("shared"):
            _shared.append(document["shared"])
        if "status" not in document:
            raise ForeignCodeError("was ended from outside")
        return int(document["status"])

    def __exit__(self, *_: object) -> None:
        self._control.close()  # whoever watches the command ends with it, and so does the command
        try:
            self._process.wait(END_WITHIN_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._home.cleanup()


def _parse(data: bytes, status: int, errors: IO[bytes]) -> Any:
    if status or not data:
        size = errors.seek(0, os.SEEK_END)
        last = clean(os.pread(errors.fileno(), 2000, max(0, size - 2000)).decode(errors="replace"), 300, keep="end")
        how = f"ended with status {status}" if status >= 0 else f"was killed by signal {-status}"
        raise ForeignCodeError(f"{how}: {last.splitlines()[-1]}" if last else how)
    if len(data) > MOST_ANSWER:
        raise ForeignCodeError(f"gave an answer of more than {MOST_ANSWER >> 20} MiB")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as e:
        raise ForeignCodeError(f"gave an answer that is not JSON: {clean(str(e), 200)}") from e


def _value_of(document: Any, function: Callable[..., Any], raises: Sequence[type[Exception]]) -> Any:
    try:
        if isinstance(document, dict) and document.keys() == {"error", "text"}:
            name, text = (clean(decode(document[key], str, key), 1000) for key in ("error", "text"))
            for kind in raises:
                if kind.__name__ == name:
                    raise kind(text)
            raise ForeignCodeError(f"raised {name}: {text}")
        if isinstance(document, dict) and document.keys() == {"value"}:
            return decode(document["value"], get_type_hints(function)["return"], "the answer")
        raise ValueError("the answer is neither a value nor an error")
    except (ValueError, RecursionError) as e:
        if isinstance(e, (ForeignCodeError, *raises)):
            raise
        raise ForeignCodeError(f"gave a wrong answer: {clean(str(e), 300)}") from e
