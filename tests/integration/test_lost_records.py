"""Results files that lose records: no run waits for a word that nobody will say."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import pytest

from orchestrator.events import AttemptEnded, NodeExpected, NodeLost
from tests.integration.kit import Bench
from tests.waiting import PATIENCE_S, wait_until


def followers(bench: Bench, node: str = "here") -> list[int]:
    """Pids of `worker follow` on the node's folder."""
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (proc / "cmdline").read_bytes().split(b"\0")
            here = os.readlink(proc / "cwd").startswith(str(bench.workdir / bench.paths.run / node))
            if here and b"follow" in words and b"worker" in words:
                found.append(int(proc.name))
    return found


def records(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True) if path.exists() else []


def ends(path: Path) -> list[str]:
    """Attempts whose end is on record."""
    return [r["attempt"] for r in map(json.loads, records(path)) if r["type"] == "attempt_ended"]


@pytest.mark.full
def test_the_end_of_an_attempt_that_is_on_no_record_is_found_out(bench: Bench) -> None:
    """The last records of a worker were destroyed before they were read; the worker lives and is idle."""
    bench.slots = 1
    bench.inventory.write_text(
        f"defaults: {{family: a16w16, tuner: replay}}\nnodes: {{here: {{gpus: [0], workdir: {bench.workdir}}}}}\n"
    )
    n = bench.shapes(groups=3)
    run = bench.start("tune", *bench.tune_args([bench.held(1, 3)]))
    wait_until(lambda: bench.tuned() >= 1, "a shape is tuned")
    (pid,) = followers(bench)
    os.kill(pid, signal.SIGSTOP)
    try:
        bench.release()
        path = bench.node() / "events" / "0.jsonl"
        # groups of one shape: all that was sent is done
        wait_until(lambda: len([a for a in ends(path) if a.startswith("g")]) == 3, "the worker is idle")
        kept = [
            r for r in records(path) if not (b'"attempt_ended"' in r and json.loads(r)["attempt"] == ends(path)[-1])
        ]
        kept = [r for r in kept if not (b'"shape_tuned"' in r and json.loads(r)["attempt"] == ends(path)[-1])]
        lost = ends(path)[-1]
        with path.open("r+b") as f:
            f.write(b"".join(kept))
            f.truncate()
    finally:
        os.kill(pid, signal.SIGCONT)
    out, _ = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 0, out
    bench.check_books(tuned=n, failed={})
    with bench.ledger() as ledger:
        (told,) = [r for _, r in ledger.journal_records() if isinstance(r, AttemptEnded) and r.attempt == lost]
    assert "not on record" in told.detail


def lost_at(bench: Bench) -> list[float]:
    """Times at which h2 was given up."""
    with bench.ledger() as ledger:
        return [t for t, r in ledger.journal_records() if isinstance(r, NodeLost) and r.node == "h2"]


@pytest.mark.full
def test_a_truncated_results_file_costs_its_node_and_its_worker_is_stopped(bench: Bench) -> None:
    """It is shorter than what was read of it: the node is given up, the other does its work; nothing is left."""
    bench.inventory.write_text(
        "defaults: {family: a16w16, tuner: replay}\nnodes:\n"
        + "".join(f"  {n}: {{gpus: [{i}], workdir: {bench.workdir}/{n}}}\n" for i, n in enumerate(("h1", "h2")))
    )
    n = bench.shapes(groups=24)
    run = bench.start("tune", *bench.tune_args([bench.held(18, 24)], seconds=0.1, more=["--lost-after", "4"]))
    path: list[Path] = []

    def has_results() -> bool:
        path[:] = [p for p in bench.workdir.glob("h2/*/h2/events/1.jsonl") if len(ends(p)) > 2]
        return bool(path) and bench.tuned() > 3

    wait_until(has_results, "it has results")
    wait_until(lambda: bench.tuned() == 18, "its file grows no more")
    at = time.time()
    os.truncate(path[0], 100)
    wait_until(lambda: lost_at(bench), "the node is given up")
    bench.release()
    out, _ = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 0, out
    bench.check_books(tuned=n, failed={})  # no process is left, also not of the node that was given up
    assert "shrank from" in out
    with bench.ledger() as ledger:
        journal = list(ledger.journal_records())
    assert lost_at(bench)[0] >= at + 4.0
    assert [r.node for _, r in journal if isinstance(r, NodeExpected)] == ["h1", "h2"]
