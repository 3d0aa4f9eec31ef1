"""The holder: the script that a lease runs. It keeps the lease while workers or a controller use it.

1. slurm.py and kubernetes.py submit `holder_script` (templates/lease.sh.j2). The holder makes the lease's folder,
   `leases/ID` below the pool's `workdir:`, and writes the file `ready` there.
2. Every command of a controller in the lease begins with `prelude`: it waits for `ready`, changes to the folder, and
   holds a lock on its file `connected`. So relative folders of nodes lie in the lease's folder.
3. When the lease ends, the holder prints an archive of its workers' files between the lines BEGIN and END.
   `leftovers_in` finds it in the output, and `rows_of` reads it: what the stream of the node did not deliver any more.
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
"""The holder looks this often, in seconds, whether a worker lives."""
MAX_UNPACKED = 1 << 30
"""Most bytes that an archive may unpack to. A small one could hold far more than our memory."""
RECORDS_OR_LOG = re.compile(r"(?:^|/)([^/]+)/(events|logs)/([0-9]{1,4})\.(?:jsonl|log)$")


def folder_word(folder: str) -> str:
    """The folder as a word of the shell. It is absolute or begins with `~/`; "" stands for a folder of the user in
    $TMPDIR."""
    if not folder:
        return '"${TMPDIR:-/tmp}/gemmfleet-$(id -u)"'
    return f'"$HOME"/{quote(folder[2:])}' if folder.startswith("~/") else quote(folder)


def holder_script(run: str, pool: str, workdir: str, *, out: str = "", idle_s: int | None = None, most: int = 0) -> str:
    """The holder's script. It takes the lease's id from $GEMMFLEET_LEASE, or in a Slurm job the job's id.

    `out`: shell word of the folder for its standard output; "" if the scheduler keeps standard output. The file `here`
    in it shows that the folder is the one from which we read. A holder that does not see the file cannot hand over
    anything, so it keeps the lease until its time limit. `idle_s`: seconds without workers and controller after which
    it ends; None: IDLE_S. `most`: the largest archive in bytes that a kept standard output can hold, 0 for any size.
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
    """Shell text that waits (20 s at most) for a lease's folder, changes to it, and shows the holder that a controller
    is there."""
    folder = f"{folder_word(workdir)}/leases/{quote(lease)}"
    return (
        f'l={folder}; i=0; until [ -s "$l/ready" ] || [ $i -ge 200 ]; do i=$((i+1)); sleep 0.1; done; '
        'cd "$l" || exit; exec 9>>connected; flock -s 9; '
    )


def leftovers_in(text: bytes) -> bytes | None:
    """The last archive in a holder's standard output; None if there is none, or it was cut off."""
    _, begin, rest = text.rpartition(f"{BEGIN}\n".encode())
    data, end, _ = rest.partition(f"\n{END}".encode())
    if not begin or not end:
        return None
    try:
        return base64.b64decode(b"".join(data.split()), validate=True)
    except binascii.Error:
        return None


def rows_of(archive: bytes) -> Iterator[tuple[str, Chunk]]:
    """(node, whole file) of each records file (events/SLOT.jsonl) and log (logs/SLOT.log) in a packed archive. Yields
    what comes before damage, and then raises TarError, OSError or EOFError."""
    with gzip.open(io.BytesIO(archive)) as unpacked:
        for path, content in read_files(unpacked, MAX_UNPACKED):
            name = RECORDS_OR_LOG.search(path)
            if name is not None:
                stream = "E" if name[2] == "events" else "L"
                yield name[1], Chunk(stream, name[3], 0, content)
