"""The common part of `ssh` and `exec`: they reach a node by commands alone, so files and renames are commands too.

Three things are here: quoting for the POSIX shell of a node (`command_line`, `quote`), `CommandTransport`, and the tar
stream by which it puts files on a node.

A put unpacks the stream aside on the node, in a folder `.put-<token>`, and then renames each file into place. The last
member of the stream is the script `place`, which does the renames: it is there only if all before it has arrived. If
the folder does not exist yet, the whole tree becomes it by one rename. The node needs sh, tar (GNU, busybox or BSD),
mkdir, mv and rm.
"""

from __future__ import annotations

import io
import math
import posixpath
import secrets
import shlex
import signal
import tarfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

from orchestrator.errors import SlowError, TransportError
from orchestrator.transport.base import Completed, RemoteFile, path_fault


def command_line(node: str, argv: Sequence[str]) -> str:
    """The command as text for a node's login shell, such as `exec ls -l 'a b'`. Because of `exec` the first word cannot
    mean a built-in or keyword of that shell. Raises TransportError if no command line can carry the words.
    """
    if not argv or any("\0" in w for w in argv):
        raise TransportError(node, "a command needs words without NUL characters")
    return "exec " + " ".join(map(quote, argv))


def limited(line: str, seconds: float) -> str:
    """The line of `command_line` with a limit that the node itself enforces, so that a command does not outlive us.

    GNU's `timeout` ends all processes of the command's group, busybox's only the command. Without either there is no
    limit. The exit code of a command that was ended is 128 plus the number of the signal.
    """
    return (
        f"set -- {line.removeprefix('exec ')}; if timeout -s KILL 9 true 2>/dev/null;"
        f' then timeout -s KILL {math.ceil(seconds)} "$@"; else (exec "$@"); fi; exit "$?"'
    )


def quote(word: str) -> str:
    """Quote a word for a POSIX shell. Unlike shlex.quote it quotes `A=b` too, which may be an assignment, and a `~` at
    the beginning."""
    if "=" in word or word.startswith("~"):
        return "'" + word.replace("'", "'\"'\"'") + "'"
    return shlex.quote(word)


def absolute(folder: str) -> str:
    """The path with a beginning that no command takes for an option. A relative one starts where commands start."""
    return folder if folder.startswith("/") else f"./{folder}"


CALL_S = 60.0
"""Seconds for a put or rename, besides the time for its bytes."""


BYTES_A_SECOND = 250_000
"""A link that is slower than this counts as broken."""


AFTERLIFE_S = 2.0
"""The node ends a command this many seconds after its time limit, so that our own error comes first."""


MAX_OUTPUT = 64 * 1024 * 1024
"""A command that prints more than this, in bytes, is an error."""


RENAME = """\
if [ -d "$2" ]; then echo "$2: Is a directory" >&2; exit 1; fi
mv -f -- "$1" "$2" && exit 0
[ -e "$1" ] || [ -L "$1" ] || exit 3
exit 1
"""


