"""The transport `exec`: reaches the inside of a Slurm job or a pod, where each command is slow to start.

So short commands share a few shells that stay open on the node (`KeptShell`), each of which runs SCRIPT. A long command
(`open`) has a start of its own. `Opener` starts either: a step of srun here, a pod's command in pod.py.

A request to a shell is one line of shell text, which calls a function of SCRIPT. The bytes of a file (`w`) or of
standard input (`x`) follow it:

    w NUMBER SIZE MODE FOLDER ASIDE PATH     write a file of SIZE bytes to ASIDE, and rename it to PATH
    m NUMBER FROM TO                         rename
    x NUMBER SECONDS SIZE WORD...            run a command with SIZE bytes of standard input

The answer to `w` and `m` is `NUMBER CODE LENGTH` and a message of that length; `x` gives two lengths, of output and
errors, and then both. For example, `m 7 a b` is answered by `7 2 0` if there is no file `a`.

The shell reads its line byte by byte (`read` does so on a pipe), so the bytes that follow are left for `head`. The
`head` of busybox reads ahead, so we send nothing more before the answer, and the size shows whether all bytes came.
After an error in `w` nobody knows how many were read: the shell reports the error and ends, and the next request starts
a new shell.
"""

from __future__ import annotations

import contextlib
import math
import posixpath
import queue
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

from orchestrator.errors import SlowError, TransportError, UnreachableError
from orchestrator.transport.base import Channel, Completed, RemoteFile
from orchestrator.transport.commands import (
    AFTERLIFE_S,
    CALL_S,
    MAX_OUTPUT,
    CommandTransport,
    command_line,
    quote,
)
from orchestrator.transport.local import LocalTransport, ProcessChannel
from orchestrator.transport.ssh import SshChannel, SshTransport

SCRIPT = """\
LC_ALL=C; export LC_ALL; umask 077; set -fC; n='
'
r() { printf '%s %s %s\\n%s' "$1" "$2" "${#3}" "$3"; }
d() { if [ -d "$1" ]; then echo "$1: Is a directory"; false; fi; }
w() {
    if m=$( {
        { [ -d "$4" ] || mkdir -p -- "$4"; } && d "$6" &&
        { if [ "$2" -gt 0 ]; then head -c "$2"; fi >"$5"; } &&
        { [ $(wc -c <"$5") -eq "$2" ] || { echo "the connection broke"; false; }; } &&
        { [ "$3" = 600 ] || chmod -- "$3" "$5"; } && mv -f -- "$5" "$6"
    } 2>&1 ); then r "$1" 0 ""
    else rm -f -- "$5"; r "$1" 1 "$m"; exit 1; fi
}
m() {
    if e=$( { d "$3" && mv -f -- "$2" "$3"; } 2>&1 ); then r "$1" 0 ""
    elif [ ! -e "$2" ] && [ ! -L "$2" ]; then r "$1" 2 ""
    else r "$1" 1 "$e"; fi
}
x() {
    if [ -z "${o:-}" ]; then
        o=$(mktemp -d ./.shell-XXXXXX 2>&1) || { r "$1" 1 "$o"; exit 1; }
        trap 'rm -rf -- "$o"' 0
        t=; timeout -s KILL 9 true 2>/dev/null && t='timeout -s KILL'
    fi
    i=$1 l=${t:+$t $2} s=$3; shift 3
    if [ "$s" -gt 0 ]; then head -c "$s" | { (exec $l "$@"); c=$?; cat >/dev/null; exit "$c"; }
    else (exec $l "$@") </dev/null; fi >|"$o/out" 2>|"$o/err"
    c=$?
    echo "$i $c" $(wc -c <"$o/out") $(wc -c <"$o/err"); cat "$o/out" "$o/err"
}
echo "$0"
while IFS= read -r line; do eval "$line"; done
"""
"""The program of a kept shell. `r` prints an answer, `d` refuses a folder as a file's name. `$n` is a newline, which no
request can hold. `$0` is a mark: after it the login has printed all that it prints by itself."""
MAX_BANNER = 64 * 1024
"""Most bytes that a login may print before the shell is ready, and most in a line of an answer."""
MAX_MESSAGE = 64 * 1024
OK = 0
GONE = 2
"""Codes of an answer to `w` and `m`: done; the file to rename is not there. Any other is an error."""


class ShellError(Exception):
    """A request failed on the node; the text is the node's own."""


