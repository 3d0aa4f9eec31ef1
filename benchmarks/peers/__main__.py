"""python -m benchmarks.peers [--nodes 16,64,128] [--turns 3] [--only reach,tasks,makespan] [--environment FOLDER]"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.figure import Figure, show
from benchmarks.light import need_sshd
from benchmarks.peers import reach, tasks
from benchmarks.peers.environment import make
from benchmarks.peers.table import OURS, Row, table
from orchestrator import __version__

NODES, TURNS, SEEDS = (16, 64, 128), 3, (1, 2, 3)
PARTS = ("reach", "tasks", "makespan")
BOUNDS = (
    (reach.STATUS_WHOLE, 1.0, ("pyinfra", "Ansible")),
    (reach.DEPLOY_WHOLE, 1.0, ("pyinfra", "Ansible")),
    (reach.STATUS_INSIDE, 1.3, ("asyncssh",)),
    (reach.DEPLOY_INSIDE, 1.5, ("asyncssh",)),
)
"""Ours may take so many times as long as the fastest of these: command lines, and the library that checks host keys."""
EVEN_SPLIT = 1.3


def measure(
    where: Path, folder: Path, nodes: Sequence[int] = NODES, turns: int = TURNS, parts: Sequence[str] = PARTS
) -> list[Figure]:
    """Measure the parts, print their tables and notes; ours against the bounds. The peers' environment lies `where`."""
    if "reach" in parts:
        need_sshd()
    log(f"installing peers into {where}")
    environment = make(where)
    ours = {OURS: __version__}
    figures = []
    if "reach" in parts:
        rows = reach.rows(environment, nodes, turns, log)
        head = ours | {who: environment.versions.get(p.package, "") for who, p in reach.PEERS.items() if p.package}
        _show(rows, head, {who: p.note for who, p in reach.PEERS.items()})
        figures += _reached(rows)
    others: list[Row] = []
    if "tasks" in parts:
        others.append(tasks.zero_cost_row(environment, folder, turns, log))
    if "makespan" in parts:
        others += tasks.makespan_rows(SEEDS, log)
        figures += [_makespan(row) for row in others if tasks.EVEN in row.values]
    if others:
        queue = {tasks.QUEUE: environment.versions.get("hyperqueue", ""), tasks.FLOOR: "", tasks.EVEN: ""}
        _show(others, ours | queue, tasks.NOTES)
    return figures


def log(text: str) -> None:
    print(f"peers: {text}", file=sys.stderr, flush=True)


def _show(rows: Sequence[Row], versions: Mapping[str, str], notes: Mapping[str, str]) -> None:
    count = max(len(values) for row in rows for values in row.values.values())
    print(f"\nmedian of {count} (lowest to highest), and how many times as long as {OURS}\n\n{table(rows, versions)}\n")
    print("\n".join(f"- {who}: {note}." for who, note in notes.items()))


def _reached(rows: Sequence[Row]) -> list[Figure]:
    figures = []
    for row in rows:
        for start, factor, whom in BOUNDS:
            peers = {who: row.median(who) for who in whom if who in row.values}
            if not row.what.startswith(start) or not peers:
                continue
            if OURS not in row.values:
                raise SystemExit(f"{row.what}: ours: {row.missing.get(OURS)}")
            who = min(peers, key=lambda name: peers[name])
            how = f"bound: {factor} x {who} ({peers[who]:.2f} s)"
            figures.append(Figure(row.what, row.median(OURS), factor * peers[who], "s", how))
    return figures


def _makespan(row: Row) -> Figure:
    faster = row.median(tasks.EVEN) / row.median(OURS)
    return Figure(f"{row.what}: even split over ours", faster, EVEN_SPLIT, "times", "simulated", at_least=True)


def main(argv: list[str]) -> int:
    """Returns the exit code: 1 where a bound is broken."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description="gemmfleet beside others.")
    parser.add_argument("--nodes", default=",".join(map(str, NODES)), help="numbers of light nodes")
    parser.add_argument("--turns", type=int, default=TURNS, help="repetitions, all peers in turn in each")
    parser.add_argument("--only", default=",".join(PARTS), help="parts to measure")
    parser.add_argument("--environment", type=Path, help="keep the peers there; default: a temporary folder")
    args = parser.parse_args(argv)
    parts = args.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(sorted(unknown))}; there are: {', '.join(PARTS)}")
    with tempfile.TemporaryDirectory(prefix="gemmfleet-bench-") as scratch:
        folder = Path(scratch)
        where = args.environment or folder / "environment"
        counts = [int(n) for n in args.nodes.split(",")]
        figures = measure(where.absolute(), folder, counts, args.turns, parts)
    show(figures)
    return 0 if all(f.holds for f in figures) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
