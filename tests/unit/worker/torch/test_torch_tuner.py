"""The torch tuner from end to end on small shapes: every family, every candidate, every verdict."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from worker.protocol import Row, Spec, SpecShape, TableKernel
from worker.tuners.base import Emit
from worker.tuners.catalog import find_tuner
from worker.tuners.common.device import Device
from worker.tuners.common.operands import error_ratio
from worker.tuners.common.problem import UnsupportedError, parse
from worker.tuners.torch.search import Operands, Weights
from worker.tuners.torch.spec import TorchTuner
from worker.tuners.torch.variants import Workspace, variants

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
    made = find_tuner("torch").create()
    assert isinstance(made, TorchTuner)
    info = made.open()
    assert {"gfx", "cu_num", "device", "torch", "threads"} <= set(info)
    assert info["torch"] == torch.__version__
    assert info["gfx"].startswith("cpu-") != torch.cuda.is_available()
    return made


def spec(family: str, *keys: dict[str, int | str], **options: Any) -> Spec:
    shapes = tuple(SpecShape(i + 1, dict(k)) for i, k in enumerate(keys))
    return Spec("g0001-1", "run", 1, family=family, tuner="torch", shapes=shapes, options={**QUICK, **options})


def mnk(m: int, n: int, k: int, **more: str) -> dict[str, int | str]:
    return {"M": m, "N": n, "K": k, **more}


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
        ("a16w16", mnk(1, 9, 129, bias="True", outdtype="torch.float32")),
        ("a16w16", mnk(5, 40, 136, dtype="torch.float16", outdtype="torch.float16")),
        ("a16w16", mnk(4, 33, 133, dtype="torch.float32", outdtype="torch.bfloat16", bias="True")),
        ("a8w8", mnk(18, 264, 264, q_dtype_w="torch.int8")),
        ("a8w8", mnk(2, 48, 160, q_dtype_w="torch.int8")),
        ("a8w8", mnk(3, 272, 64, q_dtype_w="torch.float8_e4m3fn")),
        ("a8w8", mnk(2, 7, 40, q_dtype_w="torch.float8_e4m3fnuz")),
        ("a4w4_blockscale", mnk(1, 7, 32)),
        ("a4w4_blockscale", mnk(3, 300, 160)),
    ],
)
def test_every_candidate_is_right_on_ragged_shapes(tuner: TorchTuner, family: str, key: dict[str, int | str]) -> None:
    log = Log()
    tuner.tune(spec(family, key), log.emit())
    kinds = [m["type"] for m in log.messages if m["type"] != "alive"]
    assert kinds == ["shape_started"] + ["row"] * len(log.rows) + ["shape_tuned"]
    names = [r["kernelName"] for r in log.rows]
    assert len(names) == len(set(names)) == len({r["kernelId"] for r in log.rows})
    problem = parse(family, key)
    for row in log.rows:
        assert row["status"] in ("ok", "unsupported"), row
        assert row["libtype"] == "torch"
        if row["status"] == "ok":
            assert row["errRatio"] == 0
            assert row["us"] > 0
            assert row["tflops"] == pytest.approx(problem.flops / row["us"] / 1e6, rel=1e-3)
            assert row["bw"] == pytest.approx(problem.moved_bytes / row["us"] / 1e3, rel=1e-3)
            assert row["samples"] >= 1
        else:
            assert (row["us"], row["samples"]) == (-1, 0)
            assert row["detail"]
    ok = [r for r in log.rows if r["status"] == "ok"]
    assert len(ok) >= 4
    winner = log.of("shape_tuned")[0]["row"]
    assert winner["kernelName"] in {r["kernelName"] for r in ok}
    assert winner["samples"] >= 5


def test_numbers_of_variants_are_unique_and_never_used_again() -> None:
    """kernelId is made of them, and tables of earlier versions name those that are gone."""
    gone = {
        "a16w16": {6, 14, 22, 24, 28, 32, 34, 38, 42, 44, 48, 50, 51, 52},
        "a8w8": {2, 3, 12, 14, 22, 31, 32, 33, 34, 36, 37},
        "a4w4_blockscale": {1, 2, 10, 11, 20, 32, 40, 41},
    }
    for family, numbers in gone.items():
        for m, q, gpu in itertools.product((1, 8), ("int8", "float8_e4m3fn"), (True, False)):
            used = [v.number for v in variants(parse(family, mnk(m, 512, 1024, q_dtype_w=q)), gpu)]
            assert len(set(used)) == len(used) >= 2
            assert not numbers & set(used)


@pytest.mark.parametrize("family", ["a16w16", "a8w8", "a4w4_blockscale"])
def test_what_a_gpu_gets_computes_the_same_on_a_cpu(family: str) -> None:
    """Those of a GPU that a CPU can run as well."""
    p, cpu = parse(family, mnk(20, 272, 512)), torch.device("cpu")
    operands = Operands.make(p, Weights.make(p, cpu, 0, lambda: 1 << 34))
    reference = operands.reference(lambda: None)
    ran = set()
    for v in variants(p, gpu=True):
        try:
            run = v.make(Workspace(p, cpu, None, 1 << 34))
        except UnsupportedError:
            continue
        out = run(operands.checked, operands.weights.layout(v.layout)[0])
        assert error_ratio(out, reference) == 0, v.stem
        ran.add(v.stem)
    assert len(ran) == {"a16w16": 3, "a8w8": 2, "a4w4_blockscale": 1}[family]


def test_one_verdict_a_shape_in_order_and_import_is_counted_once() -> None:
    made = TorchTuner()
    made.open()
    log = Log()
    keys = [mnk(1, 8, 64), mnk(2, 8, 64, scaleAB="True"), mnk(2**20, 2**20, 2**20), mnk(3, 8, 64)]
    first = made.tune(spec("a16w16", *keys), log.emit())
    again = made.tune(spec("a16w16", keys[0]), Log().emit())
    ends = [(m["type"], m["shape"]) for m in log.messages if m["type"] in ("shape_tuned", "shape_failed")]
    assert ends == [("shape_tuned", 1), ("shape_failed", 2), ("shape_failed", 3), ("shape_tuned", 4)]
    odd, huge = log.of("shape_failed")
    assert {odd["reason"], huge["reason"]} == {"unsupported"}
    assert "scaleAB" in odd["detail"]
    assert "bytes" in huge["detail"]
    assert "available" in huge["detail"]
    assert set(first) == {"import", "inputs", "check", "measure", "other"}
    assert first["import"] > 0
    assert again["import"] == 0
    assert all(v >= 0 for v in first.values())
    assert first["measure"] > 0


def test_threads_are_an_option_and_an_interrupt_leaves_the_device_as_it_was(tuner: TorchTuner) -> None:
    rows: list[Row] = []

    def send(message: dict[str, Any]) -> None:
        if message["type"] == "row":
            rows.append(message["row"])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuner.tune(spec("a16w16", mnk(2, 8, 64), threads=[1]), Emit(send))
    assert torch.get_num_threads() == Device().cores
    if not torch.cuda.is_available():
        assert [(r["kernelName"], r["kernelId"]) for r in rows] == [("torch_linear_wnk_t1", 10_001)]
    with pytest.raises(ValueError, match="unknown option 'colour'"):
        tuner.tune(spec("a16w16", mnk(1, 8, 64), colour=1), Log().emit())


def test_only_the_kernels_of_a_table_are_measured(tuner: TorchTuner) -> None:
    every = Log()
    tuner.tune(spec("a16w16", mnk(8, 32, 64)), every.emit())
    name = every.rows[1]["kernelName"]
    log = Log()
    asked = replace(spec("a16w16", mnk(8, 32, 64)), only={"1": [TableKernel("torch", "7", name, "0")._asdict()]})
    tuner.tune(asked, log.emit())
    assert [r["kernelName"] for r in log.rows] == [name]
    none = Log()
    tuner.tune(replace(asked, only={"1": [TableKernel("torch", "7", "torch_of_old", "0")._asdict()]}), none.emit())
    assert [m["reason"] for m in none.of("shape_failed")] == ["no_candidate"]
