"""Settings and observers of the controller: timeouts, the constant part of specs, who is shown its progress."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from orchestrator.events import Record
from orchestrator.status import RunStatus


class Watcher(Protocol):
    """Display of a run, updated a few times a second."""

    def update(self, status: RunStatus) -> None: ...
    def note(self, text: str, *, bad: bool = False) -> None: ...


class JournalObserver(Protocol):
    """Live status of a run: fed the journal and what nodes report beside it (orchestrator/run/view/status.py)."""

    def feed(self, t: float, record: Record) -> None: ...
    def progress(self, node: str, detail: str) -> None: ...
    def trouble(self, node: str, detail: str, *, on_record: bool = False) -> None: ...
    def take_notes(self) -> list[tuple[str, bool]]: ...
    def status(self, now: float) -> RunStatus: ...


@dataclass(frozen=True, slots=True)
class SpecOptions:
    """Constant part of every spec of a run."""

    run: str
    family: str
    tuner: str
    watchdog_s: float
    err_ratio: float
    options: dict[str, object]


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Timeouts of a run, in seconds."""

    tick: float = 0.2
    view: float = 0.2
    lost: float = 90.0
    """A node that stopped answering is given up after this."""
    never_up: float = 20.0
    """A node that could not be prepared even once is given up after this long (and still tried again)."""
    starting: float = 60.0
    """The same for a node that has reported nothing at all yet."""
    grace: float = 30.0
    """Time for running attempts after the first Ctrl-C."""
    shutdown: float = 10.0
    """Time for workers to stop at the end."""


class Interrupts:
    """Number of Ctrl-C so far, read by the loop."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *_: object) -> None:
        self.count += 1
