"""The script that a lease runs: it keeps the lease while workers or a controller use it, and hands over their files.

A lease's folder is `leases/ID` below the pool's `workdir:`. Commands start there, so relative folders of nodes lie in
it. When a lease ends, the holder prints an archive of its workers' files on standard output.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import io
import re
from collections.abc import Iterator

from orchestrator.archives import read_files
from orchestrator.ledger.ingest import Chunk
from orchestrator.templating import quote, render

BEGIN = "-----BEGIN GEMMFLEET LEFTOVERS-----"
"""The line before the archive in a holder's output; END is the one after it."""
END = "-----END GEMMFLEET LEFTOVERS-----"
IDLE_S = 120
"""A lease ends after this many seconds without workers and without a controller."""
LOOK_S = 2
"""Seconds between two looks of the holder for workers."""
MAX_LEFT = 1 << 30
"""Most bytes of the files in an archive, which is packed: a small one can hold far more than our memory."""
LEFT_FILE = re.compile(r"(?:^|/)([^/]+)/(events|logs)/([0-9]{1,4})\.(?:jsonl|log)$")


def folder_word(folder: str) -> str:
    """Shell word for a folder, absolute or beginning with ~/. "" stands for a folder of the user in $TMPDIR."""
    if not folder:
        return '"${TMPDIR:-/tmp}/gemmfleet-$(id -u)"'
    return f'"$HOME"/{quote(folder[2:])}' if folder.startswith("~/") else quote(folder)


def holder_script(run: str, pool: str, workdir: str, *, out: str = "", idle_s: int | None = None, most: int = 0) -> str:
    """The holder's script. $GEMMFLEET_LEASE is the lease's id; in a Slurm job, the job's id.

    `out`: shell word of the folder for its standard output, "" if standard output is kept anyway. The file `here` in it
    shows that it is the submitter's folder; a holder that does not see the file stays until it must end. `most`: the
    largest archive in bytes that standard output is kept of, 0 for any size.
    """
    values = {
        "run": run,
        "pool": pool,
        "base": folder_word(workdir),
        "out": out,
        "most": most,
        "idle_s": IDLE_S if idle_s is None else idle_s,
        "look_s": LOOK_S,
        "begin": BEGIN,
        "end": END,
    }
    return render("lease.sh.j2", values)


def prelude(workdir: str, lease: str) -> str:
    """Shell text that waits for a lease's folder, changes to it, and shows the holder that a controller is there."""
    folder = f"{folder_word(workdir)}/leases/{quote(lease)}"
    return (
        f'l={folder}; i=0; until [ -s "$l/ready" ] || [ $i -ge 200 ]; do i=$((i+1)); sleep 0.1; done; '
        'cd "$l" || exit; exec 9>>connected; flock -s 9; '
    )


def leftovers_in(text: bytes) -> bytes | None:
    """The last archive in a holder's standard output, or None."""
    _, begin, rest = text.rpartition(f"{BEGIN}\n".encode())
    data, end, _ = rest.partition(f"\n{END}".encode())
    if not begin or not end:  # cut off, or none was written
        return None
    try:
        return base64.b64decode(b"".join(data.split()), validate=True)
    except binascii.Error:
        return None


def rows_of(archive: bytes) -> Iterator[tuple[str, Chunk]]:
    """(node, whole file) of each events and log file of a packed archive. Raises TarError, OSError, EOFError."""
    with gzip.open(io.BytesIO(archive)) as unpacked:
        for path, content in read_files(unpacked, MAX_LEFT):
            name = LEFT_FILE.search(path)
            if name is not None:
                stream = "E" if name[2] == "events" else "L"
                yield name[1], Chunk(stream, name[3], 0, content)
