"""The search against stand-ins for GPU, kernels and compiler (processes, pipes and deaths are real), and its policy."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.support.search_standin import PROBLEM, Kit, Tile, true_us
from worker.triton_configs.kinds import BY_NAME
from worker.tuners.aiter_triton import space
from worker.tuners.base import TunerFault
from worker.tuners.common.helper_process import HelperDied, HelperError, HelperProcess, HelperTimedOut
from worker.tuners.common.problem import Problem
from worker.tuners.search.compile_pool import CompileResult
from worker.tuners.search.forked_process import ForkedProcess
from worker.tuners.search.kernel_store import KernelStore
from worker.tuners.search.messages import Answer, CallBench
from worker.tuners.search.ranker import CandidateRanker, StopRules
from worker.tuners.search.source import CompileFacts
from worker.tuners.search.space import best_of_each_tile
from worker.tuners.search.target import datasheet_target
from worker.tuners.search.tile_config import TileConfig

Make = Callable[..., Kit]

BEST = Tile(64, 64, 64)
SLOW = Tile(128, 128, 64)
OTHER = Tile(64, 32, 64)
FIVE = [Tile(256, 128, 64, warps=8), SLOW, OTHER, BEST, Tile(32, 32, 64)]
LARGE = Problem("a16w16", 1, 8192, 8192, 8192, "bfloat16")


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[Make]:
    made: list[Kit] = []

    def make(behave: dict[str, str] | None = None, **options: Any) -> Kit:
        made.append(Kit(tmp_path, behave or {}, **options))
        return made[-1]

    yield make
    for k in made:
        k.close()


@pytest.mark.parametrize(("problem", "rounds"), [(PROBLEM, 5), (LARGE, 12)])
def test_the_fastest_wins_and_every_candidate_is_a_row(kit: Make, problem: Problem, rounds: int) -> None:
    """Large shapes are ranked sustained: in more rounds."""
    k = kit()
    assert k.run(FIVE, problem) == BEST.name
    assert {(n, r["status"], r["libtype"]) for n, r in k.rows().items()} == {(c.name, "ok", "triton") for c in FIVE}
    assert k.ranked is not None
    ranking = k.ranked.ranking
    assert ranking.us[ranking.winner] == pytest.approx(true_us(BEST))
    assert ranking.rounds >= rounds
    assert (ranking.margin or 0) > 3
    assert k.context.spent["check"] > 0
    assert k.context.spent["compile"] > 0
    k.measurer.send(CallBench("time_canary"))
    assert k.measurer.wait_for_answer(20) == Answer((2.0, 3.0))


def test_what_does_not_compile_is_a_row_and_a_crashed_compiler_is_replaced(kit: Make) -> None:
    k = kit()
    odd = {16: ("unsupported", "shared memory"), 8: ("unsupported", "232448 are there"), 32: ("error", "SIGSEGV")}
    assert k.run([*(Tile(64, 64, step) for step in odd), *FIVE]) == BEST.name
    for step, (status, detail) in odd.items():
        row = k.rows()[Tile(64, 64, step).name]
        assert row["status"] == status
        assert detail in row["detail"]


@pytest.mark.parametrize(
    ("how", "status"),
    [
        ("kill", "error"),
        ("hang", "timeout"),
        ("raise CUDA error: an illegal memory access was encountered", "error"),
        ("raise HIP error: hipErrorLaunchFailure: unspecified launch failure", "error"),
        ("raise Memory access fault by GPU node-2 on address 0x7f", "error"),
    ],
)
def test_a_candidate_that_faults_twice_is_blocked_and_the_shape_goes_on(kit: Make, how: str, status: str) -> None:
    k = kit({SLOW.name: how}, hang_s=0.5 if how == "hang" else 20)
    assert k.run(FIVE) == BEST.name
    assert k.rows()[SLOW.name]["status"] == status
    assert "blocked from now on" in k.rows()[SLOW.name]["detail"]
    assert {n for n, r in k.rows().items() if r["status"] == "ok"} == {c.name for c in FIVE} - {SLOW.name}
    k.run(FIVE)
    assert k.rows()[SLOW.name]["detail"].startswith("blocked: ")
    assert k.store.count_faults("a16w16") == {SLOW.name: 2}, "it was not run again"


def test_a_candidate_that_faulted_once_gets_another_chance(kit: Make) -> None:
    k = kit({SLOW.name: "kill"}, once=True)
    k.run(FIVE)
    assert k.rows()[SLOW.name]["status"] == "ok"
    assert k.store.count_faults("a16w16") == {SLOW.name: 1}


def test_a_device_on_which_everything_faults_ends_the_attempt(kit: Make) -> None:
    with pytest.raises(TunerFault, match="died 6 times") as e:
        kit({"tile_": "kill"}).run(FIVE)
    assert e.value.outcome == "fault"


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("Triton Error [CUDA]: out of memory", "oom"),
        ("out of resource: shared memory, Required: 300000, Hardware limit: 232448", "unsupported"),
        ("Triton Error [HIP]: Code: 1, Messsage: invalid argument", "error"),
    ],
)
def test_an_error_that_leaves_the_device_sound_is_a_row(kit: Make, text: str, status: str) -> None:
    k = kit({SLOW.name: f"raise {text}"})
    before = k.measurer.connections
    k.run(FIVE)
    assert k.rows()[SLOW.name]["status"] == status
    assert k.measurer.connections == before  # the same process
    assert k.store.count_faults("a16w16") == {}


@pytest.mark.parametrize("when", ["wrong", "wrong later"])
def test_wrong_results_never_win(kit: Make, when: str) -> None:
    """Later: after it was measured, in the check of the fastest."""
    k = kit({BEST.name: when})
    assert k.run(FIVE) == OTHER.name
    assert k.rows()[BEST.name]["status"] == "wrong"


@pytest.mark.parametrize(("k_size", "reason"), [(512, "wrong_result"), (999, "unsupported")])
def test_a_shape_without_a_right_candidate_or_without_room_has_a_reason(kit: Make, k_size: int, reason: str) -> None:
    k = kit({"tile_": "wrong"}, search="fast")
    assert k.run(FIVE, replace(PROBLEM, k=k_size)) == ""
    assert k.search.why_none()[0] == reason


def test_candidates_of_one_machine_code_are_measured_once_and_those_that_spill_last(kit: Make) -> None:
    k = kit()
    twin = replace(BEST, waves=1)
    tiles = [SLOW, twin, BEST, OTHER]
    task = k.task(tiles)
    for (key, _), code in zip(task.jobs, ("slow", "best", "best", "other"), strict=True):
        facts = CompileFacts(0, None, 3 if code == "slow" else 0, code)
        k.context.compiled[key] = CompileResult(key, "ok", "", facts)
    k.run(tiles, task=task)
    assert set(k.rows()) == {SLOW.name, twin.name, OTHER.name}, "a second candidate with the same code has no row"
    assert list(k.rows())[-1] == SLOW.name
    k.run([twin, BEST], task=replace(k.task([twin, BEST], id_=2), always=frozenset({1})))
    assert set(k.rows(2)) == {twin.name, BEST.name}


def test_fast_and_a_budget_stop_before_all_are_measured(kit: Make) -> None:
    many = [Tile(m, n, 64, warps=w) for m in (32, 64, 128, 256) for n in (32, 64, 128) for w in (4, 8)]
    k = kit(search="fast")
    won = k.run(many)
    assert k.rows()[won]["us"] == min(r["us"] for r in k.rows().values())
    assert len(k.rows()) < len(many)
    k = kit(budget_s_per_shape=1e-3)
    assert k.run(FIVE)
    assert len(k.rows()) < len(FIVE)


def test_the_shapes_of_a_group_share_compiled_kernels(kit: Make) -> None:
    k = kit()
    second = k.task(FIVE, replace(PROBLEM, m=128), 2)
    assert len(k.context.jobs_of([second])) == len(FIVE)
    assert k.run(FIVE) == BEST.name
    assert k.context.jobs_of([second]) == [], "there is nothing left to compile"
    assert k.run(FIVE, task=second) == BEST.name


def obey(connection: Connection) -> None:
    """A helper that answers each job with its length, kills itself, or says nothing any more."""
    while True:
        job = connection.recv()
        if job == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif job == "hang":
            time.sleep(600)
        connection.send(len(job))


@pytest.mark.parametrize(
    ("job", "error", "text"),
    [
        ("die", HelperDied, "the helper died: it was killed by SIGKILL"),
        ("hang", HelperTimedOut, "no sign of life for 1 s"),
    ],
)
def test_the_end_of_a_helper_is_an_exception_and_its_successor_works(
    job: str, error: type[HelperError], text: str
) -> None:
    helper = HelperProcess(lambda: ForkedProcess("the helper", obey, {}), 60)
    helper.start()
    for _ in range(2):
        assert helper.send("twelve bytes")
        assert helper.wait_for_answer() == 12
        helper.send(job)
        with pytest.raises(error) as e:
            helper.wait_for_answer(1.0 if job == "hang" else None)
        assert (str(e.value), helper.is_alive, helper.answers_owed) == (text, False, 0)
        helper.start()
    helper.end()


def test_processes_that_died_without_work_are_replaced_and_cost_no_candidate(kit: Make) -> None:
    k = kit()
    assert k.run(FIVE[:2])
    for process in multiprocessing.active_children():
        process.kill()
        process.join()
    assert k.run(FIVE) == BEST.name
    assert {row["status"] for row in k.rows().values()} == {"ok"}


H200 = datasheet_target(90)
SHAPES = [(16, 1536, 7168), (512, 7168, 2048), (4096, 6144, 4096)]


def ranker_of(*us: float, apart: float = 5.0, **rules: Any) -> CandidateRanker:
    """A ranker of candidates with these estimates, so far apart that none teaches another."""
    return CandidateRanker(us, [(apart * i,) for i in range(len(us))], StopRules(**rules))


def tried_with(ranker: CandidateRanker, times: dict[int, float]) -> list[int]:
    """Candidates tried, in order, with measured `times`."""
    tried = []
    while not ranker.is_done():
        tried.append(ranker.order()[0])
        ranker.add_time(tried[-1], times[tried[-1]])
    return tried


def listed(m: int, n: int, k: int) -> tuple[list[TileConfig], list[float]]:
    """Candidates of AITER's a16w16 with their estimates."""
    p = Problem("a16w16", 1, m, n, k, "bfloat16")
    found = space.space_of(BY_NAME["a16w16"], p, H200, lambda values: dict(values)).candidates(most=300)
    return found, [space.estimate(p, c, H200) for c in found]


