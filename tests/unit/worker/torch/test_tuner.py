"""The torch tuner on small shapes: families, formats, every candidate; and its search over candidates of ours."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.marks import WITH_TORCH
from worker.protocol import FIELDS, Row, Spec, SpecShape, TableKernel
from worker.tuners.base import Emit
from worker.tuners.catalog import make_tuner
from worker.tuners.common.device import Device, Operand, Run
from worker.tuners.common.operands import error_ratio, widen_rows
from worker.tuners.common.problem import Problem, UnsupportedError, parse
from worker.tuners.torch.operands import Operands, Weights
from worker.tuners.torch.search import Search, Spent
from worker.tuners.torch.spec import TorchOptions
from worker.tuners.torch.tuner import TorchTuner
from worker.tuners.torch.variants import Candidate, Variant, Workspace, variants

pytestmark = WITH_TORCH

A16W16, A8W8, A4W4 = "a16w16", "a8w8", "a4w4_blockscale"
CPU = torch.device("cpu")
Key = dict[str, int | str]
# the budget is ample so that a busy machine changes nothing
QUICK = {"budget_s_per_shape": 10, "rotate_mb": 1}


class Log:
    """Messages of a tuner."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def emit(self) -> Emit:
        return Emit(lambda m: self.messages.append(json.loads(json.dumps(m))))

    def of(self, type_: str) -> list[dict[str, Any]]:
        return [m for m in self.messages if m["type"] == type_]

    @property
    def rows(self) -> list[Row]:
        return [m["row"] for m in self.of("row")]


@pytest.fixture(scope="module")
def tuner() -> TorchTuner:
    made = make_tuner("torch")
    assert isinstance(made, TorchTuner)
    info = made.open()
    assert {"gfx", "cu_num", "device", "torch", "threads"} <= set(info)
    assert info["gfx"].startswith("cpu-") != torch.cuda.is_available()
    return made


def spec(family: str, *keys: Key, **options: Any) -> Spec:
    shapes = tuple(SpecShape(i + 1, dict(k)) for i, k in enumerate(keys))
    return Spec("g0001-1", "run", 1, family=family, tuner="torch", shapes=shapes, options={**QUICK, **options})


def mnk(m: int, n: int, k: int, **more: str) -> Key:
    return {"M": m, "N": n, "K": k, **more}


def operands_of(p: Problem) -> Operands:
    return Operands.make(p, Weights.make(p, CPU, 0, lambda: 1 << 34))


