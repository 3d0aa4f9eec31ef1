"""Lines through one stream of a transport: their rate, and those that were lost."""

from __future__ import annotations

import time

from benchmarks.figure import Figure
from orchestrator.transport.base import Transport

LINES = 100_000


def stream_figures(transport: Transport, what: str, rate: float, by: str) -> list[Figure]:
    """Figures of LINES numbered lines of a tuner's length. `rate`: bound in lines/s; `by`: the command beneath."""
    script = f"seq 1 {LINES} | awk '{{printf \"%s line of a tuner %060d\\n\", $1, $1}}'"
    began = time.perf_counter()
    channel = transport.open(["sh", "-c", script])
    out = bytearray()
    while more := channel.read(1 << 20):
        out += more
    measured = LINES / (time.perf_counter() - began)
    channel.close()
    lost = LINES - sum(line.startswith(b"%d " % n) for n, line in enumerate(out.splitlines(), 1))
    return [
        Figure(f"lines of {what}'s stream", measured, rate, "lines/s", f"{LINES:,} lines by {by}", at_least=True),
        Figure(f"lines of {what}'s stream: lost", lost, 0, "lines", "numbers in order"),
    ]
