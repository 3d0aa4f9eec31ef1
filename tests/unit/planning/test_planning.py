"""Groups, their cutting and order, what is left out, and the plan that `--plan` shows."""

from __future__ import annotations

import heapq
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import TunedDBError
from orchestrator.families import get_family
from orchestrator.planning import CostModel, Group, make_groups, make_plan
from orchestrator.planning.plan import SMALLEST_CUT_S
from orchestrator.run.earlier import drop_tuned
from orchestrator.shapes import Shape
from tests.support.ledger_kit import A8W8

FLAT = CostModel(setup_s=1.0, shape_s=2.0, flop_s=0.0, weight_s=0.0, source="test")
STEEP = CostModel(setup_s=0.5, shape_s=0.1, flop_s=1e-6, weight_s=1e-6, source="test")

KEYS = st.tuples(st.integers(1, 300), st.sampled_from([64, 128, 4096]), st.sampled_from([64, 256]))


def numbered(keys: list[tuple[int, int, int]]) -> list[Shape]:
    return [Shape(i, key) for i, key in enumerate(keys, 1)]


def seconds(cost: CostModel, shapes: Sequence[Shape]) -> float:
    """Of one attempt at these shapes."""
    return cost.setup_s + sum(cost.cost_s(s, A8W8) for s in shapes)


def expected_end(groups: Sequence[Group], slots: int) -> float:
    """Seconds until the last group is over, each taken by the slot that is free first."""
    free = [0.0] * slots
    for group in groups:
        heapq.heapreplace(free, free[0] + group.cost_s)
    return max(free)


@settings(deadline=None)
@given(st.lists(KEYS, unique=True, max_size=80), st.integers(1, 16), st.sampled_from([FLAT, STEEP]))
def test_each_shape_is_in_exactly_one_group_of_its_kind(
    keys: list[tuple[int, int, int]], slots: int, cost: CostModel
) -> None:
    shapes = numbered(keys)
    by_id = {s.id: s for s in shapes}
    groups = make_groups(shapes, A8W8, cost, slots)
    assert sorted(i for g in groups for i in g.shapes) == sorted(by_id)
    for g in groups:
        assert len({by_id[i].key[1:] for i in g.shapes}) == 1
        ms = [int(by_id[i].key[0]) for i in g.shapes]
        assert ms == sorted(ms)
        assert g.cost_s == pytest.approx(seconds(cost, [by_id[i] for i in g.shapes]))
    assert [g.id for g in groups] == sorted({g.id for g in groups})
    assert [g.cost_s for g in groups] == sorted((g.cost_s for g in groups), reverse=True)
    assert groups == make_groups(list(reversed(shapes)), A8W8, cost, slots), "whatever the order of the file"


@settings(deadline=None)
@given(st.lists(KEYS, unique=True, min_size=1, max_size=80), st.integers(1, 16), st.sampled_from([FLAT, STEEP]))
def test_what_is_short_is_not_cut_and_parts_are_consecutive(
    keys: list[tuple[int, int, int]], slots: int, cost: CostModel
) -> None:
    shapes = numbered(keys)
    groups = make_groups(shapes, A8W8, cost, slots)
    by_id = {s.id: s.key for s in shapes}
    for kind in {s.key[1:] for s in shapes}:
        members = [s for s in shapes if s.key[1:] == kind]
        spans = sorted(
            (int(by_id[g.shapes[0]][0]), int(by_id[g.shapes[-1]][0])) for g in groups if by_id[g.shapes[0]][1:] == kind
        )
        assert all(spans[i][1] < spans[i + 1][0] for i in range(len(spans) - 1))
        if seconds(cost, members) <= SMALLEST_CUT_S:
            assert len(spans) == 1


def test_a_small_run_is_not_cut_and_a_large_one_is() -> None:
    shapes = numbered([(m, 64, 64) for m in range(1, 31)])
    cheap = CostModel(1.0, 0.1, 0.0, 0.0, "")
    assert [len(g.shapes) for g in make_groups(shapes, A8W8, cheap, 8)] == [30]
    parts = make_groups(numbered([(m, 64, 64) for m in range(1, 101)]), A8W8, FLAT, 2)  # 201 s on 2 slots
    assert 4 <= len(parts) <= 16
    assert expected_end(parts, 2) <= 1.15 * 201 / 2
    assert min(len(g.shapes) for g in parts) >= 2, "no crumbs"


def test_one_slot_cuts_nothing_as_nobody_waits_for_it() -> None:
    shapes = numbered([(m, n, 64) for n in (64, 128) for m in range(1, 51)])
    assert [len(g.shapes) for g in make_groups(shapes, A8W8, FLAT, 1)] == [50, 50]
    assert len(make_groups(shapes[:50], A8W8, FLAT, 1)) == 1, "however large its share"