class CommandTransport(ABC):
    """The part of a Transport that is made of commands. A subclass gives `_run`, and may have faster ways for files."""

    node: str

    @abstractmethod
    def _run(self, argv: Sequence[str], stdin: bytes, timeout: float, name: str) -> Completed:
        """Run a command to its end within `timeout` seconds. `name`: what it is called in errors."""

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float = 60.0) -> Completed:
        """Run a command to its end; its code is negative if a signal ended it. Raises TransportError, also if the node
        cannot start the command: its shell, or `timeout`, then exits with 126 or 127 and says so."""
        began = time.monotonic()
        done = self._run(argv, stdin, timeout, argv[0])
        if done.code == -signal.SIGKILL and time.monotonic() - began >= timeout:
            # the node's own limit (AFTERLIFE_S) ended it before this busy machine looked at the clock
            raise SlowError(self.node, f"{argv[0]} took longer than {timeout:g} s")
        words = done.err.decode("utf-8", "replace")
        if done.code in (126, 127) and ("exec: " in words or "timeout: " in words) and argv[0] in words:
            raise TransportError(self.node, f"cannot run {argv[0]}: {words.strip()[-300:]}")
        return done

    def put(self, folder: str, files: Mapping[str, RemoteFile], empty: Sequence[str] = ()) -> None:
        """Write files aside and rename each into place."""
        fault = path_fault([*files, *empty])
        if not fault and ("\0" in folder or not folder):
            fault = f"{folder!r} is not a folder"
        if fault:
            raise TransportError(self.node, fault)
        self._put(absolute(folder).rstrip("/") or "/", files, empty)

    def _put(self, folder: str, files: Mapping[str, RemoteFile], empty: Sequence[str]) -> None:
        token = f".put-{secrets.token_hex(8)}"
        data = stream(token, files, empty)
        limit = CALL_S + len(data) / BYTES_A_SECOND
        done = self._run(unpack_argv(folder, token), data, limit, f"writing to {folder}")
        if done.code != 0:
            raise TransportError(self.node, f"cannot write to {folder}: {done.text or f'code {done.code}'}")

    def rename(self, src: str, dst: str) -> bool:
        """Rename on the node; False if `src` is gone. Raises TransportError if the result is unknown, because the
        connection broke."""
        src = absolute(src)
        dst = absolute(dst)
        if "\0" in src + dst:
            raise TransportError(self.node, f"cannot rename {src!r}: no path has a NUL character")
        return self._rename(src, dst)

    def _rename(self, src: str, dst: str) -> bool:
        done = self._run(["sh", "-c", RENAME, "sh", src, dst], b"", CALL_S, f"renaming {src}")
        if done.code not in (0, 3):
            raise TransportError(self.node, f"cannot rename {src}: {done.text or f'code {done.code}'}")
        return done.code == 0


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


def unpack_argv(folder: str, token: str) -> list[str]:
    """The command that reads `stream` from its standard input."""
    return ["sh", "-c", UNPACK, "sh", folder.rstrip("/") or "/", token]


def stream(token: str, files: Mapping[str, RemoteFile], empty: Sequence[str]) -> bytes:
    """The tar stream: a tree `<token>/` and the script `place`, in GNU format, which busybox reads too."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.GNU_FORMAT, errors="surrogateescape") as tar:
        now = int(time.time())
        for folder in ("", *_folders(files, empty)):
            tar.addfile(_member(posixpath.join(token, folder).rstrip("/"), 0o700, now, tarfile.DIRTYPE))
        for name, file in files.items():
            tar.addfile(_member(f"{token}/{name}", file.mode, now, size=len(file.data)), io.BytesIO(file.data))
        script = "".join(_place(files, empty)).encode("utf-8", "surrogateescape")
        tar.addfile(_member("place", 0o600, now, size=len(script)), io.BytesIO(script))
    return archive.getvalue()


def _member(name: str, mode: int, now: int, kind: bytes = tarfile.REGTYPE, size: int = 0) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.mode = mode
    info.type = kind
    info.size = size
    info.mtime = now
    return info


def _folders(files: Mapping[str, RemoteFile], empty: Sequence[str]) -> list[str]:
    """Every folder of the tree below its root, parents first."""
    folders: set[str] = set()
    for folder in (*empty, *(posixpath.dirname(n) for n in files)):
        while folder and folder not in folders:
            folders.add(folder)
            folder = posixpath.dirname(folder)
    return sorted(folders)


def _place(files: Mapping[str, RemoteFile], empty: Sequence[str]) -> Iterator[str]:
    """The lines of the script: $r is the unpacked tree, $d the folder. One `mv` for each folder renames its files."""
    for words in _batches([f'"$d"/{quote(f)}' for f in _folders(files, empty)]):
        yield f"mkdir -p -- {words} || exit 1\n"
    by_folder: dict[str, list[str]] = {}
    for name in files:
        by_folder.setdefault(posixpath.dirname(name), []).append(f'"$r"/{quote(name)}')
    for folder, names in by_folder.items():
        for words in _batches(names):
            yield f'mv -f -- {words} "$d"/{quote(folder) if folder else ""} || exit 1\n'


def _batches(words: Sequence[str]) -> Iterator[str]:
    """The words in lines that are short enough for one command."""
    batch: list[str] = []
    size = 0
    for word in words:
        if batch and size + len(word) > MAX_WORDS_BYTES:
            yield " ".join(batch)
            batch = []
            size = 0
        batch.append(word)
        size += len(word) * 4 + 200  # UTF-8, and "$d" and "$r" are longer than they look
    if batch:
        yield " ".join(batch)
