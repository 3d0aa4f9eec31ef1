"""The holder: the script that a lease runs, the way into its folder, and the rows that it leaves on standard output.

A lease's folder is `leases/ID` below the pool's `workdir:`. Commands begin there: relative folders of nodes lie in it.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
import tarfile
from collections.abc import Iterator

from orchestrator.ledger.ingest import Chunk
from orchestrator.templating import quote, render

BEGIN, END = "-----BEGIN GEMMFLEET LEFTOVERS-----", "-----END GEMMFLEET LEFTOVERS-----"
IDLE_S = 120
"""A lease without workers and without a controller ends after so many seconds."""
LOOK_S = 2
LEFT_FILE = re.compile(r"(?:^|/)([^/]+)/(events|logs)/([0-9]{1,4})\.(?:jsonl|log)$")


def folder_word(folder: str) -> str:
    """Shell word of a folder, absolute or beginning with ~/; "" stands for one of the user's own in $TMPDIR."""
    if not folder:
        return '"${TMPDIR:-/tmp}/gemmfleet-$(id -u)"'
    return f'"$HOME"/{quote(folder[2:])}' if folder.startswith("~/") else quote(folder)


def script(run: str, pool: str, workdir: str, *, out: str = "", idle_s: int | None = None, most: int = 0) -> str:
    """The holder's script. Its lease's id is $GEMMFLEET_LEASE, in a Slurm job the job's own.

    `out`: shell word of the folder for its standard output, where the file `here` shows that it is the folder of
    whoever ran it; a holder that does not see that ends only when it must. "": standard output is kept anyway.
    `most`: bytes of an archive that standard output is kept of, 0 for any.
    """
    values = {"run": run, "pool": pool, "base": folder_word(workdir), "out": out, "most": most}
    idle_s = IDLE_S if idle_s is None else idle_s
    return render("lease.sh.j2", {**values, "idle_s": idle_s, "look_s": LOOK_S, "begin": BEGIN, "end": END})


def prelude(workdir: str, lease: str) -> str:
    """Shell text that goes to the folder of a lease as soon as it is there, and stays known to its holder."""
    folder = f"{folder_word(workdir)}/leases/{quote(lease)}"
    return (
        f'l={folder}; i=0; until [ -s "$l/ready" ] || [ $i -ge 200 ]; do i=$((i+1)); sleep 0.1; done; '
        'cd "$l" || exit; exec 9>>connected; flock -s 9; '
    )


def leftovers_in(text: bytes) -> bytes | None:
    """The last archive in a holder's standard output, or None."""
    _, begin, rest = text.rpartition(f"{BEGIN}\n".encode())
    data, end, _ = rest.partition(f"\n{END}".encode())
    if not begin or not end:
        return None
    try:
        return base64.b64decode(b"".join(data.split()), validate=True)
    except binascii.Error:
        return None


def rows_of(archive: bytes) -> Iterator[tuple[str, Chunk]]:
    """(node, whole file) of each events and log file of an archive. Raises TarError, OSError."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            name = LEFT_FILE.search(member.name)
            if member.isfile() and name is not None and (file := tar.extractfile(member)) is not None:
                yield name[1], Chunk("E" if name[2] == "events" else "L", name[3], 0, file.read())