class KeptShell:
    """One shell on the node, for one request at a time. The first request starts it, and the first after its end.

    A request may raise ShellError, SlowError, or UnreachableError if nobody knows whether it was carried out.
    `deadline`: by when it must be answered, in the seconds of time.monotonic().
    """

    def __init__(self, node: str, start: Callable[[str, float], Channel]) -> None:
        """`start`: starts a line of shell text on the node, until a deadline."""
        self._node = node
        self._start = start
        self._channel: Channel | None = None
        self._buffer = bytearray()
        self._number = 0

    def write(self, path: str, file: RemoteFile, deadline: float) -> None:
        """Put a file in place by rename; its folder is made with mode 0700."""
        folder = posixpath.dirname(path)
        aside = posixpath.join(folder, f".{secrets.token_hex(8)}.tmp")
        words = [str(len(file.data)), f"{file.mode:o}", folder or ".", aside, path]
        try:
            self._ask("w", words, file.data, deadline)
        except UnreachableError:  # doing it twice does no harm
            self._ask("w", words, file.data, deadline)

    def rename(self, src: str, dst: str, deadline: float) -> bool:
        """Rename on the node; False if `src` is gone."""
        return self._ask("m", [src, dst], b"", deadline)[0] != GONE

    def run(self, argv: Sequence[str], stdin: bytes, limit: float, deadline: float) -> Completed:
        """Run a command where the shell began, for `limit` seconds at most."""
        words = [str(math.ceil(limit + AFTERLIFE_S)), str(len(stdin)), *argv]
        code, out, err = self._ask("x", words, stdin, deadline)
        return Completed(code if code <= 128 else 128 - code, out, err)

    def close(self) -> None:
        """Close the shell. A request that waits for its answer gets UnreachableError."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _ask(self, verb: str, words: Sequence[str], data: bytes, deadline: float) -> tuple[int, bytes, bytes]:
        """Send a request, and return its answer: (code, message, b"") of `w` and `m`, (code, output, errors) of `x`."""
        channel = self._channel
        if channel is None or channel.ended:
            channel = self.open(deadline)
        self._number += 1
        number = str(self._number)
        # a newline would end the request: the shell has it as $n
        request = " ".join([verb, number, *(quote(w).replace("\n", "'\"$n\"'") for w in words)]) + "\n"
        with self._closed_on_error(keep=verb == "m"):
            with contextlib.suppress(BrokenPipeError, ConnectionError):
                # if the shell ended meanwhile, its answer has the reason
                channel.send(request.encode("utf-8", "surrogateescape") + data, deadline)
            return self._answer(channel, number, deadline)

    @contextmanager
    def _closed_on_error(self, *, keep: bool = False) -> Iterator[None]:
        """Close the shell if the block fails; with `keep` not for an error that the node has reported. Raise SlowError
        for TimeoutError."""
        try:
            yield
        except BaseException as e:
            if not (keep and isinstance(e, ShellError)):
                self.close()
            if isinstance(e, TimeoutError):
                raise SlowError(self._node, "the node did not answer in time") from e
            raise

    def _lost(self, words: str) -> UnreachableError:
        return UnreachableError(self._node, f"the shell on the node {words}")

    def _answer(self, channel: Channel, number: str, deadline: float) -> tuple[int, bytes, bytes]:
        """The answer to the request of that number, as `_ask` returns it."""
        line = self._line(channel, deadline)
        answered, _, rest = line.partition(b" ")
        numbers = rest.split()
        if answered != number.encode() or len(numbers) not in (2, 3) or not all(n.isdigit() for n in numbers):
            raise self._lost(f"answered {line[:80]!r}")
        code, length, *length_of_errors = map(int, numbers)
        if length_of_errors:
            if length + length_of_errors[0] > MAX_OUTPUT:
                raise ShellError(f"it printed more than {MAX_OUTPUT >> 20} MiB")
            return code, self._bytes(channel, length, deadline), self._bytes(channel, length_of_errors[0], deadline)
        message = self._bytes(channel, min(length, MAX_MESSAGE), deadline)
        if code not in (OK, GONE):
            raise ShellError(message.decode("utf-8", "replace").strip() or "it gave no reason")
        return code, message, b""

    def _bytes(self, channel: Channel, count: int, deadline: float) -> bytes:
        while len(self._buffer) < count:
            self._fill(channel, deadline)
        message = bytes(self._buffer[:count])
        del self._buffer[:count]
        return message

    def _line(self, channel: Channel, deadline: float) -> bytes:
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > MAX_BANNER:
                raise self._lost("talks too much")
            self._fill(channel, deadline)
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def _fill(self, channel: Channel, deadline: float) -> None:
        more = channel.read(65536, deadline)
        if not more:
            raise self._lost(channel.error())
        self._buffer += more

    def open(self, deadline: float) -> Channel:
        """Start the shell anew, and skip what the login prints by itself."""
        self.close()
        mark = f"ready-{secrets.token_hex(8)}"
        channel = self._start(command_line(self._node, ["sh", "-c", SCRIPT, mark]), deadline)
        self._channel = channel
        self._buffer.clear()
        seen = 0
        with self._closed_on_error():
            while (line := self._line(channel, deadline)) != mark.encode():
                seen += len(line) + 1
                if seen > MAX_BANNER:
                    raise self._lost("talks too much")
        return channel


MAX_SHELLS = 4
"""Most shells at a time. A slow command keeps one busy."""
SMALL_FILES = 4
"""Most files that a kept shell takes. More are sent as a tar stream."""
SMALL_BYTES = 256 * 1024
"""Most bytes that it takes."""
CONNECT_S = 30.0
SRUN = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--mpi=none", "--unbuffered", "--quiet")
T = TypeVar("T")


class Opener(Protocol):
    """Starts commands on a node for ExecTransport: SrunOpener for a job's steps, PodOpener (pod.py) for a pod's."""

    def connect(self) -> None:
        """Prepare for `start`; call it again after a broken connection. Raises TransportError."""

    def start(self, command: str, deadline: float) -> Channel:
        """Start a line of shell text. Raises TransportError."""

    def close(self) -> None:
        """Undo `connect`."""


class SrunOpener:
    """Starts steps of a Slurm job. All steps share the job's resources."""

    def __init__(self, transport: LocalTransport | SshTransport, way: Sequence[str]) -> None:
        """`transport`: reaches the machine where `srun` runs; nothing else uses it. `way`: srun's options for the job
        and its CPUs."""
        self._transport = transport
        self._argv = (*SRUN, *way, "sh", "-c")
        self.connect = transport.connect
        self.close = transport.close

    def start(self, command: str, deadline: float) -> ProcessChannel | SshChannel:
        """Start a line of shell text as a step. Raises TransportError."""
        return self._transport.open([*self._argv, command])


