"""A shell on a node that is kept open: small files, renames and commands without the cost of a start.

A request is one line of shell text, a function of ours with quoted words, and for `w` and `x` exactly as many bytes
after it as it says. The shell reads lines byte by byte (`read` does on a pipe), so what follows is left for `head`;
busybox's reads ahead, so nothing follows before the answer, and the size shows whether all of it came. The answer is
`NUMBER CODE LENGTH` and as many bytes of message, that of `x` (a command) has two lengths, of output and errors. After
an error in `w` it is unknown how much was read: the shell reports why and ends, and the next request starts a new one.
"""

from __future__ import annotations

import contextlib
import math
import posixpath
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from orchestrator.errors import SlowError, UnreachableError
from orchestrator.transport.base import Completed, RemoteFile, TimedChannel, command_line, quote

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
MAX_BANNER = 64 * 1024
MAX_MESSAGE = 64 * 1024
MAX_OUTPUT = 64 * 1024 * 1024
"""A command that prints more than this, in bytes, is an error."""
AFTERLIFE_S = 2.0
"""Seconds after its time limit at which a command is ended by its node: our own error comes first."""
OK, GONE = 0, 2


class ShellError(Exception):
    """The request failed on the node; the text is the node's own."""


class KeptShell:
    """One shell, one request at a time; started when first used, and again when it is gone.

    Every request may raise ShellError, SlowError, and UnreachableError where it is unknown whether it was done.
    """

    def __init__(self, node: str, start: Callable[[str, float], TimedChannel]) -> None:
        self._node = node
        self._start = start
        self._channel: TimedChannel | None = None
        self._buffer = bytearray()
        self._number = 0

    def write(self, path: str, file: RemoteFile, deadline: float) -> None:
        """Put a file in place by rename; its folder is made (0700)."""
        folder = posixpath.dirname(path)
        aside = posixpath.join(folder, f".{secrets.token_hex(8)}.tmp")
        words = [str(len(file.data)), f"{file.mode:o}", folder or ".", aside, path]
        try:
            self._ask("w", words, file.data, deadline)
        except UnreachableError:  # doing it twice does no harm
            self._ask("w", words, file.data, deadline)

    def rename(self, src: str, dst: str, deadline: float) -> bool:
        """False where `src` is gone."""
        return self._ask("m", [src, dst], b"", deadline)[0] != GONE

    def run(self, argv: Sequence[str], stdin: bytes, limit: float, deadline: float) -> Completed:
        """Run a command where the shell began, for `limit` seconds at most."""
        words = [str(math.ceil(limit + AFTERLIFE_S)), str(len(stdin)), *argv]
        code, out, err = self._ask("x", words, stdin, deadline)
        return Completed(code if code <= 128 else 128 - code, out, err)

    def close(self) -> None:
        """Close the shell; a request that waits gets UnreachableError."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _ask(self, verb: str, words: Sequence[str], data: bytes, deadline: float) -> tuple[int, bytes, bytes]:
        """(code, output or message, errors) of a request."""
        channel = self._channel
        if channel is None or channel.ended:
            channel = self.open(deadline)
        self._number += 1
        number = str(self._number)
        # a newline would end the request: the shell has it as $n
        request = " ".join([verb, number, *(quote(w).replace("\n", "'\"$n\"'") for w in words)]) + "\n"
        with self._to_its_end(keep=verb == "m"):
            with contextlib.suppress(BrokenPipeError, ConnectionError):
                # where the shell ended in between, its answer has the reason
                channel.send(request.encode("utf-8", "surrogateescape") + data, deadline)
            return self._answer(channel, number, deadline)

    @contextmanager
    def _to_its_end(self, *, keep: bool = False) -> Iterator[None]:
        """Close the shell if the block fails; `keep`: not for an error that the node has reported."""
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

    def _answer(self, channel: TimedChannel, number: str, deadline: float) -> tuple[int, bytes, bytes]:
        head = self._line(channel, deadline).split()
        if len(head) not in (3, 4) or head[0] != number.encode() or not all(h.isdigit() for h in head[1:]):
            raise self._lost(f"answered {b' '.join(head)[:80]!r}")
        code, length, *more = map(int, head[1:])
        if more:
            if length + more[0] > MAX_OUTPUT:
                raise ShellError(f"it printed more than {MAX_OUTPUT >> 20} MiB")
            return code, self._bytes(channel, length, deadline), self._bytes(channel, more[0], deadline)
        message = self._bytes(channel, min(length, MAX_MESSAGE), deadline)
        if code not in (OK, GONE):
            raise ShellError(message.decode("utf-8", "replace").strip() or "it gave no reason")
        return code, message, b""

    def _bytes(self, channel: TimedChannel, count: int, deadline: float) -> bytes:
        while len(self._buffer) < count:
            self._fill(channel, deadline)
        found = bytes(self._buffer[:count])
        del self._buffer[:count]
        return found

    def _line(self, channel: TimedChannel, deadline: float) -> bytes:
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > MAX_BANNER:
                raise self._lost("talks too much")
            self._fill(channel, deadline)
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def _fill(self, channel: TimedChannel, deadline: float) -> None:
        more = channel.read(65536, deadline)
        if not more:
            raise self._lost(channel.error())
        self._buffer += more

    def open(self, deadline: float) -> TimedChannel:
        """Start it anew, past whatever the login prints."""
        self.close()
        mark = f"ready-{secrets.token_hex(8)}"
        channel = self._start(command_line(["sh", "-c", SCRIPT, mark]), deadline)
        self._channel = channel
        self._buffer.clear()
        seen = 0
        with self._to_its_end():
            while (line := self._line(channel, deadline)) != mark.encode():
                seen += len(line) + 1
                if seen > MAX_BANNER:
                    raise self._lost("talks too much")
        return channel
