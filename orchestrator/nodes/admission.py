"""Admission of a run's workers to a node: waits while it is occupied, skips it, or shares it (`--busy`). Of several
runs only one at a time checks a node and starts its workers: it holds the folder of the node's device locks (LOCKS)
meanwhile, which ends with its connection. So the other runs see the devices that its workers locked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

from orchestrator.engines import Engine
from orchestrator.errors import EngineError, LeftOutError
from orchestrator.nodes.facts import ARGV, TIMEOUT_S, NodeFacts, read_facts
from orchestrator.nodes.occupancy import Occupant, occupants, occupants_text
from orchestrator.transport import Channel, Transport
from worker.protocol import LOCKS

FIRST_S, LONGEST_S = 2.0, 30.0
"""Pause before an occupied node is checked again; each is half as long again as the one before."""

TURN_S, LONGEST_TURN_S = 10, 330
"""Time that the lock is waited for at once, and the longest time that it is held, in seconds."""
TURN = """\
command -v flock >/dev/null 2>&1 || { echo none; exit; }
folder=${GEMMFLEET_LOCKS:-$1}
(umask 0 && mkdir -m 1777 -- "$folder") 2>/dev/null
hold='echo ours; command -v timeout >/dev/null 2>&1 && exec timeout "$1" cat; exec cat'
flock -w "$2" "$folder" sh -c "$hold" sh "$3"
[ $? -eq 1 ] && echo theirs || echo none
"""
"""Prints `ours` and holds the lock until its input ends; `theirs`: another run holds it; `none`: no locks there."""
ANOTHER_START = Occupant("start", "another run is starting its workers there")

Report = Callable[[str, str], None]
"""Called with what is done (wait, free, skip, share), and why."""


class StartLock:
    """Lock on a node; held, if its answer is `ours`, until it is closed."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def answer(self) -> str:
        answer = b""
        while not answer.endswith(b"\n") and (more := self._channel.read(64)):
            answer += more
        return answer.decode("ascii", "replace").strip()

    def close(self) -> None:
        self._channel.close()
        self._channel.error()

    def __enter__(self) -> StartLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class NodeAdmission:
    """Admission to one node of a run. `gpus`: from the node's facts to the numbers of its GPUs that are ours. `locks`:
    False where a scheduler lends each GPU to one run alone."""

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
        self._transport, self._engine, self._mode, self._script = transport, engine, mode, script
        self._locks = locks and mode != "share"
        self._gpus, self._run, self._first_s, self._place = gpus, run, first_s, place

    def __call__(self, ended: threading.Event, report: Report) -> AbstractContextManager[object]:
        """Wait until the workers may start, or `ended` is set; while the context lasts no other run starts. Raise
        LeftOutError, NodeError."""
        if self._ours_run():
            return nullcontext()  # a node that already runs our workers is not given up for others
        began, waiting = time.monotonic(), frozenset[str]()
        for pause in _pauses(self._first_s):
            turn = self._take_turn() if self._locks else None
            try:
                found = (turn,) if isinstance(turn, Occupant) else self._look()
            except BaseException:
                if isinstance(turn, StartLock):
                    turn.close()
                raise
            names = frozenset(o.id for o in found)
            if not found:
                if waiting:
                    report("free", f"it was occupied for {time.monotonic() - began:.0f} s")
                return turn if isinstance(turn, StartLock) else nullcontext()
            if isinstance(turn, StartLock):
                turn.close()
            if self._mode == "share":
                report("share", occupants_text(found))
                return nullcontext()
            if self._mode == "skip" and not isinstance(turn, Occupant):
                report("skip", occupants_text(found))
                raise LeftOutError(f"{self._transport.node}: left out (--busy skip): {occupants_text(found)}")
            if names != waiting:
                report("wait", occupants_text(found))
                waiting = names
            if ended.wait(pause):
                break
        return nullcontext()

    def _take_turn(self) -> StartLock | Occupant | None:
        """The lock, held until closed; ANOTHER_START where another run has it; None where the node has no locks."""
        words = [self._place, str(TURN_S), str(LONGEST_TURN_S)]
        turn = StartLock(self._transport.open(["sh", "-c", TURN, "sh", *words]))
        answer = turn.answer()
        if answer == "ours":
            return turn
        turn.close()
        return ANOTHER_START if answer == "theirs" else None

    def _look(self) -> tuple[Occupant, ...]:
        facts = read_facts(self._transport.run(ARGV, stdin=self._script, timeout=TIMEOUT_S))
        return occupants(facts, self._gpus(facts), self._run)

    def _ours_run(self) -> bool:
        try:
            return any(w.state == "running" for w in self._engine.list())
        except EngineError:
            return False  # the start raises what is wrong with it


def _pauses(first_s: float) -> Iterator[float]:
    pause = first_s
    while True:
        yield pause
        pause = min(pause * 1.5, LONGEST_S)
