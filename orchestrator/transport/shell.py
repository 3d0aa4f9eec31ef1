"""Files and commands on a node that is reached by commands alone, whatever carries them.

Files go as one tar stream: it is unpacked aside on the node, then each file is renamed into place. The node needs sh,
tar (GNU, busybox or BSD), mkdir, mv and rm. The last member is a shell script that puts things in place: it is there
only if everything before it is. Where the folder does not exist yet, the whole tree becomes it by one rename.
"""

from __future__ import annotations

import io
import posixpath
import secrets
import tarfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

from orchestrator.errors import TransportError
from orchestrator.transport.base import Completed, RemoteFile, absolute, quote

CALL_S, BYTES_A_SECOND = 60.0, 250_000
"""Time for a put or rename, and the slowest link that still is one."""


RENAME = """\
if [ -d "$2" ]; then echo "$2: Is a directory" >&2; exit 1; fi
mv -f -- "$1" "$2" && exit 0
[ -e "$1" ] || [ -L "$1" ] || exit 3
exit 1
"""


class CommandTransport(ABC):
    """The part of a Transport that is made of commands: files, and the words of errors."""

    node: str

    @abstractmethod
    def _run(self, argv: Sequence[str], stdin: bytes, timeout: float, name: str) -> Completed:
        """Run a command to its end; `name` stands for it in errors."""

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float = 60.0) -> Completed:
        """Run a command to its end. A code is negative where a signal ended it."""
        done = self._run(argv, stdin, timeout, argv[0])
        words = done.err.decode("utf-8", "replace")
        if done.code in (126, 127) and ("exec: " in words or "timeout: " in words) and argv[0] in words:
            raise TransportError(self.node, f"cannot run {argv[0]}: {words.strip()[-300:]}")
        return done

    def put(self, folder: str, files: Mapping[str, RemoteFile], empty: Sequence[str] = ()) -> None:
        """Write files aside and rename each into place."""
        wrong = faults([*files, *empty])
        if wrong or "\0" in folder or not folder:
            raise TransportError(self.node, wrong or f"{folder!r} is not a folder")
        self._put(absolute(folder).rstrip("/") or "/", files, empty)

    def _put(self, folder: str, files: Mapping[str, RemoteFile], empty: Sequence[str]) -> None:
        token = f".put-{secrets.token_hex(8)}"
        data = stream(token, files, empty)
        limit = CALL_S + len(data) / BYTES_A_SECOND
        done = self._run(unpack_argv(folder, token), data, limit, f"writing to {folder}")
        if done.code != 0:
            raise TransportError(self.node, f"cannot write to {folder}: {done.text or f'code {done.code}'}")

    def rename(self, src: str, dst: str) -> bool:
        """Rename on the node; False where `src` is gone. TransportError where that is unknown: the connection broke."""
        src, dst = absolute(src), absolute(dst)
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
