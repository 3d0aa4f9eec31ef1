"""python -m benchmarks.peers [--nodes 16 64 128] [--turns 3] [--only reach tasks makespan] [--environment FOLDER]"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.figure import Figure, show
from benchmarks.peers import reach, tasks
from benchmarks.peers.callers import PEERS
from benchmarks.peers.environment import make
from benchmarks.peers.table import OURS, Row, table
from orchestrator import __version__

NODES, TURNS, SEEDS = (16, 64, 128), 3, (1, 2, 3)
PARTS = ("reach", "tasks", "makespan")
PEERS_OF, FACTOR = {"whole command": ("pyinfra", "Ansible"), "program running": ("asyncssh",)}, 1.5
"""Ours may take at most FACTOR times as long as the faster of these. Whole commands are compared with command lines,
because a command starts slower than a library. Once the program runs, we compare with a plain gather of asyncssh."""
EVEN_SPLIT = 1.3


def measure(
    where: Path, folder: Path, nodes: Sequence[int] = NODES, turns: int = TURNS, parts: Sequence[str] = PARTS
) -> list[Figure]:
    """Measure the parts, print their tables and notes; ours against the bounds. The peers' environment lies `where`."""
    if "reach" in parts:
        reach.need_sshd()
    _log(f"installing peers into {where}")
    environment = make(where)
    figures, others = [], list[Row]()
    if "reach" in parts:
        rows = reach.rows(environment, nodes, turns, _log)
        versions = {who: environment.versions.get(p.package, "") for who, p in PEERS.items()}
        _show(rows, {**versions, OURS: __version__}, {who: p.note for who, p in PEERS.items()})
        figures += [f for row in rows for f in reached(row)]
    if "tasks" in parts:
        others.append(tasks.zero_cost_row(environment, folder, turns, _log))
    if "makespan" in parts:
        others += tasks.makespan_rows(SEEDS, _log)
        figures += [_makespan(row) for row in others if tasks.EVEN in row.values]
    if others:
        versions = {OURS: __version__, tasks.QUEUE: environment.versions.get("hyperqueue", "")}
        _show(others, {**versions, tasks.FLOOR: "", tasks.EVEN: ""}, tasks.NOTES)
    return figures


def _log(text: str) -> None:
    print(f"peers: {text}", file=sys.stderr, flush=True)


def _show(rows: Sequence[Row], versions: Mapping[str, str], notes: Mapping[str, str]) -> None:
    print(f"\nmedian (lowest to highest), and how many times as long as {OURS}\n\n{table(rows, versions)}\n")
    print("\n".join(f"- {who}: {note}." for who, note in notes.items()), flush=True)


def reached(row: Row) -> list[Figure]:
    """Ours against the fastest of its peers; empty if no peer was measured."""
    if OURS not in row.values:
        raise SystemExit(f"{row.what}: {row.missing.get(OURS)}")
    names = next((names for part, names in PEERS_OF.items() if part in row.what), ())
    peers = {who: row.median(who) for who in names if who in row.values}
    if not peers:
        return []
    who = min(peers, key=lambda name: peers[name])
    return [Figure(row.what, row.median(OURS), FACTOR * peers[who], "s", f"median; bound: {FACTOR} x {who}")]


def _makespan(row: Row) -> Figure:
    faster = row.median(tasks.EVEN) / row.median(OURS)
    return Figure(f"{row.what}: even split over ours", faster, EVEN_SPLIT, "times", "simulated", at_least=True)


def main(argv: list[str]) -> int:
    """Returns the exit code: 1 where a bound is broken."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description="gemmfleet beside others.")
    parser.add_argument(
        "--nodes", type=int, nargs="+", default=NODES, choices=range(1, 500), metavar="N", help="light nodes"
    )
    parser.add_argument("--turns", type=int, default=TURNS, choices=range(1, 100), metavar="N", help="repetitions")
    parser.add_argument("--only", nargs="+", default=PARTS, choices=PARTS, help="parts to measure")
    parser.add_argument("--environment", type=Path, help="keep the peers there; default: a temporary folder")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="gemmfleet-bench-") as scratch:
        where = args.environment or Path(scratch) / "environment"
        figures = measure(where.absolute(), Path(scratch), args.nodes, args.turns, args.only)
    show(figures)
    return 0 if all(f.holds for f in figures) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
