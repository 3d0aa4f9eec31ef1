"""A run read from its ledger goes in the simulator as it went; and then without a node, or with more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator import events as ev
from orchestrator.errors import InputError
from orchestrator.ledger import Ledger
from orchestrator.paths import RunPaths
from orchestrator.reasons import Reason
from orchestrator.run.replay import read_job
from orchestrator.simulation.job import Setting, plan_of
from orchestrator.simulation.plan import Faults, Outage, Poison, Sickness, SimLease, SimPlan, Span
from orchestrator.simulation.simulator import Result, Simulator, simulate
from tests.support import report_kit as kit


def kept(folder: Path, plan: SimPlan, *more: ev.Record) -> tuple[RunPaths, Result]:
    """A finished run that went as the plan does; `more`: records a second apart after its end."""
    shapes = sum(len(g.shapes) for g in plan.groups)
    paths, asked = kit.empty_run(folder, shapes)
    result = Simulator(plan).run()
    # the controller records trouble with a link; the simulator has only what the policy needs
    broken = [(o.at, ev.NodeTroubled(o.node, "silent", kit.BEGAN + o.at)) for o in plan.faults.outages if o.at]
    late = [(result.makespan_s + i, r) for i, r in enumerate(more, 1)]
    journal = [*sorted([*result.journal, *broken], key=lambda r: r[0]), *late]
    with Ledger.open(paths.ledger) as ledger:
        kit.fill(ledger, journal, asked, {})
        with ledger.transaction():
            ledger.set_meta("state", "finished")
    return paths, result


def quarantined(result: Result) -> set[tuple[str, str]]:
    return {(r.node, r.slot) for _, r in result.journal if isinstance(r, ev.Quarantine)}


PLAIN = replace(kit.plan(192, per_group=4), faults=Faults(), setup_s=6.0, cold_s=15.0)


def test_a_run_without_faults_takes_as_long_again(tmp_path: Path) -> None:
    paths, result = kept(tmp_path, PLAIN)
    job = read_job(paths)
    assert job.took_s == pytest.approx(result.makespan_s, abs=2.0)
    assert job.plan.nodes == PLAIN.nodes
    assert job.plan.setup_s == pytest.approx(6.0)
    assert job.plan.cold_s == pytest.approx(15.0)
    assert job.plan.faults == Faults()
    true = {s: t for g in PLAIN.groups for s, t in zip(g.shapes, g.seconds, strict=True)}
    assert job.seconds == pytest.approx(true, abs=0.06), "but for the time that news takes"
    again = simulate(plan_of(job, Setting(), 5))
    assert again.makespan_s == pytest.approx(result.makespan_s, rel=0.05)


def test_some_candidates_measured_again_are_not_the_time_of_a_tuning(tmp_path: Path) -> None:
    group = replace(PLAIN.groups[0], shapes=(1, 2), seconds=(10.0, 10.0))
    plan = SimPlan({"n1": 1}, (group,), setup_s=6.0, cold_s=15.0)
    again = f"{group.id}-9"
    more = (
        ev.Send(again, group.id, "n1", "0", 9, (("c0",),)), ev.AttemptStarted(again, "n1", "0"),
        ev.ShapeStarted(again, 1), ev.ShapeTuned(again, 1, complete=False),
        ev.AttemptEnded(again, Reason.DONE, None, "", 3.0),
    )  # fmt: skip
    job = read_job(kept(tmp_path, plan, *more)[0])
    assert job.seconds == pytest.approx({1: 10.0, 2: 10.0}, abs=0.1)
    assert job.plan.setup_s == pytest.approx(15.0)


def test_what_went_wrong_goes_wrong_again(tmp_path: Path) -> None:
    """Poison, a refusal, a killed worker, a sick slot, a node lost for a while, a link break, the controller."""
    faults = Faults(
        poison={5: Poison(), 40: Poison(Reason.HANG)},
        refused={17: Reason.NO_CANDIDATE},
        worker_killers=frozenset({30}),
        sick={("n2", "3"): Sickness(since=20.0)},
        outages=(Outage("n3", 40.0, 150.0), Outage("n1", 60.0, 20.0, "link")),
        controller=(Span(70.0, 90.0),),
    )
    paths, result = kept(tmp_path, replace(PLAIN, faults=faults))
    assert result.end == "finished"
    job = read_job(paths)
    seen = job.plan.faults
    assert {s: (p.reason, p.chance) for s, p in seen.poison.items() if p.chance == 1.0} == {
        5: (Reason.FAULT, 1.0),
        40: (Reason.HANG, 1.0),
    }
    assert (seen.refused, seen.worker_killers) == ({17: Reason.NO_CANDIDATE}, frozenset({30}))
    assert set(seen.sick) == {("n2", "3")}
    assert seen.sick["n2", "3"].canary
    away = next(o for o in seen.outages if o.node == "n3")
    assert away.kind == "power"
    assert away.at == pytest.approx(40.0, abs=10.0)
    assert away.seconds == pytest.approx(150.0, abs=15.0)
    assert any(o.node == "n1" and o.kind == "link" for o in seen.outages)
    assert seen.controller[0].since == pytest.approx(70.0, abs=10.0)
    again = simulate(plan_of(job, Setting(), 1))
    assert again.end == "finished"
    assert set(result.of("failed")) == set(again.of("failed"))
    assert quarantined(again) == quarantined(result) == {("n2", "3")}
    assert again.makespan_s == pytest.approx(result.makespan_s, rel=0.25)


def test_without_the_sick_node_nothing_is_quarantined(tmp_path: Path) -> None:
    sick = {("n2", str(s)): Sickness(since=15.0) for s in range(4)}
    paths, result = kept(tmp_path, replace(PLAIN, faults=Faults(sick=sick)))
    assert quarantined(result)
    job = read_job(paths)
    same, without = (simulate(plan_of(job, Setting(without=w), 1)) for w in ((), ("n2",)))
    assert quarantined(same)
    assert quarantined(without) == set()
    assert all(r.node != "n2" for _, r in without.journal if isinstance(r, ev.Send))
    assert len(without.of("tuned")) == 192


def test_with_more_nodes_it_is_over_sooner(tmp_path: Path) -> None:
    job = read_job(kept(tmp_path, PLAIN)[0])
    three, six = (simulate(plan_of(job, Setting(nodes=n), 1)).makespan_s for n in (0, 6))
    assert six < 0.8 * three


def test_a_late_node_is_late_again_and_a_lease_ends_again(tmp_path: Path) -> None:
    lease = SimLease("host", ("0", "1", "2", "3"), since=10.0, until=80.0, cause="preempted")
    plan = replace(PLAIN, faults=Faults(outages=(Outage("n1", 0.0, 60.0),)), leases={"n3": lease})
    job = read_job(kept(tmp_path, plan)[0])
    late = next(o for o in job.plan.faults.outages if o.node == "n1")
    assert late.at == 0.0
    assert late.seconds == pytest.approx(60.0, abs=10.0)
    known = job.plan.leases["n3"]
    assert (known.host, known.gpus, known.cause, known.charged) == ("host", lease.gpus, "preempted", False)
    assert known.until == pytest.approx(80.0, abs=5.0)


def test_an_attempt_without_gaps_has_its_batches_apart(tmp_path: Path) -> None:
    """Three processes of four shapes: their start is a gap between shapes, which --batch leaves out."""
    group = replace(PLAIN.groups[0], shapes=tuple(range(1, 13)), seconds=(10.0,) * 12)
    plan = SimPlan({"n1": 1}, (group,), setup_s=6.0, cold_s=15.0, batch=4)
    job = read_job(kept(tmp_path, plan)[0])
    assert job.gaps == pytest.approx(
        {**dict.fromkeys((4, 8), 6.0), **dict.fromkeys((1, 2, 3, 5, 6, 7, 9, 10, 11), 0.0)}
    )
    assert sum(job.seconds.values()) == pytest.approx(120.0 + 2 * 6.0)
    six = simulate(plan_of(replace(job, plan=replace(job.plan, setup_s=6.0)), Setting(batch=6), 1))
    assert six.setup_s == pytest.approx(15.0 + 6.0)


def test_a_run_with_nothing_to_tune_is_refused(tmp_path: Path) -> None:
    paths, _ = kit.empty_run(tmp_path)
    with pytest.raises(InputError, match="none of its shapes was to be tuned"):
        read_job(paths)
