"""A slot's side of the node folder: its inbox of specs, requests to stop or cancel, the epoch, and its locks.

The slot that renames a spec out of `inbox/` owns it; losing that race is normal. A claimed spec is in `claimed/<slot>/`
until its end is recorded, then in `attempts/<attempt>/`. Loops call `Control.tick` in every turn; it also touches the
slot's heartbeat.

A worker holds two locks (flock) until it ends: its slot's in the node folder, and its device's on the host. So only one
run at a time measures on a GPU, or on the cores, even if the runs have different work folders. The devices' locks are
files in one folder that every user of the host may open (LOCKS). A lock file names its owner for the others. If a
worker cannot open the file, another user may hold it: the device counts as occupied.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pwd
import signal
import stat
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from worker.agent.records import FULL
from worker.process import signal_name
from worker.protocol import LOCKS, LOCKS_ENV, MAX_SPEC_BYTES, InboxName, NodeConfig, NodePaths, ProtocolError, Spec
from worker.text import clean

BEAT_EVERY_S = 1.0
DRAIN, NOW = "drain", "now"


class SpecRejectedError(Exception):
    """A claimed spec will not be run; the text says why."""


class Inbox:
    """One slot's side of the inbox."""

    def __init__(self, paths: NodePaths, slot: str) -> None:
        self._paths = paths
        self._slot = slot

    def claim(self, *, canaries_only: bool = False) -> InboxName | None:
        """Claim the first spec that this slot may take, if there is one.

        `canaries_only`: take only specs of kind canary that name this slot. The kind is not in the file's name, so
        these specs are read before they are claimed.
        """
        for text in sorted(os.listdir(self._paths.inbox)):
            name = InboxName.parse(text)
            if name is None or not name.claimable_by(self._slot):
                continue
            if canaries_only and not (name.slot == self._slot and self._is_canary(text)):
                continue
            try:
                os.rename(self._paths.inbox / text, self.path(name))
            except FileNotFoundError:  # another slot was faster
                continue
            return name
        return None

    def path(self, claim: InboxName) -> Path:
        """The file of a spec that this slot has claimed."""
        return self._paths.claimed(self._slot) / str(claim)

    def claimed(self) -> list[InboxName]:
        """Specs that this slot has claimed, in order."""
        names = map(InboxName.parse, sorted(os.listdir(self._paths.claimed(self._slot))))
        return [name for name in names if name]

    def put_away(self, claim: InboxName, as_name: str = "spec.json") -> None:
        """Move a claimed spec into its attempt's folder, where `spec.json` marks the attempt as ended."""
        folder = self._paths.attempt(claim.attempt)
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / as_name
        if os.path.lexists(target):
            target = folder / f"{claim.seq:08d}.{as_name}"
        os.rename(self.path(claim), target)

    def _is_canary(self, text: str) -> bool:
        """Return whether a waiting spec is a canary. An unreadable spec counts too: it is claimed and then refused."""
        try:
            return Spec.loads(read_spec(self._paths.inbox / text)).kind == "canary"
        except FileNotFoundError:
            return False
        except (OSError, ProtocolError, SpecRejectedError):
            return True


def read_spec(path: Path) -> bytes:
    """The bytes of a spec. Raises OSError, or SpecRejectedError if it is not a plain file or too large."""
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


def accept(path: Path, attempt: str, config: NodeConfig, epoch: int) -> tuple[Spec, bytes]:
    """A claimed spec, and its bytes on one line. Raises SpecRejectedError, which says why not to run it."""
    try:
        data = read_spec(path)
        spec = Spec.loads(data)
    except OSError as e:
        raise SpecRejectedError(f"the spec cannot be read: {e.strerror}") from e
    except ProtocolError as e:
        raise SpecRejectedError(str(e)) from e
    if spec.attempt != attempt:
        raise SpecRejectedError(f"the spec is of attempt {spec.attempt}, its file of {attempt}")
    if spec.run != config.run:
        raise SpecRejectedError(f"the spec is of run {spec.run!r}, this node works for {config.run!r}")
    if spec.epoch < epoch:
        raise SpecRejectedError(f"the spec is of controller {spec.epoch}, the node listens to {epoch}")
    if spec.tuner and spec.tuner != config.tuner:
        raise SpecRejectedError(f"the spec asks for tuner {spec.tuner}, this worker holds {config.tuner}")
    return spec, data.replace(b"\n", b" ").replace(b"\r", b" ")


