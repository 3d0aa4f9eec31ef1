"""Stream of a node: records and logs of its slots from given offsets on, and a heartbeat.

Frames are as in worker.protocol. Reads only; any number may run beside the workers. It keeps each file open
and sends what was added: records up to their last whole line, log bytes as they are, at most CHUNK bytes a
frame. It ends when its stdin or stdout is closed. inotify tells it of changes, by ctypes, for Python has no module
for it. It tells only of what this kernel itself writes, and each user has a limited number of instances
(fs.inotify.max_user_instances): where it does not tell, the files are polled.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import stat
import struct
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from worker.agent.inbox import read_epoch, read_stop
from worker.protocol import BEAT_S, MAX_RECORD_BYTES, SLOT_RE, InboxName, NodePaths

MODIFY, MOVED_TO, CREATE, OVERFLOW = 0x2, 0x80, 0x100, 0x4000
NEW_NAMES = MOVED_TO | CREATE | OVERFLOW
"""Of what `wait` returns: there may be files that were not there before."""
GATHER_S = 0.002
"""Changes so close together are told of at once."""
_EVENT = struct.Struct("iIII")
"""Watch, mask, cookie, length of the name that follows."""


class Changes:
    """Changes of the files in folders, from now on."""

    def __init__(self, folders: Iterable[Path]) -> None:
        """Raise OSError where the kernel does not tell of them."""
        try:
            from ctypes import CDLL, get_errno

            libc = CDLL(None, use_errno=True)
            self._fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            if self._fd < 0:
                raise OSError(get_errno(), "inotify_init1")
        except (ImportError, AttributeError) as e:
            raise OSError(f"no inotify: {e}") from e
        for folder in folders:
            if libc.inotify_add_watch(self._fd, os.fsencode(folder), MODIFY | MOVED_TO | CREATE) < 0:
                number = get_errno()
                self.close()
                raise OSError(number, f"inotify_add_watch {folder}")
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def close(self) -> None:
        os.close(self._fd)

    def wait(self, seconds: float) -> int:
        """Wait for a change; return the kinds of all until now (MODIFY, ...), 0 where none came in time."""
        if not self._poll.poll(1000.0 * max(0.0, seconds)):
            return 0
        time.sleep(GATHER_S)
        seen = 0
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._fd, 65536):
                at = 0
                while at < len(data):
                    _, mask, _, length = _EVENT.unpack_from(data, at)
                    seen |= mask
                    at += _EVENT.size + length
        return seen


CHUNK = MAX_RECORD_BYTES
"""Small, because the controller queues frames by number; not smaller, so that every record fits."""
FOLDERS = ("events", "logs", "claimed")
POLL_S, POLL_SLOW_S, POLL_FAST_FOR_S = 0.01, 0.05, 2.0
LOOK_S = 0.25
"""Seconds between searches for new slots and files, where the kernel does not tell of them."""


@dataclass(slots=True)
class Followed:
    """One file, the offset up to which it was sent, and its fault if any."""

    path: Path
    whole_lines: bool
    offset: int = 0
    fd: int = -1
    error: str = ""

    def open(self) -> None:
        """Open it if it is there by now; only a regular file is read."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        except OSError as e:
            self.error = f"{self.path.name}: {e.strerror}"
            return
        if stat.S_ISREG(os.fstat(fd).st_mode):
            self.fd = fd
        else:
            os.close(fd)
            self.error = f"{self.path.name} is not a regular file"

    def read(self) -> bytes:
        """The next bytes to send, b"" where there are none (yet). Does not move the offset."""
        if self.fd < 0 or self.error:
            return b""
        size = os.fstat(self.fd).st_size
        if size < self.offset:
            self.error = f"{self.path.name} shrank from {self.offset} to {size} bytes"
            return b""
        if size == self.offset:
            return b""
        data = os.pread(self.fd, min(CHUNK, size - self.offset), self.offset)
        if not self.whole_lines:
            return data
        end = data.rfind(b"\n") + 1
        # no record is longer than a chunk: such a line is damage, and is passed on for the reader to report
        return data[:end] if end or len(data) < CHUNK else data


@dataclass(slots=True)
class Stream:
    """All files of a node, in turn."""

    paths: NodePaths
    slots: Sequence[str] = ()
    """Slots to follow; empty: all there are, also those that appear later."""
    start: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    files: dict[tuple[str, str], Followed] = field(default_factory=dict)

    def look(self) -> None:
        """Find new slots, open files that have appeared."""
        for slot in self.slots or self._slots_there():
            for kind, path in (("E", self.paths.events(slot)), ("L", self.paths.log(slot))):
                if (kind, slot) not in self.files:
                    offset = self.start.get(kind, {}).get(slot, 0)
                    self.files[kind, slot] = Followed(path, kind == "E", offset)
        for followed in self.files.values():
            if followed.fd < 0 and not followed.error:
                followed.open()

    def folders(self) -> list[Path]:
        """Folders in which slots and files appear, and whose files are sent."""
        return [self.paths.root / name for name in FOLDERS]

    def frames(self) -> Iterator[bytes]:
        """One frame of every file that has something new, records first."""
        for (kind, slot), followed in sorted(self.files.items()):
            data = followed.read()
            if data:
                yield f"{kind} {slot} {followed.offset} {len(data)}\n".encode() + data
                followed.offset += len(data)

    def beat(self, now: float) -> bytes:
        """The beat's frame. alive: an agent holds the slot's lock; age: seconds since it touched its beat; waits: the
        owner (RUN/NODE) of the device that it waits for, if it does; held: the attempts that wait or are claimed, left
        out while there are records to send."""
        beat: dict[str, Any] = {"t": now, "epoch": read_epoch(self.paths), "stop": read_stop(self.paths) or None}
        beat["slots"] = {
            slot: {"alive": is_alive(self.paths, slot), "age": _age(self.paths, slot, now)}
            for slot in sorted({slot for _, slot in self.files})
        }
        for slot, state in beat["slots"].items():
            if state["alive"] and (owner := _waits(self.paths, slot)):
                state["waits"] = owner
        held = held_attempts(self.paths)
        # in this order: an attempt's end is in the file before it leaves the folder
        if not any(f.read() for (kind, _), f in self.files.items() if kind == "E"):
            beat["held"] = sorted(held)
        errors = [f.error for f in self.files.values() if f.error]
        if errors:
            beat["error"] = "; ".join(errors)
        data = json.dumps(beat, separators=(",", ":")).encode()
        return b"B %d\n" % len(data) + data

    def _slots_there(self) -> list[str]:
        found: set[str] = set()
        for folder in self.folders():
            try:
                names = os.listdir(folder)
            except FileNotFoundError:
                continue
            found |= {n.partition(".")[0] for n in names}
        return sorted(s for s in found if SLOT_RE.match(s))


