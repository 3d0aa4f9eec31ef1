"""Workers, nodes and leases that go away, and news that comes late."""

from __future__ import annotations

from orchestrator import events as ev
from orchestrator.policy import PolicySettings
from orchestrator.reasons import Reason
from tests.support.policy_rig import Rig, fails, groups, of, proven_nodes

S = PolicySettings()


def leases(*hosts: str) -> Rig:
    """A rig with a lease a, b, ... on each host, each of which has tuned a shape."""
    rig = Rig()
    for name, host in zip("abcdef", hosts, strict=False):
        rig.lease(name, host)
    rig.singles(*range(101, 101 + len(hosts)))
    rig.tune(*range(101, 101 + len(hosts)))
    return rig


def test_a_loss_with_the_shape_in_flight_uses_up_no_try() -> None:
    rig = proven_nodes()
    rig.singles(1)
    rig.start(1)
    rig.lost(rig.where(1))
    assert (rig.shape(1).tries, len(rig.shape(1).losses)) == (0, 1)
    assert rig.where(1) != ""


def test_a_shape_in_flight_at_three_losses_fails() -> None:
    rig = proven_nodes("a", "b", "c", "d")
    rig.singles(1)
    seen = []
    for n in range(S.losses):
        seen.append(rig.where(1))
        rig.start(1)
        out = rig.lost(seen[-1])
        assert [(s, r) for s, r, _ in fails(out)] == ([(1, Reason.KILLS_NODES)] if n == S.losses - 1 else [])
    assert rig.shape(1).confirmed
    assert all(node in rig.shape(1).detail for node in seen)


def test_worker_deaths_count_and_one_slot_alone_does_not_confirm() -> None:
    rig = Rig()
    rig.node("a")
    rig.singles(1)
    for _ in range(S.losses):
        rig.fault(1, Reason.WORKER_DIED)
    assert (rig.shape(1).reason, rig.shape(1).confirmed) == (Reason.KILLS_NODES, False)


def test_news_is_late_so_that_the_next_shape_and_what_an_idle_slot_was_about_to_claim_count() -> None:
    rig = proven_nodes("a", "b")
    rig.work(1, 2, 3, 4, cost_s=20.0)
    a = rig.attempt(1)
    rig.start(a.shapes[0])
    rig.lost(a.node)
    assert [len(rig.shape(s).losses) for s in a.shapes] == [1, 1, 0, 0][: len(a.shapes)]
    other = proven_nodes("a", "b")
    other.singles(1, 2, cost_s=100.0)
    other.lost(other.where(1))
    assert (len(other.shape(1).losses), len(other.shape(2).losses)) == (1, 0)


def test_a_node_that_comes_back_late_loses_nothing() -> None:
    rig = proven_nodes("a", "b")
    rig.work(1, 2, 3, cost_s=100.0, kind="x")
    a = rig.attempt(1)
    rig.start(a.shapes[0])
    rig.lost(a.node)
    rig.do(ev.NodeJoined(a.node, ("0",)))
    rig.do(ev.ShapeTuned(a.id, a.shapes[0]))
    assert rig.shape(a.shapes[0]).state == "tuned"
    assert a.id in rig.policy.state.open_attempts, "it is at work"
    assert rig.policy.state.slot_of(a).running == a.id
    assert not any(rig.shape(s).losses for s in a.shapes)
    assert not [s for s in a.shapes[1:] if s in rig.policy.state.waiting]


def test_a_row_that_comes_late_settles_its_shape_and_takes_its_new_attempt_back() -> None:
    rig = proven_nodes("a", "b", "c")
    rig.singles(1, cost_s=30.0)
    old = rig.attempt(1)
    rig.start(1)
    rig.lost(old.node)
    new = rig.attempt(1)
    out = rig.do(ev.ShapeTuned(old.id, 1))
    assert (rig.shape(1).state, rig.shape(1).attempt) == ("tuned", old.id)
    assert of(ev.TakeBack, out) == [ev.TakeBack(new.id, new.node)]


def test_an_uncharged_end_gives_everything_back_at_once_and_blames_nobody() -> None:
    rig = leases("h1", "h2", "h3")
    rig.singles(1, 2, 3, 4, cost_s=20.0)
    rig.start(1)
    node = rig.where(1)
    out = rig.ended(node)
    assert (1,) in [shapes for _, shapes in groups(out)]
    assert (rig.shape(1).losses, rig.shape(1).tries, rig.shape(1).lease_ends) == ([], 0, [node])
    assert rig.policy.state.nodes[node].state == "gone"
    assert rig.policy.state.attempts[rig.shape(1).attempts[0]].outcome is Reason.LEASE_ENDED


