"""Units, their order and their value, what is left out, and the plan and notes of `--plan` and `shapes check`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.cli.plan_page import headline
from orchestrator.controller.prepare import prepare
from orchestrator.controller.request import RunRequest
from orchestrator.errors import TunedDBError
from orchestrator.families import get_family
from orchestrator.planning.cost import CostModel
from orchestrator.planning.plan import make_plan, make_work, memory_note, risk_notes, seconds_of
from orchestrator.planning.roofline import CHIPS
from orchestrator.planning.skipped_shapes import drop_tuned
from orchestrator.planning.worth import (
    EFFICIENCY,
    UNTUNED,
    Forecast,
    Worth,
    estimate_worths,
    measure_gain,
    value_tiers,
)
from orchestrator.shapes.model import Key, Shape
from tests.kits.fleet import command
from tests.kits.results import A8W8
from tests.standins.aiter import make_tree

FLAT = CostModel(setup_s=1.0, shape_s=2.0, flop_s=0.0, weight_s=0.0, source="test")
STEEP = CostModel(setup_s=0.5, shape_s=0.1, flop_s=1e-6, weight_s=1e-6, source="test")
MI355X = CHIPS["mi355x"]
BIG = (4096, 8192, 8192)
KEYS = st.tuples(st.integers(1, 300), st.sampled_from([64, 128, 4096]), st.sampled_from([64, 256]))
BF16 = ("False", "torch.bfloat16", "torch.bfloat16", "False", "False")
FP4 = get_family("a4w4_blockscale")
N576 = "2 shapes (1x576x7168, 16x576x7168): N is not a multiple of 128"
K29568 = "1 shape (1x8192x29568): K is not a multiple of 256"
WHY = "kernels may fault there, so the tuner aiter runs"


def numbered(keys: list[tuple[int, int, int]]) -> list[Shape]:
    return [Shape(i, key) for i, key in enumerate(keys, 1)]


@settings(deadline=None)
@given(st.lists(KEYS, unique=True, max_size=80), st.sampled_from([FLAT, STEEP]), st.sampled_from(["torch", "aiter"]))
def test_each_shape_is_in_exactly_one_unit(keys: list[tuple[int, int, int]], cost: CostModel, tuner: str) -> None:
    shapes = numbered(keys)
    by_id = {s.id: s for s in shapes}
    work = make_work(shapes, A8W8, cost, tuner=tuner)
    assert sorted(i for w in work for unit in w.units for i in unit) == sorted(by_id)
    for w in work:
        assert len({by_id[i].key[1:] for unit in w.units for i in unit}) == 1
        for unit, costs in zip(w.units, w.costs_s, strict=True):
            assert list(costs) == pytest.approx([cost.cost_s(by_id[i], A8W8) for i in unit], abs=1e-3)
    seconds = [seconds_of(w) for w in work if not w.alone]
    assert seconds == sorted(seconds, reverse=True)
    assert work == make_work(list(reversed(shapes)), A8W8, cost, tuner=tuner), "whatever the order of the file"


def test_the_tuner_says_what_may_share_a_process() -> None:
    shapes = numbered([(m, n, 64) for n in (64, 128) for m in (1, 2)])
    assert {w.kind for w in make_work(shapes, A8W8, FLAT, tuner="torch")} == {"0"}
    aiter = make_work(shapes, A8W8, FLAT, tuner="aiter")
    assert (len({w.kind for w in aiter}), [w.shares_end for w in aiter]) == (2, [False, False])
    buckets = numbered([(m, 256, 512) for m in (1, 8, 9, 16, 17, 4096, 8192)])
    (work,) = make_work(buckets, A8W8, FLAT, tuner="aiter-triton")
    assert work.shares_end
    assert len(work.units) < sum(map(len, work.units)) == 7


def test_the_plan_says_what_is_to_be_done_and_how_long_it_takes() -> None:
    shapes = numbered([(m, n, 64) for n in (64, 128, 256) for m in range(1, 41)])
    plan = make_plan(
        shapes[20:], A8W8, FLAT, {"a": 2, "b": 1}, tuner="replay", chip=("gfx950", 256),
        skipped=shapes[:20],
    )  # fmt: skip
    assert (plan.asked, plan.todo, len(plan.skipped)) == (120, 100, 20)
    assert plan.cost_s >= sum(map(seconds_of, plan.work)) == pytest.approx(200.0)
    assert plan.cost_s / 3 <= plan.end_s <= plan.cost_s
    document = json.loads(json.dumps(plan.to_json()))
    assert ([w["cost_s"] for w in document["work"]], document["todo"]) == ([80.0, 80.0, 40.0], 100)


TABLE = """gfx,cu_num,M,N,K,libtype,kernelId,splitK,us,kernelName,tflops,bw,errRatio
gfx950,256,1,64,128,ck,1,0,5.0,k,1,1,0
gfx942,256,2,64,128,ck,1,0,5.0,k,1,1,0
gfx950,128,3,64,128,ck,1,0,5.0,k,1,1,0
gfx950, 256, 4, 64, 128,ck,1,0,5.0,k,1,1,0
gfx950,256,5,64,128,ck,1,0,Null,k,1,1,0
Null,256,6,64,128,ck,1,0,5.0,k,1,1,0
"""


def test_what_the_table_has_for_this_device_is_skipped(tmp_path: Path) -> None:
    db = tmp_path / "db.csv"
    shapes = numbered([(m, 64, 128) for m in range(1, 8)])
    new = drop_tuned(shapes, A8W8, db, "gfx950", 256)
    assert new.todo == drop_tuned(shapes, A8W8, None, "gfx950", 256).todo == shapes
    assert "will be created" in new.notes[0]
    db.write_text(TABLE)
    todo, skipped, notes = drop_tuned(shapes, A8W8, db, "gfx950", 256)
    assert ([s.id for s in skipped], [s.id for s in todo]) == ([1, 4, 6], [2, 3, 5, 7])
    assert notes == [f"{db}: 1 row has no gfx: taken as gfx950 because cu_num is 256, as AITER does"]
    again = drop_tuned(shapes, A8W8, db, "gfx950", 256, retune=True)
    assert (len(again.todo), again.skipped) == (7, [])
    other = drop_tuned(shapes, A8W8, db, "gfx1100", 96)
    assert other.skipped == []
    assert "gfx942/256" in other.notes[-1]
    db.write_text("M,N,K\n1,2,3\n")
    with pytest.raises(TunedDBError, match=r"db\.csv:1: is not a tuned table of a8w8_blockscale"):
        drop_tuned(shapes, A8W8, db, "gfx950", 256)


def test_what_cannot_fit_into_the_memory_is_named_largest_first() -> None:
    family = get_family("a16w16")
    shapes = [Shape(1, (1, 2, 3, *BF16)), Shape(2, (10**9, 1280, 8192, *BF16)), Shape(3, (10**9, 64, 64, *BF16))]
    (note,) = memory_note(shapes, family, 80 * 2**30)
    assert note.startswith("the operands of 2 shapes do not fit into the device's memory of 80 GiB, and will fail: ")
    assert note.index("1000000000x1280x8192 (17") < note.index("1000000000x64x64 (238 GiB)")
    assert memory_note(shapes[:1], family, 80 * 2**30) == memory_note(shapes, family, None) == []


def test_shapes_on_which_kernels_of_aiter_may_fault_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [(m, 576, 7168) for m in (1, 2, 3, 4)] + [(1, 8192, 29568), (1, 8192, 8192)]
    assert risk_notes(FP4, keys) == [
        f"4 shapes (1x576x7168, 2x576x7168, 3x576x7168, ...): N is not a multiple of 128: {WHY} each alone",
        f"{K29568}: {WHY} it alone",
    ]
    assert risk_notes(FP4, keys, "torch") == []

    def run(*args: str) -> str:
        return command(*args).ok().out

    monkeypatch.chdir(tmp_path)
    Path("s.csv").write_text("M,N,K\n1,576,7168\n16,576,7168\n1,8192,29568\n1,8192,8192\n")
    root = make_tree(tmp_path, "newest").root
    Path("inv.yaml").write_text(f"nodes: {{n1: {{gpus: 0, gfx: gfx950, cu_num: 256, aiter: {{root: {root}}}}}}}\n")
    plan = ("tune", "s.csv", "-i", "inv.yaml", "--family", FP4.name, "--plan")
    for said in (run("shapes", "check", "s.csv", "--family", FP4.name), run(*plan, "--tuner", "aiter")):
        assert N576 in said
        assert K29568 in said
    assert WHY not in run(*plan, "--tuner", "torch")


def test_a_plan_is_printed_without_a_node_that_can_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.csv").write_text("M,N,K\n1,576,7168\n16,576,7168\n")
    Path("inv.yaml").write_text("nodes: {n1: {gpus: [4000], gfx: gfx950, cu_num: 256}}\n")
    plan = ("tune", "s.csv", "-i", "inv.yaml", "--family", FP4.name, "--tuner", "aiter", "-O", "root=/x")
    shown, document, started = (command(*plan, *more) for more in (["--plan"], ["--plan", "--json"], []))
    assert (shown.code, document.code, started.code) == (3, 3, 3)
    assert shown.err == document.err == "error: no node can be used: see the notes of the plan\n"
    assert shown.out.count("n1: gpus: [4000], but ") == 1
    assert "a4w4_blockscale with tuner aiter on gfx950 (cu_num 256): 2 shapes, no slot\n" in shown.out
    assert N576 in shown.out
    assert (document.json()["nodes"], document.json()["todo"]) == ({}, 2)
    # of several lists each has its plan, and the exit code is the error's
    Path("shapes-a8w8.csv").write_text("M,N,K,q_dtype_w\n1,576,7168,torch.int8\n")
    lists = ("tune", "s.csv", "shapes-a8w8.csv", *plan[2:], "--plan")
    shown, document = command(*lists), command(*lists, "--json")
    assert (shown.code, document.code, document.json()["exit_code"]) == (3, 3, 3)
    assert shown.out.count(", no slot\n") == len(document.json()["runs"]) == 2
    assert started.out == ""
    assert "error: no node can be used:\n  n1: gpus: [4000], but " in started.err
    assert not Path("runs").exists()


def test_a_plan_with_a_table_names_what_is_skipped_and_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.csv").write_text("M,N,K\n" + "".join(f"{m},640,7168\n" for m in range(1, 26)))
    Path("inv.yaml").write_text("nodes: {n1: {gpus: 0, gfx: gfx950, cu_num: 256}}\n")
    header = ",".join(FP4.tuned_header)
    row = dict.fromkeys(FP4.tuned_header, "0") | {"gfx": "gfx950", "cu_num": "256", "N": "640", "K": "7168", "us": "5"}
    lines = (",".join((row | {"M": str(m), "kernelName": "f4gemm_x"}).values()) for m in (7, 8, 99))
    Path("db.csv").write_text("\n".join((header, *lines)) + "\n")
    plan = ("tune", "s.csv", "-i", "inv.yaml", "--family", FP4.name, "--tuner", "aiter", "--plan", "-O", "root=/x")
    shown, document = command(*plan, "--db", "db.csv"), command(*plan, "--db", "db.csv", "--json").json()
    new = [f"{m}x640x7168" for m in range(1, 26) if m not in (7, 8)]
    assert "skipped: 7x640x7168, 8x640x7168\n" in shown.out
    assert f"new: {', '.join(new[:20])} and 3 more\n" in shown.out
    assert document["skipped_shapes"] == {"count": 2, "names": ["7x640x7168", "8x640x7168"]}
    assert document["new_shapes"] == {"count": 23, "names": new[:20]}
    assert "new_shapes" not in command(*plan, "--json").json()


def test_the_slots_of_leases_are_not_said_to_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.csv").write_text("M,N,K\n16,64,64\n")
    pools = "a: {lease: slurm, count: 1-3, gpus: 4}, b: {lease: kubernetes, gpus: 2, image: 'x:1'}"

    def said(nodes: str) -> str:
        Path("inv.yaml").write_text(f"nodes: {{{nodes}}}\n")
        request = RunRequest(Path("s.csv"), Path("runs"), Path("inv.yaml"), tuner="torch", ask=False)
        return headline(prepare(request).plan)

    assert "1 shape, up to 14 slots on 4 leases, " in said(pools)
    assert "1 shape, up to 15 slots on 1 node and 4 leases, " in said(f"{pools}, n1: {{gpus: 0}}")
    assert "1 shape, 2 slots on 2 nodes, " in said("n1: {gpus: 0}, far: {transport: ssh, host: x, gpus: 1}")


def bound_us(key: Key) -> float:
    """Time at the data sheet's fp8 peak, of a shape that computing bounds."""
    m, n, k = map(int, key)
    return 2.0 * m * n * k / MI355X.peaks["fp8"] / 1e6


