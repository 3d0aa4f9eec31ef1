"""`make demo` as a user runs it: real nodes, real torch in containers, and nothing left afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.ledger.reader import LedgerReader
from orchestrator.paths import list_runs
from tests.integration.heavy import why_not
from tests.integration.heavy.fleet import LABEL
from tests.integration.heavy.outer import Outer
from tests.integration.kit import ROOT, read_csv
from tests.support.ledger_kit import per_node
from tests.waiting import PATIENCE_S


@pytest.fixture
def temp(tmp_path: Path) -> Path:
    """Folder in which the demo makes its temporary one."""
    (tmp_path / "temp").mkdir()
    return tmp_path / "temp"


def check_nothing_is_left(pid: int, temp: Path) -> None:
    assert list(temp.iterdir()) == []
    assert str(temp) not in Path("/proc/mounts").read_text()
    outer = Outer()
    outer.acquire()
    try:
        for kind in (("ps", "-aq"), ("network", "ls", "-q")):
            assert outer.docker(*kind, "--filter", f"label={LABEL}.owner={pid}") == ""
    finally:
        outer.release()


@pytest.mark.full
@pytest.mark.system
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_the_demo_tunes_on_two_nodes_and_leaves_nothing(tmp_path: Path, temp: Path) -> None:
    argv = [sys.executable, "-m", "tests.integration.demo", "--runs", str(tmp_path / "runs")]
    env = {**os.environ, "TMPDIR": str(temp), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            out = process.communicate(timeout=PATIENCE_S)[0].decode()
        finally:
            process.send_signal(signal.SIGINT)  # it takes its nodes down, and then nothing is left of it
    assert process.returncode == 0, out
    assert "Traceback" not in out
    (run,) = list_runs(tmp_path / "runs")
    rows, asked = read_csv(run.tuned), read_csv(ROOT / "examples" / "demo.csv")
    assert [(r["M"], r["N"], r["K"]) for r in rows] == [(r["M"], r["N"], r["K"]) for r in asked]
    for row in rows:
        assert (row["libtype"], row["gfx"].startswith("cpu-"), row["kernelName"] in out) == ("torch", True, True)
        assert float(row["us"]) > 0
    with LedgerReader.open_readonly(run.ledger) as ledger:
        assert set(per_node(ledger)) == {"h1", "h2"}
    devices = json.loads(run.provenance.read_text())["devices"]
    assert [d["node"] for d in devices] == ["h1", "h2"]
    (image,) = {d["worker"]["image"] for d in devices}
    assert out.count(image.removeprefix("sha256:")[:12]) == 2, "what `nodes check` found on both nodes"
    assert all(f"$ gemmfleet {typed} " in out for typed in ("nodes check", "tune", "status", "explain"))
    check_nothing_is_left(process.pid, temp)


def test_a_machine_that_cannot_is_told_what_to_do(tmp_path: Path, temp: Path) -> None:
    argv = [sys.executable, "-m", "tests.integration.demo", "--runs", str(tmp_path / "runs")]
    env = {**os.environ, "PATH": str(temp), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 3
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: the demo needs ")
    assert ("make demo SYSTEM=1" if os.geteuid() == 0 else "run it as root") in line
    assert not (tmp_path / "runs").exists()
