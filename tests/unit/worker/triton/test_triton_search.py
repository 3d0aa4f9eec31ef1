"""The search of the tuner triton against stand-ins for GPU and compiler: real processes, pipes and deaths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.triton_standin import PROBLEM, Kit, serve_nothing, true_us
from tests.waiting import wait_until
from worker.families.triton_config import KernelConfig
from worker.protocol import Choice, TableKernel
from worker.tuners.base import TunerFault
from worker.tuners.common.problem import Problem
from worker.tuners.triton import space
from worker.tuners.triton.measuring_process import CanaryTimes, MeasuringProcess, NoDeviceError, TimeCanary
from worker.tuners.triton.processes import CompileResult
from worker.tuners.triton.search import Search
from worker.tuners.triton.tuner import candidates_of

Make = Callable[..., Kit]


@dataclass(frozen=True)
class FactsOf:
    """Facts as a compiler might tell them."""

    same_as: str
    spills: int = 0


BEST = KernelConfig(64, 64, 64)
SLOW = KernelConfig(128, 128, 64)
SLOWEST = KernelConfig(256, 128, 64, num_warps=8)
OTHER = KernelConfig(64, 32, 64)
FIVE = [SLOWEST, SLOW, OTHER, BEST, KernelConfig(32, 32, 64)]


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
    k.run(FIVE)
    assert set(k.rows) == {c.name for c in FIVE}
    assert all(r["status"] == "ok" and r["libtype"] == "triton" for r in k.rows.values())
    (won,) = k.of("shape_tuned")
    assert won["row"]["kernelName"] == BEST.name
    assert won["row"]["us"] == pytest.approx(true_us(BEST))
    assert won["row"]["samples"] >= 5
    assert k.store.hints("a16w16", "a16w16/1/256/512/bfloat16/bfloat16/False/none", 64) == [BEST.name]


def test_what_does_not_compile_is_a_row_and_a_crashed_compiler_is_replaced(kit: Make) -> None:
    k = kit(search="exhaustive")
    too_big, crash = KernelConfig(64, 64, 16), KernelConfig(64, 64, 32)
    k.run([too_big, crash, *FIVE])
    assert k.rows[too_big.name]["status"] == "unsupported"
    assert "shared memory" in k.rows[too_big.name]["detail"]
    assert k.rows[crash.name]["status"] == "error"
    assert "SIGSEGV" in k.rows[crash.name]["detail"]
    assert k.of("shape_tuned")[0]["row"]["kernelName"] == BEST.name


@pytest.mark.parametrize("how", ["segv", "abort", "kill", "raise CUDA error: an illegal memory access was encountered",
                                 "raise HIP error: unspecified launch failure"])  # fmt: skip
def test_a_candidate_that_faults_twice_is_blocked_and_the_shape_goes_on(kit: Make, how: str) -> None:
    k = kit({SLOW.name: how}, search="exhaustive")
    k.run(FIVE)
    assert k.rows[SLOW.name]["status"] == "error"
    assert "blocked from now on" in k.rows[SLOW.name]["detail"]
    assert k.store.blocked("a16w16") == {SLOW.name}
    assert k.of("shape_tuned")[0]["row"]["kernelName"] == BEST.name
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
    twin = KernelConfig(64, 64, 64, waves_per_eu=1)
    task = k.task([SLOW, twin, BEST, OTHER])
    told = [FactsOf("slow", 3), FactsOf("best"), FactsOf("best"), FactsOf("other")]
    for key, facts in zip(task.keys, told, strict=True):
        k.context.compiled[key] = CompileResult(key, "ok", "", 0.0, 0.0, facts)
    Search(k.context, task, []).run()
    named = [m["row"]["kernelName"] for m in k.of("row")]
    assert named[-1] == SLOW.name
    assert sorted(named) == sorted([SLOW.name, twin.name, OTHER.name]), "the second of one code is no row"
    kept = k.task([twin, BEST], id_=2)
    Search(k.context, replace(kept, always=frozenset({1})), []).run()
    assert {m["row"]["kernelName"] for m in k.of("row") if m["shape"] == 2} == {twin.name, BEST.name}


def test_a_candidate_that_faulted_once_gets_another_chance(kit: Make) -> None:
    k = kit({SLOW.name: "segv"}, once=True, search="exhaustive")
    k.run(FIVE)
    assert k.rows[SLOW.name]["status"] == "ok"
    assert k.store.faults("a16w16") == {SLOW.name: 1}


def test_a_hang_is_ended_and_told_as_one(kit: Make) -> None:
    k = kit({SLOW.name: "hang"}, search="exhaustive", hang_s=0.5)
    k.run(FIVE)
    assert k.rows[SLOW.name]["status"] == "timeout"
    assert k.of("shape_tuned")[0]["row"]["kernelName"] == BEST.name


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


def test_wrong_results_never_win(kit: Make) -> None:
    k = kit({BEST.name: "wrong"}, search="exhaustive")
    k.run(FIVE)
    assert k.rows[BEST.name]["status"] == "wrong"
    assert k.of("shape_tuned")[0]["row"]["kernelName"] == OTHER.name


def test_a_winner_that_is_wrong_after_being_measured_loses(kit: Make) -> None:
    k = kit({BEST.name: "wrong later"}, search="exhaustive")
    k.run(FIVE)
    assert k.rows[BEST.name]["status"] == "wrong"
    assert k.of("shape_tuned")[0]["row"]["kernelName"] == OTHER.name


def test_all_wrong_is_a_verdict(kit: Make) -> None:
    k = kit({"triton_": "wrong"})
    k.run(FIVE)
    (failed,) = k.of("shape_failed")
    assert failed["reason"] == "wrong_result"


def test_a_shape_without_room_is_unsupported(kit: Make) -> None:
    k = kit()
    k.run(FIVE, Problem("a16w16", 1, 64, 256, 999, "bfloat16"))
    (failed,) = k.of("shape_failed")
    assert (failed["reason"], failed["detail"]) == ("unsupported", "no room")


def test_a_device_on_which_everything_faults_ends_the_attempt(kit: Make) -> None:
    k = kit({"triton_": "segv"})
    with pytest.raises(TunerFault, match="died 6 times") as e:
        k.run(FIVE)
    assert e.value.outcome == "fault"


def test_fast_stops_before_all_are_measured(kit: Make) -> None:
    k = kit()
    many = [KernelConfig(m, n, 64, num_warps=w) for m in (32, 64, 128, 256) for n in (32, 64, 128) for w in (4, 8)]
    k.run(many)
    assert k.of("shape_tuned")[0]["row"]["us"] == min(r["us"] for r in k.rows.values())
    assert len(k.rows) < len(many)


def test_the_shapes_of_a_group_share_compiled_kernels(kit: Make) -> None:
    k = kit(search="exhaustive")
    first = k.task(FIVE)
    second = k.task(FIVE, Problem("a16w16", 1, 128, 256, 512, "bfloat16"), 2)
    Search(k.context, first, [second]).run()
    compiled = len(k.context.account.compiled)
    Search(k.context, second, []).run()
    assert len(k.context.account.compiled) == compiled == len(FIVE)
    assert [m["shape"] for m in k.of("shape_tuned")] == [1, 2]


def test_a_budget_ends_the_search_with_what_there_is(kit: Make) -> None:
    k = kit(search="exhaustive", budget_s_per_shape=1e-3)
    k.run(FIVE)
    assert k.of("shape_tuned")
    assert len(k.rows) < len(FIVE)


def test_without_a_gpu_the_reason_is_told() -> None:
    with pytest.raises(NoDeviceError, match="torch sees no GPU here"):
        MeasuringProcess(serve_nothing, {}, 10.0).restart()


def test_the_account_knows_when_the_gpu_waited(kit: Make) -> None:
    k = kit(search="exhaustive")
    k.run(FIVE)
    account = k.context.account
    account.end = max(b for _, b in account.measuring)
    spent = account.spent()
    assert {"inputs", "check", "measure", "compile", "wait"} == set(spent)
    assert 0 <= account.idle_s <= account.wall_s
    assert 0 < account.compile_busy <= 1
    assert PROBLEM.m == 64


def test_a_winner_is_named_and_has_a_margin(kit: Make) -> None:
    k = kit(search="exhaustive")
    k.run(FIVE)
    (won,) = k.of("shape_tuned")
    assert won["candidate"] == [BEST.name]
    assert "ran" not in won
    assert won["row"]["margin"] > 3


def test_named_candidates_are_all_ranked_whatever_their_distance(kit: Make) -> None:
    k = kit()
    far = KernelConfig(32, 32, 64)
    Search(k.context, replace(k.task([far, BEST]), always=frozenset({0, 1}), named=True), []).run()
    (won,) = k.of("shape_tuned")
    assert won["row"]["kernelName"] == BEST.name
    assert won["row"]["margin"] > 3
    assert sorted(won["ran"]) == sorted([[BEST.name], [far.name]])
    assert (k.rows[far.name]["detail"], k.rows[far.name]["us"]) == ("ranked again", true_us(far))


def test_candidates_are_chosen_by_identity_or_as_kernels_of_a_table(kit: Make) -> None:
    k = kit(max_candidates=1)
    _, one, two, *_ = space.candidates(PROBLEM, k.context.target)
    only = Choice(((one.name,),), (TableKernel("triton", "7", two.name, "0"), TableKernel("triton", "8", "gone", "0")))
    assert {c.name for c in candidates_of(PROBLEM, k.context, only)} == {one.name, two.name}


def test_large_shapes_are_measured_sustained(kit: Make) -> None:
    """Each contender runs before its sample; the stand-in counts none of it."""
    k = kit(search="exhaustive")
    k.run(FIVE, Problem("a16w16", 1, 8192, 8192, 8192, "bfloat16"))
    assert k.of("shape_tuned")[0]["row"]["us"] == pytest.approx(true_us(BEST))


def test_the_measuring_process_times_the_two_kernels(kit: Make) -> None:
    k = kit()
    k.measurer.send(TimeCanary())
    (answer,) = wait_until(lambda: [m for m in k.measurer.receive(0.1) if isinstance(m, CanaryTimes)], "its times")
    assert (answer.compute_us, answer.memory_us) == (2.0, 3.0)
