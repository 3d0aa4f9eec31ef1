"""Ends of runs on their nodes: nothing is started afterwards, nothing is left, and `cancel` reports what was seen."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.dispatch import node_registry
from orchestrator.events import NodeBusy, NodeJoined
from tests.integration.kit import Bench
from tests.integration.sshd import LightFleet, light_fleet
from tests.support.ledger_kit import tuned_times
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.system


@pytest.fixture
def light() -> Iterator[LightFleet]:
    with light_fleet() as fleet:
        yield fleet


@pytest.fixture
def mute() -> Iterator[list[tuple[str, int]]]:
    """Two places that take a connection, as a kernel does, and say nothing."""
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    yield [s.getsockname() for s in servers]
    for s in servers:
        s.close()


def add_nodes(bench: Bench, config: Path, **places: tuple[str, int]) -> None:
    options = f"transport: ssh, ssh_config: {config}, gpus: 0, workdir: {bench.workdir}"
    with bench.inventory.open("a") as f:
        f.writelines(f"  {n}: {{host: {h}, port: {p}, {options}}}\n" for n, (h, p) in places.items())


def test_where_all_is_skipped_no_node_is_started(bench: Bench) -> None:
    bench.shapes(groups=2)
    table = str(bench.root / "table.csv")
    assert bench.tune(more=["--db", table]).code == 0
    done = bench.tune(more=["--db", table])
    assert (done.code, bench.tuned()) == (0, 0), done.out + done.err
    assert not bench.node().exists()
    assert "no worker ran on here" in bench.run("cancel").out


@pytest.mark.parametrize("opens", [True, False], ids=["ends in time", "hangs"])
def test_a_run_that_ends_while_a_node_is_being_prepared_leaves_no_worker_there(
    light: LightFleet, make_bench: Callable[..., Bench], opens: bool
) -> None:
    """One node's launch.sh stands at a gate while the other, which waited for that, works. The gate opens in
    time, and the worker is stopped; or when the run is over, and the worker ends by itself, at once."""
    bench = make_bench(slots=1)
    gate, reached = light.folder / "gate", light.folder / "reached"
    gate.touch()
    places = {}
    for name, before in (("fast", f"until [ -e {reached} ]"), ("slow", f": >{reached}; while [ -e {gate} ]")):
        script = light.folder / f"{name}.sh"
        script.write_text(
            f"case $SSH_ORIGINAL_COMMAND in *launch.sh*\\ start*) {before}; do sleep 0.05; done ;; esac\n"
            'eval "$SSH_ORIGINAL_COMMAND"\n'
        )
        node = light.add(f"ForceCommand sh {script}")
        places[name] = (node.address, node.port)
    bench.inventory.write_text("defaults: {tuner: replay}\nnodes:\n")
    add_nodes(bench, light.config, **places)
    n = bench.shapes(groups=3)
    # the nodes are one machine: by default the second would wait until the first has started its workers
    run = bench.start("tune", *bench.tune_args(more=["--busy", "share"]))
    if opens:
        wait_until(lambda: bench.tuned() == n or run.poll() is not None, "the other is through")
        gate.unlink()
    out, _ = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 0, out
    assert reached.exists()
    assert [r.node for _, r in records(bench) if isinstance(r, NodeJoined)] == ["fast"]
    assert "workers may be left" not in out
    gate.unlink(missing_ok=True)
    log = bench.workdir / bench.paths.run / "slow/logs/0.log"
    wait_until(log.exists, "the late worker came")
    wait_until(lambda: not bench.processes(), "no worker is left")
    bench.check_books(tuned=n, failed={})


def test_cancel_reports_what_it_saw(make_bench: Callable[..., Bench], mute: list[tuple[str, int]]) -> None:
    """Through a living controller, and without one; two nodes never answer."""
    bench = make_bench(slots=2)
    add_nodes(bench, Path("/dev/null"), dead1=mute[0], dead2=mute[1])
    bench.shapes(groups=30)
    run = bench.start("tune", *bench.tune_args([bench.held(2, 30)]))
    wait_until(lambda: len(bench.agents()) == 2 and bench.tuned(), "both slots work")
    done = bench.run("cancel")
    assert "is cancelled" in done.out
    assert "stopped 2 workers on here" in done.out, done.out
    assert "nothing was started on dead1, dead2" in done.out
    assert run.wait(PATIENCE_S) == 130
    again = bench.start("resume")
    wait_until(lambda: len(bench.agents()) == 2, "both slots work again")
    again.kill()
    again.wait()
    done = bench.run("cancel")
    assert "no controller was driving it" in done.out
    assert "stopped 2 workers on here" in done.out, done.out
    for node in ("dead1", "dead2"):
        assert f"! {node}: workers may be left; they end after 15 minutes without work: " in done.out
    assert "no worker is left" not in done.out
    wait_until(lambda: not bench.processes(), "no worker is left")
    assert "no worker ran on here" in bench.run("cancel").out


def test_a_cancel_is_over_in_ten_seconds_by_its_limits() -> None:
    """Nodes are ended while others are awaited; what comes after that is short."""
    soon = node_registry.SOON
    assert soon.stop_s + soon.kill_s < soon.limit_s
    assert soon.limit_s + soon.kill_s + node_registry.CLOSE_S <= 10.0


def test_of_two_runs_that_start_in_the_same_moment_one_waits(
    make_bench: Callable[..., Bench], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """On the cores, and with work folders that have nothing in common, as with the default inventory."""
    benches = [make_bench(slots=1), Bench(tmp_path_factory.mktemp("second"), 1)]
    try:
        for b in benches:
            b.shapes(groups=4)
            b.inventory.write_text("defaults: {tuner: replay}\nnodes: {here: {gpus: 0}}\n")
        go = benches[0].root / "go"
        runs = [b.start("tune", *b.tune_args([{**b.held(0, 4), "until": str(go)}])) for b in benches]
        wait_until(lambda: any(isinstance(r, NodeBusy) for b in benches for _, r in records(b)), "one waits")
        go.touch()
        for run in runs:
            out, _ = run.communicate(timeout=PATIENCE_S)
            assert run.returncode == 0, out
        waited = [[r.doing for _, r in records(b) if isinstance(r, NodeBusy)] for b in benches]
        assert sorted(map(bool, waited)) == [False, True], waited
        spans = []
        for b in benches:
            b.check_books(tuned=4, failed={})
            with b.ledger() as ledger:
                times = tuned_times(ledger)
            spans.append((times[0], times[-1]))
        (_, end), (begin, _) = sorted(spans)
        assert end < begin, "they never measured at the same time"
    finally:
        benches[1].close()


def records(bench: Bench) -> list[tuple[float, object]]:
    with contextlib.suppress(Exception), bench.ledger() as ledger:
        return list(ledger.journal_records())
    return []
