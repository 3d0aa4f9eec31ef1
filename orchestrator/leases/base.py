"""A lease, the four ways in which it ends, the interface to a scheduler, the script that a lease runs (the holder), and
the thread that talks to a pool's scheduler (the keeper): it carries orders out, looks, and reports what it saw.

A lease's folder is `leases/ID` below the pool's `workdir:`. Commands start there, so relative folders of nodes lie in
it. When a lease ends, the holder prints an archive of its workers' files on standard output.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import io
import queue
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from orchestrator.archives import read_files
from orchestrator.engines import Finding
from orchestrator.errors import NodeError, UnreachableError
from orchestrator.ledger.ingest import Chunk
from orchestrator.templating import quote, render
from orchestrator.transport.base import Transport


class LeaseState(StrEnum):
    """QUEUED: not granted yet, or its holder is not up. READY: commands can be run in it. ENDED: it will not return."""

    QUEUED = "queued"
    READY = "ready"
    ENDED = "ended"


class EndCause(StrEnum):
    """The cause of a lease's end. Only FAILED counts as a lost node; else shapes in flight are queued again uncharged.

    RELEASED: we gave it back, or its holder ended by itself. PREEMPTED: the scheduler or a person took it back
    (preempted, cancelled, evicted, drained). FAILED: its machine broke, its memory was used up, or its holder failed.
    """

    RELEASED = "released"
    PREEMPTED = "preempted"
    TIME_LIMIT = "time_limit"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Lease:
    """One grant. If the scheduler starts a job again elsewhere, the old lease has ended and a new one begins.

    `id`: its name in the scheduler's commands: a job, an array task or a pod. `host`: the physical machine, "" while it
    is queued. `why`: the scheduler's words on its state, such as "Priority, expected start 14:20". `ends_at`: epoch
    seconds of its time limit. `cause`: why it ended, if it has. `way`: options by which its source reaches it.
    """

    id: str
    state: LeaseState
    host: str = ""
    why: str = ""
    ends_at: float | None = None
    cause: EndCause | None = None
    way: tuple[str, ...] = ()


class LeaseSource(Protocol):
    """The leases of one pool of one run. The names of pool and run are enough to find them.

    So if a controller dies between a request and its answer, the next one finds the leases. Every method may raise a
    NodeError: UnreachableError if the scheduler does not answer, TransportError with its message if it refuses. All
    methods are thread-safe.
    """

    def ask(self, n: int, avoid: Collection[str] = ()) -> None:
        """Ask for `n` more, not on a host in `avoid`; return as soon as they are queued."""

    def list(self) -> Sequence[Lease]:
        """All leases that the scheduler knows, also ended ones, oldest first; one cheap call."""

    def release(self, leases: Collection[Lease]) -> None:
        """Give leases back. Unknown and ended ones are ignored."""

    def transport(self, lease: Lease, node: str) -> Transport:
        """The transport into a lease that is READY. `node`: its name in messages."""

    def check(self) -> Sequence[Finding]:
        """Check what the scheduler can tell about the pool without granting a lease."""

    def leftovers(self, lease: Lease) -> bytes | None:
        """The tar that an ended lease left, with events/ and logs/ of its node folders, or None."""

    def forget(self) -> None:
        """Remove what ended leases of the run left outside themselves. Raises NodeError if a lease has not ended."""

    def close(self) -> None:
        """Close the connection to the scheduler; the leases stay."""


BEGIN, END = "-----BEGIN GEMMFLEET LEFTOVERS-----", "-----END GEMMFLEET LEFTOVERS-----"
IDLE_S = 120
"""A lease ends after this many seconds without workers and without a controller."""
LOOK_S = 2
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
    values = {"run": run, "pool": pool, "base": folder_word(workdir), "out": out, "most": most}
    idle_s = IDLE_S if idle_s is None else idle_s
    return render("lease.sh.j2", {**values, "idle_s": idle_s, "look_s": LOOK_S, "begin": BEGIN, "end": END})


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
    if not begin or not end:
        return None
    try:
        return base64.b64decode(b"".join(data.split()), validate=True)
    except binascii.Error:
        return None


def rows_of(archive: bytes) -> Iterator[tuple[str, Chunk]]:
    """(node, whole file) of each events and log file of a packed archive. Raises TarError, OSError, EOFError."""
    with gzip.open(io.BytesIO(archive)) as unpacked:
        for path, content in read_files(unpacked, MAX_LEFT):
            if name := LEFT_FILE.search(path):
                yield name[1], Chunk("E" if name[2] == "events" else "L", name[3], 0, content)


FIRST_S = 0.1
"""Seconds from a request to the first look: an idle scheduler has granted it by then."""
SOON_S, SOON_FOR_S, USUAL_S = 0.5, 30.0, 5.0
"""Seconds between two looks: in the first SOON_FOR_S seconds after a request, and later."""


@dataclass(frozen=True, slots=True)
class Look:
    """All leases that the scheduler knows, after the orders up to `number` were carried out."""

    number: int
    leases: tuple[Lease, ...]
    refused: str = ""
    """The scheduler's words where it refused to grant more."""