def held_attempts(paths: NodePaths) -> set[str]:
    """Attempts in the inbox or claimed by a slot; what moves from one to the other meanwhile is seen."""
    held = set()
    for folder in (paths.inbox, *_claim_folders(paths)):
        try:
            names = [InboxName.parse(n) for n in os.listdir(folder)]
        except OSError:
            continue
        held |= {n.attempt for n in names if n}
    return held


def _claim_folders(paths: NodePaths) -> list[Path]:
    try:
        return [paths.claimed(n) for n in os.listdir(paths.root / "claimed") if SLOT_RE.match(n)]
    except OSError:
        return []


def is_alive(paths: NodePaths, slot: str) -> bool:
    """True where an agent holds the slot's lock. A shared lock for an instant: agents try theirs for a while."""
    try:
        fd = os.open(paths.lock(slot), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False


def _waits(paths: NodePaths, slot: str) -> str:
    """Owner of the device that a slot's agent waits for (worker.agent.loop.sign)."""
    try:
        return paths.lock(slot).read_text(errors="replace").partition("\n")[2][:200]
    except OSError:
        return ""


def follow(stream: Stream, out: int, changes: Changes | None = None, beat_s: float = BEAT_S) -> None:
    """Send frames to `out` until that fails (BrokenPipeError). `changes`: those in the stream's folders; without them,
    or once there was one that they did not tell of, the files are polled. `beat_s`: seconds between beats."""
    next_beat = next_look = moved = 0.0
    told = NEW_NAMES
    while True:
        now = time.monotonic()
        if now >= next_look or told & NEW_NAMES:
            stream.look()
            next_look = now + (LOOK_S if changes is None else BEAT_S)
        if now >= next_beat:
            _send(out, stream.beat(time.time()))
            next_beat = now + beat_s
        sent = False
        for frame in stream.frames():
            _send(out, frame)
            sent = True
        if changes is None:
            told = 0
            if sent:
                moved = now
            else:
                time.sleep(POLL_S if now - moved < POLL_FAST_FOR_S else POLL_SLOW_S)
        elif sent and told:
            told = MODIFY  # a file may have more than a frame takes
        elif sent:
            told = changes.wait(POLL_S)
            if not told:  # another machine writes, and this kernel does not see it
                changes.close()
                changes = None
        else:
            told = changes.wait(min(next_look, next_beat) - time.monotonic())


def parse_start(text: str) -> dict[str, dict[str, int]]:
    """Offsets from `{"E":{"0":123},"L":{"0":45}}`. Raises ValueError."""
    raw = json.loads(text)
    for kind, offsets in raw.items() if isinstance(raw, dict) else (("", None),):
        if kind not in ("E", "L") or not isinstance(offsets, dict):
            raise ValueError('offsets look like {"E":{"0":123},"L":{"0":45}}')
        for slot, offset in offsets.items():
            if not SLOT_RE.match(slot) or type(offset) is not int or offset < 0:
                raise ValueError(f"{offset!r} is not an offset of slot {slot!r}")
    return dict(raw)


def main(node_dir: Path, slots: Sequence[str], start: str) -> int:
    """Follow on stdout until stdin or stdout is closed. Status 2: the arguments are wrong."""
    try:
        stream = Stream(NodePaths(node_dir), slots, parse_start(start))
        if not node_dir.is_dir():
            raise ValueError(f"{node_dir} is not a folder")
    except ValueError as e:
        print(f"worker follow: {e}", file=sys.stderr)
        return 2
    threading.Thread(target=_exit_with_stdin, daemon=True).start()
    changes: Changes | None = None
    with contextlib.suppress(OSError):
        changes = Changes(stream.folders())
    try:
        follow(stream, sys.stdout.fileno(), changes)
    except (BrokenPipeError, KeyboardInterrupt):
        pass
    os._exit(0)  # the thread may sit in a read that would hold a clean exit up


def _exit_with_stdin() -> None:
    try:
        while os.read(0, 4096):
            pass
    except OSError:
        pass
    os._exit(0)


def _send(out: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(out, view) :]


def _age(paths: NodePaths, slot: str, now: float) -> float | None:
    try:
        return round(max(0.0, now - os.stat(paths.beat(slot)).st_mtime), 3)
    except OSError:
        return None