@pytest.mark.parametrize("shape", SHAPES)
def test_fast_comes_near_the_best_where_neighbours_are_alike(shape: tuple[int, int, int]) -> None:
    """The model is wrong by a factor for each knob's value; the ranker learns it."""
    found, estimates = listed(*shape)
    points = [c.features for c in found]
    ratios = []
    for seed in range(6):
        rng = random.Random(seed)
        values = [sorted(set(column)) for column in zip(*points, strict=True)]
        wrong = {(knob, v): rng.lognormvariate(0, 0.15) for knob, known in enumerate(values) for v in known}
        times = {}
        for i, point in enumerate(points):
            times[i] = estimates[i] * rng.lognormvariate(0, 0.02)
            for knob, value in enumerate(point):
                times[i] *= wrong[(knob, value)]
        tried = tried_with(CandidateRanker(estimates, points, StopRules()), times)
        assert len(tried) <= min(len(found), 64)
        ratios.append(min(times[i] for i in tried) / min(times.values()))
    assert statistics.geometric_mean(ratios) <= 1.05
    assert max(ratios) <= 1.3


def test_exhaustive_tries_every_candidate_seeds_first_and_in_an_order_that_a_neighbour_taught() -> None:
    ranker, neighbour = ranker_of(10.0, 11.0, 12.0, all=True), ranker_of(20.0, 21.0, 22.0)
    neighbour.add_time(0, 60.0)
    neighbour.add_time(1, 21.0)
    ranker.learn_from(neighbour)
    ranker.put_first([2])
    assert tried_with(ranker, {0: 10.0, 1: 11.0, 2: 12.0}) == [2, 1, 0]


