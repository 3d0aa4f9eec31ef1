"""A lease, the four ways in which one ends, what a scheduler of leases must offer, and the script that a lease runs.

That script is the holder. A lease's folder is `leases/ID` below the pool's `workdir:`. Commands begin there: relative
folders of nodes lie in it. What workers wrote comes back on the holder's standard output.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
import tarfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from orchestrator.engines import Finding
from orchestrator.ledger.ingest import Chunk
from orchestrator.templating import quote, render
from orchestrator.transport.base import Transport


class LeaseState(StrEnum):
    """QUEUED: granted not yet, or its holder is not up. READY: commands can be run in it. ENDED: gone for good."""

    QUEUED = "queued"
    READY = "ready"
    ENDED = "ended"


class EndCause(StrEnum):
    """Cause of a lease's end. Only FAILED counts as a lost node; else what was in flight goes back uncharged.

    RELEASED: we gave it back, or its holder ended by itself. PREEMPTED: the scheduler or a person took it back
    (preempted, cancelled, evicted, drained). FAILED: its machine broke, its memory was used up, or its holder failed.
    """

    RELEASED = "released"
    PREEMPTED = "preempted"
    TIME_LIMIT = "time_limit"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Lease:
    """One grant. One that the scheduler starts again elsewhere is a new lease; the one before has ended.

    `id`: its name in commands of the scheduler, that of a job, an array task or a pod. `host`: the physical one, ""
    while it is queued. `why`: the scheduler's own words on its state, such as "Priority, expected start 14:20".
    `ends_at`: epoch seconds of its time limit. `cause`: that of the end of one that ended. `way`: options by which its
    source reaches it.
    """

    id: str
    state: LeaseState
    host: str = ""
    why: str = ""
    ends_at: float | None = None
    cause: EndCause | None = None
    way: tuple[str, ...] = ()


class LeaseSource(Protocol):
    """Leases of one pool of one run, which are found by the names of both alone.

    So a controller that died between asking and hearing the answer finds them again. Every method may raise a
    NodeError: UnreachableError where the scheduler does not answer, TransportError with its words where it refuses.
    All are safe to call from several threads.
    """

    def ask(self, n: int, avoid: Collection[str] = ()) -> None:
        """Ask for `n` more, none of them on a host of `avoid`; return as soon as they are queued."""

    def list(self) -> Sequence[Lease]:
        """All that the scheduler knows, ended ones included, oldest first; one cheap call."""

    def release(self, leases: Collection[Lease]) -> None:
        """Give back; unknown and ended ones do no harm."""

    def transport(self, lease: Lease, node: str) -> Transport:
        """Files and commands in a lease that is READY. `node`: its name in messages."""

    def check(self) -> Sequence[Finding]:
        """Findings on the pool that the scheduler gives without granting a lease."""

    def leftovers(self, lease: Lease) -> bytes | None:
        """The tar with events/ and logs/ of its node folders that an ended lease left, or None."""

    def close(self) -> None:
        """Let go of the scheduler; the leases go on."""


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


def holder_script(run: str, pool: str, workdir: str, *, out: str = "", idle_s: int | None = None, most: int = 0) -> str:
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
