"""`make demo` as a user runs it: real nodes, real torch in containers, and nothing left afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.ledger.reader import LedgerReader
from orchestrator.paths import RunPaths, list_runs
from tests.integration.heavy import why_not
from tests.integration.heavy.fleet import LABEL
from tests.integration.heavy.outer import Outer
from tests.integration.kit import ROOT, read_csv
from tests.support.ledger_kit import per_node
from tests.waiting import PATIENCE_S, wait_until


def on_nodes(test: Callable[..., None]) -> Callable[..., None]:
    """Needs nodes. The first run builds their images, hence the time."""
    for mark in (pytest.mark.full, pytest.mark.system, pytest.mark.skipif(bool(why_not()), reason=why_not())):
        test = mark(test)
    return test


@pytest.fixture
def temp(tmp_path: Path) -> Path:
    """Folder in which the demo makes its temporary one."""
    (tmp_path / "temp").mkdir()
    return tmp_path / "temp"


@contextlib.contextmanager
def demo(tmp_path: Path, temp: Path) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-m", "tests.integration.demo", "--runs", str(tmp_path / "runs")]
    env = {**os.environ, "TMPDIR": str(temp), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)  # it takes its nodes down, and then nothing is left of it


def check_nothing_is_left(pid: int, out: str, temp: Path) -> None:
    assert list(temp.iterdir()) == []
    assert str(temp) not in Path("/proc/mounts").read_text()
    subnet = re.search(r"@(198\.18\.\d+)\.10$", out, re.M)
    assert subnet, out
    routes = subprocess.run(["ip", "route"], capture_output=True, text=True, check=True).stdout
    outer = Outer()
    outer.acquire()
    try:
        flt = f"label={LABEL}.owner={pid}"
        assert outer.docker("ps", "-aq", "--filter", flt) == ""
        assert outer.docker("network", "ls", "-q", "--filter", flt) == ""
        others = outer.docker("network", "ls", "-q", "--filter", f"label={LABEL}").split()
        taken = [outer.docker("network", "inspect", "-f", "{{json .IPAM.Config}}", o, check=False) for o in others]
    finally:
        outer.release()
    # another user of the machine may have taken the same subnet since
    assert f"blackhole {subnet[1]}.0/24" not in routes or any(f"{subnet[1]}.0/24" in t for t in taken)


def only_run(tmp_path: Path) -> RunPaths:
    (run,) = list_runs(tmp_path / "runs")
    return run


@on_nodes
def test_the_demo_tunes_on_two_nodes_and_leaves_nothing(tmp_path: Path, temp: Path) -> None:
    with demo(tmp_path, temp) as process:
        out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, out
    assert "Traceback" not in out
    run = only_run(tmp_path)
    rows, asked = read_csv(run.tuned), read_csv(ROOT / "examples" / "demo.csv")
    assert [(r["M"], r["N"], r["K"]) for r in rows] == [(r["M"], r["N"], r["K"]) for r in asked]
    for row in rows:
        assert row["libtype"] == "torch"
        assert row["gfx"].startswith("cpu-")
        assert float(row["us"]) > 0
        assert float(row["err_ratio"]) <= 0.05
        assert row["kernelName"] in out
    with LedgerReader.open_readonly(run.ledger) as ledger:
        assert set(per_node(ledger)) == {"h1", "h2"}
    devices = json.loads(run.provenance.read_text())["devices"]
    assert [d["node"] for d in devices] == ["h1", "h2"]
    (image,) = {d["worker"]["image"] for d in devices}
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", image)
    assert out.count(image.removeprefix("sha256:")[:12]) == 2, "what `nodes check` found on both nodes"
    for typed in ("nodes check", "tune", "status", "explain"):
        assert f"$ gemmfleet {typed} " in out
    check_nothing_is_left(process.pid, out, temp)


@on_nodes
@pytest.mark.soak
def test_a_demo_that_is_stopped_in_the_middle_leaves_nothing(tmp_path: Path, temp: Path) -> None:
    def tuned() -> int:
        with contextlib.suppress(Exception), LedgerReader.open_readonly(only_run(tmp_path).ledger) as ledger:
            return ledger.counts().tuned
        return 0

    with demo(tmp_path, temp) as process:
        wait_until(lambda: tuned() > 0 or process.poll() is not None, "it tunes")
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, out
    assert "Traceback" not in out
    with LedgerReader.open_readonly(only_run(tmp_path).ledger) as ledger:
        assert ledger.state == "interrupted"
        assert len(read_csv(only_run(tmp_path).tuned)) == ledger.counts().tuned > 0
    check_nothing_is_left(process.pid, out, temp)


def test_a_machine_that_cannot_is_told_what_to_do(tmp_path: Path, temp: Path) -> None:
    argv = [sys.executable, "-m", "tests.integration.demo", "--runs", str(tmp_path / "runs")]
    env = {**os.environ, "PATH": str(temp), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 3
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: the demo needs ")
    assert ("make demo SYSTEM=1" if os.geteuid() == 0 else "run it as root") in line
    assert not (tmp_path / "runs").exists()
