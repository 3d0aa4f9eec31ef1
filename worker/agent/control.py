"""Control of a running agent: requests to stop or cancel, the epoch, signals; and its heartbeat."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

from worker.process import signal_name
from worker.protocol import NodePaths

BEAT_EVERY_S = 1.0
DRAIN, NOW = "drain", "now"


class Control:
    """Call `tick` in every turn of a loop. `stop` is "", `drain` (finish the attempt) or `now`."""

    def __init__(self, paths: NodePaths, slot: str, *, beats: bool = True) -> None:
        self._paths = paths
        self._beat = paths.beat(slot) if beats else None
        self._next_beat = 0.0
        self.stop = ""
        self.why = ""
        """Origin of the request to stop, for the log."""

    def take_signals(self) -> None:
        """SIGTERM and SIGINT mean: stop now."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
        # an inherited SIG_IGN would have the kernel reap the tuner's process, and its exit status with it
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def tick(self) -> None:
        """Touch the heartbeat file when it is due, look for a request to stop."""
        now = time.monotonic()
        if self._beat and now >= self._next_beat:
            self._next_beat = now + BEAT_EVERY_S
            try:
                os.utime(self._beat)
            except FileNotFoundError:
                self._beat.touch()
        if self.stop != NOW:
            self._read_stop()

    def cancelled(self, attempt: str) -> bool:
        """Whether there is a request to end this attempt."""
        return os.path.lexists(self._paths.cancel(attempt))

    def forget_cancel(self, attempt: str) -> None:
        """Remove the request once it was carried out."""
        self._paths.cancel(attempt).unlink(missing_ok=True)

    def epoch(self) -> int:
        """Number of the controller that this node obeys, 0 for none yet."""
        return read_epoch(self._paths)

    def _read_stop(self) -> None:
        word = read_stop(self._paths)
        if word:
            self.stop = NOW if word == NOW else DRAIN
            self.why = f"control/stop says {self.stop}"

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.stop = NOW
        self.why = signal_name(number)


def read_stop(paths: NodePaths) -> str:
    """The word in control/stop, "" where there is no such file."""
    try:
        return paths.stop.read_bytes()[:64].decode(errors="replace").strip() or DRAIN
    except FileNotFoundError:
        return ""


def read_epoch(paths: NodePaths) -> int:
    """The number in the epoch file, 0 where there is none."""
    try:
        return int(paths.epoch.read_bytes()[:64])
    except (FileNotFoundError, ValueError):
        return 0
