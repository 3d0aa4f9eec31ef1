"""Timeouts and pauses of a controller: how long it waits for nodes, streams and workers.

drive.py puts the user's `--lost-after` and `--grace` into them (`RunContext.timeouts`). The timeouts of the policy are
in policy/settings.py, those of a scheduler's leases in leases/leased_nodes.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from worker.protocol import BEAT_S, LOST_BEATS


@dataclass(frozen=True, slots=True)
class StopLimits:
    """Limits in seconds: for workers to stop, for killed workers to end, and for everything together on a slow node."""

    stop_s: float
    kill_s: float
    limit_s: float


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Timeouts and pauses of a run, in seconds. Users set `lost` and `grace`; tests shorten the others."""

    tick: float = 0.2
    """A turn of the loop waits this long for a message."""
    view: float = 0.2
    lost: float = 90.0
    """A node that stopped answering is given up after this."""
    never_up: float = 20.0
    """A node that was never prepared successfully is given up after this long (but still tried again)."""
    starting: float = 60.0
    """The same limit for a node that has not reported anything yet."""
    grace: float = 30.0
    """Running attempts have this long to finish after the first Ctrl-C."""
    shutdown: float = 10.0
    """Workers have this long to stop at the end."""
    first_word: float = 30.0
    """A stream may take this long to begin, because a container must start for it."""
    silence: float = LOST_BEATS * BEAT_S + 1.0
    """We close a stream that is silent for this long."""
    backoff: float = 0.2
    """Pause before a node is prepared again. It doubles each time, up to `longest_backoff`."""
    longest_backoff: float = 15.0
    jitter: float = 0.3
    """Random part of this pause, so that the nodes do not all begin at once."""
    steady: float = 5.0
    """A stream that lasted this long has worked, and the pauses start again with the shortest."""
    vanished: float = 60.0
    """If an attempt is missing on its node this long after it was sent, it has vanished: the write is done by then."""
    busy: float = 2.0
    """Pause before an occupied node is checked again. Each pause is 1.5 times the one before."""
    close: float = 1.0
    """All nodes together have this long to finish their current calls when the run ends."""
    stop: StopLimits = field(default=StopLimits(5.0, 2.0, 20.0))
    """Limits for stopping workers at the end of a run."""
    cancel: StopLimits = field(default=StopLimits(3.0, 1.5, 7.0))
    """The same limits for a cancelled run. It is over within 10 s, whatever its nodes do."""