class ExecTransport(CommandTransport):
    """The transport `exec` (base.py::Transport)."""

    def __init__(self, node: str, opener: Opener, prelude: str = "") -> None:
        """`prelude`: shell text that runs before every command, and changes to the folder where commands start."""
        self.node = node
        self._opener = opener
        self._prelude = prelude
        self._open = False
        """`connect` was called, and `close` was not."""
        self._shells = [KeptShell(node, self._start) for _ in range(MAX_SHELLS)]
        self._free: queue.LifoQueue[KeptShell] = queue.LifoQueue()
        for shell in self._shells:
            self._free.put(shell)

    def connect(self) -> None:
        """Close any old shells and start a first one. Raises TransportError."""
        self._drop_shells()
        self._opener.connect()
        self._open = True
        self._ask(lambda shell, deadline: shell.open(deadline), "cannot start a shell", CONNECT_S)

    def close(self) -> None:
        """Calls in progress in other threads end with a TransportError."""
        self._open = False
        self._drop_shells()
        self._opener.close()

    def _drop_shells(self) -> None:
        for shell in self._shells:
            shell.close()

    def open(self, argv: Sequence[str]) -> Channel:
        """Run a command and stream its output. Its input ends when the channel is closed."""
        return self._start(command_line(self.node, argv), time.monotonic() + CALL_S)

    def _start(self, command: str, deadline: float) -> Channel:
        if not self._open:
            raise UnreachableError(self.node, "there is no connection")
        return self._opener.start(self._prelude + command, deadline)

    def _ask(self, ask: Callable[[KeptShell, float], T], what: str, seconds: float = CALL_S) -> T:
        """Wait for a free shell, give it a request, and return its result. `what`: the start of error messages."""
        deadline = time.monotonic() + seconds
        try:
            shell = self._free.get(timeout=seconds)
        except queue.Empty:
            raise TransportError(self.node, "the shells on the node are busy for too long") from None
        try:
            return ask(shell, deadline)
        except ShellError as e:
            raise TransportError(self.node, f"{what}: {e}") from e
        finally:
            self._free.put(shell)

    def _put(self, folder: str, files: Mapping[str, RemoteFile], empty: Sequence[str]) -> None:
        if not files or empty or len(files) > SMALL_FILES or sum(len(f.data) for f in files.values()) > SMALL_BYTES:
            super()._put(folder, files, empty)
            return
        for name, file in files.items():
            path = f"{folder}/{name}"
            self._ask(lambda shell, until, p=path, f=file: shell.write(p, f, until), f"cannot write {path}")  # type: ignore[misc]

    def _rename(self, src: str, dst: str) -> bool:
        return self._ask(lambda shell, deadline: shell.rename(src, dst, deadline), f"cannot rename {src}")

    def _run(self, argv: Sequence[str], stdin: bytes, timeout: float, name: str) -> Completed:
        command_line(self.node, argv)

        def run(shell: KeptShell, deadline: float) -> Completed:
            return shell.run(argv, stdin, timeout, time.monotonic() + timeout)

        try:
            return self._ask(run, name)
        except SlowError as e:
            raise SlowError(self.node, f"{name} took longer than {timeout:g} s") from e
