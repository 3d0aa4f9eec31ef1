"""`make demo` as a user runs it: real nodes, real torch in containers, and nothing left afterwards."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.paths import list_runs
from tests.integration.heavy import why_not
from tests.integration.heavy.fleet import LABEL
from tests.integration.heavy.outer import Outer
from tests.kits.fleet import read_csv
from tests.paths import ROOT
from tests.waiting import PATIENCE_S

ARGV = [sys.executable, "-m", "tests.integration.demo", "--runs"]


@pytest.mark.full
@pytest.mark.system
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_the_demo_tunes_on_two_nodes_and_leaves_nothing(tmp_path: Path) -> None:
    temp, runs = tmp_path / "temp", tmp_path / "runs"
    temp.mkdir()
    env = {**os.environ, "TMPDIR": str(temp), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen([*ARGV, str(runs)], cwd=ROOT, env=env, stdout=subprocess.PIPE) as process:
        try:
            out = process.communicate(timeout=PATIENCE_S)[0].decode()
        finally:
            process.send_signal(signal.SIGINT)  # it takes its nodes down, and then nothing is left of it
    assert process.returncode == 0, out
    (run,) = list_runs(runs)
    rows, asked = read_csv(run.tuned), read_csv(ROOT / "examples" / "demo.csv")
    assert [(r["M"], r["N"], r["K"]) for r in rows] == [(r["M"], r["N"], r["K"]) for r in asked]
    for row in rows:
        assert (row["libtype"], row["gfx"].startswith("cpu-"), row["kernelName"] in out) == ("torch", True, True)
        assert float(row["us"]) > 0
        assert float(row["err_ratio"]) <= 0.05
    devices = json.loads(run.provenance.read_text())["devices"]
    assert [d["node"] for d in devices] == ["h1", "h2"]
    (image,) = {d["worker"]["image"] for d in devices}
    assert out.count(image.removeprefix("sha256:")[:12]) == 2, "what `nodes check` found on both nodes"
    for typed in ("nodes check", "tune", "status", "explain"):
        assert f"$ gemmfleet {typed} " in out
    assert list(temp.iterdir()) == []
    assert str(temp) not in Path("/proc/mounts").read_text()
    outer = Outer()
    outer.acquire()
    try:
        flt = f"label={LABEL}.owner={process.pid}"
        assert outer.docker("ps", "-aq", "--filter", flt) == outer.docker("network", "ls", "-q", "--filter", flt) == ""
    finally:
        outer.release()


def test_a_machine_that_cannot_is_told_what_to_do(tmp_path: Path) -> None:
    env = {**os.environ, "PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*ARGV, str(tmp_path / "runs")], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 3
    assert re.fullmatch(r"error: the demo needs .*(make demo SYSTEM=1|run it as root)[^\n]*\n", done.stderr)
    assert not (tmp_path / "runs").exists()
