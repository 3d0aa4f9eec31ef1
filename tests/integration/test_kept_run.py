"""A run that version 0.3 made, whose worker still lives: shown, resumed and retried by today's code.

What 0.3 left behind, its worker's code included, is in tests/data/run-0.3 (see the README there).
"""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import tarfile
from contextlib import closing
from pathlib import Path
from typing import Any

from orchestrator.events import NodeJoined, Resumed, Send
from orchestrator.paths import RunPaths
from tests.kits.fleet import Bench
from tests.paths import TEST_DATA
from tests.waiting import wait_until

KEPT = TEST_DATA / "run-0.3"
RUN = "20250104-102510-f741"
CODE_OF_03 = "087a3c24d462dc16"
SCRIPTS = ("launch.sh", "tune.sh", "follow.sh", "node.json")


def test_a_run_of_03_is_shown_resumed_with_its_living_worker_and_retried(bench: Bench) -> None:
    lay_out_run(bench)
    lay_out_node(bench)
    start_worker_of_03(bench)
    worker = bench.workers()["0"]

    check_shown(bench)

    resume = bench.start("resume", RUN)
    wait_until(lambda: len(bench.journal(NodeJoined)) > 1 or resume.poll() is not None, "the node joins again")
    assert resume.poll() is None, bench.finish(resume)
    assert [resumed.epoch for resumed in bench.journal(Resumed)] == [1, 2]
    assert bench.workers() == {"0": worker}, "the worker of 0.3 does not live any more"
    bench.release()
    out = bench.finish(resume, 1)
    assert "4 tuned, 1 failed" in out, out
    bench.check_books(tuned=4, failed={"2x16x64": "no_candidate"})
    assert codes_of_workers(bench) == [CODE_OF_03, CODE_OF_03]
    # it finished what the controller of 0.3 had sent, and did again what was lost, which today's controller sent
    assert attempts_of(bench, shape=5) == ["g0003"]
    lost, again = attempts_of(bench, shape=3)
    assert [lost, again] == attempts_sent(bench, shape=3)

    retry = bench.run("retry", RUN)
    assert retry.code == 1, retry
    assert "trying 1 failed shape again" in retry.out + retry.err
    bench.check_books(tuned=4, failed={"2x16x64": "no_candidate"})
    *earlier, latest = codes_of_workers(bench)
    assert earlier == [CODE_OF_03, CODE_OF_03]
    assert latest != CODE_OF_03
    failed, retried = attempts_of(bench, shape=2)
    assert [failed, retried] == attempts_sent(bench, shape=2)
    assert bench.run("status", RUN, "--json").json()["state"] == "finished"


def check_shown(bench: Bench) -> None:
    """`status` and `explain` tell what the controller of 0.3 wrote down."""
    status = bench.run("status", RUN, "--json").json()
    assert (status["state"], status["controller"]) == ("interrupted", "")
    assert status["shapes"] == {"total": 5, "tuned": 1, "skipped": 0, "failed": 1, "running": 1, "pending": 2}
    (node,) = status["nodes"]
    assert (node["name"], node["slot_states"][0]["attempt"]) == ("here", "g0002")
    assert "no controller drives it; continue with: " in bench.run("status", RUN).out
    explained = bench.run("explain", RUN).out
    assert "shape 2x16x64: failed (no_candidate): none of 4 candidates ran" in explained
    assert "g0001 on here slot 0: the tuner's verdict" in explained


def lay_out_run(bench: Bench) -> None:
    """Lay out the folder of the run as the killed controller of 0.3 left it."""
    paths = RunPaths(bench.runs / RUN)
    copy_filled(KEPT / "run", paths.root, bench)
    for folder in paths.folders():
        folder.mkdir(exist_ok=True)
    for script in SCRIPTS:
        copy_filled(KEPT / "node" / script, paths.node("here") / script, bench)
    with closing(sqlite3.connect(paths.ledger)) as ledger:
        ledger.execute("PRAGMA journal_mode=WAL")
        ledger.executescript((KEPT / "ledger.sql").read_text())


def lay_out_node(bench: Bench) -> None:
    """Lay out the folder of the node as the killed worker of 0.3 left it: one group begun, one not."""
    copy_filled(KEPT / "node", bench.folder(), bench)
    with tarfile.open(KEPT / "worker.tar.xz") as code:
        code.extractall(bench.folder() / "code", filter="data")


def copy_filled(source: Path, target: Path, bench: Bench) -> None:
    """Copy a file or a folder, with the places of this test where the source has placeholders."""
    if source.is_dir():
        for inner in source.iterdir():
            copy_filled(inner, target / inner.name, bench)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    text = source.read_text().replace("@ROOT@", str(bench.root)).replace("@PYTHON@", sys.executable)
    target.write_text(text)


def start_worker_of_03(bench: Bench) -> None:
    """Start the worker by the script and the code of 0.3, and wait until it measures what the controller of 0.3 sent.

    The worker first gives up the group that the one before it had begun.
    """
    subprocess.run(["sh", "launch.sh", "start", "0"], cwd=bench.folder(), stdin=subprocess.DEVNULL, check=True)
    wait_until(lambda: attempts_of(bench, shape=5), "the worker of 0.3 measures shape 5")


def worker_records(bench: Bench, kind: str) -> list[dict[str, Any]]:
    """Records of a kind that the workers of the slot have written, in order."""
    lines = (bench.folder() / "events" / "0.jsonl").read_text().splitlines()
    return [record for line in lines if (record := json.loads(line))["type"] == kind]


def codes_of_workers(bench: Bench) -> list[str]:
    """The code of each worker that the slot has had."""
    return [record["info"]["code"] for record in worker_records(bench, "worker_started")]


def attempts_of(bench: Bench, shape: int) -> list[str]:
    """Attempts in which a worker began the shape."""
    return [record["attempt"] for record in worker_records(bench, "shape_started") if record["shape"] == shape]


def attempts_sent(bench: Bench, shape: int) -> list[str]:
    """Attempts in which a controller sent the shape."""
    return [sent.attempt for sent in bench.journal(Send) if shape in sent.shapes]
