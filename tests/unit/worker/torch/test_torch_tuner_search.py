"""The search over candidates that we make up: wrong ones, partial ones, raising ones, slow ones."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from tests.unit.worker.torch.test_torch_tuner import Log
from worker.protocol import FIELDS, SpecShape
from worker.tuners.common.device import Device, Operand, Run
from worker.tuners.common.operands import error_ratio
from worker.tuners.common.problem import Problem, UnsupportedError
from worker.tuners.torch.search import Operands, Search, StageTimes, Weights
from worker.tuners.torch.spec import Options
from worker.tuners.torch.variants import Candidate, Variant, Workspace

P = Problem("a16w16", 1, 8, 32, 64, "bfloat16")
BF16 = torch.bfloat16
Make = Callable[[Workspace], Run]


def search(*makes: Make, budget: float = 10) -> Log:
    """Run the search over candidates of our own, on the CPU."""
    device, log = Device("cpu"), Log()
    operands = Operands.make(P, Weights.make(P, device.torch, 1 << 16, lambda: 1 << 34))
    candidates = [Candidate(Variant(i + 1, f"c{i}", "nk", m), 1) for i, m in enumerate(makes)]
    shape = SpecShape(1, {"M": P.m, "N": P.n, "K": P.k})
    options, began = Options(budget_s_per_shape=budget), time.perf_counter()
    Search(shape, operands, device, options, 0.05, log.emit(), StageTimes(), began, candidates).run()
    device.leave()
    return log


def good(workspace: Workspace) -> Run:
    out = workspace.output(BF16)
    return lambda x, w: torch.mm(x[0], w[0].t(), out=out)


def after(step: Callable[[], object]) -> Make:
    """A good candidate that does something before each call."""

    def make(workspace: Workspace) -> Run:
        inner = good(workspace)

        def run(x: Operand, w: Operand) -> torch.Tensor:
            step()
            return inner(x, w)

        return run

    return make


def slow(seconds: float) -> Make:
    return after(lambda: time.sleep(seconds))


def raising(error: Exception) -> Make:
    def step() -> None:
        raise error

    return after(step)


def lossy(workspace: Workspace) -> Run:
    """Leaves out the last eighth of K."""
    return lambda x, w: x[0][:, : P.k * 7 // 8] @ w[0][:, : P.k * 7 // 8].t()


def partial(workspace: Workspace) -> Run:
    """Right, but never writes the last three of 32 columns."""
    out = workspace.output(BF16).zero_()

    def run(x: Operand, w: Operand) -> torch.Tensor:
        torch.mm(x[0], w[0][:-3].t(), out=out[:, :-3])
        return out

    return run


def huge(workspace: Workspace) -> Run:
    workspace.empty(1 << 50, dtype=BF16)
    raise AssertionError("not reached")


def verdicts(log: Log) -> list[str]:
    return [r["status"] for r in log.rows]


def winner(log: Log) -> str:
    return str(log.of("shape_tuned")[0]["row"]["kernelName"])


def test_a_wrong_candidate_is_rejected_and_cannot_win() -> None:
    log = search(lossy, partial, good)
    assert verdicts(log) == ["wrong", "wrong", "ok"]
    assert [r["us"] for r in log.rows[:2]] == [-1, -1]
    assert log.rows[0]["errRatio"] > 0.05
    assert log.rows[1]["errRatio"] == pytest.approx(3 / 32), "what is not written is wrong"
    assert winner(log) == "torch_c2_t1"
    assert search(lossy).of("shape_failed")[0]["reason"] == "wrong_result"


def test_a_candidate_that_returns_an_earlier_answer_is_wrong() -> None:
    """An output of its own that it filled once, before anything was poisoned or checked."""
    kept: list[torch.Tensor] = []

    def make(workspace: Workspace) -> Run:
        inner = good(workspace)

        def run(x: Operand, w: Operand) -> torch.Tensor:
            if not kept:
                kept.append(inner(x, w).clone())
            return kept[0]

        return run

    assert verdicts(search(make, make)) == ["ok", "wrong"], "the second finds the first's output poisoned"


@pytest.mark.parametrize(
    ("odd", "status", "detail"),
    [
        (raising(NotImplementedError('"addmm" not implemented for Half')), "unsupported", "NotImplementedError"),
        (raising(RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLt")), "unsupported", "RuntimeError"),
        (raising(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to")), "oom", "RuntimeError"),
        (raising(ZeroDivisionError("division by zero")), "error", "ZeroDivisionError"),
        (huge, "oom", "the candidate's buffers needs "),
    ],
)
def test_what_raises_or_does_not_fit_is_a_row(odd: Make, status: str, detail: str) -> None:
    log = search(odd, good)
    assert verdicts(log) == [status, "ok"]
    assert log.rows[0]["detail"].startswith(detail)


@pytest.mark.parametrize(
    ("makes", "reason", "detail"),
    [
        ([raising(UnsupportedError("no such operator"))], "unsupported", "no such operator"),
        ([raising(ValueError("odd")), raising(UnsupportedError("none"))], "no_candidate", "1 unsupported, 1 error"),
        ([], "no_candidate", ""),
    ],
)
def test_a_shape_without_a_winner_has_a_reason(makes: list[Make], reason: str, detail: str) -> None:
    (failed,) = search(*makes).of("shape_failed")
    assert failed["reason"] == reason
    assert detail in failed["detail"]


def test_a_fault_of_the_device_is_no_row() -> None:
    with pytest.raises(RuntimeError, match="illegal memory access"):
        search(raising(RuntimeError("CUDA error: an illegal memory access was encountered")), good)


def test_a_slow_candidate_is_stopped_early_but_has_its_number() -> None:
    log = search(good, slow(0.02))
    assert log.rows[1]["us"] == pytest.approx(20_000, rel=0.5)
    assert log.rows[1]["samples"] <= 2
    assert winner(log) == "torch_c0_t1"


def test_the_budget_has_a_hard_limit() -> None:
    log = search(good, slow(0.35), slow(0.35), good, good, budget=0.2)
    states = verdicts(log)
    assert states[0] == "ok", "the first is always measured"
    assert states[3:] == ["timeout", "timeout"]
    assert "budget of 0.2 s" in log.rows[3]["detail"]
    assert winner(log) == "torch_c0_t1"


def test_a_winner_is_named_and_has_a_margin() -> None:
    (won,) = search(slow(20e-3), slow(26e-3), slow(80e-3)).of("shape_tuned")
    assert won["candidate"] == ["torch_c0_t1"]
    assert set(won["row"]) == {f.name for f in FIELDS if f.column} | {"margin"}
    assert won["row"]["margin"] > 0


def test_error_ratio_is_aiters() -> None:
    ref = torch.tensor([[0.0, 1.0, 100.0, -1.0]])
    off = torch.tensor([[0.0099, 1.0199, 101.009, -1.0201]])
    assert error_ratio(off, ref) == 0.25
    assert error_ratio(torch.tensor([[float("nan"), 1.0, float("inf"), -1.0]]), ref) == 0.5
    assert error_ratio(ref[:, :3], ref) == 1.0


def test_the_timer_goes_round_all_copies_and_keeps_a_number_of_threads() -> None:
    device, seen = Device("cpu"), list[tuple[int, int]]()
    xs, ws = ([(torch.tensor(i),) for i in range(count)] for count in (2, 3))

    def run(x: Operand, w: Operand) -> torch.Tensor:
        seen.append((int(x[0]), int(w[0])))
        return x[0]

    timer = device.timer(run, xs, ws, 1)
    timer(1)
    seen.clear()
    assert min(timer(4), timer(2)) > 0
    assert seen == [(1, 1), (0, 2), (0, 0), (1, 1), (0, 2), (0, 0)]
    assert torch.get_num_threads() == 1
    device.leave()
    assert torch.get_num_threads() == device.cores
