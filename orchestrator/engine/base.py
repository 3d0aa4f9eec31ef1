"""Interface of every engine, and the state of a worker."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A slot's worker as its engine sees it: running, ended (with a code) or absent."""

    slot: str
    state: str
    code: int | None = None
    oom_killed: bool = False
    """Whether the kernel ended a process of it for memory."""
    signal: int | None = None
    """Signal that ended it, where one did."""
    started_at: float | None = None
    """Epoch seconds."""
    restarts: int = 0
    """Times that the engine itself started it again."""
    health: str = ""
    """State as the engine names it: running, restarting, paused, healthy, exited, ..."""

    @property
    def why(self) -> str:
        """Sentence on how it ended; empty while it runs."""
        if self.state != "ended":
            return ""
        memory = "out of memory" if self.oom_killed else ""
        if self.signal is not None:
            try:
                name = signal.Signals(self.signal).name
            except ValueError:
                name = f"signal {self.signal}"
            return f"killed by {name}" + (f" ({memory})" if memory else "")
        return f"ended with code {self.code}" + (f" ({memory})" if memory else "")


class Engine(Protocol):
    """Starts, lists and stops the workers of one node folder; nothing else."""

    def prepare(self) -> None:
        """Do what may take long before workers can be started (pull an image); starts nothing."""
        ...

    def start(self, slots: Sequence[str] = (), env: Mapping[str, str] | None = None) -> None:
        """Start the workers that do not run (all slots by default); safe to repeat."""
        ...

    def hold(self) -> None:
        """Make ready for commands that are run by tune.sh while no worker is there; `tidy` undoes it."""
        ...

    def list(self) -> list[WorkerState]: ...

    def stop(self, *, kill: bool = False) -> None:
        """End all workers: ask (they close their books), or kill."""
        ...

    def tidy(self) -> None:
        """Remove what the closed run left in the engine itself (containers); files stay."""
        ...

    def close(self) -> None:
        """Give back what it holds here; the workers go on."""
        ...
