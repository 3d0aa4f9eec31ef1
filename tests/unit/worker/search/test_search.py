"""The search against stand-ins for GPU, kernels and compiler: real processes, pipes and deaths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.search_standin import PROBLEM, Kit, Tile, serve_nothing, true_us
from tests.waiting import wait_until
from worker.tuners.base import TunerFault
from worker.tuners.common.problem import Problem
from worker.tuners.search.compiling import CompileResult
from worker.tuners.search.measuring import Answer, Ask, MeasuringProcess, NoDeviceError

Make = Callable[..., Kit]


@dataclass(frozen=True)
class FactsOf:
    """Facts as a compiler might tell them."""

    same_as: str
    spills: int = 0
    shared_bytes: int = 0


BEST = Tile(64, 64, 64)
SLOW = Tile(128, 128, 64)
SLOWEST = Tile(256, 128, 64, warps=8)
OTHER = Tile(64, 32, 64)
FIVE = [SLOWEST, SLOW, OTHER, BEST, Tile(32, 32, 64)]


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[Make]:
    made: list[Kit] = []

    def make(behave: dict[str, str] | None = None, **options: Any) -> Kit:
        made.append(Kit(tmp_path, behave or {}, **options))
        return made[-1]

    yield make
    for k in made:
        k.close()


def test_the_fastest_wins_and_every_candidate_is_a_row(kit: Make) -> None:
    k = kit(search="exhaustive")
    assert k.run(FIVE) == BEST.name
    assert set(k.rows) == {c.name for c in FIVE}
    assert all(r["status"] == "ok" and r["libtype"] == "triton" for r in k.rows.values())
    assert k.ranked is not None
    ranking = k.ranked.ranking
    assert ranking.us[ranking.winner] == pytest.approx(true_us(BEST))
    assert ranking.rounds >= 5
    assert ranking.margin is not None
    assert ranking.margin > 3


def test_what_does_not_compile_is_a_row_and_a_crashed_compiler_is_replaced(kit: Make) -> None:
    k = kit(search="exhaustive")
    refused, large, crash = Tile(64, 64, 16), Tile(64, 64, 8), Tile(64, 64, 32)
    assert k.run([refused, large, crash, *FIVE]) == BEST.name
    assert k.rows[refused.name]["status"] == k.rows[large.name]["status"] == "unsupported"
    assert "shared memory" in k.rows[refused.name]["detail"]
    assert "needs 232449 bytes of shared memory, 232448 are there" in k.rows[large.name]["detail"]
    assert k.rows[crash.name]["status"] == "error"
    assert "SIGSEGV" in k.rows[crash.name]["detail"]


@pytest.mark.parametrize("how", ["segv", "abort", "kill", "raise CUDA error: an illegal memory access was encountered",
                                 "raise HIP error: unspecified launch failure"])  # fmt: skip
def test_a_candidate_that_faults_twice_is_blocked_and_the_shape_goes_on(kit: Make, how: str) -> None:
    k = kit({SLOW.name: how}, search="exhaustive")
    assert k.run(FIVE) == BEST.name
    assert k.rows[SLOW.name]["status"] == "error"
    assert "blocked from now on" in k.rows[SLOW.name]["detail"]
    assert k.store.blocked("a16w16") == {SLOW.name}
    assert {n for n, r in k.rows.items() if r["status"] == "ok"} == {c.name for c in FIVE} - {SLOW.name}


def test_a_blocked_candidate_is_not_run_again(kit: Make) -> None:
    k = kit({SLOW.name: "segv"}, search="exhaustive")
    for _ in range(2):
        k.store.faulted("a16w16", SLOW.name, "seen before")
    k.run(FIVE)
    assert k.rows[SLOW.name]["detail"].startswith("blocked: ")
    assert k.store.faults("a16w16") == {SLOW.name: 2}


def test_candidates_of_one_machine_code_are_measured_once_and_those_that_spill_last(kit: Make) -> None:
    k = kit(search="exhaustive")
    twin = replace(BEST, waves=1)
    tiles = [SLOW, twin, BEST, OTHER]
    task = k.task(tiles)
    told = [FactsOf("slow", 3), FactsOf("best"), FactsOf("best"), FactsOf("other")]
    for key, facts in zip(task.keys, told, strict=True):
        k.context.compiled[key] = CompileResult(key, "ok", "", 0.0, 0.0, facts)
    k.run(tiles, task=task)
    named = [m["row"]["kernelName"] for m in k.messages if m["type"] == "row"]
    assert named[-1] == SLOW.name
    assert sorted(named) == sorted([SLOW.name, twin.name, OTHER.name]), "the second of one code is no row"
    both = [twin, BEST]
    k.run(both, task=replace(k.task(both, id_=2), always=frozenset({1})))
    shown = {m["row"]["kernelName"] for m in k.messages if m["type"] == "row" and m["shape"] == 2}
    assert shown == {twin.name, BEST.name}


def test_a_candidate_that_faulted_once_gets_another_chance(kit: Make) -> None:
    k = kit({SLOW.name: "segv"}, once=True, search="exhaustive")
    k.run(FIVE)
    assert k.rows[SLOW.name]["status"] == "ok"
    assert k.store.faults("a16w16") == {SLOW.name: 1}


def test_a_hang_is_ended_and_told_as_one(kit: Make) -> None:
    k = kit({SLOW.name: "hang"}, search="exhaustive", hang_s=0.5)
    assert k.run(FIVE) == BEST.name
    assert k.rows[SLOW.name]["status"] == "timeout"


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("Triton Error [CUDA]: out of memory", "oom"),
        ("out of resource: shared memory, Required: 300000, Hardware limit: 232448", "unsupported"),
        ("Triton Error [HIP]: Code: 1, Messsage: invalid argument", "error"),
        ("CUDA error: too many resources requested for launch", "unsupported"),
    ],
)
def test_an_error_that_leaves_the_device_sound_is_a_row(kit: Make, text: str, status: str) -> None:
    k = kit({SLOW.name: f"raise {text}"}, search="exhaustive")
    before = k.measurer.connections
    k.run(FIVE)
    assert k.rows[SLOW.name]["status"] == status
    assert k.measurer.connections == before  # the same process
    assert k.store.faults("a16w16") == {}


@pytest.mark.parametrize("when", ["wrong", "wrong later"])
def test_wrong_results_never_win(kit: Make, when: str) -> None:
    """Later: after it was measured, in the check of the fastest."""
    k = kit({BEST.name: when}, search="exhaustive")
    assert k.run(FIVE) == OTHER.name
    assert k.rows[BEST.name]["status"] == "wrong"


def test_all_wrong_is_a_verdict(kit: Make) -> None:
    k = kit({"tile_": "wrong"})
    assert k.run(FIVE) == ""
    assert k.search.why_none()[0] == "wrong_result"


def test_a_shape_without_room_is_unsupported(kit: Make) -> None:
    k = kit()
    assert k.run(FIVE, replace(PROBLEM, k=999)) == ""
    assert k.search.why_none() == ("unsupported", "no room")


def test_a_device_on_which_everything_faults_ends_the_attempt(kit: Make) -> None:
    k = kit({"tile_": "segv"})
    with pytest.raises(TunerFault, match="died 6 times") as e:
        k.run(FIVE)
    assert e.value.outcome == "fault"


def test_fast_stops_before_all_are_measured(kit: Make) -> None:
    k = kit()
    many = [Tile(m, n, 64, warps=w) for m in (32, 64, 128, 256) for n in (32, 64, 128) for w in (4, 8)]
    won = k.run(many)
    assert k.rows[won]["us"] == min(r["us"] for r in k.rows.values())
    assert len(k.rows) < len(many)


def test_the_shapes_of_a_group_share_compiled_kernels(kit: Make) -> None:
    k = kit(search="exhaustive")
    second = k.task(FIVE, replace(PROBLEM, m=128), 2)
    assert k.run(FIVE, following=[second]) == BEST.name
    compiled = len(k.context.account.compiled)
    assert k.run(FIVE, task=second) == BEST.name
    assert len(k.context.account.compiled) == compiled == len(FIVE)


def test_earlier_winners_are_found_among_the_candidates(kit: Make) -> None:
    k = kit()
    k.store.won(PROBLEM.family, PROBLEM.group_name, 32, OTHER.name, 1.0)
    k.store.won(PROBLEM.family, PROBLEM.group_name, 64, BEST.name, 1.0)
    k.store.won(PROBLEM.family, PROBLEM.group_name, 64, "gone", 1.0)
    assert k.context.winners(k.task(FIVE)) == [FIVE.index(BEST), FIVE.index(OTHER)]


def test_a_budget_ends_the_search_with_what_there_is(kit: Make) -> None:
    k = kit(search="exhaustive", budget_s_per_shape=1e-3)
    assert k.run(FIVE)
    assert len(k.rows) < len(FIVE)


def test_without_a_gpu_the_reason_is_told() -> None:
    with pytest.raises(NoDeviceError, match="torch sees no GPU here"):
        MeasuringProcess(serve_nothing, {}, 10.0).restart()


def test_the_account_knows_when_the_gpu_waited(kit: Make) -> None:
    k = kit(search="exhaustive")
    k.run(FIVE)
    account = k.context.account
    account.end = max(b for _, b in account.measuring)
    assert set(account.spent()) == {"inputs", "check", "measure", "compile", "wait"}
    assert 0 <= account.idle_s <= account.wall_s


def test_large_shapes_are_measured_sustained(kit: Make) -> None:
    """Each contender runs before its sample; the stand-in counts none of it."""
    k = kit(search="exhaustive")
    assert k.run(FIVE, Problem("a16w16", 1, 8192, 8192, 8192, "bfloat16")) == BEST.name
    assert k.ranked is not None
    assert k.ranked.ranking.rounds >= 12


def test_the_measuring_process_times_the_two_kernels(kit: Make) -> None:
    k = kit()
    k.measurer.send(Ask("time_canary"))
    (answer,) = wait_until(lambda: [m for m in k.measurer.receive(0.1) if isinstance(m, Answer)], "its times")
    assert answer.value == (2.0, 3.0)
