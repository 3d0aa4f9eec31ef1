"""Streams a node's records and logs from given offsets on, with a heartbeat (`worker follow`, started by follow.sh).

Frames are defined in worker/protocol/records.py. It only reads, and any number of these streams may run beside the
workers. It keeps each file open, looks for new bytes every few milliseconds, and sends them: records up to the last
whole line, log bytes as they are, at most CHUNK bytes in a frame. It ends when its stdin or stdout is closed.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from worker.agent.control import read_epoch, read_stop
from worker.process import write_all
from worker.protocol import BEAT_S, MAX_RECORD_BYTES, SLOT_RE, InboxName, NodePaths

CHUNK = MAX_RECORD_BYTES
"""Bytes of a file in a frame. Small, because the controller queues frames by number; every record fits."""
FOLDERS = ("events", "logs", "claimed")
"""Folders whose entries begin with a slot's number."""
POLL_S = 0.01
"""Seconds between looks for new bytes,"""
POLL_SLOW_S = 0.05
"""and after POLL_FAST_FOR_S seconds without any."""
POLL_FAST_FOR_S = 2.0
LOOK_S = 0.1
"""Seconds between searches for new slots and files."""


@dataclass(slots=True)
class Followed:
    """One file that is followed."""

    path: Path
    whole_lines: bool
    """Send up to the last whole line only."""
    offset: int = 0
    """The offset up to which it was sent."""
    fd: int = -1
    error: str = ""
    """The reason that it cannot be read any more."""

    def open(self) -> None:
        """Open the file if it exists by now. Only a regular file is read."""
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
        """The next bytes to send, b"" if nothing is new. Does not move the offset."""
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
        # no record is longer than a chunk, so such a line is damaged; pass it on, and the reader reports it
        return data[:end] if end or len(data) < CHUNK else data


@dataclass(slots=True)
class Stream:
    """All files of a node, in turn."""

    paths: NodePaths
    start: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Offsets to begin at, by kind and slot: {"E": {"0": 123}, "L": {"0": 45}}."""
    files: dict[tuple[str, str], Followed] = field(default_factory=dict)
    """By (kind, slot); the kind is E (events) or L (log)."""

    def find_files(self) -> None:
        """Find new slots, and open new files."""
        names: list[str] = []
        for folder in FOLDERS:
            names += _names(self.paths.root / folder)
        stems = {name.partition(".")[0] for name in names}
        for slot in sorted(filter(SLOT_RE.match, stems)):
            for kind, path in (("E", self.paths.events(slot)), ("L", self.paths.log(slot))):
                if (kind, slot) not in self.files:
                    offset = self.start.get(kind, {}).get(slot, 0)
                    self.files[kind, slot] = Followed(path, whole_lines=kind == "E", offset=offset)
        for followed in self.files.values():
            if followed.fd < 0 and not followed.error:
                followed.open()

    def frames(self) -> Iterator[bytes]:
        """One frame for each file with new bytes, records first."""
        for (kind, slot), followed in sorted(self.files.items()):
            data = followed.read()
            if data:
                yield f"{kind} {slot} {followed.offset} {len(data)}\n".encode() + data
                followed.offset += len(data)

    def beat(self, now: float) -> bytes:
        """The frame of a beat (worker/protocol/records.py). `held` are the attempts that wait or are claimed; it is
        left out while there are records to send, because they may tell of the end of one."""
        held = held_attempts(self.paths)
        beat: dict[str, Any] = {
            "t": now,
            "epoch": read_epoch(self.paths),
            "stop": read_stop(self.paths) or None,
            "slots": {slot: self._slot_state(slot, now) for slot in sorted({slot for _, slot in self.files})},
        }
        # the order matters: an attempt's end is in the file before it leaves the folder
        if not any(f.read() for (kind, _), f in self.files.items() if kind == "E"):
            beat["held"] = sorted(held)
        errors = [f.error for f in self.files.values() if f.error]
        if errors:
            beat["error"] = "; ".join(errors)
        data = json.dumps(beat, separators=(",", ":")).encode()
        return b"B %d\n" % len(data) + data

    def _slot_state(self, slot: str, now: float) -> dict[str, Any]:
        """alive: an agent holds the slot's lock. age: seconds since it touched its beat. waits: the holder of the
        device that it waits for, if it waits; worker.agent.locks.sign has written it."""
        state: dict[str, Any] = {"alive": is_alive(self.paths, slot), "age": None}
        with suppress(OSError):
            state["age"] = round(max(0.0, now - os.stat(self.paths.beat(slot)).st_mtime), 3)
        with suppress(OSError):
            waits = self.paths.lock(slot).read_text(errors="replace").partition("\n")[2][:200]
            if waits and state["alive"]:
                state["waits"] = waits
        return state


def held_attempts(paths: NodePaths) -> set[str]:
    """Attempts in the inbox or claimed by a slot. Does not miss an attempt that moves between them meanwhile."""
    names = _names(paths.inbox)
    for slot in _names(paths.root / "claimed"):
        if SLOT_RE.match(slot):
            names += _names(paths.claimed(slot))
    return {name.attempt for name in map(InboxName.parse, names) if name is not None}


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def is_alive(paths: NodePaths, slot: str) -> bool:
    """Return whether an agent holds the slot's lock. Takes a shared lock for an instant; agents try theirs longer."""
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


def follow(stream: Stream, out: int, beat_s: float = BEAT_S) -> None:
    """Send frames to `out` until that fails (BrokenPipeError). `beat_s`: seconds between beats."""
    next_beat = next_look = moved = 0.0
    while True:
        now = time.monotonic()
        if now >= next_look:
            stream.find_files()
            next_look = now + LOOK_S
        if now >= next_beat:
            write_all(out, stream.beat(time.time()))
            next_beat = now + beat_s
        sent = False
        for frame in stream.frames():
            write_all(out, frame)
            sent = True
        if sent:
            moved = now
        else:
            time.sleep(POLL_S if now - moved < POLL_FAST_FOR_S else POLL_SLOW_S)


def parse_start(text: str) -> dict[str, dict[str, int]]:
    """Offsets from `{"E":{"0":123},"L":{"0":45}}`. Raises ValueError."""
    raw = json.loads(text)
    if not isinstance(raw, dict) or not set(raw) <= {"E", "L"} or not all(map(_are_offsets, raw.values())):
        raise ValueError('offsets look like {"E":{"0":123},"L":{"0":45}}')
    return raw


def _are_offsets(raw: Any) -> bool:
    if not isinstance(raw, dict):
        return False
    return all(SLOT_RE.match(slot) and type(offset) is int and offset >= 0 for slot, offset in raw.items())


def main(node_dir: Path, start: str) -> int:
    """Follow on stdout until stdin or stdout is closed. Status 2: the arguments are wrong."""
    try:
        stream = Stream(NodePaths(node_dir), parse_start(start))
        if not node_dir.is_dir():
            raise ValueError(f"{node_dir} is not a folder")
    except ValueError as e:
        print(f"worker follow: {e}", file=sys.stderr)
        return 2
    threading.Thread(target=_exit_with_stdin, daemon=True).start()
    with suppress(BrokenPipeError, KeyboardInterrupt):
        follow(stream, sys.stdout.fileno())
    os._exit(0)  # the thread may be blocked in a read, which would delay a clean exit


def _exit_with_stdin() -> None:
    with suppress(OSError):
        while os.read(0, 4096):
            pass
    os._exit(0)
