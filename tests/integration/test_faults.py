"""Shapes, workers and tuners that misbehave for real; the books add up each time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.kit import Bench
from tests.waiting import PATIENCE_S, wait_until

POISON = {"N": "32", "M": "2"}


@pytest.mark.parametrize(
    ("fault", "reason", "more"),
    [
        pytest.param({"kind": "abort"}, "fault", [], marks=pytest.mark.full),
        ({"kind": "exit"}, "fault", []),
        pytest.param({"kind": "error"}, "error", [], marks=pytest.mark.full),
        pytest.param({"kind": "stop"}, "hang", ["--watchdog", "1"], marks=pytest.mark.full),
        ({"kind": "hang"}, "hang", ["--watchdog", "1"]),
        pytest.param({"kind": "kill_worker"}, "kills_nodes", [], marks=pytest.mark.full),
        pytest.param({"kind": "truncate"}, "kills_nodes", [], marks=pytest.mark.full),
        pytest.param({"kind": "wrong"}, "wrong_result", [], marks=pytest.mark.full),
        pytest.param({"kind": "no_candidate"}, "no_candidate", [], marks=pytest.mark.full),
    ],
    ids=lambda v: v["kind"] if isinstance(v, dict) else None,
)
def test_a_poison_shape_fails_alone(bench: Bench, fault: dict[str, str], reason: str, more: list[str]) -> None:
    n = bench.shapes(groups=3, per_group=4)
    done = bench.tune(faults=[{**fault, "match": POISON}], more=more)
    assert done.code == 1, done.out + done.err
    bench.check_books(tuned=n - 1, failed={"2x32x64": reason})
    assert f"2x32x64 failed: {reason}" in done.out
    assert done.out.count("2x32x64 failed: ") == 1
    assert "gemmfleet retry" in done.out
    assert "2x32x64" in bench.run("explain").out


def test_out_of_memory_is_a_reason(bench: Bench) -> None:
    n = bench.shapes(groups=2, per_group=3)
    done = bench.tune(faults=[{"kind": "oom", "match": POISON}])
    assert done.code == 1
    bench.check_books(tuned=n - 1, failed={"2x32x64": "oom"})


def test_with_one_slot_the_verdict_is_unconfirmed(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(slots=1)
    n = bench.shapes(groups=2, per_group=3)
    done = bench.tune(faults=[{"kind": "abort", "match": POISON}])
    assert done.code == 1
    bench.check_books(tuned=n - 1, failed={"2x32x64": "fault"})
    assert "unconfirmed" in done.out


def test_an_intermittent_fault_is_tuned_in_the_end(bench: Bench) -> None:
    n = bench.shapes(groups=3, per_group=4)
    done = bench.tune(faults=[{"kind": "abort", "match": POISON, "times": 1}])
    assert done.code == 0, done.out
    bench.check_books(tuned=n, failed={})


def test_retry_of_a_failed_shape(bench: Bench) -> None:
    n = bench.shapes(groups=2, per_group=3)
    done = bench.tune(faults=[{"kind": "no_candidate", "match": POISON, "times": 1}])
    assert done.code == 1
    bench.check_books(tuned=n - 1, failed={"2x32x64": "no_candidate"})
    nothing = bench.run("retry", "--reason", "oom")
    assert nothing.code == 0
    assert "no failed shape with reason 'oom' (failed shapes have: no_candidate)" in nothing.out
    for args, said in (
        (
            ["--reason", "nonsense"],
            "--reason 'nonsense' is not a reason for which a shape fails (there are: fault",
        ),
        (["--reason", "no_candidates"], "did you mean no_candidate?"),
        (["--group", "g9999"], "has no group 'g9999'"),
    ):
        wrong = bench.run("retry", *args)
        assert (wrong.code, said in wrong.err) == (2, True), wrong.err
    again = bench.run("retry", "--reason", "no_candidate")
    assert again.code == 0, again.out + again.err
    bench.check_books(tuned=n, failed={})


def test_a_slot_with_a_sick_canary_gets_no_work(bench: Bench) -> None:
    n = bench.shapes(groups=4)
    done = bench.tune(faults=[{"kind": "sick_canary", "match": {"slot": "1"}}])
    assert done.code == 0, done.out + done.err
    bench.check_books(tuned=n)
    with bench.ledger() as ledger:
        assert {a.slot for a in ledger.attempts() if a.started_at} == {"0"}
    assert "canary" in bench.run("explain", "here").out


def test_a_killed_worker_comes_back(bench: Bench) -> None:
    n = bench.shapes(groups=6)
    run = bench.start("tune", *bench.tune_args(seconds=0.4))
    for wanted in (1, 3):
        wait_until(lambda: bench.tuned() >= wanted, f"{wanted} shapes are tuned")  # noqa: B023
        for pid in bench.agents().values():
            os.kill(pid, signal.SIGKILL)
    out, _ = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 0, out
    bench.check_books(tuned=n, failed={})


def test_a_killed_tuner_comes_back(bench: Bench) -> None:
    n = bench.shapes(groups=6)
    run = bench.start("tune", *bench.tune_args(seconds=0.4))
    wait_until(lambda: bench.tuned() >= 1, "a shape is tuned")
    for pid in bench.children():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    out, _ = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 0, out
    bench.check_books(tuned=n, failed={})


@pytest.mark.full
@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("env: {PYTHONHOME: /nonexistent}", "no Python 3.10 to 3.13 found"),
        ("workdir: /proc/nowhere", "cannot write /proc/nowhere"),
    ],
    ids=["python", "workdir"],
)
def test_a_node_that_cannot_work_ends_the_run_with_3(bench: Bench, broken: str, said: str) -> None:
    bench.shapes(groups=2)
    bench.inventory.write_text(f"defaults: {{tuner: replay}}\nnodes:\n  here:\n    gpus: 0\n    {broken}\n")
    done = bench.tune()
    assert done.code == 3, done.out + done.err
    assert said in done.err
    assert "gemmfleet resume" in done.out
    with bench.ledger() as ledger:
        assert ledger.counts().pending == 2


def _tmpfs(folder: Path, size: str) -> bool:
    folder.mkdir(parents=True, exist_ok=True)
    return (
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], capture_output=True).returncode
        == 0
    )


@pytest.mark.full
def test_a_full_disk_on_the_node_costs_nothing_but_time(bench: Bench) -> None:
    n = bench.shapes(groups=6, per_group=4)
    if not _tmpfs(bench.workdir, "3m"):
        pytest.skip("a small tmpfs cannot be mounted here (not root?)")
    try:
        run = bench.start("tune", *bench.tune_args([bench.held(2, 6)]))
        wait_until(lambda: bench.tuned() == 8 and len(bench.children()) == 2, "the other groups are held")
        bench.release("ready")
        filler = bench.workdir / "filler"
        with filler.open("wb", buffering=0) as f, contextlib.suppress(OSError):
            while True:
                f.write(b"x" * 4096)
        (bench.node() / "ready").rename(bench.node() / "released")  # takes no space
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(3.0)
        assert run.poll() is None, "it waits for space"
        filler.unlink()
        out, _ = run.communicate(timeout=PATIENCE_S)
        assert run.returncode == 0, out
        bench.check_books(tuned=n, failed={})
    finally:
        bench.close()
        subprocess.run(["umount", "-l", bench.workdir], check=True)


def test_a_full_disk_of_the_controller_loses_nothing(bench: Bench) -> None:
    n = bench.shapes(groups=6, per_group=4)
    if not _tmpfs(bench.runs, "2m"):
        pytest.skip("a small tmpfs cannot be mounted here (not root?)")
    try:
        run = bench.start("tune", *bench.tune_args([bench.held(2, 6)]))
        wait_until(lambda: bench.tuned() == 8 and len(bench.children()) == 2, "the other groups are held")
        filler = bench.runs / "filler"
        with filler.open("wb", buffering=0) as f, contextlib.suppress(OSError):
            while True:
                f.write(b"x" * 1024)
        bench.release()
        out, _ = run.communicate(timeout=PATIENCE_S)
        assert run.returncode == 2, out
        assert "full" in out or "space" in out
        assert "Traceback" not in out
        filler.unlink()
        done = bench.run("resume")
        assert done.code == 0, done.out + done.err
        bench.check_books(tuned=n, failed={})
    finally:
        bench.close()
        subprocess.run(["umount", "-l", bench.runs], check=True)