def test_the_expected_time_follows_the_most_similar_row_or_the_roofline() -> None:
    assert Forecast(A8W8, {}, MI355X).us(BIG) == pytest.approx(bound_us(BIG) / EFFICIENCY)
    near, far = (2048, 8192, 8192), (16384, 8192, 8192)
    known: dict[Key, float] = {near: bound_us(near) / 0.5, far: bound_us(far) / 0.8, BIG: 1e6}
    assert Forecast(A8W8, known, MI355X).us(BIG) == pytest.approx(bound_us(BIG) / 0.5), "not its own row's"
    others = [(4096, n, 8192) for n in (1024, 2048, 4096)]
    for chip in (MI355X, None):  # without a neighbour the median of all rows counts, on any chip
        usual, twice = (Forecast(A8W8, dict.fromkeys(others, us), chip).us((4096, 2048, 8192)) for us in (100.0, 200.0))
        assert twice == pytest.approx(2 * usual)


def test_what_was_not_measured_is_guessed_and_marked_so() -> None:
    shapes = [Shape(1, BIG), Shape(2, (1, 8192, 8192)), Shape(3, (2, 8192, 8192))]
    calls = dict(zip((s.key for s in shapes), (10.0, 1000.0, 1.0), strict=True))
    forecast = Forecast(A8W8, {}, MI355X)
    found = estimate_worths(shapes, calls, {BIG: 1e4, shapes[2].key: 0.001}, forecast, fixed={3})
    assert (found[1].calls, found[1].now_us, found[1].measured) == (10.0, 1e4, True)
    assert found[1].expected_us == pytest.approx(bound_us(BIG) / EFFICIENCY)
    assert found[1].value == pytest.approx(10 * (1e4 - found[1].expected_us))
    assert not found[2].measured
    assert found[2].now_us == pytest.approx(UNTUNED * found[2].expected_us)
    assert found[3].value == 0, "it is not to be tuned, and no gain is expected of a time below the expected one"


