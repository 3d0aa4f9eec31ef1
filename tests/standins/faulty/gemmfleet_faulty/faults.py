"""Real faults for the tuner `faulty`: each does to the process what its name says, none is a returned error.

A fault is a mapping:

- `kind`: hold (waits, with signs of life, until the file `until` of the node folder is there), abort (SIGABRT),
  stop (SIGSTOP), oom (allocates until it is killed or MemoryError), truncate (half a record in the slot's file,
  then SIGKILL to agent and itself), kill_worker (SIGKILL to its agent), hang, exit
  (with `code`), error (an exception), lie (breaks the protocol), wrong (every result is off), no_candidate,
  sick_canary;
- `match`: columns of the shape's key, and/or shape, attempt, group, slot, node: a value or a list of values; all must
  agree. sick_canary knows slot and node only. With kernelName, kernelId, splitK or libtype it is one candidate's: the
  fault (abort or exit) happens in a process of its own, as AITER's does;
- `times`: how often (default: always), counted over processes in a folder of the node, or in `counters`;
- `after_rows`: rows that come first; `deaf`: SIGINT is ignored; `grandchild`: leaves a process in its group;
- `how`: what sick_canary does: `wrong` (the default), or a violent kind;
- `guard`: false lets `oom` go beyond 128 MiB more than the process has (for a test that limits it by a cgroup).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import resource
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from worker.process import exit_words
from worker.protocol import NodePaths
from worker.tuners.base import Place

VIOLENT = ("abort", "stop", "oom", "truncate", "kill_worker", "hang", "exit", "error", "lie")
SOFT = ("hold", "wrong", "no_candidate", "sick_canary")


@dataclass(frozen=True, slots=True)
class Fault:
    """One requested fault; see the module's docstring."""

    kind: str
    match: Mapping[str, Any] = field(default_factory=dict)
    times: int | None = None
    after_rows: int = 0
    code: int = 3
    deaf: bool = False
    grandchild: bool = False
    how: str = "wrong"
    guard: bool = True
    counters: str = ""
    until: str = "released"

    def __post_init__(self) -> None:
        """Raises ValueError on an unknown kind: a test that asks for nothing would pass."""
        if self.kind not in (*VIOLENT, *SOFT) or self.how not in (*VIOLENT, "wrong"):
            raise ValueError(f"bad fault: {self}")

    @property
    def of_candidates(self) -> bool:
        """Return whether it happens to single candidates."""
        return not {"kernelName", "kernelId", "splitK", "libtype"}.isdisjoint(self.match)

    def strikes(self, facts: Mapping[str, Any], place: Place) -> bool:
        """Return whether it happens now, to the shape (or canary) of these facts; count it if so."""
        for name, wanted in self.match.items():
            if str(facts.get(name)) not in map(str, wanted if isinstance(wanted, list) else [wanted]):
                return False
        return self.times is None or self._count(place, self.times)

    def held(self, place: Place) -> bool:
        """Return whether a `hold` still keeps its shape."""
        return self.kind == "hold" and not (folder_of(place) / self.until).exists()

    def _count(self, place: Place, times: int) -> bool:
        """One more time, unless it was `times` before; by a file, so that it outlives whom it kills."""
        folder = Path(self.counters) if self.counters else folder_of(place) / "replay"
        folder.mkdir(parents=True, exist_ok=True)
        name = hashlib.blake2b(json.dumps(asdict(self), sort_keys=True).encode(), digest_size=8).hexdigest()
        with open(folder / name, "ab") as f:
            fcntl.flock(f, fcntl.LOCK_EX)
            if os.fstat(f.fileno()).st_size >= times:
                return False
            f.write(b".")
        return True


def folder_of(place: Place) -> Path:
    """The node's folder, or this one without a node."""
    return place.node_dir or Path.cwd()


def strike(fault: Fault, place: Place) -> None:
    """Do it. Returns only after `stop` and `lie`, whose false message the caller sends."""
    kind = fault.how if fault.kind == "sick_canary" else fault.kind
    if fault.deaf:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if fault.grandchild:
        _leave_grandchild(place)
    print(f"replay: {kind} of process {os.getpid()}", flush=True)
    if kind == "abort":
        os.abort()
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "oom":
        _exhaust_memory(fault.guard)
    elif kind == "hang":
        while True:
            time.sleep(3600)
    elif kind == "exit":
        os._exit(fault.code)
    elif kind == "error":
        raise RuntimeError("replay: an error that is no shape's fault")
    elif kind in ("truncate", "kill_worker"):
        if kind == "truncate":
            with open(NodePaths(folder_of(place)).events(place.slot), "ab", buffering=0) as f:
                f.write(b'{"type":"row","t":%.3f,"attempt":"torn","shape":1,"row":{"us":1.0,"kern' % time.time())
        os.kill(place.agent_pid, signal.SIGKILL)
        time.sleep(5)  # the kernel ends us with our agent
        os.kill(os.getpid(), signal.SIGKILL)


def strike_apart(fault: Fault, place: Place) -> str:
    """Do it in a process of its own; how that ended."""
    pid = os.fork()
    if pid == 0:
        try:
            strike(fault, place)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    return f"its process {exit_words(os.waitstatus_to_exitcode(status))}"


def _exhaust_memory(guard: bool) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if guard and soft == resource.RLIM_INFINITY:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**27, hard))
    held: list[bytearray] = []
    while True:
        block = bytearray(16 * 2**20)
        block[::4096] = b"\1" * (len(block) // 4096)  # touched, or the kernel would not give it
        held.append(block)


def _leave_grandchild(place: Place) -> None:
    """Fork one that sleeps, with all our pipes open, as a tuner's pool of processes would be left."""
    if os.fork() == 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        time.sleep(600)
        os._exit(0)
