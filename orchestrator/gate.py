"""The gate before a node's workers start: waits, leaves the node out, or lets them in beside others (`--busy`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from orchestrator.busy import Other, in_words, others
from orchestrator.engine import Engine
from orchestrator.errors import EngineError, LeftOutError
from orchestrator.nodefacts import ARGV, TIMEOUT_S, Facts, read_facts
from orchestrator.transport import Transport

FIRST_S, LONGEST_S = 2.0, 30.0
"""The pause before a busy node is asked again; each is half as long again as the one before."""

Tell = Callable[[str, str], None]
"""Told what is done (wait, free, skip, share), and why."""


class Gate:
    """For one node of a run. `gpus`: from what the node says to the numbers of its GPUs that are ours."""

    def __init__(
        self,
        transport: Transport,
        engine: Engine,
        mode: str,
        script: bytes,
        gpus: Callable[[Facts], tuple[int, ...]],
        run: str,
        *,
        first_s: float = FIRST_S,
    ) -> None:
        self._transport, self._engine, self._mode, self._script = transport, engine, mode, script
        self._gpus, self._run, self._first_s = gpus, run, first_s

    def __call__(self, closing: threading.Event, tell: Tell) -> None:
        """Returns when the workers may start, or `closing` is set. Raises LeftOutError, NodeError."""
        if self._ours_run():
            return  # a node that already works for us is not left for others
        began, waiting = time.monotonic(), frozenset[str]()
        for pause in _pauses(self._first_s):
            found = self._look()
            names = frozenset(o.id for o in found)
            if not found:
                if waiting:
                    tell("free", f"others computed there for {time.monotonic() - began:.0f} s")
                return
            if self._mode == "share":
                tell("share", in_words(found))
                return
            if self._mode == "skip":
                tell("skip", in_words(found))
                raise LeftOutError(f"{self._transport.node}: left out (--busy skip): {in_words(found)}")
            if names != waiting:
                tell("wait", in_words(found))
                waiting = names
            if closing.wait(pause):
                return

    def _look(self) -> tuple[Other, ...]:
        facts = read_facts(self._transport.run(ARGV, stdin=self._script, timeout=TIMEOUT_S))
        return others(facts, self._gpus(facts), self._run)

    def _ours_run(self) -> bool:
        try:
            return any(w.state == "running" for w in self._engine.list())
        except EngineError:
            return False  # starting will say what is wrong with it


def _pauses(first_s: float) -> Iterator[float]:
    pause = first_s
    while True:
        yield pause
        pause = min(pause * 1.5, LONGEST_S)
