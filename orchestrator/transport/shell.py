"""Files and command lines on a node that is reached by commands alone, whatever carries them.

Many files go as one tar stream, small ones and renames through a shell that is kept open.

Tar stream: unpacked aside on the node, then each file is renamed into place. The node needs sh, tar (GNU, busybox or
BSD), mkdir, mv and rm. The last member is a shell script that puts things in place: it is there only if everything
before it is. Where the folder does not exist yet, the whole tree becomes it by one rename.

Kept shell: a request is one line of shell text, a function of ours with quoted words, and for `w` and `x` exactly as
many bytes after it as it says. The shell reads lines byte by byte (`read` does on a pipe), so what follows is left for
`head`; busybox's reads ahead, so nothing follows before the answer, and the size shows whether all of it came. The
answer is `NUMBER CODE LENGTH` and as many bytes of message, that of `x` (a command) has two lengths, of output and
errors. After an error in `w` it is unknown how much was read: the shell reports why and ends, and the next request
starts a new one.
"""

from __future__ import annotations

import contextlib
import io
import math
import posixpath
import secrets
import shlex
import tarfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TypeVar

from orchestrator.errors import SlowError, TransportError
from orchestrator.transport.base import Channel, Completed, RemoteFile


def command_line(argv: Sequence[str]) -> str:
    """Command line for the node's login shell. `exec`: no built-in and no keyword of that shell can be meant.

    Raises ValueError for what no command line can carry.
    """
    if not argv or any("\0" in w for w in argv):
        raise ValueError("a command needs words without NUL characters")
    return "exec " + " ".join(map(quote, argv))


def limited_line(argv: Sequence[str], seconds: float) -> str:
    """Command line for a command that the node itself ends, with all that it started in its process group, when it
    takes longer; where the node has `timeout` (of GNU, or a busybox: there the command alone). Who started it need
    not live.

    Raises ValueError for what no command line can carry.
    """
    limit = math.ceil(seconds)
    line = command_line(argv).removeprefix("exec ")
    return f'set -- {line}; timeout -s KILL 9 true 2>/dev/null && exec timeout -s KILL {limit} "$@"; exec "$@"'


def quote(word: str) -> str:
    """Quote as shlex.quote; also `A=b` and a `~` at the beginning."""
    return (
        shlex.quote(word) if "=" not in word and not word.startswith("~") else "'" + word.replace("'", "'\"'\"'") + "'"
    )


def absolute(folder: str) -> str:
    """A path that no command takes for an option; relative ones begin where commands do."""
    return folder if folder.startswith("/") else f"./{folder}"


UNPACK = """\
d=$1 t=$2
LC_ALL=C; export LC_ALL; umask 077
w=$d; [ -e "$d" ] || w=${d%/*}
mkdir -p -- "${w:=/}" && mkdir -- "$w/$t" || exit 1
# what a put left behind that its node did not survive; not our own, whatever the clock of a file server says
find "$w" -maxdepth 1 -type d -name '.put-*' ! -name "$t" -mmin +60 -exec rm -rf -- {} + 2>/dev/null
trap 'rm -rf -- "$w/$t"' 0
tar -xmpof - -C "$w/$t" || exit 1
[ -f "$w/$t/place" ] || { echo "the stream broke off" >&2; exit 1; }
r=$w/$t/$t
if [ ! -e "$d" ]; then
    mv -- "$r" "$d" || exit 1
    [ -e "$d/$t" ] || exit 0
    r=$d/$t # another process made the folder at the same time: this is now inside
fi
. "$w/$t/place"
"""
MAX_WORDS_BYTES = 64 * 1024
"""Limit of one command; Linux allows 128 KiB an argument and 2 MiB in all."""


def faults(names: Sequence[str]) -> str:
    """Problem of names relative to a folder; "" for none."""
    for name in names:
        parts = name.split("/")
        if "\0" in name or name.startswith("/") or any(p in ("", ".", "..") for p in parts):
            return f"{name!r} is not a plain path within the folder"
    return ""


def unpack_argv(folder: str, token: str) -> list[str]:
    """The command that reads `stream` from its standard input."""
    return ["sh", "-c", UNPACK, "sh", folder.rstrip("/") or "/", token]


