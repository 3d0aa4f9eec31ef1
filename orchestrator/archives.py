"""Reads tar archives that nodes send. It writes nothing, and believes no size that an archive claims.

We walk from header to header ourselves. tarfile follows a size below zero in a circle (CVE-2025-8194) and one of 10^17
bytes for ever, and it searches pax headers in quadratic time (CVE-2024-6232). Node's archives are made by `tar` of GNU
or busybox, which write no pax headers.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from io import BufferedIOBase


def read_files(archive: BufferedIOBase, most: int) -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) of each regular file. `most`: the most bytes that the archive may claim to hold.

    Raises TarError at the first damage: what came before it was whole.
    """
    long_name = ""
    while header := archive.read(tarfile.BLOCKSIZE):
        if not header.strip(b"\0"):
            return
        member = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        padding = -member.size % tarfile.BLOCKSIZE
        most -= tarfile.BLOCKSIZE + member.size + padding
        if member.size < 0 or most < 0:
            raise tarfile.ReadError(f"its file {member.name!r} claims {member.size} bytes, which is too much")
        content = archive.read(member.size)
        if len(content) < member.size:
            raise tarfile.ReadError("it is cut off")
        archive.read(padding)
        if member.type == tarfile.GNUTYPE_LONGNAME:
            long_name = content.rstrip(b"\0").decode("utf-8", "surrogateescape")
            continue
        if member.type in (tarfile.REGTYPE, tarfile.AREGTYPE):
            yield long_name or member.name, content
        long_name = ""
