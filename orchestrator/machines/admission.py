"""Lets the workers of a run start on a node when nobody else computes there (occupancy.py says who does).

A node's driver (controller/node_driver.py) enters `NodeAdmission` as a context around the start of its workers. Inside
it is our turn: only one run at a time looks at a node and starts workers. We hold a lock on the folder of the node's
device locks (LOCKS) meanwhile, so the next run already sees the devices that our workers have locked. The lock ends
with its connection.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from orchestrator.engines import Engine
from orchestrator.errors import EngineError, LeftOutError
from orchestrator.machines.check_script import ARGV, TIMEOUT_S, read_facts
from orchestrator.machines.facts import NodeFacts
from orchestrator.machines.occupancy import Occupant, occupants, occupants_text, what_we_do
from orchestrator.transport.base import Transport
from worker.protocol import LOCKS

FIRST_S = 2.0
"""Seconds before an occupied node is checked again. Each pause is 1.5 times the one before, up to LONGEST_S."""
LONGEST_S = 30.0
TURN_S = 10
"""Seconds to wait for the lock in one call."""
LONGEST_TURN_S = 330
"""Longest time for which a run holds the lock."""
TURN = """\
command -v flock >/dev/null 2>&1 || { echo none; exit; }
folder=${GEMMFLEET_LOCKS:-$1}
(umask 0 && mkdir -m 1777 -- "$folder") 2>/dev/null
hold='echo ours; command -v timeout >/dev/null 2>&1 && exec timeout "$1" cat; exec cat'
flock -w "$2" "$folder" sh -c "$hold" sh "$3"
[ $? -eq 1 ] && echo theirs || echo none
"""
"""Shell text: prints `ours` and holds the lock until its input ends. Prints `theirs` if another run holds the lock
(flock exits with 1 after its wait), and `none` if the node has no locks. Its arguments: folder, wait, longest turn."""
ANOTHER_START = Occupant("start", "another run is starting its workers there")

Report = Callable[[str, str], None]
"""Called with our decision (wait, free, skip, share: events.NodeBusy.doing) and the reason."""


@contextmanager
def start_turn(transport: Transport, place: str) -> Iterator[str]:
    """While the context lasts, it is our turn to start workers on a node. Yields the answer of TURN."""
    channel = transport.open(["sh", "-c", TURN, "sh", place, str(TURN_S), str(LONGEST_TURN_S)])
    answer = b""
    try:
        while not answer.endswith(b"\n") and (more := channel.read(64)):
            answer += more
        yield answer.decode("ascii", "replace").strip()
    finally:
        channel.close()
        channel.error()  # whoever reads a channel calls it last


class NodeAdmission:
    """Decides when a run's workers may start on a node."""

    def __init__(
        self,
        transport: Transport,
        engine: Engine,
        mode: str,
        script: bytes,
        gpus: Callable[[NodeFacts], tuple[int, ...]],
        run: str,
        *,
        first_s: float = FIRST_S,
        place: str = LOCKS,
        locks: bool = True,
    ) -> None:
        """`mode`: wait, skip or share (occupancy.py). `script`: the brief check script of the node. `gpus`: gives the
        numbers of our GPUs from the node's facts. `first_s`: the first pause. `place`: the folder of the device locks.
        `locks`: False if a scheduler gives each GPU to only one run, so that no lock is needed."""
        self._transport = transport
        self._engine = engine
        self._mode = mode
        self._script = script
        self._gpus = gpus
        self._run = run
        self._first_s = first_s
        self._place = place
        self._locks = locks and mode != "share"
        self._shared_with: set[str] = set()

    def __call__(self, ended: threading.Event, report: Report) -> AbstractContextManager[object]:
        """Wait until the workers may start, or `ended` is set. While the context lasts, no other run starts workers.
        Raise LeftOutError, NodeError."""
        began = time.monotonic()
        pause = self._first_s
        waiting_for = frozenset[str]()
        while not self._has_workers():  # if our workers run there already, we keep the node
            with ExitStack() as turn:
                present = self._occupants_in_our_turn(turn)
                if not present:
                    if waiting_for:
                        report("free", f"it was occupied for {time.monotonic() - began:.0f} s")
                    return turn.pop_all()
            names = frozenset(occupant.id for occupant in present)
            if names != waiting_for and self.decide(present, report) == "share":
                break
            waiting_for = names
            if ended.wait(pause):
                break
            pause = min(pause * 1.5, LONGEST_S)
        return nullcontext()

    def decide(self, present: Sequence[Occupant], report: Report) -> str:
        """Report and return what we do about these occupants. Raise LeftOutError if we leave the node out. With whom
        we share it is reported once."""
        decision = "wait" if ANOTHER_START in present else what_we_do(self._mode, present)
        names = {occupant.id for occupant in present}
        if decision == "share" and names <= self._shared_with:
            return decision
        self._shared_with |= names
        report(decision, occupants_text(present))
        if decision == "skip":
            raise LeftOutError(f"{self._transport.node}: left out: {occupants_text(present)}")
        return decision

    def _occupants_in_our_turn(self, turn: ExitStack) -> tuple[Occupant, ...]:
        """Take our turn to start workers, and look who computes there. `turn` holds the lock on."""
        if self._locks and turn.enter_context(start_turn(self._transport, self._place)) == "theirs":
            return (ANOTHER_START,)
        facts = read_facts(self._transport.run(ARGV, stdin=self._script, timeout=TIMEOUT_S))
        return occupants(facts, self._gpus(facts), self._run)

    def _has_workers(self) -> bool:
        try:
            return any(w.state == "running" for w in self._engine.list())
        except EngineError:
            return False  # the start will raise the error