def test_a_group_is_not_cut_into_more_set_up_than_it_saves() -> None:
    """96 shapes over six (N, K), a set-up of 25 s and about 10 s a shape: two groups a slot, not one a shape."""
    shapes = numbered([(16 * m, n, 8192) for n in (1280, 2048, 4096, 7168, 8192, 10240) for m in range(1, 17)])
    aiter = CostModel(25.0, 10.0, 3e-12, 3e-8, "")
    groups = make_groups(shapes, A8W8, aiter, 8, tuner="aiter")
    assert 12 <= len(groups) <= 24
    assert expected_end(groups, 8) < 230.0, "it was 400 s with a group of its own for nearly every shape"


def test_batched_and_fmoe_group_by_all_but_their_m() -> None:
    batched = get_family("batched_bf16")
    shapes = [Shape(1, (16, 1, 8, 8)), Shape(2, (16, 2, 8, 8)), Shape(3, (8, 1, 8, 8))]
    assert {g.shapes for g in make_groups(shapes, batched, FLAT, 1)} == {(1, 2), (3,)}
    fmoe = get_family("fmoe")
    rest = (64, 32, 8, 2, "ActivationType.Silu", "torch.bfloat16", "torch.int8", "torch.int8", "QuantType.No", 1, 0)
    moe = [Shape(1, (16, *rest)), Shape(2, (8, *rest)), Shape(3, (8, *rest[:-1], 1))]
    assert {g.shapes for g in make_groups(moe, fmoe, FLAT, 1)} == {(2, 1), (3,)}


def test_the_plan_says_who_would_do_what() -> None:
    shapes = numbered([(m, n, 64) for n in (64, 128, 256) for m in range(1, 41)])
    plan = make_plan(
        shapes[20:], A8W8, FLAT, {"a": 2, "b": 1}, tuner="replay", gfx="gfx950", cu_num=256,
        skipped=shapes[:20], notes=["n"],
    )  # fmt: skip
    assert (plan.asked, plan.todo, len(plan.skipped)) == (120, 100, 20)
    assert sum(n.groups for n in plan.nodes) == len(plan.groups)
    assert sum(n.shapes for n in plan.nodes) == 100
    assert [n.slots for n in plan.nodes] == [2, 1]
    assert plan.cost_s == pytest.approx(sum(n.cost_s for n in plan.nodes))
    assert plan.cost_s / 3 <= plan.end_s <= plan.cost_s
    document = json.loads(json.dumps(plan.to_json()))
    assert document["groups"][0]["id"] == plan.groups[0].id
    assert document["todo"] == 100


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
    db.write_text(TABLE)
    shapes = numbered([(m, 64, 128) for m in range(1, 8)])
    todo, skipped, notes = drop_tuned(shapes, A8W8, db, "gfx950", 256)
    assert [s.id for s in skipped] == [1, 4, 6]
    assert [s.id for s in todo] == [2, 3, 5, 7]
    assert notes == [f"{db}: 1 row has no gfx: taken as gfx950 because cu_num is 256, as AITER does"]
    again = drop_tuned(shapes, A8W8, db, "gfx950", 256, retune=True)
    assert (len(again.todo), again.skipped) == (7, [])
    other = drop_tuned(shapes, A8W8, db, "gfx1100", 96)
    assert other.skipped == []
    assert "gfx942/256" in other.notes[-1]


def test_an_old_table_without_gfx_is_read_with_a_note(tmp_path: Path) -> None:
    db = tmp_path / "db.csv"
    db.write_text("cu_num,M,N,K,kernelId,splitK,us,kernelName\n80,1,64,128,1,0,5.0,k\n7,2,64,128,1,0,5.0,k\n")
    dropped = drop_tuned(numbered([(1, 64, 128), (2, 64, 128)]), A8W8, db, "gfx942", 80)
    assert [s.id for s in dropped.skipped] == [1]
    assert "none follows from cu_num 7" in dropped.notes[0]
    assert "taken as gfx942" in dropped.notes[1]


def test_text_keys_match_in_any_case(tmp_path: Path) -> None:
    family = get_family("a16w16")
    db = tmp_path / "db.csv"
    db.write_text(
        ",".join(family.tuned_header)
        + "\ngfx950,256,1,64,64,FALSE,torch.bfloat16,torch.bfloat16,false,False,ck,1,0,5.0,k,0,1,1\n"
    )
    shape = Shape(1, (1, 64, 64, "False", "torch.bfloat16", "torch.bfloat16", "False", "False"))
    assert drop_tuned([shape], family, db, "gfx950", 256).skipped == [shape]


def test_no_table_yet_is_fine_and_a_wrong_one_is_not(tmp_path: Path) -> None:
    shapes = numbered([(1, 64, 128)])
    assert drop_tuned(shapes, A8W8, None, "gfx950", 256) == (shapes, [], [])
    dropped = drop_tuned(shapes, A8W8, tmp_path / "new.csv", "gfx950", 256)
    assert dropped.todo == shapes
    assert "will be created" in dropped.notes[0]
    (tmp_path / "shapes.csv").write_text("M,N,K\n1,2,3\n")
    with pytest.raises(TunedDBError, match=r"shapes\.csv:1: is not a tuned table of a8w8_blockscale"):
        drop_tuned(shapes, A8W8, tmp_path / "shapes.csv", "gfx950", 256)
