"""The small files in which the controller tells a node what to do: stop, cancel, the epoch, and node.json.

`Control` has the requests to one slot; loops call `Control.tick` in every turn, which also touches the slot's
heartbeat. The epoch is the number of the controller that the node listens to; an older one's specs are rejected.
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

from worker.process import signal_name
from worker.protocol import NodeConfig, NodePaths

BEAT_EVERY_S = 1.0
DRAIN = "drain"
"""Request to stop: finish the attempt first."""
NOW = "now"
"""Request to stop: end the attempt."""


class Control:
    """Requests to this slot. Call `tick` in every turn of a loop."""

    def __init__(self, paths: NodePaths, slot: str, *, beats: bool = True) -> None:
        self._paths = paths
        self._beat = paths.beat(slot) if beats else None
        self._next_beat = 0.0
        self.stop = ""
        """"", DRAIN or NOW."""
        self.why = ""
        """The source of the request to stop, for the log."""

    def take_signals(self) -> None:
        """Let SIGTERM and SIGINT mean: stop now."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
        # with an inherited SIG_IGN the kernel would reap the tuner's process, and we would lose its exit status
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def tick(self) -> None:
        """Touch the heartbeat file when it is due, and look for a request to stop."""
        now = time.monotonic()
        if self._beat and now >= self._next_beat:
            self._next_beat = now + BEAT_EVERY_S
            try:
                os.utime(self._beat)
            except FileNotFoundError:
                self._beat.touch()
        if self.stop == NOW:
            return
        word = read_stop(self._paths)
        if word:
            self.stop = NOW if word == NOW else DRAIN
            self.why = f"control/stop says {self.stop}"

    def cancelled(self, attempt: str) -> bool:
        """Return whether there is a request to end this attempt."""
        return os.path.lexists(self._paths.cancel(attempt))

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.stop = NOW
        self.why = signal_name(number)


def read_stop(paths: NodePaths) -> str:
    """The word in control/stop, "" if there is no such file."""
    try:
        return paths.stop.read_bytes()[:64].decode(errors="replace").strip() or DRAIN
    except FileNotFoundError:
        return ""


def read_epoch(paths: NodePaths) -> int:
    """Number of the controller that this node obeys, 0 if there was none yet."""
    try:
        return int(paths.epoch.read_bytes()[:64])
    except (FileNotFoundError, ValueError):
        return 0


def read_config(paths: NodePaths) -> NodeConfig:
    """node.json, or the defaults where the folder has none. Raises OSError, ProtocolError."""
    try:
        return NodeConfig.loads(paths.config.read_bytes())
    except FileNotFoundError:
        return NodeConfig(run="by-hand", node="", tuner="")