@dataclass(frozen=True, slots=True)
class Order:
    """Leases to ask for, none on a host of `avoid`, and leases to give back."""

    number: int
    ask: int
    avoid: Collection[str]
    release: tuple[Lease, ...]


class Keeper:
    """Looks at the leases of one pool every few seconds, and at once after an order, until `close`."""

    def __init__(self, pool: str, source: LeaseSource, report: Callable[[Look], None]) -> None:
        """`report` is called in its thread."""
        self.source, self._report, self._closing = source, report, False
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._release: tuple[Lease, ...] = ()
        self._soon_until = time.monotonic() + SOON_FOR_S
        self._silent_since, self.silent_why = 0.0, ""
        self._thread = threading.Thread(target=self._loop, name=f"leases {pool}", daemon=True)
        self.start = self._thread.start

    def order(self, order: Order) -> None:
        """Have an order carried out; there is no other before a look showed this one."""
        self._orders.put(order)

    def look(self) -> None:
        """Look at once."""
        self._orders.put(None)

    @property
    def silent_s(self) -> float:
        """Seconds since when the scheduler has not answered."""
        return time.monotonic() - self._silent_since if self._silent_since else 0.0

    def close(self, *, release: bool, timeout: float) -> str:
        """End the thread; give all leases back, or leave them. Return why some may be left, "" where none is."""
        self._closing = True
        self.look()
        self._thread.join(timeout)
        left = self._release_all(time.monotonic() + timeout) if release else ""
        self.source.close()
        return left

    def _loop(self) -> None:
        number, order = 0, None
        while not self._closing:
            began = time.monotonic()
            pause = FIRST_S if order and order.ask else SOON_S if began < self._soon_until else USUAL_S
            number = order.number if order else number
            try:
                self._turn(number, order)
                self._silent_since = 0.0
            except NodeError as e:
                self._silent_since, self.silent_why = self._silent_since or began, e.reason
            try:
                order = self._orders.get(timeout=pause)
            except queue.Empty:
                order = None

    def _turn(self, number: int, order: Order | None) -> None:
        """Carry out an order, and look."""
        self._release += order.release if order else ()
        if self._release:
            self.source.release(self._release)
            self._release = ()
        refused = ""
        if order and order.ask:
            self._soon_until = time.monotonic() + SOON_FOR_S
            try:
                self.source.ask(order.ask, order.avoid)
            except UnreachableError:
                raise
            except NodeError as e:
                refused = e.reason
        self._report(Look(number, tuple(self.source.list()), refused))

    def _release_all(self, until: float) -> str:
        why = ""
        while True:
            try:
                found = self.source.list()
                self.source.release(found)  # ended ones, too, where something is kept of them
                left = [x.id for x in found if x.state is not LeaseState.ENDED]
                if not left:
                    return ""
                why = f"{', '.join(left[:8])} did not end in time"
            except NodeError as e:
                why = str(e)
            if time.monotonic() > until:
                return why
            time.sleep(SOON_S)
