"""Time from a slot's idling to its next claim where the controller hands every group over, on light nodes over SSH.

The real `tune` with the replay tuner and groups that cost nothing, but with a policy that keeps nothing ahead of a
slot: every group is sent when its slot's end of the last one has come over the stream. Both times are the worker's
own, from its records: end of an attempt to start of the next. The way between: the worker's file, `worker follow`, the
SSH stream, a transaction of the ledger on the disk, a file put in the inbox over SSH, and the worker's look at it.
"""

from __future__ import annotations

import functools
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figure import Figure
from benchmarks.light import LightRun, light_run

GROUPS = 200
"""A node."""


def run(folder: Path) -> list[Figure]:
    """One node by itself, which is the way; then four, which share it."""
    figures = []
    for nodes in (1, 4):
        place = folder / str(nodes)
        place.mkdir()
        with light_run(place, nodes) as light:
            gaps = _gaps(light, GROUPS * nodes)
        name = "hand-over, idle to next claim, " + ("1 node" if nodes == 1 else f"{nodes} nodes at once")
        high = statistics.quantiles(gaps, n=20)[-1]
        how = f"median of {len(gaps)}, live SSH stream, nothing in the inbox; 95 % within {1e3 * high:.0f} ms"
        figures.append(Figure(name, 1e3 * statistics.median(gaps), 50.0, "ms", how))
    return figures


def _gaps(light: LightRun, groups: int) -> list[float]:
    bench = light.bench
    bench.shapes(groups)
    argv = [sys.executable, "-m", "benchmarks.handover", *bench.argv("tune", *bench.tune_args())[3:]]
    done = subprocess.run(argv, capture_output=True, text=True, env=bench.env(), timeout=300.0)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    with bench.ledger() as ledger:
        sent = {a.id: a.sent_at for a in ledger.replayed.attempts.values()}
    gaps = []
    for node in light.nodes:
        for before, ended, attempt, started in _in_turn(light.folder(node)):
            if sent[attempt] < ended:
                raise SystemExit(f"{attempt} was sent before {before} had ended: this measures no hand-over")
            gaps.append(started - ended)
    return gaps


def _in_turn(node_folder: Path) -> Iterator[tuple[str, float, str, float]]:
    """(attempt, its end, the slot's next attempt, its start) by the worker's own clock."""
    for path in (node_folder / "events").glob("*.jsonl"):
        last: tuple[str, float] | None = None
        for line in path.read_bytes().splitlines():
            record = json.loads(line)
            if record["type"] == "attempt_started" and last is not None:
                yield (*last, record["attempt"], record["t"])
            if record["type"] == "attempt_ended":
                last = (record["attempt"], record["t"])


def main() -> None:
    """The command line, with a policy that keeps nothing ahead."""
    from orchestrator.cli.main import main as command
    from orchestrator.controller import drive
    from orchestrator.policy import Policy, PolicySettings

    settings = PolicySettings(ahead_s=0.0)
    vars(drive)["Policy"] = functools.partial(Policy, settings)
    command()


if __name__ == "__main__":
    main()
