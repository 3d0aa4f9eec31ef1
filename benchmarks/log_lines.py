"""Log lines of 8 slots through one node's stream: how many a second, whether all arrive, what the controller holds.

A real `tune` over SSH to a light node, with a long attempt under way. Beside its worker eight writers append lines to
the node's log files, one write a line, as a worker and its tuner do. The lines go through `worker follow`, the SSH
channel and the controller into the run's log. Writers, node and controller share this machine's cores.
"""

from __future__ import annotations

import functools
import hashlib
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.figure import Figure
from benchmarks.light import LightRun, light_run
from tests.waiting import wait_until

SLOTS = [str(n) for n in range(1, 9)]
"""Slots beside the worker's own, which is 0."""
RATE = 100_000
MEMORY_MB = 64.0
LOOK_S, GIVE_UP_S = 0.01, 120.0

# argv: file, slot, lines; one line of a tuner's kind and length each; prints their hash
WRITER = """
import hashlib, os, sys
path, slot, lines = sys.argv[1], sys.argv[2], int(sys.argv[3])
fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
digest = hashlib.sha256()
print("ready", flush=True)
sys.stdin.readline()
for n in range(lines):
    line = b"line %d of slot %s: M=4096 N=5120 K=8192 kernelId=%d splitK=1 us=181.25 err_ratio=0.0\\n"
    line %= (n, slot.encode(), n % 977)
    os.write(fd, line)
    digest.update(line)
print(digest.hexdigest())
"""


def run(folder: Path) -> list[Figure]:
    """200,000 lines in all, then 200,000 of each slot, of the same run."""
    with light_run(folder, 1) as light:
        bench = light.bench
        bench.shapes(1)
        tune = bench.start("tune", *bench.tune_args(seconds=3600.0))
        wait_until(lambda: light.busy_slots() == 1, "the worker is at work")
        figures: list[Figure] = []
        before = _memory_mb(tune.pid)
        for each in (200_000 // len(SLOTS), 200_000):
            figures += _measure(light, tune.pid, each, before)
        bench.run("cancel")
        tune.communicate(timeout=60.0)
    return figures


def _measure(light: LightRun, controller: int, each: int, memory_before: float) -> list[Figure]:
    log = light.bench.paths.log(light.nodes[0].name)
    base = log.stat().st_size
    writers = [_Writer(light.folder(light.nodes[0]) / "logs" / f"{slot}.log", slot, each) for slot in SLOTS]
    began = time.perf_counter()
    for writer in writers:
        writer.go()
    peak, written_s = memory_before, 0.0
    while True:
        peak = max(peak, _memory_mb(controller))
        if not written_s and all(w.ended for w in writers):
            written_s = time.perf_counter() - began
        if written_s and log.stat().st_size - base >= sum(w.expected_bytes for w in writers):
            break
        if time.perf_counter() - began > GIVE_UP_S:
            raise SystemExit(f"only {log.stat().st_size - base} bytes of log arrived within {GIVE_UP_S:g} s")
        time.sleep(LOOK_S)
    seconds = time.perf_counter() - began
    lost = _lost(log, base, writers)
    lines = each * len(writers)
    what = f"{lines:,} log lines of {len(writers)} slots"
    how = f"{seconds:.2f} s from the first write to the last line in the run's log; writing took {written_s:.2f} s"
    return [
        Figure(what, lines / seconds, RATE, "lines/s", how, at_least=True),
        Figure(f"{what}: lost or changed", lost, 0, "lines", "count and SHA-256 of every slot's lines"),
        Figure(
            f"{what}: controller's memory", peak - memory_before, MEMORY_MB, "MB",
            f"most of its resident memory beyond the {memory_before:.0f} MB before the first line",
        ),
    ]  # fmt: skip


class _Writer:
    """One slot's writer, waiting for the word."""

    def __init__(self, path: Path, slot: str, lines: int) -> None:
        self.slot, self.lines = slot, lines
        self._path, self._before = path, path.stat().st_size if path.exists() else 0
        argv = [sys.executable, "-c", WRITER, str(path), slot, str(lines)]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it is ready

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def expected_bytes(self) -> int:
        """Size of the run's log, where every line has its slot before it."""
        return self._path.stat().st_size - self._before + self.lines * len(f"[{self.slot}] ")

    @functools.cached_property
    def digest(self) -> str:
        """Digest of all its lines."""
        assert self._process.stdout is not None
        out = self._process.stdout.read()
        if self._process.wait():
            raise SystemExit(f"the writer of slot {self.slot} ended with code {self._process.returncode}")
        return out.decode().strip()


def _lost(log: Path, base: int, writers: list[_Writer]) -> int:
    """Lines that are missing or too many; where the count is right and the content is not, all of the slot's."""
    counts = {w.slot: 0 for w in writers}
    digests = {w.slot: hashlib.sha256() for w in writers}
    with log.open("rb") as f:
        f.seek(base)
        for line in f:
            tag, _, text = line.partition(b"] ")
            slot = tag[1:].decode()
            if slot in counts:
                counts[slot] += 1
                digests[slot].update(text)
    lost = 0
    for w in writers:
        if digests[w.slot].hexdigest() != w.digest:
            lost += abs(w.lines - counts[w.slot]) or w.lines
    return lost


def _memory_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise SystemExit("the controller is gone")
