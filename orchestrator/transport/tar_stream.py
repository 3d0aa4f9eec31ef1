"""Many files to a node as one tar stream, and the command that puts them in place there.

The stream is unpacked aside on the node, then each file is renamed into place. The node needs sh, tar (GNU, busybox or
BSD), mkdir, mv and rm. The last member is a shell script that puts things in place: it is there only if everything
before it is. Where the folder does not exist yet, the whole tree becomes it by one rename.
"""

from __future__ import annotations

import io
import posixpath
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence

from orchestrator.transport.base import RemoteFile
from orchestrator.transport.quoting import quote

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