class Control:
    """Requests to this slot. Call `tick` in every turn of a loop. `stop`: "", `drain` (finish the attempt) or `now`."""

    def __init__(self, paths: NodePaths, slot: str, *, beats: bool = True) -> None:
        self._paths = paths
        self._beat = paths.beat(slot) if beats else None
        self._next_beat = 0.0
        self.stop = ""
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
        if self.stop != NOW and (word := read_stop(self._paths)):
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


MAX_OWNER = 200
LOCK_PATIENCE_S = 2.0  # `worker follow` holds a slot's lock for an instant to see whether the agent lives


class SlotTakenError(Exception):
    """Another agent holds the slot."""


class DeviceLock:
    """The lock of one device. `owner`: the content of the file while we hold the lock."""

    def __init__(self, name: str, owner: str) -> None:
        self._path = Path(os.environ.get(LOCKS_ENV) or LOCKS).absolute() / name
        self._owner = owner
        self._fd = -1
        self.holder = ""
        """The owner that the last `take` found (RUN/NODE), or a sentence that begins with the path of a closed lock."""

    @property
    def is_closed(self) -> bool:
        """Return whether the last `take` could not open the file, so that nobody knows who measures there."""
        return self.holder.startswith("/")

    def take(self) -> bool:
        """Take the lock if nobody holds it, and return whether it is ours. Raises OSError if the file system has no
        locks."""
        if self._fd >= 0:
            return True
        try:
            fd = self._open()
        except OSError as e:
            self.holder = f"{_place_and_owner(self._path)} ({e.strerror})"
            return False
        if not _locked(fd):
            self.holder = clean(os.pread(fd, MAX_OWNER, 0).decode(errors="replace"))
            os.close(fd)
            return False
        self._fd = fd  # not inherited, so a tuner's process cannot keep the device after its worker is gone
        with suppress(OSError):  # on a full disk the others read no name
            os.ftruncate(fd, 0)
            os.pwrite(fd, self._owner.encode()[:MAX_OWNER], 0)
        return True

    def _open(self) -> int:
        """Open the file, or create it for all users. Raises OSError, also for what is not a regular file."""
        # without O_CREAT: the kernel refuses it in a sticky folder for a file of another user (fs.protected_regular)
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        before = os.umask(0)
        try:
            self._path.parent.mkdir(0o1777, exist_ok=True)
            try:
                fd = os.open(self._path, flags)
            except FileNotFoundError:
                fd = os.open(self._path, flags | os.O_CREAT, 0o666)
        finally:
            os.umask(before)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "it is not a regular file")
        return fd


def _place_and_owner(path: Path) -> str:
    """`PATH of OWNER, mode 600`: of the file, or of its folder if the file is not there or cannot be seen."""
    for place in (path, path.parent):
        with suppress(OSError):
            info = place.lstat()
            owner = f"user {info.st_uid}"
            with suppress(KeyError):
                owner = pwd.getpwuid(info.st_uid).pw_name
            return f"{place} of {owner}, mode {stat.S_IMODE(info.st_mode):o}"
    return str(path)


def lock_slot(path: Path) -> int:
    """Lock the slot's lock file and write our pid into it. Raises SlotTakenError after LOCK_PATIENCE_S.

    The descriptor is not inherited, so the tuner's process cannot keep the slot after the agent is gone.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    until = time.monotonic() + LOCK_PATIENCE_S
    while not _locked(fd):
        if time.monotonic() > until:
            holder = os.pread(fd, 20, 0).decode(errors="replace").partition("\n")[0].strip() or "unknown"
            os.close(fd)
            raise SlotTakenError(f"slot {path.parent.name} has an agent already (process {holder})")
        time.sleep(0.02)
    sign(fd)
    return fd


def sign(fd: int, waits_for: str = "") -> None:
    """Write into the slot's lock file: our process id, and below it the `holder` of the device that we wait for."""
    os.ftruncate(fd, 0)
    try:
        os.pwrite(fd, f"{os.getpid()}\n{waits_for}".encode(), 0)
    except OSError as e:
        if e.errno not in FULL:
            raise


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