def test_the_canary_knows_the_answer(tuner: TorchTuner, monkeypatch: pytest.MonkeyPatch) -> None:
    ok, us, detail = tuner.canary()
    assert ok
    assert us > 0
    assert "exact" in detail
    right = torch.mm

    def one_element_off(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        right(a, b, out=out)
        out[17, 5] += 1
        return out

    monkeypatch.setattr(torch, "mm", one_element_off)
    ok, us, detail = tuner.canary()
    assert (ok, us) == (False, -1.0)
    assert "1 of 65536 elements" in detail


@pytest.mark.parametrize(
    ("family", "key"),
    [
        (A16W16, mnk(1, 9, 129, bias="True", outdtype="torch.float32")),
        (A16W16, mnk(5, 40, 136, dtype="torch.float16", outdtype="torch.float16")),
        (A16W16, mnk(4, 33, 133, dtype="torch.float32", outdtype="torch.bfloat16", bias="True")),
        (A8W8, mnk(18, 264, 264, q_dtype_w="torch.int8")),
        (A8W8, mnk(2, 48, 160, q_dtype_w="torch.int8")),
        (A8W8, mnk(3, 272, 64, q_dtype_w="torch.float8_e4m3fn")),
        (A8W8, mnk(2, 7, 40, q_dtype_w="torch.float8_e4m3fnuz")),
        (A4W4, mnk(1, 7, 32)),
        (A4W4, mnk(3, 300, 160)),
    ],
)
def test_every_candidate_is_right_on_ragged_shapes(tuner: TorchTuner, family: str, key: Key) -> None:
    log = Log()
    tuner.tune(spec(family, key), log.emit())
    kinds = [m["type"] for m in log.messages if m["type"] != "alive"]
    assert kinds == ["shape_started"] + ["row"] * len(log.rows) + ["shape_tuned"]
    names = [r["kernelName"] for r in log.rows]
    assert len(names) == len(set(names)) == len({r["kernelId"] for r in log.rows})
    problem, ok = parse(family, key), [r for r in log.rows if r["status"] == "ok"]
    for row in ok:
        assert (row["errRatio"], row["libtype"]) == (0, "torch")
        assert row["tflops"] == pytest.approx(problem.flops / row["us"] / 1e6, rel=1e-3)
        assert row["bw"] == pytest.approx(problem.moved_bytes / row["us"] / 1e3, rel=1e-3)
    for row in log.rows:
        assert row in ok or (row["status"], row["us"], row["samples"]) == ("unsupported", -1, 0), row
    assert len(ok) >= 4
    winner = log.of("shape_tuned")[0]["row"]
    assert winner["kernelName"] in {r["kernelName"] for r in ok}
    assert winner["samples"] >= 5


def test_numbers_of_variants_are_unique_and_never_used_again() -> None:
    """kernelId is made of them, and tables of earlier versions name those that are gone."""
    gone = {
        A16W16: {6, 14, 22, 24, 28, 32, 34, 38, 42, 44, 48, 50, 51, 52},
        A8W8: {2, 3, 12, 14, 22, 31, 32, 33, 34, 36, 37},
        A4W4: {1, 2, 10, 11, 20, 32, 40, 41},
    }
    for family, numbers in gone.items():
        for m, q, gpu in itertools.product((1, 8), ("int8", "float8_e4m3fn"), (True, False)):
            used = [v.number for v in variants(parse(family, mnk(m, 512, 1024, q_dtype_w=q)), gpu)]
            assert len(set(used)) == len(used) >= 2
            assert not numbers & set(used)


def test_one_verdict_a_shape_in_order_and_import_is_counted_once() -> None:
    made, log = TorchTuner(), Log()
    made.open()
    keys = [mnk(1, 8, 64), mnk(2, 8, 64, scaleAB="True"), mnk(2**20, 2**20, 2**20), mnk(3, 8, 64)]
    first = made.tune(spec(A16W16, *keys), log.emit())
    ends = [(m["type"], m["shape"]) for m in log.messages if m["type"] in ("shape_tuned", "shape_failed")]
    assert ends == [("shape_tuned", 1), ("shape_failed", 2), ("shape_failed", 3), ("shape_tuned", 4)]
    odd, huge = log.of("shape_failed")
    assert {odd["reason"], huge["reason"]} == {"unsupported"}
    assert "scaleAB" in odd["detail"]
    assert "available" in huge["detail"]
    assert set(first) == {"import", "inputs", "check", "measure", "other"}
    assert first["import"] > 0
    assert first["measure"] > 0
    assert made.tune(spec(A16W16, keys[0]), Log().emit())["import"] == 0


def test_only_the_kernels_of_a_table_are_measured(tuner: TorchTuner) -> None:
    def measured(name: str | None) -> Log:
        log, asked = Log(), spec(A16W16, mnk(8, 32, 64))
        only = {"1": [TableKernel("torch", "7", name, "0")._asdict()]} if name else {}
        tuner.tune(replace(asked, only=only), log.emit())
        return log

    name = measured(None).rows[1]["kernelName"]
    assert [r["kernelName"] for r in measured(name).rows] == [name]
    assert [m["reason"] for m in measured("torch_of_old").of("shape_failed")] == ["no_candidate"]


def naive_e2m1(code: int) -> float:
    """Sign, two exponent bits of bias 1, one mantissa bit; exponent 0 is subnormal."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    size = mantissa * 0.5 if exponent == 0 else (1 + mantissa * 0.5) * 2.0 ** (exponent - 1)
    return -size if sign else size


def naive_mxfp4(codes: torch.Tensor, scale: torch.Tensor) -> list[list[float]]:
    """The even index of K is in the low half of a byte; a scale for each 32."""

    def value(row: int, i: int) -> float:
        byte = int(codes[row, i // 2])
        return naive_e2m1(byte >> 4 if i % 2 else byte & 15) * 2.0 ** (int(scale[row, i // 32]) - 127)

    return [[value(row, i) for i in range(2 * codes.shape[1])] for row in range(codes.shape[0])]


@pytest.mark.parametrize("family", [A16W16, A8W8, A4W4])
def test_inputs_are_seeded_and_outputs_are_near_one(family: str) -> None:
    p = parse(family, mnk(16, 96, 2048))
    a, b = (operands_of(p) for _ in range(2))
    x, x_again, timed, wide, w_again = (
        widen_rows(p.scale, p.k, *o) for o in (a.checked, b.checked, a.timed[0], a.weights.master, b.weights.master)
    )
    assert torch.equal(x, x_again)
    assert torch.equal(wide, w_again)
    assert not torch.equal(x, timed), "the checked X must never be timed"
    assert 0.5 < float(a.reference(lambda: None).std()) < 2.0
    if family != A8W8:
        assert torch.equal(wide, wide.bfloat16().float()), "inputs are exact in bfloat16"


@pytest.mark.parametrize(
    ("family", "dtype"),
    [(A16W16, "bfloat16"), (A8W8, "int8"), (A8W8, "float8_e4m3fn"), (A4W4, "float4_e2m1fn_x2")],
)
def test_the_reference_is_the_sum_of_products(family: str, dtype: str) -> None:
    """Against Python floats, element by element, from the stored bytes."""
    o = operands_of(Problem(family, 1, 2, 5, 64, dtype, bias=family == A16W16))
    x, w = o.checked, o.weights.master
    xs, ws = (naive_mxfp4(*t) if family == A4W4 else t[0].double().tolist() for t in (x, w))
    got = o.reference(lambda: None)
    for m, n in itertools.product(range(2), range(5)):
        want = sum(a * b for a, b in zip(xs[m], ws[n], strict=True))
        if family == A8W8:
            want *= float(x[1][m]) * float(w[1][n])
        if o.bias is not None:
            want += float(o.bias[n])
        assert float(got[m, n]) == pytest.approx(want, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(
    ("family", "key", "words"),
    [
        ("fmoe", {}, "no candidates for family fmoe"),
        (A16W16, mnk(1, 1, 8, bpreshuffle="True"), "bpreshuffle is True"),
        (A16W16, mnk(1, 1, 8, bias="maybe"), "bias is 'maybe'"),
        (A16W16, mnk(1, 1, 8, dtype="torch.int8"), "dtype is 'torch.int8'"),
        (A8W8, mnk(0, 1, 8), "M is 0"),
        (A8W8, mnk(1, 1, 2**31), "K is 2147483648"),
        (A8W8, {"M": 1, "N": "many", "K": 8}, "no whole number N"),
        (A4W4, mnk(1, 1, 33), "multiple of 32"),
    ],
)
def test_what_is_not_supported_is_said(family: str, key: Key, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        parse(family, key)


def test_options_have_defaults_and_limits() -> None:
    assert TorchOptions.parse({}) == TorchOptions()
    got = TorchOptions.parse({"budget_s_per_shape": 1, "threads": [2, 1, 2], "again": 7})
    assert (got.budget_s_per_shape, got.threads, got.again) == (1.0, (2, 1), 7)
    with pytest.raises(ValueError, match=r"unknown option 'budget'.*threads is.*again is True.*rotate_mb is -1"):
        TorchOptions.parse({"budget": 1, "threads": [0], "again": True, "rotate_mb": -1})


P = Problem("a16w16", 1, 8, 32, 64, "bfloat16")
BF16 = torch.bfloat16
Make = Callable[[Workspace], Run]


def search(*makes: Make, budget: float = 10) -> Log:
    """Run the search over candidates of our own, on the CPU."""
    device, log = Device("cpu"), Log()
    operands = Operands.make(P, Weights.make(P, device.torch, 1 << 16, lambda: 1 << 34))
    candidates = [Candidate(Variant(i + 1, f"c{i}", "nk", m), 1) for i, m in enumerate(makes)]
    shape = SpecShape(1, {"M": P.m, "N": P.n, "K": P.k})
    options, began = TorchOptions(budget_s_per_shape=budget), time.perf_counter()
    Search(shape, operands, device, options, 0.05, log.emit(), Spent(), began).run(candidates)
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
    assert log.rows[1]["errRatio"] == pytest.approx(3 / 32), "elements that were not written are wrong"
    assert winner(log) == "torch_c2_t1"
    assert search(lossy).of("shape_failed")[0]["reason"] == "wrong_result"


@pytest.mark.parametrize(
    ("odd", "status", "detail"),
    [
        (raising(NotImplementedError('"addmm" not implemented for Half')), "unsupported", "NotImplementedError"),
        (raising(RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLt")), "unsupported", "RuntimeError"),
        (raising(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to")), "oom", "RuntimeError"),
        (raising(ZeroDivisionError("division by zero")), "error", "ZeroDivisionError"),
        (huge, "oom", "MemoryError: the candidate's buffers need "),
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


def test_the_budget_has_a_hard_limit() -> None:
    log = search(good, slow(0.35), slow(0.35), good, good, budget=0.2)
    states = verdicts(log)
    assert states[0] == "ok", "the first is always measured"
    assert states[3:] == ["timeout", "timeout"]
    assert "budget of 0.2 s" in log.rows[3]["detail"]
    assert winner(log) == "torch_c0_t1"


def test_a_winner_is_named_and_has_a_margin() -> None:
    (won,) = search(slow(60e-3), slow(80e-3), slow(240e-3)).of("shape_tuned")
    assert won["candidate"] == ["torch_c0_t1"]
    assert set(won["row"]) == {f.name for f in FIELDS if f.column} | {"margin"}
    assert won["row"]["margin"] > 0


def test_error_ratio_is_aiters() -> None:
    ref = torch.tensor([[0.0, 1.0, 100.0, -1.0]])
    off = torch.tensor([[0.0099, 1.0199, 101.009, -1.0201]])
    assert error_ratio(off, ref) == 0.25
    assert error_ratio(torch.tensor([[float("nan"), 1.0, float("inf"), -1.0]]), ref) == 0.5
    assert error_ratio(ref[:, :3], ref) == 1.0