def stream(token: str, files: Mapping[str, RemoteFile], empty: Sequence[str]) -> bytes:
    """The tar stream: a tree `<token>/` and the script `place`. GNU format, which busybox reads, too."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT, errors="surrogateescape") as tar:
        now = int(time.time())
        for folder in ("", *_folders(files, empty)):
            tar.addfile(_member(posixpath.join(token, folder).rstrip("/"), 0o700, now, tarfile.DIRTYPE))
        for name, file in files.items():
            tar.addfile(_member(f"{token}/{name}", file.mode, now, size=len(file.data)), io.BytesIO(file.data))
        script = "".join(_place(files, empty)).encode("utf-8", "surrogateescape")
        tar.addfile(_member("place", 0o600, now, size=len(script)), io.BytesIO(script))
    return out.getvalue()


def _member(name: str, mode: int, now: int, kind: bytes = tarfile.REGTYPE, size: int = 0) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.mode, info.type, info.size, info.mtime = mode, kind, size, now
    return info


def _folders(files: Mapping[str, RemoteFile], empty: Sequence[str]) -> list[str]:
    """Every folder of the tree below its root, parents first."""
    found: set[str] = set()
    for folder in (*empty, *(posixpath.dirname(n) for n in files)):
        while folder and folder not in found:
            found.add(folder)
            folder = posixpath.dirname(folder)
    return sorted(found)


def _place(files: Mapping[str, RemoteFile], empty: Sequence[str]) -> Iterator[str]:
    """The script: $r is the tree, $d the folder. One mv a folder, which renames file by file."""
    for words in _batches([f'"$d"/{quote(f)}' for f in _folders(files, empty)]):
        yield f"mkdir -p -- {words} || exit 1\n"
    by_folder: dict[str, list[str]] = {}
    for name in files:
        by_folder.setdefault(posixpath.dirname(name), []).append(f'"$r"/{quote(name)}')
    for folder, names in by_folder.items():
        for words in _batches(names):
            yield f'mv -f -- {words} "$d"/{quote(folder) if folder else ""} || exit 1\n'


def _batches(words: Sequence[str]) -> Iterator[str]:
    batch: list[str] = []
    size = 0
    for word in words:
        if batch and size + len(word) > MAX_WORDS_BYTES:
            yield " ".join(batch)
            batch, size = [], 0
        batch.append(word)
        size += len(word) * 4 + 200  # UTF-8, and "$d" and "$r" are longer than they look
    if batch:
        yield " ".join(batch)


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


class ShellLost(Exception):
    """The shell is gone; whether the last request was done is unknown."""


class TimedChannel(Channel, Protocol):
    """A channel whose calls end by a deadline (time.monotonic()), with TimeoutError."""

    def read(self, size: int, deadline: float | None = None) -> bytes: ...

    def send(self, data: bytes, deadline: float | None = None) -> None:
        """Send all of `data`; OSError where the command listens no more."""
        ...

    @property
    def ended(self) -> bool: ...


class KeptShell:
    """One shell, one request at a time; started when first used, and again when it is gone."""

    def __init__(self, node: str, start: Callable[[str, float], TimedChannel]) -> None:
        self._node = node
        self._start = start
        self._one = threading.Lock()
        self._channel: TimedChannel | None = None
        self._buffer = bytearray()
        self._number = 0

    def write(self, path: str, file: RemoteFile, deadline: float) -> None:
        """Put a file in place by rename; its folder is made (0700). Raises ShellError, ShellLost, TransportError."""
        folder = posixpath.dirname(path)
        aside = posixpath.join(folder, f".{secrets.token_hex(8)}.tmp")
        words = [str(len(file.data)), f"{file.mode:o}", folder or ".", aside, path]
        for last in (False, True):
            try:
                self._ask("w", words, file.data, deadline)
                return
            except ShellLost:
                if last:  # doing it twice does no harm
                    raise

    def rename(self, src: str, dst: str, deadline: float) -> bool:
        """False where `src` is gone. Raises ShellError, ShellLost, TransportError."""
        return self._ask("m", [src, dst], b"", deadline)[0] != GONE

    def run(self, argv: Sequence[str], stdin: bytes, limit: float, deadline: float) -> Completed:
        """Run a command where the shell began, for `limit` seconds at most. Raises as `rename`, and SlowError."""
        words = [str(math.ceil(limit + AFTERLIFE_S)), str(len(stdin)), *argv]
        code, out, err = self._ask("x", words, stdin, deadline)
        return Completed(code if code <= 128 else 128 - code, out, err)

    def open(self, deadline: float) -> None:
        """Start it anew. Raises ShellLost, TransportError."""
        with self._alone(deadline):
            self._open(deadline)

    def close(self) -> None:
        """Close the shell; a request that waits gets ShellLost."""
        channel = self._channel
        if channel is not None:
            channel.close()

    def make_room(self) -> bool:
        """Give up the session if nobody uses it now."""
        if self._channel is None or not self._one.acquire(blocking=False):
            return False
        try:
            self._drop()
        finally:
            self._one.release()
        return True

    # --- one request ----------------------------------------------------------------------------------------------

    @contextmanager
    def _alone(self, deadline: float) -> Iterator[None]:
        if not self._one.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TransportError(self._node, "the shell on the node is busy for too long")
        try:
            yield
        finally:
            self._one.release()

    def _ask(self, verb: str, words: Sequence[str], data: bytes, deadline: float) -> tuple[int, bytes, bytes]:
        """(code, output or message, errors) of a request."""
        with self._alone(deadline):
            channel = self._channel
            if channel is None or channel.ended:
                channel = self._open(deadline)
            self._number += 1
            number = str(self._number)
            # a newline would end the request: the shell has it as $n
            request = " ".join([verb, number, *(quote(w).replace("\n", "'\"$n\"'") for w in words)]) + "\n"
            payload = request.encode("utf-8", "surrogateescape") + data
            try:
                with contextlib.suppress(BrokenPipeError, ConnectionError):
                    channel.send(payload, deadline)  # where the shell ended in between, its answer has the reason
                return self._answer(channel, number, deadline)
            except BaseException as e:
                if not isinstance(e, ShellError) or verb != "m":
                    self._drop()
                if isinstance(e, TimeoutError):
                    raise SlowError(self._node, "the node did not answer in time") from e
                raise

    def _answer(self, channel: TimedChannel, number: str, deadline: float) -> tuple[int, bytes, bytes]:
        head = self._line(channel, deadline).split()
        if len(head) not in (3, 4) or head[0] != number.encode() or not all(h.isdigit() for h in head[1:]):
            raise ShellLost(f"the shell on the node answered {b' '.join(head)[:80]!r}")
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
                raise ShellLost("the shell on the node talks too much")
            self._fill(channel, deadline)
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def _fill(self, channel: TimedChannel, deadline: float) -> None:
        more = channel.read(65536, deadline)
        if not more:
            raise ShellLost(f"the shell on the node {channel.error()}")
        self._buffer += more

    def _open(self, deadline: float) -> TimedChannel:
        """A new shell, past whatever the login prints."""
        self._drop()
        mark = f"ready-{secrets.token_hex(8)}"
        channel = self._start(command_line(["sh", "-c", SCRIPT, mark]), deadline)
        self._channel = channel
        self._buffer.clear()
        seen = 0
        try:
            while (line := self._line(channel, deadline)) != mark.encode():
                seen += len(line) + 1
                if seen > MAX_BANNER:
                    raise ShellLost("the login shell on the node talks too much")
        except TimeoutError as e:
            self._drop()
            raise SlowError(self._node, "the node did not answer in time") from e
        except BaseException:
            self._drop()
            raise
        return channel

    def _drop(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()


SMALL_FILES, SMALL_BYTES = 4, 256 * 1024
"""Limits of the kept shell; anything larger goes as a tar stream on a channel of its own."""
CALL_S, BYTES_A_SECOND = 60.0, 250_000
"""Time for a put or rename, and the slowest link that still is one."""
T = TypeVar("T")


class ShellTransport(ABC):
    """The part of a Transport that is made of commands and kept shells: files, and the words of errors."""

    node: str

    @abstractmethod
    def _run(self, argv: Sequence[str], stdin: bytes, timeout: float, name: str) -> Completed:
        """Run a command to its end; `name` stands for it in errors."""

    @abstractmethod
    def _kept_shell(self, deadline: float) -> AbstractContextManager[KeptShell]:
        """The kept shell, for one request that ends by the deadline. Raises TransportError where the node is gone."""

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float = 60.0) -> Completed:
        """Run a command to its end. A code is negative where a signal ended it."""
        done = self._run(argv, stdin, timeout, argv[0])
        words = done.err.decode("utf-8", "replace")
        if done.code in (126, 127) and ("exec: " in words or "timeout: " in words) and argv[0] in words:
            raise TransportError(self.node, f"cannot run {argv[0]}: {words.strip()[-300:]}")
        return done

    def put(self, folder: str, files: Mapping[str, RemoteFile], empty: Sequence[str] = ()) -> None:
        """Write files aside and rename each into place; a few small ones through the kept shell."""
        wrong = faults([*files, *empty])
        if wrong or "\0" in folder or not folder:
            raise TransportError(self.node, wrong or f"{folder!r} is not a folder")
        folder = absolute(folder).rstrip("/") or "/"
        small = len(files) <= SMALL_FILES and sum(len(f.data) for f in files.values()) <= SMALL_BYTES
        if files and not empty and small:
            for name, file in files.items():
                self._write(f"{folder}/{name}", file)
            return
        token = f".put-{secrets.token_hex(8)}"
        data = stream(token, files, empty)
        limit = CALL_S + len(data) / BYTES_A_SECOND
        done = self._run(unpack_argv(folder, token), data, limit, f"writing to {folder}")
        if done.code != 0:
            raise TransportError(self.node, f"cannot write to {folder}: {done.text or f'code {done.code}'}")

    def _write(self, path: str, file: RemoteFile) -> None:
        self._ask_shell(lambda shell, deadline: shell.write(path, file, deadline), f"cannot write {path}")

    def rename(self, src: str, dst: str) -> bool:
        """Rename on the node; False where `src` is gone. When the connection breaks, nobody knows (TransportError)."""
        src, dst = absolute(src), absolute(dst)
        if "\0" in src + dst:
            raise TransportError(self.node, f"cannot rename {src!r}: no path has a NUL character")
        return self._ask_shell(lambda shell, deadline: shell.rename(src, dst, deadline), f"cannot rename {src}")

    def _ask_shell(self, ask: Callable[[KeptShell, float], T], what: str) -> T:
        deadline = time.monotonic() + CALL_S
        try:
            with self._kept_shell(deadline) as shell:
                return ask(shell, deadline)
        except (ShellError, ShellLost) as e:
            raise TransportError(self.node, f"{what}: {e}") from e