def test_only_shapes_of_about_the_same_value_share_a_process_and_the_most_valuable_come_first() -> None:
    shapes = [Shape(i, (i, 64, 128)) for i in range(1, 9)] + [Shape(9, (1, 128, 128))]
    values = {1: 1.0, 2: 100.0, 3: 90.0, 4: 1.5, 5: 0.0, 6: 30.0, 7: 0.0, 8: 24.0, 9: 50.0}
    assert value_tiers(values) == {1: 3, 2: 0, 3: 0, 4: 3, 5: 99, 6: 0, 7: 99, 8: 1, 9: 0}
    work = make_work(shapes, A8W8, FLAT, values=values)
    assert [({i for unit in w.units for i in unit}, w.tier) for w in work] == [
        ({2, 3, 6}, 0), ({9}, 0), ({8}, 1), ({1, 4}, 3), ({5, 7}, 99)
    ]  # fmt: skip
    assert len({w.kind for w in work}) == 5, "shapes of two tiers never share a process"


def test_what_is_won_and_what_is_left_of_it() -> None:
    of = {i: Worth(10.0, 20.0, 10.0, measured=i > 1) for i in range(1, 9)}
    nothing = measure_gain(of, {})
    assert (nothing.won_us, nothing.rest_us, nothing.share) == (0.0, 800.0, 0.0)
    assert (nothing.total_us, nothing.guessed_us) == (1600.0, 200.0)
    some = measure_gain(of, {1: 15.0, 2: 30.0})
    assert (some.won_us, some.rest_us) == (50.0, 600.0), "a slower winner replaces nothing"
    many = measure_gain(of, dict.fromkeys(range(1, 5), 15.0), failed=[5])
    assert many.won_us == 200.0
    assert many.rest_us == pytest.approx(300.0 * 200 / 500), "the gains of settled shapes correct the expected rest"
    assert measure_gain(of, dict.fromkeys(of, 20.0)).share == 1.0
