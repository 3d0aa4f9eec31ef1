"""Inbox of a slot in the node folder: the controller's specs, its requests to stop or cancel, and its epoch.

The slot that renames a spec out of `inbox/` owns it; losing that race is normal. A claimed spec lies in
`claimed/<slot>/` until its end is recorded, then in `attempts/<attempt>/`. Loops call `Control.tick` in every turn;
it touches the slot's heartbeat, too.
"""

from __future__ import annotations

import os
import signal
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from worker.process import signal_name
from worker.protocol import MAX_SPEC_BYTES, InboxName, NodePaths, ProtocolError, Spec

BEAT_EVERY_S = 1.0
DRAIN, NOW = "drain", "now"


@dataclass(frozen=True, slots=True)
class Claim:
    """A spec that is this slot's to run."""

    name: InboxName
    path: Path


class SpecRejectedError(Exception):
    """A claimed spec that will not be run; the text says why."""


class Inbox:
    """One slot's side of the inbox."""

    def __init__(self, paths: NodePaths, slot: str) -> None:
        self._paths = paths
        self._slot = slot
        self._no_canary: set[str] = set()

    def claim(self, *, canaries_only: bool = False) -> Claim | None:
        """Claim the first spec that this slot may take, None if there is none.

        `canaries_only`: none but specs of kind canary that name this slot. The kind is not in the name, so
        that those specs are read before they are claimed.
        """
        for text in sorted(os.listdir(self._paths.inbox)):
            name = InboxName.parse(text)
            if name is None or not name.claimable_by(self._slot):
                continue
            if canaries_only and not (name.slot == self._slot and self._is_canary(text)):
                continue
            path = self._paths.claimed(self._slot) / text
            try:
                os.rename(self._paths.inbox / text, path)
            except FileNotFoundError:  # another slot was faster
                continue
            return Claim(name, path)
        return None

    def claimed(self) -> list[Claim]:
        """Specs that this slot has claimed, in order."""
        folder = self._paths.claimed(self._slot)
        names = [(text, InboxName.parse(text)) for text in sorted(os.listdir(folder))]
        return [Claim(name, folder / text) for text, name in names if name]

    def put_away(self, claim: Claim, as_name: str = "spec.json") -> None:
        """Move a claimed spec into its attempt's folder, where `spec.json` marks the attempt as ended."""
        folder = self._paths.attempt(claim.name.attempt)
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / as_name
        if os.path.lexists(target):
            target = folder / f"{claim.name.seq:08d}.{as_name}"
        os.rename(claim.path, target)

    def _is_canary(self, text: str) -> bool:
        """True for a waiting spec that is a canary. One that cannot be read counts: it is claimed to be refused."""
        if text in self._no_canary:
            return False
        try:
            if Spec.loads(read_spec(self._paths.inbox / text)).kind == "canary":
                return True
        except FileNotFoundError:
            return False
        except (OSError, ProtocolError, SpecRejectedError):
            return True
        self._no_canary.add(text)
        return False


def read_spec(path: Path) -> bytes:
    """The bytes of a spec. Raises OSError, or SpecRejectedError for no plain file or one too large."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise SpecRejectedError("the spec is not a regular file")
        if info.st_size > MAX_SPEC_BYTES:
            raise SpecRejectedError(f"the spec is larger than {MAX_SPEC_BYTES} bytes")
        with os.fdopen(fd, "rb", closefd=False) as f:
            return f.read(MAX_SPEC_BYTES + 1)
    finally:
        os.close(fd)


def accept(claim: Claim, *, run: str, epoch: int, tuner: str) -> tuple[Spec, bytes]:
    """A claim's spec and its bytes on one line. Raises SpecRejectedError with the reason not to run it."""
    try:
        data = read_spec(claim.path)
        spec = Spec.loads(data)
    except OSError as e:
        raise SpecRejectedError(f"the spec cannot be read: {e.strerror}") from e
    except ProtocolError as e:
        raise SpecRejectedError(str(e)) from e
    if spec.attempt != claim.name.attempt:
        raise SpecRejectedError(f"the spec is of attempt {spec.attempt}, its file of {claim.name.attempt}")
    if spec.run != run:
        raise SpecRejectedError(f"the spec is of run {spec.run!r}, this node works for {run!r}")
    if spec.epoch < epoch:
        raise SpecRejectedError(f"the spec is of controller {spec.epoch}, the node listens to {epoch}")
    if spec.tuner and spec.tuner != tuner:
        raise SpecRejectedError(f"the spec asks for tuner {spec.tuner}, this worker holds {tuner}")
    return spec, data.replace(b"\n", b" ").replace(b"\r", b" ")


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
        """True where there is a request to end this attempt."""
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