def test_a_charged_end_is_a_lost_node() -> None:
    rig = leases("h1", "h2", "h3")
    rig.singles(1)
    rig.start(1)
    rig.ended(rig.where(1), "node_failure", charged=True)
    assert (len(rig.shape(1).losses), rig.shape(1).lease_ends) == (1, [])


def test_what_ended_badly_while_its_lease_was_being_ended_is_forgiven() -> None:
    for how in ("worker", "fault", "node"):
        rig = leases("h1", "h2", "h3")
        rig.singles(1)
        node = rig.where(1)
        rig.start(1)
        if how == "node":
            rig.lost(node)
        else:
            rig.bad_end(1, Reason.FAULT if how == "fault" else Reason.WORKER_DIED)
        assert rig.shape(1).faults or rig.shape(1).losses
        rig.tick(S.came_with_s if how != "node" else 500.0)
        rig.ended(node)
        assert (rig.shape(1).faults, rig.shape(1).losses, rig.shape(1).tries) == ([], [], 0), how


def test_a_shape_that_outlives_its_leases_waits_for_a_fresh_one_and_fails_in_the_end() -> None:
    rig = Rig()
    rig.do(ev.FleetMayGrow(True))
    rig.singles(1, 2, 3)
    for n in range(S.lease_ends):
        rig.lease(f"l{n}", f"h{n}")
        if rig.where(1) == "":
            rig.tune(*next(a.shapes for a in rig.policy.outstanding()))
        assert rig.shape(1).state == "pending"
        rig.start(1)
        rig.ended(f"l{n}", "time_limit")
    assert (rig.shape(1).reason, rig.shape(1).confirmed) == (Reason.OUTLIVES_LEASE, True)
    assert "time limit" in rig.shape(1).detail


def test_it_is_not_sent_to_a_used_lease_while_a_fresh_one_may_come() -> None:
    rig = Rig()
    rig.do(ev.FleetMayGrow(True))
    rig.singles(1)
    for n in range(S.fresh_after):
        rig.lease(f"l{n}", f"h{n}")
        rig.start(1)
        rig.ended(f"l{n}")
    rig.singles(2, cost_s=500.0)
    rig.lease("l8", "h8")
    first = rig.policy.outstanding()[0].shapes
    assert first == (1,)
    rig.ended("l8", "released")
    rig.lease("l9", "h9")
    rig.do(ev.FleetMayGrow(False))
    assert rig.where(1) == "l9"


def test_a_host_that_only_ended_leases_used_is_judged_by_the_last_of_them() -> None:
    rig = Rig()
    for lease, gpu, good in (("a", "3", False), ("b", "5", True), ("c", "3", False)):
        rig.do(ev.NodeExpected(lease, ("0",), "h1", (gpu,), "job", "pool"))
        rig.do(ev.NodeJoined(lease, ("0",)))
        rig.canary(lease, ok=good)
        rig.ended(lease)
        assert rig.policy.quarantined_hosts(rig.now) == ([] if good else ["h1"])


def test_the_gpu_keeps_its_evidence_and_quarantine_from_lease_to_lease() -> None:
    rig = leases("h1", "h2")
    rig.canary("a", ok=False)
    until = rig.policy.state.nodes["a"].slots["0"].gpu.quarantined_until
    rig.ended("a")
    assert rig.policy.quarantined_hosts(rig.now) == ["h1"]
    assert rig.policy.quarantined_hosts(until) == []
    rig.do(ev.NodeExpected("c", ("0",), "h1", ("0",), "job", "pool"))
    rig.do(ev.NodeJoined("c", ("0",)))
    assert rig.policy.state.nodes["c"].slots["0"].state == "quarantined"
    rig.canary("c")
    assert rig.policy.state.nodes["c"].slots["0"].state == "quarantined", "that was its start's own canary"
    rig.now = until
    assert of(ev.AskCanary, rig.tick()) != []
    rig.canary("c")
    assert {s.state for s in rig.policy.state.nodes["c"].slots.values()} == {"ready"}