def test_the_search_goes_on_while_a_candidate_may_win() -> None:
    ranker = ranker_of(10.0, 10.0, 10.0, 1.0, apart=20, at_least=2, patience=1)
    for i in (0, 1, 2):
        ranker.add_time(i, 10.0)
    assert not ranker.is_done()
    ranker.add_time(3, 9.999)
    assert ranker.is_done()


def test_a_tile_that_the_model_misjudges_is_tried_once() -> None:
    sizes = [(16, 64), (64, 64), (64, 64), (128, 64)]
    configs = [TileConfig((("BLOCK_SIZE_M", m), ("BLOCK_SIZE_N", n))) for m, n in sizes]
    assert best_of_each_tile(configs, [19.0, 11.0, 10.0, 20.0]) == [2, 0], "twice the time is too much"


def test_the_store_keeps_faults_and_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    store = KernelStore(tmp_path, {"device": "x", "triton": "1"})
    (store.root / "blocked.jsonl").write_bytes(b'[1]\nnull\n\xff\n{"family":"a16w16","candidate":3}\n{"family":"a16')
    assert [store.record_fault("a16w16", "bad", "SIGSEGV") for _ in range(2)] == [1, 2]
    for triton, blocked in (("1", {"bad"}), ("2", set())):
        assert KernelStore(tmp_path, {"triton": triton, "device": "x"}).blocked("a16w16") == blocked


def test_the_cache_stays_below_its_size(tmp_path: Path) -> None:
    store = KernelStore(tmp_path, {"device": "x"})
    for i in range(4):
        folder = store.compiled / f"k{i}"
        folder.mkdir()
        (folder / "cubin").write_bytes(b"x" * 1000)
        os.utime(folder / "cubin", (1000 + i, 1000 + i))
    assert store.prune(2500) == 2
    assert sorted(p.name for p in store.compiled.iterdir()) == ["k2", "k3"]


@pytest.mark.parametrize(("looks", "taken", "kept"), [(2, 3, ""), (1000, 5, "1 sample while the clock was throttled")])
def test_samples_under_a_throttled_clock_are_taken_again_a_few_times(looks: int, taken: int, kept: str) -> None:
    gpu_clock = pytest.importorskip("worker.tuners.search.gpu_clock", reason="torch is not installed")
    samples, told = iter(range(1, 9)), iter(["heat"] * looks)

    class Counted:
        size = 1

        def __call__(self, calls: int) -> float:
            return next(samples)

    guard = gpu_clock.Unthrottled(gpu_clock.Clock("test", lambda: next(told, "")), Counted(), lambda _: None)
    assert guard(4) == taken
    assert guard.remark.startswith(kept)
    assert bool(guard.remark) is bool(kept)
