"""`gemmfleet status` of eight light nodes at work, of which one is silent and one refuses: who holds up whom.

The silent node is partitioned (its packets are dropped, where iptables may be used) or frozen (it accepts connections
and never speaks); on the refusing one nothing listens. The real command runs on a terminal of its own; a node counts
as shown when its line says that it is at work. All times are from the start of the process, start-up included.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import statistics
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.figure import Figure
from benchmarks.light import LightRun, light_run
from tests.integration.sshd import Sshd
from tests.waiting import wait_until

NODES, SILENT, REFUSING = 8, 2, 5
TURNS = 3
SHOWN_S, END_S = 1.0, 6.0
GIVE_UP_S = 30.0
ANSI = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
ROW = re.compile(r"\s*(n\d+)\s+0\s+(\w+)")


def run(folder: Path) -> list[Figure]:
    """Figures for each kind of silence."""
    figures = []
    with light_run(folder, NODES) as light:
        light.bench.shapes(2 * NODES)
        light.bench.start("tune", *light.bench.tune_args(seconds=3600.0))
        wait_until(lambda: light.busy_slots() == NODES, "all nodes are at work")
        light.nodes[REFUSING].stop_listening()
        for kind, silence in (("frozen", _frozen), ("partitioned", _partitioned)):
            with silence(light.nodes[SILENT]) as silent:
                if silent:
                    figures += _measure(light, kind)
    return figures


def _measure(light: LightRun, kind: str) -> list[Figure]:
    bad = {light.nodes[SILENT].name, light.nodes[REFUSING].name}
    good = {n.name for n in light.nodes} - bad
    argv, env = light.bench.argv("status"), light.bench.env()
    once = [_Terminal([*argv], env).run(lambda t: False) for _ in range(TURNS)]
    watched = [
        _Terminal([*argv, "--watch"], env).run(lambda t: bad <= t.seen("unreachable").keys()) for _ in range(TURNS)
    ]
    began = time.perf_counter()
    nodes = light.bench.run("status", "--json").json()["nodes"]
    document_s = time.perf_counter() - began
    in_json = {n["name"] for n in nodes if n["state"] == "unreachable"}
    for reported in (*(set(t.seen("unreachable")) for t in (*once, *watched)), in_json):
        if reported != bad:
            raise SystemExit(f"{sorted(bad)} do not answer, and status says {sorted(reported)}")
    of = f"{NODES} nodes, one refusing, one {kind}"
    seconds = {
        "status, six shown": (SHOWN_S, [t.all_shown(good) for t in once]),
        "status, its end": (END_S, [t.ended for t in once]),
        "status --watch, six shown": (SHOWN_S, [t.all_shown(good) for t in watched]),
        "status --watch, verdicts": (END_S, [max(t.seen("unreachable").values()) for t in watched]),
        "status --json": (END_S, [document_s]),
    }
    return [
        Figure(f"{what}, one {kind}", statistics.median(s), bound, "s", _median_of(s, of))
        for what, (bound, s) in seconds.items()
    ]


def _median_of(seconds: list[float], of: str) -> str:
    if len(seconds) == 1:
        return f"once, whole command; {of}"
    return f"median of {len(seconds)} ({min(seconds):.2f} to {max(seconds):.2f} s), whole command; {of}"


# --- silence ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _frozen(node: Sshd) -> Iterator[bool]:
    node.pause()
    try:
        yield True
    finally:
        node.resume()


@contextlib.contextmanager
def _partitioned(node: Sshd) -> Iterator[bool]:
    """False where packets cannot be dropped here: without root, or without iptables."""
    rule = ["INPUT", "-d", node.address, "-j", "DROP"]
    if not _iptables("-I", *rule):
        print("status: the partition is left out, it needs root and iptables", file=sys.stderr)
        yield False
        return
    try:
        yield True
    finally:
        _iptables("-D", *rule)


def _iptables(*argv: str) -> bool:
    try:
        return subprocess.run(["iptables", *argv], capture_output=True, timeout=10.0).returncode == 0
    except OSError:
        return False


# --- the terminal -----------------------------------------------------------------------------------------------------


@dataclass
class _Terminal:
    """A command on a terminal of its own, and when it first showed what of which node."""

    argv: list[str]
    env: dict[str, str]
    ended: float = 0.0
    _first: dict[tuple[str, str], float] = field(default_factory=dict)

    def run(self, enough: Callable[[_Terminal], bool]) -> _Terminal:
        """Run to the end, or until there is enough to interrupt it."""
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
        began = time.perf_counter()
        env = {**self.env, "TERM": "xterm"}
        process = subprocess.Popen(self.argv, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
        os.close(theirs)
        line = b""
        try:
            while more := _read(ours, began + GIVE_UP_S - time.perf_counter()):
                *whole, line = (line + more).split(b"\n")
                for one in whole:
                    self._see(ANSI.sub(b"", one).decode("utf-8", "replace"), time.perf_counter() - began)
                if enough(self):
                    process.send_signal(signal.SIGINT)
                    break
            process.wait(GIVE_UP_S)
            self.ended = time.perf_counter() - began
        finally:
            process.kill()
            process.wait()
            os.close(ours)
        return self

    def _see(self, line: str, t: float) -> None:
        if row := ROW.match(line.replace("\r", "")):
            self._first.setdefault((row[1], row[2]), t)

    def seen(self, state: str) -> dict[str, float]:
        """Seconds until a node was first shown in a state."""
        return {node: t for (node, s), t in self._first.items() if s == state}

    def all_shown(self, nodes: set[str]) -> float:
        """Seconds until the last of them was shown at work."""
        busy = self.seen("busy")
        if not nodes <= busy.keys():
            raise SystemExit(f"status shows {sorted(busy)} at work, not all of {sorted(nodes)}")
        return max(busy[n] for n in nodes)


def _read(fd: int, seconds: float) -> bytes:
    """Bytes that the terminal shows next, b"" at the end."""
    if not select.select([fd], [], [], max(0.0, seconds))[0]:
        raise SystemExit(f"the command did not end within {GIVE_UP_S:g} s")
    try:
        return os.read(fd, 65536)
    except OSError:  # EIO: the other end is closed
        return b""
